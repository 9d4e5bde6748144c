"""Where a run's time went and how much of it was useful, computed from the records of workers and generations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from packtrain.observe.history import surviving
from packtrain.observe.spans import COMPUTING, LABELS
from packtrain.run.records import Generation, Point, TimeSpent

_AFTER_A_PAUSE = ("start", "resumed")  # causes of generations before which no machine was working


@dataclass(frozen=True)
class RankTime:
    """One rank's time by span, over all generations."""

    rank: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class Goodput:
    """`parts` add up to the time in which the run had machines; `useful` is the part that made surviving steps."""

    useful: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    ranks: tuple[RankTime, ...] = ()

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def fraction(self) -> float | None:
        return self.useful / self.seconds if self.seconds else None

    def within(self, seconds: float) -> Goodput:
        """Return it for a run that took so long: what its workers do not account for, nodes took to start them."""
        starting = seconds - self.seconds
        if not self.parts or starting <= 0:
            return self
        return replace(self, parts={**self.parts, "start": self.parts.get("start", 0.0) + starting})


def goodput(generations: Iterable[Generation], points: Sequence[Point], spent: Sequence[TimeSpent]) -> Goodput:
    """Account for the time of a run, by the first rank's clock in each generation."""
    by_span: defaultdict[str, float] = defaultdict(float)
    causes = {generation.number: generation.cause for generation in generations}
    lost, accounts = lost_seconds(points), _accounts(points, spent)
    by_span["recovery"] = sum(_recoveries(accounts, causes).values())
    for number, records in sorted(accounts.items()):
        seconds = _total(records)
        starting = seconds.pop("start", 0.0)
        if causes.get(number, "start") in _AFTER_A_PAUSE:
            by_span["start"] += starting
        computing = sum(seconds.get(span, 0.0) for span in COMPUTING)
        # Lost steps are known from points, and spans from records, which do not say which step they belong to: take the
        # same share from every span.
        share = max(0.0, 1 - lost.get(number, 0.0) / computing) if computing else 1.0
        for span, amount in seconds.items():
            by_span[span] += amount * share if span in COMPUTING else amount
        by_span["lost steps"] += computing * (1 - share)
    useful = sum(by_span[span] for span in COMPUTING)  # without lost steps, which were moved to a part of their own
    ranks = tuple(
        RankTime(rank, _total([record for record in spent if record.rank == rank]))
        for rank in sorted({record.rank for record in spent})
    )
    return Goodput(useful, {name: amount for name, amount in by_span.items() if amount > 0}, ranks)


def recovery_seconds(
    generations: Iterable[Generation], points: Sequence[Point], spent: Sequence[TimeSpent]
) -> dict[int, float]:
    """Return how long it took from the end of the generation before to the first step of each, where one failed."""
    return _recoveries(_accounts(points, spent), {generation.number: generation.cause for generation in generations})


def _recoveries(accounts: Mapping[int, Sequence[TimeSpent]], causes: Mapping[int, str]) -> dict[int, float]:
    recoveries: dict[int, float] = {}
    ended: float | None = None
    for number, records in sorted(accounts.items()):
        if causes.get(number, "start") not in _AFTER_A_PAUSE:
            # A record covers the time before it: the first one began its seconds earlier.
            began = records[0].time - sum(records[0].seconds.values())
            gap = max(0.0, began - ended) if ended is not None else 0.0  # clocks of two machines may disagree
            recoveries[number] = gap + sum(record.seconds.get("start", 0.0) for record in records)
        ended = records[-1].time
    return recoveries


def _accounts(points: Sequence[Point], spent: Sequence[TimeSpent]) -> dict[int, list[TimeSpent]]:
    """Return the first rank's records of each generation, in order.

    Records are written every few seconds, so a worker that is killed has made steps after its last one, or before its
    first. The points of those steps hold their times; they become the record that the worker could not write.
    """
    accounts: defaultdict[int, list[TimeSpent]] = defaultdict(list)
    for record in sorted((record for record in spent if record.rank == 0), key=lambda record: record.time):
        accounts[record.generation].append(record)
    # Steps that no record covers, by generation.
    started = {point.generation: point for point in points if point.kind == "start"}
    uncovered: defaultdict[int, list[Point]] = defaultdict(list)
    for point in points:
        records = accounts.get(point.generation)
        if point.kind == "train" and (not records or point.step > records[-1].step):
            uncovered[point.generation].append(point)
    for generation, steps in uncovered.items():
        seconds = {span: sum(step.values.get(f"{span}_seconds", 0.0) for step in steps) for span in LABELS}
        records = accounts[generation]
        since = records[-1].time if records else started.get(generation, steps[0]).time - seconds["start"]
        records.append(TimeSpent(since + sum(seconds.values()), generation, 0, steps[-1].step, seconds))
    return dict(accounts)


def lost_seconds(points: Sequence[Point]) -> dict[int, float]:
    """Return the computing time of each generation's steps that no later generation continued from."""
    counting = {(point.generation, point.step) for point in surviving(points) if point.kind == "train"}
    lost: defaultdict[int, float] = defaultdict(float)
    for point in points:
        if point.kind == "train" and (point.generation, point.step) not in counting:
            lost[point.generation] += sum(point.values.get(f"{span}_seconds", 0.0) for span in COMPUTING)
    return dict(lost)


def _total(records: Sequence[TimeSpent]) -> dict[str, float]:
    total: defaultdict[str, float] = defaultdict(float)
    for record in records:
        for span, seconds in record.seconds.items():
            total[span if span in LABELS else "other"] += seconds
    return dict(total)
