"""The machines of a run, as they stand in its folder: leases, what they measure, generations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Cause = Literal[
    "start", "resumed", "joined", "notice", "ended",  # no failures
    "store", "port",  # failures that are nobody's fault, and pass
    "machine", "program", "memory", "disk", "hang", "number", "mistake",  # failures that count
]  # fmt: skip


@dataclass(frozen=True)
class Member:
    """A machine of a generation; its place in the list is its rank among them."""

    node: str
    address: str
    workers: int


@dataclass(frozen=True)
class Generation:
    """One attempt: who takes part, where the first of them can be met, and the step committed when it began.

    `cause` is why there had to be a new one, and `failed_step` the step at which the one before failed, if it is
    known; `culprit` is the machine that alone ended it, by an error of its own. `used_seconds` is the run's time until
    then; `seconds_left` is what the budget still allows.
    """

    number: int
    members: tuple[Member, ...]
    port: int
    reason: str
    step: int = 0
    cause: Cause = "start"
    failed_step: int | None = None
    used_seconds: float = 0.0
    seconds_left: float | None = None
    culprit: str | None = None

    def rank_of(self, node: str) -> int | None:
        return next((rank for rank, member in enumerate(self.members) if member.node == node), None)


@dataclass(frozen=True)
class Gpu:
    """One graphics card; fractions are of all of it."""

    name: str
    used_fraction: float
    memory_used_bytes: int
    memory_bytes: int
    watts: float
    celsius: float


@dataclass(frozen=True)
class WorkerUse:
    """What one worker process takes: `cpu_fraction` is of one core."""

    rank: int
    cpu_fraction: float
    memory_bytes: int


@dataclass(frozen=True)
class Telemetry:
    """What a machine is doing; fractions are of all of it."""

    cpu_fraction: float = 0.0
    memory_fraction: float = 0.0
    memory_bytes: int = 0
    disk_free_bytes: int = 0
    sent_bytes_per_second: float = 0.0
    received_bytes_per_second: float = 0.0
    gpus: tuple[Gpu, ...] = ()
    workers: tuple[WorkerUse, ...] = ()


@dataclass(frozen=True)
class Measured:
    """A machine's telemetry at one moment of its own clock."""

    time: float
    node: str
    telemetry: Telemetry


@dataclass(frozen=True)
class Report:
    """How a generation's workers ended on one machine."""

    generation: int
    cause: Cause
    text: str
    step: int | None = None
    hopeless: bool = False


@dataclass(frozen=True)
class Node:
    """A machine's lease. `renewal` counts up; readers judge its age by their own clock.

    `leaving`: it has been told to go, and asks the others of its generation to commit with it. `stopping` is the
    generation whose workers it has asked to commit and end; those who watch it do the same. `machine_seconds` is
    how long it has been there, which is what it costs.
    """

    node: str
    hostname: str
    address: str
    port: int
    workers: int
    joined: int
    renewal: int
    used_seconds: float
    left: bool = False
    leaving: bool = False
    stopping: int = 0
    machine_seconds: float = 0.0
    report: Report | None = None
    telemetry: Telemetry = field(default_factory=Telemetry)
