"""This machine: nodes as detached processes, which keep running when the terminal is closed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from packtrain.errors import Mistake
from packtrain.fleet.fleet import (
    Fleet,
    FleetBuilder,
    HasShell,
    HasTargets,
    LaunchPlan,
    Machine,
    Say,
    Target,
    missing_package,
    node_arguments,
    silent,
)
from packtrain.fleet.host import (
    Facts,
    StartedNode,
    end_processes,
    find_processes,
    log_directory,
    secrets_line,
    start_process,
)
from packtrain.fleet.remote import last_line
from packtrain.job import Job
from packtrain.job.part import Location
from packtrain.node.address import LOOPBACK
from packtrain.run.run import Run
from packtrain.store import Store
from packtrain.system import check_shared_memory
from packtrain.units import MAX_WORKERS

THIS_MACHINE = "this machine"


class LocalSettings(FleetBuilder):
    """This machine; several nodes on it stand for as many machines."""

    shares_machines = True
    harmless = frozenset({"machines"})

    def faults(self) -> Iterator[tuple[Location, str]]:
        if self.machines.most > MAX_WORKERS:
            yield ("machines",), f"must be at most {MAX_WORKERS:,}: each is a process on this machine"

    def build(self) -> LocalFleet:
        return LocalFleet(self)

    @classmethod
    def missing_here(cls) -> Mapping[str, str]:
        return missing_package("torch", "train")


class LocalFleet(Fleet, HasTargets, HasShell):
    trains_here = True

    def __init__(self, settings: LocalSettings) -> None:
        self._settings = settings

    def check(self, job: Job, store: Store, say: Say = silent) -> None:  # noqa: ARG002
        log_directory()
        if job.recipe is not None:
            check_shared_memory()

    def plan(self, run: Run) -> list[LaunchPlan]:
        # All nodes are on this machine: they need no network, and nobody else should reach them.
        arguments = (*node_arguments(run, sys.executable, self._settings), "--address", LOOPBACK)
        return [LaunchPlan(THIS_MACHINE, arguments)] * self._settings.machines.most

    def start(self, run: Run, plans: Sequence[LaunchPlan], tied: bool, say: Say = silent) -> list[StartedNode]:  # noqa: ARG002
        return [start_process(run.name, plan.arguments, tied) for plan in plans]

    def machines(self, run: Run) -> list[Machine]:
        return [Machine(THIS_MACHINE, "running") for _ in find_processes("python", run.name, run.store.url)]

    def end(self, run: Run) -> None:
        end_processes(find_processes("python", run.name, run.store.url))

    def shell(self, run: Run, machine: str | None) -> tuple[str, ...]:
        if machine not in (None, THIS_MACHINE, socket.gethostname(), *(lease.node for lease in run.leases())):
            raise Mistake(f"{run.name}: no machine {machine!r}; it runs on this machine only: omit the name")
        return (os.environ.get("SHELL") or "/bin/sh",)

    def targets(self) -> list[Target]:
        return [LocalTarget(f"process {number}") for number in range(1, self._settings.machines.most + 1)]


class LocalTarget(Target):
    def __init__(self, name: str) -> None:
        self.name = name

    def python(self) -> str | None:
        return sys.executable

    def run(self, command: Sequence[str], secrets: dict[str, str], seconds: float) -> str:
        text = secrets_line(secrets)
        ended = subprocess.run(list(command), input=text, capture_output=True, check=False, timeout=seconds)
        if ended.returncode != 0:
            raise Mistake(last_line(ended.stderr.decode(errors="replace")) or f"exit code {ended.returncode}")
        return ended.stdout.decode()

    def link_options(self, rank: int, facts: Facts) -> list[str]:  # noqa: ARG002
        return ["--rank", str(rank), "--address", LOOPBACK]
