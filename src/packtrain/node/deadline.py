"""The budget as a deadline that each node keeps by its own clock, whatever the store and other nodes do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from packtrain.job.job import BudgetSettings, FleetSettings
from packtrain.process import say
from packtrain.run.records import Generation, Lease
from packtrain.run.run import Run

MARGIN_SECONDS = 300.0  # before the deadline, for the last checkpoint ...
_MARGIN_FRACTION = 0.1  # ... but at most this fraction of the time left, for short budgets


def seconds_left(
    budget: BudgetSettings, fleet: FleetSettings, leases: Iterable[Lease], used_seconds: float, machines: int
) -> float | None:
    """Return how long that many machines may still train together; None without a budget.

    Hours are wall time of the run; dollars are paid for every machine, including those that are gone.
    """
    limits = []
    if budget.hours is not None:
        limits.append(budget.hours * 3600 - used_seconds)
    price = fleet.dollars_per_hour
    if budget.dollars is not None and price is not None:
        limits.append((budget.dollars - sum(lease.dollars for lease in leases)) / price * 3600 / max(1, machines))
    return max(0.0, min(limits)) if limits else None


def left_at_start(run: Run, latest: Generation | None) -> float | None:
    """Return the limit of a node that joins: what the latest generation had left at its start, less the time since.

    The lease of the generation's first node says how much time that is.
    """
    if latest is not None and latest.job != run.job_digest:
        # The run was resumed with another job: its budget may be another one, and what was used before counts.
        leases = run.leases()
        used = max((lease.used_seconds for lease in leases), default=0.0)
        return seconds_left(run.job.budget, run.job.fleet, leases, used, run.job.fleet.kind.machines.most)
    if latest is None or latest.seconds_left is None:
        # All machines may have started at the same time: each keeps to its share.
        return seconds_left(run.job.budget, run.job.fleet, (), 0.0, run.job.fleet.kind.machines.most)
    first = run.lease(latest.members[0].node)
    used = 0.0 if first is None else max(0.0, first.used_seconds - latest.used_seconds)
    return max(0.0, latest.seconds_left - used)


def used_up(budget: BudgetSettings) -> str:
    limits = [f"{budget.hours:g} hours"] if budget.hours is not None else []
    limits += [f"{budget.dollars:g} dollars"] if budget.dollars is not None else []
    return f"the budget of {' and '.join(limits)} is used up"


class Deadline:
    """Calls `warn` some time before the deadline and `end` at it, both from a thread of its own.

    Whatever `warn` raises, `end` is called.
    """

    def __init__(
        self, warn: Callable[[], None], end: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._warn, self._end, self._clock = warn, end, clock
        self._changed = threading.Condition()
        self._at: float | None = None
        self._margin = 0.0
        self._warned = self._over = False
        self._thread: threading.Thread | None = None

    def set(self, seconds: float | None) -> None:
        """Set the deadline, in seconds from now, in place of an earlier one. None: there is no budget."""
        if seconds is None:
            return
        with self._changed:
            self._at = self._clock() + seconds
            self._margin = min(MARGIN_SECONDS, _MARGIN_FRACTION * seconds)
            self._warned = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="deadline", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    @property
    def seconds_left(self) -> float | None:
        return None if self._at is None else self._at - self._clock()

    @property
    def is_near(self) -> bool:
        """True if it is time to commit and end."""
        return self._at is not None and self._clock() >= self._at - self._margin

    def close(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                assert self._at is not None
                due = self._at if self._warned else self._at - self._margin
                if self._over:
                    return
                if self._clock() < due:
                    self._changed.wait(due - self._clock())
                    continue
                ended, self._warned = self._warned, True
            if ended:
                self._end()
                return
            try:
                self._warn()
            except Exception as error:
                say(f"warning: cannot tell the workers about the deadline: {type(error).__name__}: {error}")
