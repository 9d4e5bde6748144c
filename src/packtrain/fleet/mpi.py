"""Hosts under Open MPI's `mpirun`, which starts one agent on each over ssh. Agents never speak MPI.

mpirun stays here as long as the run goes on, detached from the terminal: when it ends, so do the agents. A job that
must outlive this machine is for the ssh fleet.
"""

from __future__ import annotations

import argparse
import builtins
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import FrameType

import psutil
from psutil import Process

from packtrain.errors import Mistake, PacktrainError
from packtrain.fleet import local as agents
from packtrain.fleet.fleet import Fleet, Machine, Python, Start, Started, Tell, Word, node_arguments, passed_on, silent
from packtrain.fleet.local import END_SECONDS, start_here
from packtrain.fleet.remote import end_with_client
from packtrain.fleet.ssh import ListedHosts, SshFleet, SshSettings
from packtrain.job.job import Job
from packtrain.job.part import Argument, Location
from packtrain.node.preemption import SECONDS_VARIABLE
from packtrain.run.liveness import LEASE_SECONDS, LeaseWatch
from packtrain.run.run import Run
from packtrain.store import Store, open_store
from packtrain.system import say

_HOSTS = "-H"
# Not "-o StrictHostKeyChecking=no", which is what most advice on mpirun begins with.
_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"


class MpiSettings(ListedHosts):
    """Hosts that `mpirun` reaches; Python has the same path on all of them. `options` go to mpirun as they are."""

    python: Python | None = None
    interface: Word | None = None
    options: tuple[Argument, ...] = ()

    def faults(self) -> Iterator[tuple[Location, str]]:
        yield from super().faults()
        for number, host in enumerate(self.hosts):
            if ":" in host:
                yield ("hosts", number), "mpirun takes no port; name it in ~/.ssh/config"

    def build(self) -> Fleet:
        return MpiFleet(self)


class MpiFleet(Fleet):
    def __init__(self, settings: MpiSettings) -> None:
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
        return replace(start, arguments=(sys.executable, "-m", "packtrain.fleet.mpi", *own, "--", *words))

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
        return SshFleet(
            SshSettings(hosts=settings.hosts, machines=settings.machines, python=settings.python or sys.executable)
        )


def _need_mpirun() -> None:
    if shutil.which("mpirun") is None:
        raise Mistake("mpirun is not there: install Open MPI (openmpi-bin), or use fleet: {ssh: {hosts: [...]}}")


def _slots(hosts: Sequence[str]) -> str:
    return ",".join(f"{host}:1" for host in hosts)


def _starters(run: Run) -> builtins.list[Process]:
    return agents.started_by("mpirun", run.name, run.store.url)


# Holds mpirun while a run goes on, and ends it when what it waits for will not come.
#
# python -m packtrain.fleet.mpi --run RUN --store STORE --least 2 -- mpirun ...
#
# mpirun waits for a machine that lost its power as if it were there; if it notices, it ends all the others. Here the
# leases say who is lost: a run that can go on without goes on, and mpirun ends when the run has, or when too few
# machines are left for it. What it left of itself on this machine ends with it.


LEAVE_SECONDS = 10.0  # for mpirun to see by itself that all agents have left
REPLACE_SECONDS = 20.0  # for somebody to start another machine by hand
# For mpirun alone, so that it never ends the others; its helpers on the machines still notice when this one is gone.
_KEEPALIVE = {"OMPI_MCA_oob_tcp_keepalive_time": "0", "OMPI_MCA_plm_rsh_pass_environ_mca_params": "0"}


@dataclass
class EndPolicy:
    """Decides when mpirun waits for machines that will not come: `why` is a reason that has held for long enough."""

    least: int
    watch: LeaseWatch = field(default_factory=LeaseWatch)
    _began: bool = False
    _since: tuple[str, float] = ("", 0.0)

    def why(self, ended: bool, now: float) -> str | None:
        self._began = self._began or self.watch.count_alive(now) > 0
        there = self.watch.count_remaining(now)
        reason, patience = "", 0.0
        if ended and there == 0:
            reason, patience = "the run has ended", LEAVE_SECONDS
        elif not ended and self._began and there < self.least:
            reason, patience = f"{there} of the {self.least} machines that the run needs are left", REPLACE_SECONDS
        if reason != self._since[0]:
            self._since = (reason, now)
        return reason if reason and now - self._since[1] >= patience else None


def keep(command: Sequence[str], run: Run, least: int) -> int:
    """The exit code of the command, which ends with this process and gets the signals that this one gets."""
    process = subprocess.Popen(
        command,
        env={**os.environ, **_KEEPALIVE},
        preexec_fn=end_with_client,  # noqa: PLW1509 - prctl alone
    )

    def pass_on(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, pass_on)
    policy = EndPolicy(least)
    while process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(LEASE_SECONDS)
        with suppress(PacktrainError):  # a store that is away says nothing
            policy.watch.observe(run.leases(), time.monotonic())
            why = policy.why(run.result() is not None, time.monotonic())
            if why is not None and process.poll() is None:
                say(f"mpirun: ends, for {why}")
                _end(process, run, policy)
    return process.returncode


def _end(process: subprocess.Popen[bytes], run: Run, policy: EndPolicy) -> None:
    """Agents that are there commit and leave; mpirun, and its connections to machines that are gone, then end."""
    process.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + END_SECONDS
    while process.poll() is None and time.monotonic() < deadline and policy.watch.count_remaining(time.monotonic()):
        time.sleep(LEASE_SECONDS / 2)
        with suppress(PacktrainError):
            policy.watch.observe(run.leases(), time.monotonic())
    with suppress(psutil.NoSuchProcess, subprocess.TimeoutExpired):
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait(LEAVE_SECONDS)
        for one in family:
            with suppress(psutil.NoSuchProcess):
                one.kill()


def main(given: Sequence[str]) -> int:
    place = list(given).index("--")
    parser = argparse.ArgumentParser(prog="packtrain.fleet.mpi")
    parser.add_argument("--run", required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--least", type=int, required=True)
    options = parser.parse_args(given[:place])
    return keep(given[place + 1 :], Run(open_store(options.store), options.run), options.least)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
