"""The records in a run's folder: leases, generations, events, metrics, times, logs, the result.

Every type here is stored as JSON by `run.py` (one object each) or `chunks.py` (streams of lines), and checked when it
is read (store/records.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from packtrain.store.records import (
    Address,
    Count,
    Digest,
    FileName,
    Label,
    Many,
    Measurement,
    Measurements,
    Number,
    Port,
    Price,
    Seconds,
    Time,
    WorkerCount,
)

MAX_PICTURE_BYTES = 32 << 10
"""Of the JPEG of a sample."""
MAX_GRID_SIDE = 32
"""Of a grid of attention."""

Cause = Literal[
    "start", "resumed", "joined", "preempted", "ended",  # not failures
    "store", "port",  # failures that pass by themselves, and that no machine is to blame for
    "machine", "program", "memory", "disk", "hang", "number", "mistake",  # failures that count
]  # fmt: skip


@dataclass(frozen=True)
class Member:
    """A node of a generation; its index in `Generation.members` is its rank among the nodes."""

    node: FileName
    address: Address
    workers: WorkerCount


@dataclass(frozen=True)
class Generation:
    """One try of a set of nodes to train together. The rendezvous is at the first member's address and `port`.

    `step` is the last committed step when it began. `cause` and `reason` say why the one before it ended, and
    `failed_step` at which step that failed, if known; `culprit` is the node that ended it alone, by an error of its
    own or because it was lost; `restarted` is as in its report. `used_seconds` is the run's time until then;
    `seconds_left` is what the budget still allows. `job` is the digest of its job: `packtrain resume --set` changes the
    job, and with it the fleet and the budget. `launches` is how often clients had launched machines by then: a node
    that comes back by itself does not.
    """

    number: Count
    members: Annotated[Many[Member], Field(min_length=1)]
    port: Port
    reason: str
    step: Count = 0
    cause: Cause = "start"
    failed_step: Count | None = None
    used_seconds: Seconds = 0.0
    seconds_left: Seconds | None = None
    culprit: FileName | None = None
    job: Label = ""
    launches: Count = 0
    restarted: bool = False

    @property
    def is_after_fault(self) -> bool:
        """True if the generation before it did not end as people wanted."""
        return self.cause not in ("start", "resumed", "joined")

    def rank_of(self, node: str) -> int | None:
        return next((rank for rank, member in enumerate(self.members) if member.node == node), None)


# Leases and telemetry.


@dataclass(frozen=True)
class Gpu:
    """One GPU; fractions are of the whole card."""

    name: Label
    used_fraction: Number
    memory_used_bytes: Count
    memory_bytes: Count
    watts: Number
    celsius: Number


@dataclass(frozen=True)
class WorkerUse:
    """Resource use of one worker process; `cpu_fraction` is of one core."""

    rank: Count
    cpu_fraction: Number
    memory_bytes: Count
    peak_memory_bytes: Count = 0


@dataclass(frozen=True)
class Telemetry:
    """Resource use of a machine; fractions are of the whole machine."""

    cpu_fraction: Number = 0.0
    memory_fraction: Number = 0.0
    memory_bytes: Count = 0
    disk_free_bytes: Count = 0
    sent_bytes_per_second: Number = 0.0
    received_bytes_per_second: Number = 0.0
    gpus: Many[Gpu] = ()
    workers: Many[WorkerUse] = ()
    disk_read_bytes_per_second: Number = 0.0
    disk_written_bytes_per_second: Number = 0.0


@dataclass(frozen=True)
class TelemetrySample:
    """A machine's telemetry at a time of its own clock."""

    time: Time
    node: FileName
    telemetry: Telemetry


@dataclass(frozen=True)
class GpuModel:
    """A kind of GPU."""

    name: Label
    memory_bytes: Count


@dataclass(frozen=True)
class MachineFacts:
    """A machine and the programs on it: what does not change while its node runs. Empty where nothing is known.

    `versions` are those of packtrain, python and, where they are installed, torch, cuda (of torch) and the GPU driver.
    """

    system: Label = ""
    processor: Label = ""
    cores: Count = 0
    memory_bytes: Count = 0
    gpus: Many[GpuModel] = ()
    versions: dict[Label, Label] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeReport:
    """How a generation's workers ended on one node. `fatal`: another try would end the same way.

    `lost` is the node that is gone, if that is why. `restarted`: the program started from the beginning, although a
    checkpoint was restored, and failed; what it committed is no progress.
    """

    generation: Count
    cause: Cause
    text: str
    step: Count | None = None
    fatal: bool = False
    lost: FileName | None = None
    restarted: bool = False


@dataclass(frozen=True)
class Lease:
    """A node's lease. `renewal` counts up; readers judge its age by their own clock.

    `machine` is the same for all nodes of one machine, and empty if the fleet gives each node a part of a machine.
    `joined` is the number of the first generation that the node could be part of. `left`: the node has ended.
    `leaving`: it got a preemption notice, and asks its generation to commit. `stopping` is the generation whose
    workers it has asked to commit and exit; nodes that watch it do the same. `machine_seconds` is how long it has been
    up, and `dollars_per_hour` what that costs: a run may move to machines of another price. `job` is the digest of the
    job that it was started with.
    """

    node: FileName
    hostname: Address
    address: Address
    port: Port
    workers: WorkerCount
    joined: Count
    renewal: Count
    used_seconds: Seconds
    machine: Label = ""
    left: bool = False
    leaving: bool = False
    stopping: Count = 0
    machine_seconds: Seconds = 0.0
    dollars_per_hour: Price = 0.0
    job: Label = ""
    report: NodeReport | None = None
    telemetry: Telemetry = field(default_factory=Telemetry)
    facts: MachineFacts = field(default_factory=MachineFacts)

    @property
    def dollars(self) -> float:
        """The price of the machine so far."""
        return self.machine_seconds / 3600 * self.dollars_per_hour


# Events.

EventKind = Literal[
    "machine", "generation", "superseded", "lost", "excluded",
    "restored", "checkpoint", "evaluation", "data",
    "warning", "failure", "hang", "stacks",
    "changed", "stopping", "stopped", "finished", "failed",
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
    "changed": "info",
    "stopping": "info",
    "stopped": "report",  # the summary of the run says how it ended
    "finished": "report",
    "failed": "report",
}


@dataclass(frozen=True)
class Event:
    """Something that happened to a run, in words."""

    time: Time
    kind: EventKind
    text: str
    generation: Count = 0

    @property
    def display(self) -> EventDisplay:
        return EVENT_DISPLAY[self.kind]


# Metrics, times and logs.

GridSide = Annotated[int, Field(ge=1, le=MAX_GRID_SIDE)]
Grid = Annotated[str, Field(pattern="^[A-Za-z0-9+/]*={0,2}$")]
"""Base64 of one byte per cell, row by row: 255 is the most attention of this grid, 0 is none."""


@dataclass(frozen=True)
class Sample:
    """A prediction of the model beside the reference.

    `picture` shows an input that is an image: the digest of a JPEG (`Run.picture`). `attention` has a grid of
    `attention_shape` (rows, columns) for each of the `words` of the prediction: where the model looked when it wrote
    the word. `confidence` is the probability that the model gave to its prediction.
    """

    input: str
    reference: str
    prediction: str
    picture: Digest | None = None
    words: Many[str] = ()
    attention: Many[Grid] = ()
    attention_shape: tuple[GridSide, GridSide] | None = None
    confidence: Annotated[float, Field(ge=0, le=1)] | None = None

    @model_validator(mode="after")
    def _has_whole_grids(self) -> Sample:
        rows, columns = self.attention_shape or (0, 0)
        if self.attention and len(self.attention) != len(self.words):
            raise ValueError("words and their attention differ in number")
        if any(len(grid) != (rows * columns + 2) // 3 * 4 for grid in self.attention):
            raise ValueError("attention is not a grid of its shape")
        return self


_OF_A_STEP = {"loss", "rate", "epoch", "elapsed_seconds", "step_seconds"}

_LOSSES = ("loss", "train/loss", "train_loss", "loss/train", "train_loss_step")  # as programs and their tools call it
_EVALUATED = ("val", "eval", "test", "acc")  # the start of a number that says how good a program's model is


def loss_name(names: Container[str]) -> str | None:
    """Return the name of the training loss among those of a step; None if a program has not logged it there."""
    return next((name for name in _LOSSES if name in names), None)


def evaluates(name: str) -> bool:
    """True if a program's number says how good its model is, to judge by its name."""
    return name.lower().startswith(_EVALUATED)


@dataclass(frozen=True)
class Point:
    """Measurements at a step. `start` marks the step that a generation resumes from.

    A step of a recipe, `train`, has at least those that its readers need. A program's step, `log`, has what the program
    has logged, under names of its own. `counts` says of how many samples the scores of an evaluation are.
    """

    kind: Literal["start", "train", "valid", "test", "log"]
    generation: Count
    step: Count
    time: Time
    values: Measurements
    samples: Many[Sample] = ()
    counts: dict[Label, Count] = field(default_factory=dict)

    def column(self, name: str) -> str:
        """Return the name of a measurement among those of all kinds: `valid.bleu`; a program's own stay as they are."""
        return name if self.kind == "log" else f"{self.kind}.{name}"

    @property
    def is_evaluation(self) -> bool:
        """True of a row in which a program only evaluates its model, which it may count by epochs, or in batches."""
        return self.kind == "log" and all(map(evaluates, self.values))

    @model_validator(mode="after")
    def _is_complete(self) -> Point:
        if self.kind == "train":
            missing = _OF_A_STEP - self.values.keys()
            if missing or not math.isfinite(self.values["epoch"]):
                raise ValueError("a step lacks measurements")
        return self


@dataclass(frozen=True)
class TimeSpent:
    """Seconds of a worker by span (train/recorder.py), since its previous record.

    `gpu_allocated_bytes` is the most that its tensors took on its GPU so far, `gpu_reserved_bytes` that torch held.
    """

    time: Time
    generation: Count
    rank: Count
    step: Count
    seconds: dict[Label, Seconds]
    gpu_allocated_bytes: Count = 0
    gpu_reserved_bytes: Count = 0


@dataclass(frozen=True)
class LogLine:
    """A line that a worker or (without a rank) the launcher wrote."""

    time: Time
    generation: Count
    node: FileName
    rank: Count | None
    stream: Literal["out", "err"]
    text: str

    @property
    def labeled(self) -> str:
        """The text after the worker that wrote it: `[rank 3] loading`."""
        return f"[{'launcher' if self.rank is None else f'rank {self.rank}'}] {self.text}"


# The end of a run.

Status = Literal["finished", "failed", "stopped"]


@dataclass(frozen=True)
class Result:
    """How a run ended. `scores` are of the full test split, or else of the full validation split, if it finished.

    `job` is the digest of the job that ended: a client that changes it may be killed before it removes the result.
    """

    status: Status
    reason: str
    step: Count
    seconds: Seconds
    scores: dict[Label, Measurement] = field(default_factory=dict)
    signatures: dict[Label, str] = field(default_factory=dict)
    samples: Many[Sample] = ()
    counts: dict[Label, Count] = field(default_factory=dict)
    job: str = field(default="", compare=False)


@dataclass(frozen=True)
class JobSource:
    """The job as a person wrote it: the file with its comments, and what `--set` changed, in that order.

    `commit` is that of the git repository that the job's code is in, and `uncommitted` the number of its files that
    were changed since; without git it is empty. `directory` is where the file was, on the machine of that person.
    """

    file: Label
    text: str
    overrides: Many[str] = ()
    commit: Annotated[str, Field(pattern="^([0-9a-f]{40}|[0-9a-f]{64})?$")] = ""
    uncommitted: Count = 0
    directory: str = ""

    @property
    def last_overrides(self) -> tuple[str, ...]:
        """The overrides that count: a field that is set again, as by `resume`, has its last value."""
        last = {override.partition("=")[0]: place for place, override in enumerate(self.overrides)}
        return tuple(self.overrides[place] for place in sorted(last.values()))


@dataclass(frozen=True)
class Forecast:
    """The expectation of a run when it was created. `source` says where it is from: measured steps, or a table.

    `limit` is the resource that bounds a step. `seconds` is the whole run, `step_seconds` one step without evaluation.
    `duration` is that of the job then, which `resume` may change.
    """

    source: Label
    limit: Literal["compute", "network", "data", "memory"]
    workers: WorkerCount
    steps: Count
    step_seconds: Seconds
    units_per_second: Number
    seconds: Seconds
    dollars: Price | None
    memory_bytes: Count
    parameters: Count
    gradient_bytes: Count
    checkpoint_bytes: Count
    duration: Label


@dataclass(frozen=True)
class MirroredRun:
    """The run of MLflow that mirrors this one, on the server with that digest of its URI."""

    server: Digest
    run: Label


@dataclass(frozen=True)
class Notes:
    """Words of people about a run: tags to find it by, and a sentence."""

    tags: Many[Label] = ()
    text: str = ""


@dataclass(frozen=True)
class RemovedRun:
    """A run that had this name was removed, or is called `renamed_to` now. No later run gets its name."""

    time: Time
    client: Label
    renamed_to: Label = ""


@dataclass(frozen=True)
class RenamedRun:
    """A run that got this name later. `created` is the time of its job, which a copy in a bucket does not have."""

    time: Time
    client: Label
    former: Label
    created: Time


@dataclass(frozen=True)
class Discarding:
    """A deletion by `packtrain gc` of what nothing uses: packs, files that jobs name, folders that are no runs."""

    time: Time
    client: Label
    packs: Many[str]
    files: Many[str]
    runs: Many[str]


@dataclass(frozen=True)
class StopRequest:
    """A person asked the run to stop."""

    reason: str
    time: Time


@dataclass(frozen=True)
class FleetLaunch:
    """A client is about to start machines: written before anything exists, so that `down` finds whatever came of it.

    `fleet` is the job's section of that time: a run may move from one fleet to another. `failed`: nothing was started,
    as far as the client knows.
    """

    time: Time
    client: Label
    fleet: dict[str, Any]
    failed: bool = False
