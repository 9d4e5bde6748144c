"""Hosts under Open MPI's `mpirun`, which starts one agent on each over ssh. Agents never speak MPI.

mpirun stays here as long as the run goes on, detached from the terminal: when it ends, so do the agents. A job that
must outlive this machine is for the ssh fleet.
"""

from __future__ import annotations

import builtins
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace

from psutil import Process

from packtrain.errors import Mistake
from packtrain.fleet import agents
from packtrain.fleet.agents import END_SECONDS
from packtrain.fleet.fleet import Fleet, Machine, Start, Started, Tell, node_arguments, passed_on, silent
from packtrain.fleet.local import start_here
from packtrain.fleet.ssh import SshFleet
from packtrain.job import Job
from packtrain.node.notices import SECONDS_VARIABLE
from packtrain.places import Mpi, Ssh
from packtrain.runs import Run
from packtrain.store import Store

_HOSTS = "-H"
# Not "-o StrictHostKeyChecking=no", which is what most advice on mpirun begins with.
_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"


class MpiFleet(Fleet):
    def __init__(self, settings: Mpi) -> None:
        self._settings = settings

    def plan(self, run: Run) -> builtins.list[Start]:
        settings, names = self._settings, passed_on(run.job)
        hosts = settings.hosts[: settings.machines.most]
        command = (
            "mpirun",
            *(("--allow-run-as-root",) if os.geteuid() == 0 else ()),
            _HOSTS, _slots(hosts),
            "--map-by", "ppr:1:node",
            "--bind-to", "none",  # or all of a machine's workers would share one core
            "--mca", "plm", "rsh", "--mca", "plm_rsh_agent", _SSH,
            "--mca", "orte_abort_on_non_zero_status", "0",  # one agent that leaves does not end the others
            "--mca", "odls_base_sigkill_timeout", f"{END_SECONDS:.0f}",  # time for the last checkpoint
            *(word for name in names for word in ("-x", name)),
            "-x", f"{SECONDS_VARIABLE}={END_SECONDS:.0f}",
            *settings.options,
            *node_arguments(run, settings.python or sys.executable, settings, settings.interface),
        )  # fmt: skip
        return [Start(", ".join(hosts), command, names, run.store.url)]

    def check(self, job: Job, store: Store, tell: Tell = silent) -> None:
        _need_mpirun()
        self._over_ssh().check(job, store, tell)

    def start(self, starts: Sequence[Start], tied: bool, tell: Tell = silent) -> builtins.list[Started]:
        """mpirun starts nothing at all where one of its hosts does not answer, so such hosts are left out here."""
        _need_mpirun()
        return [start_here(self._kept(self._with_those_who_answer(start, tell)), tied) for start in starts]

    def _kept(self, start: Start) -> Start:
        words = list(start.arguments)
        run, store = words[words.index("node") + 1], start.store
        own = ("--run", run, "--store", store, "--least", str(self._settings.machines.least))
        return replace(start, arguments=(sys.executable, "-m", "packtrain.fleet.keeper", *own, "--", *words))

    def _with_those_who_answer(self, start: Start, tell: Tell) -> Start:
        asked = [Start(host, (), start.variables, start.store) for host in self._settings.hosts]
        ready, faults = self._over_ssh().prepare(asked, tell)
        for fault in faults:
            tell(f"goes on without {fault}")
        hosts = [host.start.machine for host in ready][: self._settings.machines.most]
        place = start.arguments.index(_HOSTS) + 1
        arguments = (*start.arguments[:place], _slots(hosts), *start.arguments[place + 1 :])
        return replace(start, machine=", ".join(hosts), arguments=arguments)

    def list(self, run: Run) -> builtins.list[Machine]:
        """mpirun is here or it is not; what the machines do, the store knows."""
        state = "running" if _starters(run) else "ended"
        return [Machine(host, state) for host in self._settings.hosts[: self._settings.machines.most]]

    def end(self, run: Run) -> None:
        """mpirun passes SIGUSR1 on, and ends when the agents have left; SIGTERM would let it wait out its grace."""
        agents.end_all(_starters(run), END_SECONDS, signal.SIGUSR1)

    def shell(self, run: Run, machine: str | None) -> tuple[str, ...]:
        return self._over_ssh().shell(run, machine)

    def _over_ssh(self) -> SshFleet:
        """The same hosts, as ssh sees them: that is how mpirun reaches them too."""
        settings = self._settings
        return SshFleet(Ssh(hosts=settings.hosts, machines=settings.machines, python=settings.python or sys.executable))


def _need_mpirun() -> None:
    if shutil.which("mpirun") is None:
        raise Mistake("mpirun is not there: install Open MPI (openmpi-bin), or use fleet: {ssh: {hosts: [...]}}")


def _slots(hosts: Sequence[str]) -> str:
    return ",".join(f"{host}:1" for host in hosts)


def _starters(run: Run) -> builtins.list[Process]:
    return agents.started_by("mpirun", run.name, run.store.url)
