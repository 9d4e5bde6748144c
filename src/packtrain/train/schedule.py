"""The learning rate at a step: pure functions of the schedule's settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from packtrain.job import Constant, Noam, Schedule

Rate = Callable[[int], float]


def noam(settings: Noam, width: int) -> Rate:
    """Linear warm-up, then the inverse root of the step."""
    warmup = settings.warmup.value
    if settings.peak is not None:
        factor = settings.peak * warmup**0.5
    else:
        assert settings.scale is not None
        factor = settings.scale * width**-0.5
    return lambda step: factor * min((step + 1) * warmup**-1.5, (step + 1) ** -0.5)


def constant(settings: Constant, width: int) -> Rate:  # noqa: ARG001 - every schedule is built alike
    return lambda _: settings.rate


SCHEDULES: Mapping[type[Schedule], Callable[[Any, int], Rate]] = {Noam: noam, Constant: constant}


def rate_of(schedule: Schedule, width: int) -> Rate:
    """The rate for step 0, 1, 2, ...; `width` is the model's, which some formulas have in them."""
    return SCHEDULES[type(schedule)](schedule, width)
