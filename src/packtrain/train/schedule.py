"""Learning rate schedules: the settings of each kind, and the rate of a step as a pure function of them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, PlainSerializer, PlainValidator

from packtrain.job.job import EpochSettings, TrainSettings
from packtrain.job.kinds import ScheduleKind
from packtrain.job.part import (
    BatchSize,
    Boolean,
    Fraction,
    Length,
    Location,
    NotNegative,
    Part,
    Pixels,
    Positive,
    Scale,
    Steps,
    is_set,
    rules_in_schema,
)
from packtrain.units import ENOUGH, Duration, cut_to

if TYPE_CHECKING:  # progress needs numpy, which takes longer to import than it takes to read a job
    from packtrain.train.progress import Progress

Rate = Callable[["Progress"], float]

_LONGEST_WARMUP = 8000.0  # steps, of a default whose own is in epochs


def rate_of(train: TrainSettings, width: int) -> Rate:
    """Return the rate of a job: that of its schedule, scaled by the batch of the epoch if the job says so."""
    from packtrain.train.progress import up_to_rounding

    rate: Rate = train.schedule.build(width, train.duration)
    scale = train.scale_rate
    if scale is None:
        return rate
    return lambda progress: rate(progress) * scale.factor(train.in_epoch(int(up_to_rounding(progress.epochs))).batch)


class NoamSettings(ScheduleKind):
    """Linear warm-up, then the inverse square root of the step.

    `scale` is the factor of the formula that includes the model's width; `peak` is the rate at the end of the warm-up.
    If `warmup` is more than `share` of the run, that share is the warm-up, and its peak is what `warmup` would reach.
    """

    harmless = frozenset({"warmup", "scale", "peak", "share"})
    model_config = rules_in_schema({"not": {"allOf": [is_set("scale"), is_set("peak")]}})

    warmup: Steps
    scale: Positive | None = None
    peak: Positive | None = None
    share: Scale | None = None

    @property
    def follows_duration(self) -> bool:
        return self.share is not None

    def faults(self) -> Iterator[tuple[Location, str]]:
        if (self.scale is None) == (self.peak is None):
            yield (), "set exactly one of scale and peak"

    def faults_in(self, train: TrainSettings) -> Iterator[tuple[Location, str]]:
        if self.share is not None and train.duration.unit == "seconds":
            yield (
                ("schedule", "noam", "share"),
                "requires train.duration in steps or epochs",
            )

    def doubts_in(self, train: TrainSettings) -> Iterator[str]:
        return iter(()) if self.share else _endless_warmup("noam", self.warmup, train)

    @property
    def in_words(self) -> str:
        factor = (
            f"{self.scale:g} divided by the square root of the model's width"
            if self.peak is None
            else f"chosen so that the peak is {self.peak:g}"
        )
        if self.share is None:
            length = f"for {self.warmup}"
        else:
            factor = f"{factor} with {self.warmup}"
            length = f"to the same peak for {self.warmup} or {self.share:.0%} of the run, whichever is shorter"
        return (
            f"It rises linearly {length}, then falls with the inverse square root of the step: the factor is {factor}."
        )

    def fitted(self, written: Duration, duration: Duration) -> NoamSettings:
        if duration.unit != "steps" or self.share is not None:
            return self
        return self._warmed_up_in(cut_to(self.warmup, written, duration) or Duration(1.0, "steps"))

    def default_for(self, written: Duration, duration: Duration) -> NoamSettings:
        if duration.unit != "seconds":
            return self.fitted(written, duration)
        return self.model_copy(update={"share": None})._warmed_up_in(_in_steps(self.warmup, duration))

    def beside(self, fields: Mapping[str, object]) -> Mapping[str, object]:
        if fields.get("scale") is not None or fields.get("peak") is not None:
            return self.model_dump(mode="json", exclude_none=True, exclude={"scale", "peak"})
        try:
            warmup = Duration.parse(str(fields["warmup"]))
        except (KeyError, ValueError):
            return super().beside(fields)
        return self._warmed_up_in(warmup).model_dump(mode="json", exclude_none=True)

    def _warmed_up_in(self, warmup: Duration) -> NoamSettings:
        """Return the schedule with another warm-up and the same peak."""
        if warmup == self.warmup:
            return self
        if self.scale is None:
            return self.model_copy(update={"warmup": warmup})
        scale = float(f"{self.scale * math.sqrt(warmup.value / self.warmup.value):.6g}")
        return self.model_copy(update={"warmup": warmup, "scale": scale})

    def build(self, width: int, duration: Duration) -> Rate:
        warmup = self.warmup.value
        if self.peak is not None:
            factor = self.peak * warmup**0.5
        else:
            assert self.scale is not None
            factor = self.scale * width**-0.5

        def rate(progress: Progress) -> float:
            return float(factor * min((progress.step + 1) * warmup**-1.5, (progress.step + 1) ** -0.5))

        if self.share is None:
            return rate
        share, peak = Duration(self.share * duration.value, duration.unit), float(factor * warmup**-0.5)

        def rate_in_share(progress: Progress) -> float:
            # The shorter of both warm-ups counts, so that a long run has exactly `rate`.
            warmups = _warmup_progress(share, progress)
            return (
                rate(progress)
                if warmups <= (progress.step + 1) / warmup
                else peak * min(warmups, 1 / math.sqrt(warmups))
            )

        return rate_in_share


class ConstantSettings(ScheduleKind):
    """The same rate all along."""

    harmless = frozenset({"rate"})

    rate: Positive

    @property
    def in_words(self) -> str:
        return f"It stays at {self.rate:g}."

    def build(self, width: int, duration: Duration) -> Rate:  # noqa: ARG002
        return lambda _: self.rate


class _OverTheRun(ScheduleKind):
    """A schedule that depends on where the run ends."""

    ends_with_run = True
    harmless = frozenset({"peak"})

    peak: Positive

    def default_for(self, written: Duration, duration: Duration) -> ScheduleKind:
        # Nobody knows the last step of a run that ends by the clock: a rate that falls all the time needs none.
        if duration.unit == "seconds":
            return NoamSettings(warmup=_in_steps(None, duration), peak=self.peak)
        return self.fitted(written, duration)

    def faults_in(self, train: TrainSettings) -> Iterator[tuple[Location, str]]:
        if train.duration.unit == "seconds":
            yield ("duration",), "must be in steps or epochs; the schedule depends on the length of the run"


class OneCycleSettings(_OverTheRun):
    """Up to the peak over a share of the run, then down to almost zero, both along a cosine."""

    harmless = frozenset({"warmup", "start", "end"})

    warmup: Fraction = 0.3
    start: Scale = 0.04
    end: Scale = 0.0001

    @property
    def in_words(self) -> str:
        return (
            f"It rises along a cosine from {self.peak * self.start:g} to {self.peak:g} over the first"
            f" {self.warmup:.0%} of the run, then falls along a cosine to {self.peak * self.end:g} at its end."
        )

    def build(self, width: int, duration: Duration) -> Rate:  # noqa: ARG002
        def rate(progress: Progress) -> float:
            share = min(1.0, progress.in_unit(duration.unit) / duration.value)
            if share < self.warmup:
                return self.peak * _cosine(self.start, 1.0, share / self.warmup)
            return self.peak * _cosine(1.0, self.end, (share - self.warmup) / (1 - self.warmup))

        return rate


class CosineSettings(_OverTheRun):
    """Linear up to the peak, then along a cosine to the floor at the end of the run."""

    harmless = frozenset({"warmup", "floor"})

    warmup: Length | None = None
    floor: NotNegative = 0.0

    @property
    def in_words(self) -> str:
        start = f"rises linearly to {self.peak:g} in {self.warmup}" if self.warmup else f"starts at {self.peak:g}"
        return f"It {start}, then falls along half a cosine to {self.floor:g} at the end of the run."

    def fitted(self, written: Duration, duration: Duration) -> CosineSettings:
        if self.warmup is None or duration.unit == "seconds":
            return self
        return self.model_copy(update={"warmup": cut_to(self.warmup, written, duration)})

    def faults_in(self, train: TrainSettings) -> Iterator[tuple[Location, str]]:
        yield from super().faults_in(train)
        where = ("schedule", "cosine", "warmup")
        if self.warmup is None:
            return
        if self.warmup.unit != train.duration.unit:
            yield where, f"must be in {train.duration.unit}, like the duration"
        elif self.warmup.value >= train.duration.value:
            yield where, "must be shorter than the run"

    def build(self, width: int, duration: Duration) -> Rate:  # noqa: ARG002
        warmup = self.warmup.value if self.warmup else 0.0

        def rate(progress: Progress) -> float:
            at = progress.in_unit(duration.unit)
            if at < warmup:
                return self.peak * _warmup_share(self.warmup, progress)
            return _cosine(self.peak, self.floor, min(1.0, (at - warmup) / (duration.value - warmup)))

        return rate


class StepDownSettings(ScheduleKind):
    """A rate that is multiplied by a factor at regular intervals, after a linear warm-up."""

    harmless = frozenset({"rate", "every", "factor", "warmup"})

    rate: Positive
    every: Length
    factor: Scale = 0.1
    warmup: Length | None = None

    @property
    def in_words(self) -> str:
        start = f"rises linearly to {self.rate:g} in {self.warmup}" if self.warmup else f"starts at {self.rate:g}"
        return f"It {start}, and is multiplied by {self.factor:g} every {self.every}."

    def faults(self) -> Iterator[tuple[Location, str]]:
        for field, length in (("every", self.every), ("warmup", self.warmup)):
            if length is not None and length.unit == "seconds":
                yield (field,), "must be in steps or epochs"

    def doubts_in(self, train: TrainSettings) -> Iterator[str]:
        return _endless_warmup("step", self.warmup, train)

    def fitted(self, written: Duration, duration: Duration) -> StepDownSettings:
        if self.warmup is None or self.warmup.unit != duration.unit:
            return self
        return self.model_copy(update={"warmup": cut_to(self.warmup, written, duration)})

    def build(self, width: int, duration: Duration) -> Rate:  # noqa: ARG002
        from packtrain.train.progress import multiples

        def rate(progress: Progress) -> float:
            # `multiples` makes up for rounding: 1 + 9/25 epochs count as 1.36.
            downs = multiples(progress.in_unit(self.every.unit), self.every.value)
            return self.rate * _warmup_share(self.warmup, progress) * float(self.factor**downs)

        return rate


def _rates(value: object) -> tuple[float, float]:
    pair = value if isinstance(value, (list, tuple)) else (value, value)
    if len(pair) != 2 or not all(isinstance(rate, (int, float)) and not isinstance(rate, bool) for rate in pair):
        raise ValueError("must be a rate, or a pair of rates such as [0.5, 2.0]")
    if not all(0 < rate < math.inf for rate in pair):
        raise ValueError("must be greater than 0")
    return float(pair[0]), float(pair[1])


class Phase(Part):
    """A phase of the run; a pair of rates is a linear change. Fields that are not given keep their value."""

    harmless = frozenset({"until", "rate", "batch", "size", "min_scale", "rectangular"})

    until: Length
    rate: Annotated[
        tuple[float, float],
        PlainValidator(_rates, json_schema_input_type=Positive | tuple[Positive, Positive]),
        PlainSerializer(list),
    ]
    batch: BatchSize | None = None
    size: Pixels | None = None
    min_scale: Scale | None = None
    rectangular: Boolean | None = None

    @property
    def in_words(self) -> str:
        first, last = self.rate
        return f"until {self.until} " + (f"at {first:g}" if first == last else f"linearly from {first:g} to {last:g}")

    @property
    def changes_data(self) -> bool:
        return any(setting is not None for setting in (self.batch, self.size, self.min_scale, self.rectangular))

    def applied(self, before: EpochSettings) -> EpochSettings:
        return EpochSettings(
            self.batch or before.batch,
            self.size or before.size,
            self.min_scale or before.min_scale,
            before.rectangular if self.rectangular is None else self.rectangular,
        )


class PhasesSettings(ScheduleKind):
    """Phases of the run, one after the other."""

    harmless = frozenset({"phases"})

    phases: Annotated[tuple[Phase, ...], Field(json_schema_extra={"minItems": 1})]

    @property
    def in_words(self) -> str:
        return f"It has phases: {'; '.join(phase.in_words for phase in self.phases)}. The last rate holds after that."

    def faults(self) -> Iterator[tuple[Location, str]]:
        if not self.phases:
            yield ("phases",), "must have at least one phase"
            return
        unit = self.phases[0].until.unit
        start = 0.0
        for number, phase in enumerate(self.phases):
            if phase.until.unit == "seconds" or phase.until.unit != unit:
                yield ("phases", number, "until"), "must be in steps or in epochs, the same in all phases"
                return
            if phase.until.value <= start:
                yield ("phases", number, "until"), "must be later than in the previous phase"
            # The batches of an epoch are planned as a whole, so their settings cannot change in the middle of it.
            if phase.changes_data and number and (unit != "epochs" or start != int(start)):
                where = ("phases", number - 1, "until")
                yield where, "must be a whole number of epochs; the next phase changes the batch or the images"
            start = phase.until.value

    def faults_in(self, train: TrainSettings) -> Iterator[tuple[Location, str]]:
        for number, phase in enumerate(self.phases):
            if phase.batch is not None and phase.batch.unit != train.batch.unit:
                yield ("schedule", "phases", number, "batch"), f"must be in {train.batch.unit}, like the batch"

    def in_epoch(self, settings: EpochSettings, epoch: int) -> EpochSettings:
        # Of phases in steps only the first one may change the data, so it does not matter when the others start.
        starts = [0.0, *(phase.until.value for phase in self.phases)]
        for phase, start in zip(self.phases, starts, strict=False):
            if start <= epoch:
                settings = phase.applied(settings)
        return settings

    def build(self, width: int, duration: Duration) -> Rate:  # noqa: ARG002
        """Return rates that are linear within each phase; after the last phase its last rate holds."""
        from packtrain.train.progress import up_to_rounding

        edges = [0.0, *(phase.until.value for phase in self.phases)]
        unit = self.phases[0].until.unit

        def rate(progress: Progress) -> float:
            at = progress.in_unit(unit)
            # At an edge the next phase applies; after the last edge the last phase does.
            number = min(len(self.phases), bisect_right(edges, up_to_rounding(at))) - 1
            start, end = list(pairwise(edges))[number]
            first, last = self.phases[number].rate
            return first + (last - first) * min(1.0, max(0.0, (at - start) / (end - start)))

        return rate


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


def _warmup_share(warmup: Duration | None, progress: Progress) -> float:
    """Return the share of the full rate in a linear warm-up, which its last step reaches."""
    return 1.0 if warmup is None else min(1.0, _warmup_progress(warmup, progress))


def _warmup_progress(warmup: Duration, progress: Progress) -> float:
    """Return how many times as long as a warm-up the run has trained."""
    ahead = 1.0 if warmup.unit == "steps" else 0.0  # the first step is not made at a rate of 0
    return (progress.in_unit(warmup.unit) + ahead) / warmup.value


def _endless_warmup(word: str, warmup: Duration | None, train: TrainSettings) -> Iterator[str]:
    if warmup is not None and warmup.unit == train.duration.unit and warmup.value >= train.duration.value:
        field = f"train.schedule.{word}.warmup: {warmup}"
        yield f"{field} do not end before the run, which has {train.duration}: the rate is still rising at its end"


def _in_steps(warmup: Duration | None, duration: Duration) -> Duration:
    """Return a warm-up in steps for a run of so many seconds, as if a step took one: most take less."""
    steps = float(max(1, round(ENOUGH * duration.value)))
    return Duration(min(steps, warmup.value if warmup else _LONGEST_WARMUP), "steps")
