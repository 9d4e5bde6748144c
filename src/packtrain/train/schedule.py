"""The learning rate at a moment: pure functions of the schedule's settings."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from packtrain.job.train import Constant, Cosine, Noam, OneCycle, Phases, Schedule, StepDown, Train
from packtrain.train.progress import Progress, multiples, up_to_rounding
from packtrain.units import Duration

Rate = Callable[[Progress], float]


def noam(settings: Noam, width: int, _: Duration) -> Rate:
    """Linear warm-up, then the inverse root of the step."""
    warmup = settings.warmup.value
    if settings.peak is not None:
        factor = settings.peak * warmup**0.5
    else:
        assert settings.scale is not None
        factor = settings.scale * width**-0.5
    return lambda now: factor * min((now.step + 1) * warmup**-1.5, (now.step + 1) ** -0.5)


def constant(settings: Constant, _: int, __: Duration) -> Rate:
    return lambda _: settings.rate


def one_cycle(settings: OneCycle, _: int, duration: Duration) -> Rate:
    def rate(now: Progress) -> float:
        done = min(1.0, now.in_unit(duration.unit) / duration.value)
        if done < settings.warmup:
            return settings.peak * _cosine(settings.start, 1.0, done / settings.warmup)
        return settings.peak * _cosine(1.0, settings.end, (done - settings.warmup) / (1 - settings.warmup))

    return rate


def cosine(settings: Cosine, _: int, duration: Duration) -> Rate:
    warmup = settings.warmup.value if settings.warmup else 0.0

    def rate(now: Progress) -> float:
        at = now.in_unit(duration.unit)
        if at < warmup:
            return settings.peak * _warmth(settings.warmup, now)
        return _cosine(settings.peak, settings.floor, min(1.0, (at - warmup) / (duration.value - warmup)))

    return rate


def step_down(settings: StepDown, _: int, __: Duration) -> Rate:
    def rate(now: Progress) -> float:
        downs = multiples(now.in_unit(settings.every.unit), settings.every.value)
        return settings.rate * _warmth(settings.warmup, now) * float(settings.factor**downs)

    return rate


def phases(settings: Phases, _: int, __: Duration) -> Rate:
    """Linear within each phase; after the last one, as it ended."""
    edges = [0.0, *(phase.until.value for phase in settings.phases)]
    unit = settings.phases[0].until.unit

    def rate(now: Progress) -> float:
        at = now.in_unit(unit)
        number = min(len(settings.phases), bisect_right(edges, up_to_rounding(at))) - 1
        start, end = list(pairwise(edges))[number]
        first, last = settings.phases[number].rate
        return first + (last - first) * min(1.0, max(0.0, (at - start) / (end - start)))

    return rate


def _cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * done)) / 2


def _warmth(warmup: Duration | None, now: Progress) -> float:
    """The share of the full rate in a linear warm-up, which reaches it with its last step."""
    if warmup is None:
        return 1.0
    ahead = 1.0 if warmup.unit == "steps" else 0.0
    return min(1.0, (now.in_unit(warmup.unit) + ahead) / warmup.value)


SCHEDULES: Mapping[type[Schedule], Callable[[Any, int, Duration], Rate]] = {
    Noam: noam,
    Constant: constant,
    OneCycle: one_cycle,
    Cosine: cosine,
    StepDown: step_down,
    Phases: phases,
}


def rate_of(settings: Train, width: int) -> Rate:
    """The rate at every moment of a run; `width` is the model's, which some formulas have in them."""
    return SCHEDULES[type(settings.schedule)](settings.schedule, width, settings.duration)
