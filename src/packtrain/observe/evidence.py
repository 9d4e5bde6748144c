"""The evidence of a run: everything in its folder that a finding may need, read once."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from packtrain.errors import PacktrainError
from packtrain.job import Job
from packtrain.observe.history import surviving
from packtrain.observe.spans import STEP_SPANS
from packtrain.observe.status import Status, status_in_full
from packtrain.pack.manifest import Manifest, find_manifest
from packtrain.run.checkpoint import Checkpoint, committed, file_key
from packtrain.run.liveness import state_of
from packtrain.run.records import (
    Event,
    Forecast,
    Generation,
    JobSource,
    Lease,
    Point,
    Result,
    TelemetrySample,
    TimeSpent,
)
from packtrain.run.run import Run
from packtrain.store.records import decode
from packtrain.units import counted

Read = TypeVar("Read")

_TELEMETRY_BYTES = 32 << 20  # some 100,000 samples: enough for means of a week on many machines
_MAX_STATE_BYTES = 1 << 20


@dataclass(frozen=True)
class _State:
    """The part of a checkpoint's `state.json` that says what computed it."""

    versions: dict[str, str]


@dataclass(frozen=True, eq=False)
class Evidence:
    """The records of a run. `raw` includes the steps that were lost; `telemetry` may be a part, evenly spaced.

    `versions` are those of the programs that made the newest checkpoint.
    """

    job: Job
    status: Status
    raw: Sequence[Point] = ()
    spent: Sequence[TimeSpent] = ()
    telemetry: Sequence[TelemetrySample] = ()
    events: Sequence[Event] = ()
    generations: Sequence[Generation] = ()
    leases: Sequence[Lease] = ()
    checkpoints: Sequence[Checkpoint] = ()
    manifest: Manifest | None = None
    forecast: Forecast | None = None
    result: Result | None = None
    pack: str = ""
    job_digest: str = ""
    code_digest: str = ""
    store: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    source: JobSource | None = None

    @cached_property
    def points(self) -> list[Point]:
        """The points that count: no step twice, and none that a restart discarded."""
        return surviving(self.raw)

    @cached_property
    def steps(self) -> list[Point]:
        return [point for point in self.points if point.kind == "train"]

    @cached_property
    def logged(self) -> list[Point]:
        """The numbers that a program has logged."""
        return [point for point in self.points if point.kind == "log"]

    @cached_property
    def evaluations(self) -> list[Point]:
        return [point for point in self.points if point.kind == "valid"]

    def scores(self, name: str) -> list[tuple[float, float]]:
        """Return (step, value) of a validation score, without those that are not finite."""
        return values_of(self.evaluations, name)

    @cached_property
    def workers(self) -> int:
        """The number of workers of the last generation that trained."""
        members = self.generations[-1].members if self.generations else ()
        return sum(member.workers for member in members) or len({record.rank for record in self.spent}) or 1

    @cached_property
    def conditions(self) -> dict[str, float]:
        """Measurements at the start of the last generation, such as `link_bytes_per_second`, if there are any."""
        starts = [point for point in self.raw if point.kind == "start"]
        return max(starts, key=lambda point: point.generation).values if starts else {}

    @cached_property
    def machines(self) -> int:
        return len(self.generations[-1].members) if self.generations else 1

    def machines_of(self, nodes: Iterable[str]) -> tuple[int, str]:
        """Return how many machines these nodes were at a time, and that in words: `2 machines at a time`.

        A launch or a replacement starts new nodes, which may be on the same machines, or be pods on them.
        """
        hosts = {lease.node: lease.hostname for lease in self.leases}
        machines = {node: hosts.get(node, node) for node in nodes}
        together = (
            len({machines[member.node] for member in generation.members if member.node in machines})
            for generation in self.generations
        )
        total = len({*machines.values()})
        count = max(together, default=0) or total
        return count, counted(count, "machine") + (" at a time" if count < total else "")

    @cached_property
    def step_shares(self) -> dict[str, float]:
        """The share of each span in the time of all steps, over all ranks; empty if there is no record."""
        return shares(self.rank_seconds.values())

    @cached_property
    def rank_seconds(self) -> dict[int, dict[str, float]]:
        """Seconds of each rank in its steps, by span. From the first rank's points if nothing else is known."""
        ranks: dict[int, dict[str, float]] = {}
        for record in self.spent:
            seconds = ranks.setdefault(record.rank, dict.fromkeys(STEP_SPANS, 0.0))
            for span in STEP_SPANS:
                seconds[span] += record.seconds.get(span, 0.0)
        if not ranks and self.steps:
            ranks[0] = {span: sum(seconds_of(point, span) for point in self.steps) for span in STEP_SPANS}
        return ranks

    @cached_property
    def training_telemetry(self) -> list[TelemetrySample]:
        """The samples from the times in which a generation made steps, without its startup."""
        times: dict[int, tuple[float, float]] = {}
        for point in self.raw:
            if point.kind == "train":
                first, last = times.get(point.generation, (point.time, point.time))
                times[point.generation] = min(first, point.time), max(last, point.time)
        spans = sorted(times.values())
        starts = [first for first, _ in spans]  # one generation follows the other
        return [
            sample
            for sample in self.telemetry
            if (number := bisect_right(starts, sample.time)) and sample.time <= spans[number - 1][1]
        ]


def values_of(points: Sequence[Point], name: str) -> list[tuple[float, float]]:
    return [
        (float(point.step), point.values[name]) for point in points if math.isfinite(point.values.get(name, math.nan))
    ]


def seconds_of(point: Point, span: str) -> float:
    return point.values.get(f"{span}_seconds", 0.0)


def shares(seconds: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the share of each span in the sum of all."""
    total: dict[str, float] = {}
    for spans in seconds:
        for span, amount in spans.items():
            total[span] = total.get(span, 0.0) + max(0.0, amount)
    duration = sum(total.values())
    return {span: amount / duration for span, amount in total.items()} if duration > 0 else {}


def gather(run: Run) -> Evidence:
    raw, result = run.points().read(), run.result()
    checkpoints = committed(run)
    pack = _unless_lost(run.pack_name, "") if run.job.recipe is not None else ""
    return Evidence(
        job=run.job,
        status=status_in_full(run, result.status if result else state_of(run), raw, result),
        raw=raw,
        spent=run.time_spent().read(),
        telemetry=run.telemetry().spread(_TELEMETRY_BYTES),
        events=sorted(run.events().read(), key=lambda event: event.time),
        generations=run.generations(),
        leases=run.leases(),
        checkpoints=checkpoints,
        manifest=_unless_lost(lambda: find_manifest(run.store, pack), None) if pack else None,
        forecast=run.forecast(),
        result=result,
        pack=pack,
        job_digest=run.job_digest,
        code_digest=_unless_lost(lambda: run.code_digest, ""),
        store=run.store.url,
        versions=_unless_lost(lambda: _versions(run, checkpoints[-1]), {}) if run.job.recipe and checkpoints else {},
        source=run.source(),
    )


def _unless_lost(read: Callable[[], Read], otherwise: Read) -> Read:
    """Return what a report can do without: the store may have lost it, or have it from another version of Packtrain."""
    try:
        return read()
    except PacktrainError:
        return otherwise


def _versions(run: Run, checkpoint: Checkpoint) -> dict[str, str]:
    key = file_key(run, checkpoint.name, "state.json")
    return decode(_State, run.store.get(key, _MAX_STATE_BYTES), key).versions
