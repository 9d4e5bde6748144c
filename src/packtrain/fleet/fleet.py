"""A fleet is a way to start `packtrain node RUN` on machines. Nothing more."""

from __future__ import annotations

import builtins
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from packtrain.errors import Mistake
from packtrain.job.job import Job
from packtrain.job.kinds import FleetKind
from packtrain.job.part import matching
from packtrain.node.preemption import Notices
from packtrain.run.run import Run
from packtrain.store import Store

Tell = Callable[[str], None]

# Settings that several fleets have.
Word = Annotated[str, matching(r"[A-Za-z0-9_][A-Za-z0-9_.:@+-]{0,126}", "a name")]
Python = Annotated[str, matching(r"[A-Za-z0-9_./~+-]+", "the path of a Python, as in /opt/train/bin/python")]


def silent(_: str) -> None:
    """For those who do not want to hear what happens beside a start."""


@dataclass(frozen=True)
class Start:
    """What would be started on one machine: a value that can be printed and compared. Never holds a secret.

    `variables` are the names of those whose values go along; `store` is what the machine must be able to see;
    `script` is the text that the arguments are given on standard input.
    """

    machine: str
    arguments: tuple[str, ...]
    variables: tuple[str, ...] = ()
    store: str = ""
    script: str | None = None


@dataclass(frozen=True)
class Machine:
    """What a fleet sees of a run on one of its machines: `state` is a word, `detail` a person's explanation."""

    name: str
    state: str
    detail: str = ""


class Started(ABC):
    """A node that was started, as far as this client can see it."""

    log: Path | None

    @abstractmethod
    def exit_code(self) -> int | None:
        """None while it goes on."""


class Fleet(ABC):
    trains_here = False  # whether this machine is one of them, and so needs torch
    not_tied: str | None = None  # why its nodes cannot be tied to a command, if they cannot

    def check(self, job: Job, store: Store, tell: Tell = silent) -> None:  # noqa: B027
        """Refuses what could not be started. Comes before all that takes long; `start` looks again."""

    @abstractmethod
    def plan(self, run: Run) -> builtins.list[Start]:
        """What `start` would do for this run. Nobody is asked anything."""

    @abstractmethod
    def start(self, starts: Sequence[Start], tied: bool, tell: Tell = silent) -> builtins.list[Started]:
        """Starts the nodes. Tied ones end with this process; others go on without it.

        Returned are those that this client can watch; the store tells about all of them.
        """

    @abstractmethod
    def list(self, run: Run) -> builtins.list[Machine]:
        """What of the run is on the machines now."""

    @abstractmethod
    def end(self, run: Run) -> None:
        """Ends what is left of the run on all machines; workers may commit before. Harmless when nothing is left."""

    def withdraw(self, run: Run) -> None:  # noqa: B027
        """Takes back what waits in a queue for a run that has been stopped, for fleets that have one."""

    def queue(self, run: Run) -> str | None:  # noqa: ARG002
        """Where the run stands in a queue, for fleets that have one and can be asked from here."""
        return None

    def notices(self) -> Sequence[Notices]:
        """What a node on one of its machines asks whether that machine is to go."""
        return ()

    def shell(self, run: Run, machine: str | None) -> tuple[str, ...]:
        """The command that opens a terminal on a machine of the run."""
        raise Mistake(f"{run.name}: its machines have no shell to open from here ({machine or 'any'})")


def node_arguments(run: Run, python: str, kind: FleetKind, interface: str | None = None) -> tuple[str, ...]:
    """The one command that every fleet starts."""
    where = () if interface is None else ("--interface", interface)
    # The job says it, too; but a machine that the store does not answer cannot read it there.
    off = ("--power-off",) if kind.power_off else ()
    return (python, "-m", "packtrain", "node", run.name, "--store", run.store.url, *where, *off)


def passed_on(job: Job) -> tuple[str, ...]:
    """The names of the variables that nodes elsewhere need: the job's, and those that open the store."""
    store = [name for name in os.environ if name.startswith("AWS_")]
    return tuple(sorted({*store, *(name for name in job.environment if name in os.environ)}))


def values_of(variables: Sequence[str]) -> dict[str, str]:
    return {name: os.environ[name] for name in variables if name in os.environ}
