"""The dollars that a run has cost so far and will have cost at its end, computed from its leases and its pace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from packtrain.job import Job
from packtrain.node.deadline import dollars_paid
from packtrain.run.records import Lease, Point
from packtrain.units import show_dollars

_MOST_EPOCHS = 1000  # that are looked at one by one


@dataclass(frozen=True)
class Cost:
    """Dollars of all machines of a run, also of those that are gone.

    `per_hour` is for the machines that work on it now. `expected` is the total at the end of the duration at the
    present pace, or the budget if that is less; None if the run has ended, or its pace is not known.
    """

    so_far: float
    per_hour: float
    expected: float | None
    budget: float | None

    @property
    def line(self) -> str:
        """As people read it: `$3.42 so far, $1.05 per hour, $12.40 expected, 6% of the budget of $60.00`."""
        parts = [f"{show_dollars(self.so_far)} so far" if self.per_hour else show_dollars(self.so_far)]
        if self.per_hour:
            parts.append(f"{show_dollars(self.per_hour)} per hour")
        if self.expected is not None:
            parts.append(f"{show_dollars(self.expected)} expected")
        if self.budget is not None:
            parts.append(f"{self.so_far / self.budget:.0%} of the budget of {show_dollars(self.budget)}")
        return ", ".join(parts)


def cost_of(job: Job, leases: Sequence[Lease], running: bool, steps: Sequence[Point]) -> Cost | None:
    """Return the cost of a run; None if no price is known. `steps` are recent ones, of one generation if possible."""
    price = job.fleet.dollars_per_hour
    paid = dollars_paid(leases)
    if price is None and not paid:
        return None
    # A machine that died has not left, and another took its place.
    working = min(sum(not lease.left for lease in leases), job.fleet.kind.machines.most) if running else 0
    per_hour = working * (price or 0.0)
    left = seconds_to_goal(job, steps)
    expected = paid + per_hour * left / 3600 if per_hour and left is not None else None
    if expected is not None and job.budget.dollars is not None:
        expected = min(expected, job.budget.dollars)
    return Cost(paid, per_hour, expected, job.budget.dollars)


def goal_step(job: Job, last: Point | None) -> int | None:
    """Return the step at which a recipe's duration ends; None if that is not known, as for a time.

    The steps of an epoch are known once some of them are made; later epochs may have batches of another size.
    """
    duration = job.train.duration if job.recipe is not None else None
    if duration is None or duration.unit == "seconds":
        return None
    if duration.unit == "steps":
        return int(duration.value)
    epochs = last.values["epoch"] if last is not None else 0.0
    if last is None or not 0 < epochs < math.inf:
        return None
    return max(last.step, round(last.step * _relative_steps(job, duration.value) / _relative_steps(job, epochs)))


def _relative_steps(job: Job, epochs: float) -> float:
    """Return a number that grows as the steps of so many epochs do: with batches twice as large, half as fast."""
    if max(epochs, job.train.duration.value) > _MOST_EPOCHS:
        return epochs
    whole = int(epochs)
    parts = [1 / job.train.in_epoch(epoch).batch.value for epoch in range(whole + 1)]
    return sum(parts[:whole]) + (epochs - whole) * parts[whole]


def share_done(job: Job, last: Point | None) -> float | None:
    """Return the share of a recipe's duration that is done; a program does not tell."""
    if job.recipe is None:
        return None
    if last is None:
        return 0.0
    goal, values = job.train.duration, last.values
    done = {"steps": last.step, "epochs": values["epoch"], "seconds": values["elapsed_seconds"]}[goal.unit]
    return min(1.0, done / goal.value)


def seconds_to_goal(job: Job, steps: Sequence[Point]) -> float | None:
    """Return the time until a recipe's duration ends at the pace of these steps; None if they show no pace."""
    if job.recipe is None or not steps:
        return None
    first, last, goal = steps[0], steps[-1], job.train.duration
    values = last.values
    if goal.unit == "seconds":
        return max(0.0, goal.value - values["elapsed_seconds"])
    done, before = (
        (float(last.step), float(first.step)) if goal.unit == "steps" else (values["epoch"], first.values["epoch"])
    )
    seconds = values["elapsed_seconds"] - first.values["elapsed_seconds"]
    return max(0.0, (goal.value - done) * seconds / (done - before)) if done > before else None
