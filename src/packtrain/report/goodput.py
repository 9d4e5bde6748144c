"""Where a run's time went, and how much of it was useful: pure, out of what workers and generations wrote down."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from packtrain.run.records import Generation, Point, TimeSpent
from packtrain.run.run import surviving

COMPUTING = ("forward", "backward", "exchange", "wait", "optimizer")
"""Spans in which steps are made; what else there is keeps a run from them."""
_AWAY = ("start", "resumed")  # causes of generations before which nobody was at work


@dataclass(frozen=True)
class RankTime:
    """Where one rank's time went, over all generations."""

    rank: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class Goodput:
    """`parts` add up to the time in which the run had machines; `useful` is what made steps that survived."""

    useful: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    ranks: tuple[RankTime, ...] = ()

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def fraction(self) -> float | None:
        return self.useful / self.seconds if self.seconds else None


def goodput(generations: Iterable[Generation], points: Sequence[Point], spent: Sequence[TimeSpent]) -> Goodput:
    """The time of a run, by the first rank's clock in each generation."""
    parts: defaultdict[str, float] = defaultdict(float)
    causes = {generation.number: generation.cause for generation in generations}
    lost = lost_seconds(points)
    ended: float | None = None
    for number, records in sorted(_accounts(points, spent).items()):
        seconds = _added(records)
        again = causes.get(number, "start") not in _AWAY
        if again and ended is not None:
            began = records[0].time - sum(records[0].seconds.values())
            parts["recovery"] += max(0.0, began - ended)
        parts["recovery" if again else "start"] += seconds.pop("start", 0.0)
        computing = sum(seconds.get(span, 0.0) for span in COMPUTING)
        kept = max(0.0, 1 - lost.get(number, 0.0) / computing) if computing else 1.0
        for span, one in seconds.items():
            parts[span] += one * kept if span in COMPUTING else one
        parts["lost steps"] += computing * (1 - kept)
        ended = records[-1].time
    useful = sum(parts[span] for span in COMPUTING)
    return Goodput(useful, {name: one for name, one in parts.items() if one > 0}, _by_rank(spent))


def _accounts(points: Sequence[Point], spent: Sequence[TimeSpent]) -> dict[int, list[TimeSpent]]:
    """The first rank's records of each generation, in order.

    They are written every few seconds: a worker that is killed has made steps after its last one, or all of its steps
    before the first. What these took is in their points, and makes the record that it did not come to write.
    """
    accounts: defaultdict[int, list[TimeSpent]] = defaultdict(list)
    for one in sorted((one for one in spent if one.rank == 0), key=lambda one: one.time):
        accounts[one.generation].append(one)
    started = {point.generation: point for point in points if point.kind == "start"}
    left: defaultdict[int, list[Point]] = defaultdict(list)
    for point in points:
        known = accounts.get(point.generation)
        if point.kind == "train" and (not known or point.step > known[-1].step):
            left[point.generation].append(point)
    for generation, steps in left.items():
        seconds = {span: sum(step.values.get(f"{span}_seconds", 0.0) for step in steps) for span in ORDER}
        known = accounts[generation]
        since = known[-1].time if known else started.get(generation, steps[0]).time - seconds["start"]
        known.append(TimeSpent(since + sum(seconds.values()), generation, 0, steps[-1].step, seconds))
    return dict(accounts)


def lost_seconds(points: Sequence[Point]) -> dict[int, float]:
    """The computing time of each generation's steps that no later one went on from."""
    kept = {(point.generation, point.step) for point in surviving(points) if point.kind == "train"}
    lost: defaultdict[int, float] = defaultdict(float)
    for point in points:
        if point.kind == "train" and (point.generation, point.step) not in kept:
            lost[point.generation] += sum(point.values.get(f"{span}_seconds", 0.0) for span in COMPUTING)
    return dict(lost)


def _by_rank(spent: Sequence[TimeSpent]) -> tuple[RankTime, ...]:
    ranks = sorted({one.rank for one in spent})
    return tuple(RankTime(rank, _added([one for one in spent if one.rank == rank])) for rank in ranks)


def _added(records: Sequence[TimeSpent]) -> dict[str, float]:
    total: defaultdict[str, float] = defaultdict(float)
    for record in records:
        for span, seconds in record.seconds.items():
            total[span] += seconds
    return dict(total)


ORDER: Mapping[str, str] = {
    "forward": "forward",
    "backward": "backward",
    "exchange": "exchange that computing did not hide",
    "wait": "waiting for the slowest rank",
    "optimizer": "optimiser",
    "data": "waiting for data",
    "save": "copying for checkpoints",
    "evaluation": "evaluation",
    "start": "start",
    "recovery": "recovery",
    "lost steps": "steps that were lost",
    "other": "keeping records",
}
"""The parts in the order in which they are shown, in words."""
