"""How a model learns: the `train` section of a job, with its optimisers, schedules and ways to exchange gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from packtrain.job.kinds import (
    EXCHANGES,
    OPTIMIZERS,
    SCHEDULES,
    ExchangeKind,
    OptimizerKind,
    ScheduleKind,
    default_kind,
    read_kind,
    write_kind,
)
from packtrain.job.part import (
    Batch,
    Count,
    Fraction,
    Length,
    Location,
    Part,
    Pixels,
    Positive,
    Scale,
    Seconds,
    Truth,
)
from packtrain.units import Amount, Duration


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
    exchange: Annotated[ExchangeKind, read_kind(EXCHANGES, ExchangeKind), write_kind(EXCHANGES)] = default_kind(
        EXCHANGES, "ddp"
    )
    optimizer: Annotated[OptimizerKind, read_kind(OPTIMIZERS, OptimizerKind), write_kind(OPTIMIZERS)] = default_kind(
        OPTIMIZERS, "adam"
    )
    schedule: Annotated[ScheduleKind, read_kind(SCHEDULES, ScheduleKind), write_kind(SCHEDULES)]
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
        yield from self.schedule.faults_in(self)
        yield from self.exchange.faults_in(self)

    def in_epoch(self, epoch: int) -> EpochSettings:
        return self.schedule.in_epoch(EpochSettings(self.batch, self.size, self.min_scale, self.rectangular), epoch)
