"""When things are due: pure questions about how far a run has come."""

from __future__ import annotations

import math
from dataclasses import dataclass

from packtrain.units import Duration


@dataclass(frozen=True)
class Progressed:
    """How far a run has come, in every unit a duration can have. The first rank's clock is everyone's."""

    steps: int
    epochs: float
    seconds: float

    def in_unit(self, unit: str) -> float:
        return {"steps": float(self.steps), "epochs": self.epochs, "seconds": self.seconds}[unit]


def reached(goal: Duration, now: Progressed) -> bool:
    return now.in_unit(goal.unit) >= goal.value


def due(every: Duration, before: Progressed, now: Progressed) -> bool:
    """Whether a multiple of `every` lies after `before` and not after `now`."""
    return now.in_unit(every.unit) // every.value > before.in_unit(every.unit) // every.value


def fraction(goal: Duration, now: Progressed) -> float:
    return min(1.0, now.in_unit(goal.unit) / goal.value)


LEAST_SECONDS, MOST_SECONDS = 10.0, 1800.0
_HOPED_SECONDS = 4 * 3600.0  # between failures, before any was seen


def save_interval(save_seconds: float, commit_seconds: float, failures: int, elapsed_seconds: float) -> float:
    """How long to train between two saves, so that saves and lost work together cost the least.

    The optimum for a save that stops training for `save_seconds` is the root of twice that times the mean time
    between failures (Young, 1974). A save is not begun before the one ahead of it can have been committed.
    """
    between_failures = (_HOPED_SECONDS + elapsed_seconds) / (failures + 1)
    best = math.sqrt(2 * save_seconds * between_failures)
    return min(MOST_SECONDS, max(LEAST_SECONDS, best, 2 * commit_seconds))
