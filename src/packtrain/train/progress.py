"""The progress of a run, and what is due at that point: pure functions of one value."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from packtrain.data.loader import Position
from packtrain.units import Duration

_ROUNDING = 1e-12  # far more than the rounding error of an epoch, far less than a step


@dataclass(frozen=True)
class Progress:
    """The steps and epochs made, the next global batch, and the seconds spent.

    Random states are not part of it: every step draws its own from its number. A run owes an evaluation if one was due
    at this step and a stop came first.
    """

    step: int = 0
    epochs: float = 0.0
    position: Position = field(default_factory=Position)
    seconds: float = 0.0
    best_score: float | None = None
    owes_evaluation: bool = False

    def in_unit(self, unit: str) -> float:
        return {"steps": float(self.step), "epochs": self.epochs, "seconds": self.seconds}[unit]


def up_to_rounding(value: float) -> float:
    """Return slightly more, so that 1 + 9/25 epochs count as 1.36; far less than one step in a trillion."""
    return value * (1 + _ROUNDING)


def multiples(value: float, every: float) -> int:
    """Count the multiples of `every` up to `value`, without zero."""
    return math.floor(up_to_rounding(value / every))


def reached(goal: Duration, progress: Progress) -> bool:
    return multiples(progress.in_unit(goal.unit), goal.value) >= 1


class Recurring:
    """Something that is due every so often, or never. It depends only on values that are equal on all ranks.

    In steps and epochs it is due at each multiple. A time counts from the end of the last occurrence; otherwise an
    evaluation that takes longer than its interval would be due again immediately. A run resumed after `seconds` counts
    from the multiple before, so that a run that fails often still reaches the next one.
    """

    def __init__(self, every: Duration | None, seconds: float) -> None:
        self._every = every
        self._since: float | None = 0.0
        if every is not None and every.unit == "seconds":
            self._since = multiples(seconds, every.value) * every.value

    def due(self, before: Progress, progress: Progress) -> bool:
        """True if it fell due after `before` and by `progress`; a time stays due until `restart`."""
        if self._every is None:
            return False
        unit, every = self._every.unit, self._every.value
        if unit != "seconds":
            return multiples(progress.in_unit(unit), every) > multiples(before.in_unit(unit), every)
        if self._since is None and progress.seconds > before.seconds:
            self._since = progress.seconds
        return self._since is not None and multiples(progress.seconds - self._since, every) >= 1

    def restart(self) -> None:
        """Count a time anew, after an occurrence."""
        # The clock that all ranks share arrives with the next step sync: count from there.
        self._since = None


MIN_SAVE_INTERVAL, MAX_SAVE_INTERVAL = 10.0, 1800.0
_EXPECTED_SECONDS = 4 * 3600.0  # between failures, before any was seen


def save_interval(save_seconds: float, commit_seconds: float, failures: int, elapsed_seconds: float) -> float:
    """Return the seconds between two saves that minimize the cost of saving plus the cost of lost work.

    The optimum for a save that stops training for `save_seconds` is the root of twice that times the mean time
    between failures (Young, 1974). A save never starts before the previous one could have been committed.
    """
    between_failures = (_EXPECTED_SECONDS + elapsed_seconds) / (failures + 1)
    best = math.sqrt(2 * save_seconds * between_failures)
    return min(MAX_SAVE_INTERVAL, max(MIN_SAVE_INTERVAL, best, 2 * commit_seconds))
