"""How a model learns: the `train` section of a job, with its optimisers, schedules and ways to exchange gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, PlainSerializer, PlainValidator

from packtrain.job.kinds import EXCHANGES, OPTIMIZERS, SCHEDULES, OptimizerKind, default_kind, read_kind, write_kind
from packtrain.job.part import (
    Batch,
    Count,
    Fraction,
    Length,
    Location,
    NotNegative,
    Part,
    Positive,
    Seconds,
    Steps,
    Truth,
)
from packtrain.units import Amount, Duration

Pixels = Annotated[int, Field(strict=True, ge=8, le=8192)]
Scale = Annotated[float, Field(strict=True, gt=0, le=1, allow_inf_nan=False)]


# Schedules.


class Schedule(Part):
    """How the rate goes with the steps."""


class Noam(Schedule):
    """Linear to the end of the warm-up, then with the inverse root of the step.

    `scale` is the factor of the formula that has the model's width in it; `peak` is the rate at the end of
    the warm-up.
    """

    warmup: Steps
    scale: Positive | None = None
    peak: Positive | None = None

    def faults(self) -> Iterator[tuple[Location, str]]:
        if (self.scale is None) == (self.peak is None):
            yield (), "exactly one of scale and peak is needed"


class Constant(Schedule):
    rate: Positive


class OverTheRun(Schedule):
    """One that must know where the run ends."""


class OneCycle(OverTheRun):
    """Up to the peak over a share of the run, then down to next to nothing, both along a cosine."""

    peak: Positive
    warmup: Fraction = 0.3
    start: Scale = 0.04
    end: Scale = 0.0001


class Cosine(OverTheRun):
    """Linear up to the peak, then along a cosine to the floor at the run's end."""

    peak: Positive
    warmup: Length | None = None
    floor: NotNegative = 0.0


class StepDown(Schedule):
    """A rate that is multiplied by a factor every so often, after a linear warm-up."""

    rate: Positive
    every: Length
    factor: Scale = 0.1
    warmup: Length | None = None


def _rates(value: object) -> tuple[float, float]:
    pair = value if isinstance(value, (list, tuple)) else (value, value)
    if len(pair) != 2 or not all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in pair):
        raise ValueError("must be a rate, or a pair of rates such as [0.5, 2.0]")
    if not all(0 < one < math.inf for one in pair):
        raise ValueError("must be more than 0")
    return float(pair[0]), float(pair[1])


class Phase(Part):
    """A stretch of the run. A pair of rates is gone through linearly; what is not said stays as it was."""

    until: Length
    rate: Annotated[tuple[float, float], PlainValidator(_rates), PlainSerializer(list)]
    batch: Batch | None = None
    size: Pixels | None = None
    min_scale: Scale | None = None
    rectangular: Truth | None = None

    @property
    def changes_data(self) -> bool:
        return any(one is not None for one in (self.batch, self.size, self.min_scale, self.rectangular))


class Phases(Schedule):
    """Stretches of the run, one after the other."""

    phases: tuple[Phase, ...]

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
                yield ("phases", number, "until"), "must be later than that of the phase before"
            if phase.changes_data and number and (unit != "epochs" or start != int(start)):
                where = ("phases", number - 1, "until")
                yield where, "must be a whole number of epochs: the next phase changes the batch or the pictures"
            start = phase.until.value

    def before(self, epoch: int) -> tuple[Phase, ...]:
        """The phases that have begun when an epoch begins."""
        starts = [0.0, *(phase.until.value for phase in self.phases)]
        in_epochs = self.phases[0].until.unit == "epochs"
        begun = [phase for phase, start in zip(self.phases, starts, strict=False) if start <= epoch]
        return tuple(begun) if in_epochs else self.phases[:1]


# Exchanges of gradients.


class Exchange(Part):
    """How workers keep their weights the same."""


class Ddp(Exchange):
    """Gradients are averaged at every step; `compress` sends them in 16 bits."""

    compress: Literal["no", "fp16", "bf16"] = "no"


class LocalSteps(Exchange):
    """Every worker steps by itself; every so many steps their changes are averaged and applied with momentum."""

    every: Steps
    rate: Positive = 0.7
    momentum: Fraction = 0.9


class Fsdp(Exchange):
    """Weights, gradients and the optimiser's state are divided among the workers."""


# The section.


@dataclass(frozen=True)
class EpochSettings:
    """What holds throughout an epoch."""

    batch: Amount
    size: int
    min_scale: float
    rectangular: bool


class Train(Part):
    """`micro_batch` is the most that a worker computes at once; gradients of what is more are added up."""

    duration: Length
    batch: Batch
    micro_batch: Batch | None = None
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    exchange: Annotated[Exchange, read_kind(EXCHANGES, Exchange), write_kind(EXCHANGES)] = Ddp()
    optimizer: Annotated[OptimizerKind, read_kind(OPTIMIZERS, OptimizerKind), write_kind(OPTIMIZERS)] = default_kind(
        OPTIMIZERS, "adam"
    )
    schedule: Annotated[Schedule, read_kind(SCHEDULES, Schedule), write_kind(SCHEDULES)]
    clip: Positive | None = None
    label_smoothing: Fraction = 0.0
    ema: Annotated[float, Field(strict=True, gt=0, lt=1, allow_inf_nan=False)] | None = None
    size: Pixels = 224
    min_scale: Scale = 0.08
    rectangular: Truth = False
    compile: Truth = False
    patience: Seconds = Duration(60, "seconds")
    seed: Count = 1

    def faults(self) -> Iterator[tuple[Location, str]]:
        if self.micro_batch is not None and self.micro_batch.unit != self.batch.unit:
            yield ("micro_batch",), f"must be counted in {self.batch.unit}, as the batch is"
        if isinstance(self.exchange, LocalSteps) and self.precision == "fp16":
            yield ("precision",), "fp16 scales the loss for all workers alike, and local steps do not: use bf16 or fp32"
        if isinstance(self.schedule, OverTheRun) and self.duration.unit == "seconds":
            yield ("duration",), "must be in steps or epochs: the schedule goes by how much of the run is left"
        if isinstance(self.schedule, Cosine) and self.schedule.warmup is not None:
            where: Location = ("schedule", "cosine", "warmup")
            if self.schedule.warmup.unit != self.duration.unit:
                yield where, f"must be counted in {self.duration.unit}, as the duration is"
            elif self.schedule.warmup.value >= self.duration.value:
                yield where, "must be shorter than the run"
        for where, length in self._lengths():
            if length.unit == "seconds":
                yield where, "must be in steps or epochs"
        if isinstance(self.schedule, Phases):
            for number, phase in enumerate(self.schedule.phases):
                if phase.batch is not None and phase.batch.unit != self.batch.unit:
                    where = ("schedule", "phases", number, "batch")
                    yield where, f"must be counted in {self.batch.unit}, as the batch is"

    def _lengths(self) -> Iterator[tuple[Location, Duration]]:
        if isinstance(self.schedule, StepDown):
            yield ("schedule", "step", "every"), self.schedule.every
            if self.schedule.warmup is not None:
                yield ("schedule", "step", "warmup"), self.schedule.warmup

    def in_epoch(self, epoch: int) -> EpochSettings:
        found = EpochSettings(self.batch, self.size, self.min_scale, self.rectangular)
        if not isinstance(self.schedule, Phases):
            return found
        for phase in self.schedule.before(epoch):
            found = EpochSettings(
                phase.batch or found.batch,
                phase.size or found.size,
                phase.min_scale or found.min_scale,
                found.rectangular if phase.rectangular is None else phase.rectangular,
            )
        return found
