"""Hosts under Open MPI's `mpirun`, which starts one node on each over ssh. Nodes never use MPI themselves.

mpirun keeps running on this machine, detached from the terminal, as long as the run: when it ends, so do the nodes. A
run that must outlive this machine is for the ssh fleet.

`python -m packtrain.fleet.mpi --run RUN --store STORE --least 2 -- mpirun ...` supervises mpirun. By itself, mpirun
would wait for a machine that lost its power, and end all the others once it notices. The supervisor watches the leases
instead: if enough machines are left, the run continues; mpirun ends when the run has ended or too few are left. If
mpirun itself is killed, the supervisor ends the nodes: its daemons on the machines would let them train for another
minute, and stay.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from types import FrameType

import psutil

from packtrain.errors import Mistake, PacktrainError
from packtrain.fleet import fleet_of
from packtrain.fleet.fleet import (
    LaunchPlan,
    Machine,
    Python,
    Say,
    Word,
    missing_programs,
    node_arguments,
    passed_variables,
    silent,
    values_of,
)
from packtrain.fleet.host import END_SECONDS, StartedNode, end_processes, find_processes, start_process
from packtrain.fleet.remote import end_with_client
from packtrain.fleet.ssh import ListedHosts, SshFleet, SshSettings, unavailable
from packtrain.job import Job
from packtrain.job.part import Argument, Location, rules_in_schema
from packtrain.node.preemption import SECONDS_VARIABLE
from packtrain.process import OwnLog, run_main, say
from packtrain.run.liveness import LEASE_SECONDS, LeaseWatch
from packtrain.run.run import Run
from packtrain.store import Store, open_store

_HOSTS = "-H"
# Host keys are checked: no "-o StrictHostKeyChecking=no", which most advice on mpirun begins with.
_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"
LEAVE_SECONDS = 10.0  # for mpirun to notice by itself that all nodes have left
REPLACE_SECONDS = 20.0  # for a person to start another machine
# No keepalive for mpirun itself, or it would end all nodes when one machine is gone; its daemons on the machines keep
# theirs, and so notice when this machine is gone.
_KEEPALIVE = {"OMPI_MCA_oob_tcp_keepalive_time": "0", "OMPI_MCA_plm_rsh_pass_environ_mca_params": "0"}


class MpiSettings(ListedHosts):
    """Hosts that `mpirun` reaches; Python has the same path on all of them. `options` go to mpirun as they are."""

    model_config = rules_in_schema({"properties": {"hosts": {"items": {"not": {"pattern": ":"}}}}})

    python: Python | None = None
    interface: Word | None = None
    options: tuple[Argument, ...] = ()

    def faults(self) -> Iterator[tuple[Location, str]]:
        yield from super().faults()
        for number, host in enumerate(self.hosts):
            if ":" in host:
                yield ("hosts", number), "mpirun takes no port; set it in ~/.ssh/config"

    def build(self) -> MpiFleet:
        return MpiFleet(self)

    @classmethod
    def missing_here(cls) -> Mapping[str, str]:
        return missing_programs(mpirun="openmpi-bin", ssh="openssh-client")


class MpiFleet(SshFleet):
    """The hosts of an ssh fleet: mpirun reaches them by ssh, too."""

    programs = ("mpirun", "ssh")

    def __init__(self, settings: MpiSettings) -> None:
        # Not validated again: the path of this Python may be one that a job file could not have.
        super().__init__(
            SshSettings.model_construct(
                hosts=settings.hosts,
                machines=settings.machines,
                python=settings.python or sys.executable,
                interface=settings.interface,
            )
        )
        self._mpi = settings

    def plan(self, run: Run) -> list[LaunchPlan]:
        settings, names = self._mpi, passed_variables(run.job.environment, run.store.url)
        hosts = settings.hosts[: settings.machines.most]
        command = (
            "mpirun",
            *(("--allow-run-as-root",) if os.geteuid() == 0 else ()),
            _HOSTS, _slots(hosts),
            "--map-by", "ppr:1:node",
            "--bind-to", "none",  # or all workers of a machine would share one core
            "--mca", "plm", "rsh", "--mca", "plm_rsh_agent", _SSH,
            "--mca", "orte_abort_on_non_zero_status", "0",  # a node that leaves must not end the others
            "--mca", "odls_base_sigkill_timeout", f"{END_SECONDS:.0f}",  # time for the last checkpoint
            *(word for name in names for word in ("-x", name)),
            "-x", f"{SECONDS_VARIABLE}={END_SECONDS:.0f}",
            *settings.options,
            *node_arguments(run, settings.python or sys.executable, settings, settings.interface),
        )  # fmt: skip
        return [LaunchPlan(", ".join(hosts), command, names)]

    def check(self, job: Job, store: Store, say: Say = silent) -> None:
        self._require_mpirun()
        super().check(job, store, say)

    def start(self, run: Run, plans: Sequence[LaunchPlan], tied: bool, say: Say = silent) -> list[StartedNode]:
        """Start mpirun under its supervisor, with the hosts that answer: if one does not, mpirun starts nothing."""
        self._require_mpirun()
        machines = self._settings.machines
        options = ("--run", run.name, "--store", run.store.url, "--least", str(machines.least))
        started = []
        for plan in plans:
            needs_torch = run.job.program is None
            usable, faults = self.usable_hosts(run.store.url, plan.variables, say, needs_torch=needs_torch)
            for fault in faults:
                say(f"{unavailable(fault)}; continuing without it")
            words = list(plan.arguments)
            # The plan was made without asking any host: put those that answer in place of its list.
            words[words.index(_HOSTS) + 1] = _slots([host.name for host in usable][: machines.most])
            command = (sys.executable, "-P", "-m", "packtrain.fleet.mpi", *options, "--", *words)
            started.append(start_process(run.name, command, tied))
        return started

    def machines(self, run: Run) -> list[Machine]:
        """Return the state of mpirun for every host; what each of them does is in the store."""
        hosts = self._settings.hosts[: self._settings.machines.most]
        if find_processes("mpirun", run.name, run.store.url):
            return [Machine(host, "running") for host in hosts]
        return [Machine(host, "ended", is_over=True) for host in hosts]

    def end(self, run: Run) -> None:
        """End with SIGUSR1: mpirun forwards it and ends with the nodes. After SIGTERM it would wait for its timeout."""
        running = find_processes("mpirun", run.name, run.store.url)
        end_processes(running, signal.SIGUSR1)
        if not running:  # it was killed, or runs on another machine
            super().end(run)

    def _require_mpirun(self) -> None:
        if shutil.which("mpirun") is None:
            raise Mistake("mpirun is missing; install Open MPI (openmpi-bin), or use fleet: {ssh: {hosts: [...]}}")


def _slots(hosts: Sequence[str]) -> str:
    return ",".join(f"{host}:1" for host in hosts)


@dataclass
class EndPolicy:
    """Decides when to end mpirun. `why` returns a reason once it has held for long enough."""

    min_machines: int
    watch: LeaseWatch = field(default_factory=LeaseWatch)
    _began: bool = False
    _since: tuple[str, float] = ("", 0.0)

    def why(self, ended: bool, clock: float) -> str | None:
        self._began = self._began or self.watch.count_alive(clock) > 0  # before that, machines are still starting
        count = self.watch.count_remaining(clock)
        reason, patience = "", 0.0
        if ended and count == 0:
            reason, patience = "the run has ended", LEAVE_SECONDS
        elif not ended and self._began and count < self.min_machines:
            reason = f"only {count} of the {self.min_machines} machines that the run needs are left"
            patience = REPLACE_SECONDS
        if reason != self._since[0]:
            self._since = (reason, clock)
        return reason if reason and clock - self._since[1] >= patience else None


def supervise(command: Sequence[str], run: Run, min_machines: int) -> int:
    """Run mpirun until it ends, forward signals to it, and return its exit code. It ends with this process."""
    passed = [name for option, name in pairwise(command) if option == "-x"]
    process = subprocess.Popen(
        command,
        env={**os.environ, **values_of(passed), **_KEEPALIVE},
        preexec_fn=end_with_client,  # noqa: PLW1509 - prctl alone
    )

    def forward(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, forward)
    policy, why = EndPolicy(min_machines), None
    connections: list[psutil.Process] = []
    while process.poll() is None:
        with suppress(psutil.NoSuchProcess):
            connections = psutil.Process(process.pid).children(recursive=True)  # to end them if mpirun is killed
        with suppress(subprocess.TimeoutExpired):
            process.wait(LEASE_SECONDS)
        with suppress(PacktrainError):  # while the store does not answer, nothing is decided
            policy.watch.observe(run.leases(), time.monotonic())
            why = policy.why(run.result() is not None, time.monotonic())
            if why is not None and process.poll() is None:
                say(f"ending mpirun: {why}")
                _end(process, run, policy)
    if process.returncode < 0 and why is None:
        say(f"mpirun was killed ({signal.Signals(-process.returncode).name}); ending the nodes over ssh")
        try:
            fleet_of(run.job.fleet.kind).end(run)
        except PacktrainError as error:
            say(f"warning: {error}")
        _kill(connections)
    return process.returncode


def _end(process: subprocess.Popen[bytes], run: Run, policy: EndPolicy) -> None:
    """Let the remaining nodes commit and leave; then kill mpirun and its ssh connections to machines that are gone."""
    process.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + END_SECONDS
    while process.poll() is None and time.monotonic() < deadline and policy.watch.count_remaining(time.monotonic()):
        time.sleep(LEASE_SECONDS / 2)
        with suppress(PacktrainError):
            policy.watch.observe(run.leases(), time.monotonic())
    with suppress(psutil.NoSuchProcess, subprocess.TimeoutExpired):
        children = psutil.Process(process.pid).children(recursive=True)  # before the kill, which orphans them
        process.kill()
        process.wait(LEAVE_SECONDS)
        _kill(children)


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def main(words: Sequence[str]) -> int:
    place = list(words).index("--")
    parser = argparse.ArgumentParser(prog="packtrain.fleet.mpi")
    parser.add_argument("--run", required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--least", type=int, required=True)
    options = parser.parse_args(words[:place])
    log, run = OwnLog(), Run(open_store(options.store), options.run)
    code = supervise(words[place + 1 :], run, options.least)
    result = run.result()
    if result is not None and result.status != "failed":
        log.remove()
    return code


if __name__ == "__main__":
    run_main(main)
