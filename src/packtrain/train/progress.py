"""When things are due: pure questions about how far a run has come."""

from __future__ import annotations

import math
from dataclasses import dataclass

from packtrain.units import Duration

_ROUNDING = 1e-12


@dataclass(frozen=True)
class Progressed:
    """How far a run has come, in every unit a duration can have. The first rank's clock is everyone's."""

    steps: int
    epochs: float
    seconds: float

    def in_unit(self, unit: str) -> float:
        return {"steps": float(self.steps), "epochs": self.epochs, "seconds": self.seconds}[unit]


def up_to_rounding(value: float) -> float:
    """A little more, so that 1 + 9/25 epochs are not less than 1.36: far less than a step of a trillion."""
    return value * (1 + _ROUNDING)


def marks(value: float, every: float) -> int:
    """How many multiples of `every` are not more than `value`, zero apart."""
    return math.floor(up_to_rounding(value / every))


def reached(goal: Duration, now: Progressed) -> bool:
    return marks(now.in_unit(goal.unit), goal.value) >= 1


class Recurring:
    """Something that is due every so often, or never. All it goes by is the same on all ranks.

    Steps and epochs have no memory: it is due at each multiple. A time is counted from the end of the last one, which
    is the first common clock after it; else what takes longer than its interval would be due at once. A run that goes
    on after `seconds` counts from the multiple before, so that one which often fails comes to it all the same.
    """

    def __init__(self, every: Duration | None, seconds: float) -> None:
        self._every = every
        self._since: float | None = 0.0
        if every is not None and every.unit == "seconds":
            self._since = marks(seconds, every.value) * every.value

    def due(self, before: Progressed, now: Progressed) -> bool:
        """Whether it fell due after `before` and not after `now`; a time stays due until it is over."""
        if self._every is None:
            return False
        unit, every = self._every.unit, self._every.value
        if unit != "seconds":
            return marks(now.in_unit(unit), every) > marks(before.in_unit(unit), every)
        if self._since is None and now.seconds > before.seconds:
            self._since = now.seconds
        return self._since is not None and marks(now.seconds - self._since, every) >= 1

    def over(self) -> None:
        """It was done just now."""
        self._since = None


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
