"""The records in a run's folder: leases, generations, events, metrics, times, logs, the result.

Every type here is stored as JSON by `run.py` (one object each) or `chunks.py` (streams of lines).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Cause = Literal[
    "start", "resumed", "joined", "preempted", "ended",  # not failures
    "store", "port",  # failures that pass by themselves, and that no machine is to blame for
    "machine", "program", "memory", "disk", "hang", "number", "mistake",  # failures that count
]  # fmt: skip


@dataclass(frozen=True)
class Member:
    """A node of a generation; its index in `Generation.members` is its rank among the nodes."""

    node: str
    address: str
    workers: int


@dataclass(frozen=True)
class Generation:
    """One try of a set of nodes to train together. The rendezvous is at the first member's address and `port`.

    `step` is the last committed step when it began. `cause` and `reason` say why the one before it ended, and
    `failed_step` at which step that failed, if known; `culprit` is the node that ended it alone, by an error of its
    own. `used_seconds` is the run's time until then; `seconds_left` is what the budget still allows.
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


# Leases and telemetry.


@dataclass(frozen=True)
class Gpu:
    """One GPU; fractions are of the whole card."""

    name: str
    used_fraction: float
    memory_used_bytes: int
    memory_bytes: int
    watts: float
    celsius: float


@dataclass(frozen=True)
class WorkerUse:
    """Resource use of one worker process; `cpu_fraction` is of one core."""

    rank: int
    cpu_fraction: float
    memory_bytes: int


@dataclass(frozen=True)
class Telemetry:
    """Resource use of a machine; fractions are of the whole machine."""

    cpu_fraction: float = 0.0
    memory_fraction: float = 0.0
    memory_bytes: int = 0
    disk_free_bytes: int = 0
    sent_bytes_per_second: float = 0.0
    received_bytes_per_second: float = 0.0
    gpus: tuple[Gpu, ...] = ()
    workers: tuple[WorkerUse, ...] = ()


@dataclass(frozen=True)
class TelemetrySample:
    """A machine's telemetry at a time of its own clock."""

    time: float
    node: str
    telemetry: Telemetry


@dataclass(frozen=True)
class NodeReport:
    """How a generation's workers ended on one node. `fatal`: another try would end the same way."""

    generation: int
    cause: Cause
    text: str
    step: int | None = None
    fatal: bool = False


@dataclass(frozen=True)
class Lease:
    """A node's lease. `renewal` counts up; readers judge its age by their own clock.

    `machine` is the same for all nodes of one machine, and empty if the fleet gives each node a part of a machine.
    `joined` is the number of the first generation that the node could be part of. `left`: the node has ended.
    `leaving`: it got a preemption notice, and asks its generation to commit. `stopping` is the generation whose
    workers it has asked to commit and exit; nodes that watch it do the same. `machine_seconds` is how long it has been
    up, which is what it costs.
    """

    node: str
    hostname: str
    address: str
    port: int
    workers: int
    joined: int
    renewal: int
    used_seconds: float
    machine: str = ""
    left: bool = False
    leaving: bool = False
    stopping: int = 0
    machine_seconds: float = 0.0
    report: NodeReport | None = None
    telemetry: Telemetry = field(default_factory=Telemetry)


# Events.

EventKind = Literal[
    "machine", "generation", "superseded", "lost", "excluded",
    "restored", "checkpoint", "evaluation", "data",
    "warning", "failure", "hang", "stacks",
    "stopping", "stopped", "finished", "failed",
]  # fmt: skip
EventDisplay = Literal["report", "info", "warning"]
TellEvent = Callable[[EventKind, str], None]

# Where a person sees an event: "report" only in the report, "info" and "warning" while following the run, too.
EVENT_DISPLAY: Mapping[EventKind, EventDisplay] = {
    "machine": "report",
    "generation": "info",
    "superseded": "report",  # the generation that follows it says the same
    "lost": "warning",
    "excluded": "warning",
    "restored": "info",
    "checkpoint": "report",  # there are too many to show
    "evaluation": "info",
    "data": "info",
    "warning": "warning",
    "failure": "warning",
    "hang": "warning",
    "stacks": "info",
    "stopping": "info",
    "stopped": "report",  # the summary of the run says how it ended
    "finished": "report",
    "failed": "report",
}


@dataclass(frozen=True)
class Event:
    """Something that happened to a run, in words."""

    time: float
    kind: EventKind
    text: str
    generation: int = 0

    @property
    def display(self) -> EventDisplay:
        return EVENT_DISPLAY[self.kind]


# Metrics, times and logs.


@dataclass(frozen=True)
class Sample:
    """A prediction of the model beside the reference."""

    input: str
    reference: str
    prediction: str


@dataclass(frozen=True)
class Point:
    """Measurements at a step. `start` marks the step that a generation resumes from."""

    kind: Literal["start", "train", "valid", "test"]
    generation: int
    step: int
    time: float
    values: dict[str, float]
    samples: tuple[Sample, ...] = ()


@dataclass(frozen=True)
class TimeSpent:
    """Seconds of a worker by span (train/recorder.py), since its previous record."""

    time: float
    generation: int
    rank: int
    step: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class LogLine:
    """A line that a worker or (without a rank) the launcher wrote."""

    time: float
    generation: int
    node: str
    rank: int | None
    stream: Literal["out", "err"]
    text: str


# The end of a run.

Status = Literal["finished", "failed", "stopped"]


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    status: Status
    reason: str
    step: int
    seconds: float
    scores: dict[str, float] = field(default_factory=dict)
    signatures: dict[str, str] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()


@dataclass(frozen=True)
class StopRequest:
    """A person asked the run to stop."""

    reason: str
    time: float
