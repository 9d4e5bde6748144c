"""All runs of a store as rows of a list, kept up to date at a cost that depends on what changes.

A finished run is read once. In a directory, folders tell by their times that something in them has changed; in a
bucket, runs that work are looked at every second and the others in turn.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

from packtrain.errors import PacktrainError
from packtrain.job.part import is_name
from packtrain.observe.follower import EndFollower
from packtrain.observe.measure import BestBy, Score
from packtrain.observe.status import is_evaluated, status_of
from packtrain.run.liveness import State, StateWatch
from packtrain.run.records import Notes, Result
from packtrain.run.run import Run
from packtrain.run.sweeps import sweep_of
from packtrain.store import Store
from packtrain.store.records import DamagedRecord
from packtrain.web.reader import is_away

Row = dict[str, Any]
Tell = Callable[[Sequence[Row], Sequence[str]], None]

LOADING, DAMAGED, ABSENT = "loading", "damaged", "absent"
"""States of a row that are not those of a run: not read yet, not readable (`reason` says why), and without a job."""
_SPARKS = 40
_MAX_TAGS, _MAX_NOTE = 50, 2000  # as many as `packtrain tag` allows; the store may have more
_FIRST_PART, _PART = 24, 64  # runs that are read before pages are told: at first those that fit a screen
_LIST_SHARE, _LIST_SHARE_ASIDE = 0.01, 0.002  # of the time, to list all runs; if pages show single ones, the latter
_STARTING_SECONDS = 3600.0
_TURN_SECONDS = 60.0  # in which a bucket's finished runs are looked at once, ...
_QUIET_SECONDS = 10.0  # ... and those on which no machine works
_EMPTY: Row = {
    "state": LOADING, "reason": "", "job": "", "recipe": None, "description": "", "step": None, "goal": None,
    "progress": None, "loss": None, "loss_steps": 0, "rate": None, "units_per_second": None, "unit": "",
    "seconds": None, "seconds_left": None, "dollars": None, "dollars_left": None, "measure": "", "lower": False,
    "score": None, "best": None, "test": None, "machines": None, "created": None, "tags": [], "note": "",
    "sweep": None, "sparkline": [], "problem": None,
}  # fmt: skip


@dataclass
class ListedRun:
    """A run as the list has it, with what is needed to read only what is new."""

    run: Run
    row: Row
    stamp: tuple[int, ...] | None = None
    looked: float = 0.0
    is_read: bool = False
    job_time: datetime | None = None
    """When the job was written that the row is made from."""
    created: float | None = None
    result: Result | None = None
    end: EndFollower | None = None
    watch: StateWatch | None = None
    machines: int | None = None
    """Those of the last generation of a run that has ended."""

    @property
    def is_busy(self) -> bool:
        if self.row["state"] == "waiting":  # somebody has just started it, or it was forgotten
            return time.time() - (self.created or 0.0) < _STARTING_SECONDS
        return self.row["state"] in ("running", LOADING)


class RunList:
    """The rows, the thread that keeps them up to date while somebody looks, and those who want to hear of changes."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.away: str | None = None
        """Why the store cannot be read now."""
        self._runs: dict[str, ListedRun] = {}
        self._lock, self._looking = threading.Lock(), threading.Lock()
        self._list_again = 0.0
        # A disk answers at once; a bucket is slow to answer one request, but answers many at the same time.
        self._pool = ThreadPoolExecutor(2 if store.is_directory else 16, thread_name_prefix="rows")

    def rows(self) -> list[Row]:
        """Return all rows, the newest run first."""
        with self._lock:
            rows = [listed.row for listed in self._runs.values()]
        return sorted(rows, key=lambda row: (row["created"] or float("inf"), row["name"]), reverse=True)

    def find(self, name: str) -> ListedRun | None:
        with self._lock:
            return self._runs.get(name)

    def row(self, name: str) -> Row | None:
        listed = self.find(name)
        return listed.row if listed else None

    def refresh(self, name: str) -> None:
        """Read one row now, if it is known and was not read yet."""
        listed = self.find(name)
        if listed is not None and not listed.is_read:
            self._refresh(listed)

    def look(self, tell: Tell = lambda *_: None, shown: Collection[str] = ()) -> None:
        """Read what has changed, and tell the changed rows, in several parts if there are many, and the runs gone.

        Pages show the runs `shown`: those are looked at every time.
        """
        with self._looking:
            try:
                self._look(tell, shown)
                self.away = None
            except PacktrainError as error:
                self.away = str(error)

    def _look(self, tell: Tell, shown: Collection[str]) -> None:
        started = time.monotonic()
        if started >= self._list_again:
            due = self._list(tell, shown)
            listed_at = time.monotonic()
            share = _LIST_SHARE_ASIDE if shown else _LIST_SHARE
            self._list_again = listed_at + min(_QUIET_SECONDS, (listed_at - started) / share)
        else:
            with self._lock:
                due = [listed for listed in self._runs.values() if listed.is_busy or listed.run.name in shown]
        self._read_in_parts(due, self._refresh, tell)
        # Last, because it is many reads: first all runs are listed.
        self._read_in_parts(
            [listed for listed in due if listed.end is not None and listed.end.unread], _add_curve, tell
        )

    def _list(self, tell: Tell, shown: Collection[str]) -> list[ListedRun]:
        """Find out which runs there are, and return those that may have changed, the newest first."""
        stamps = self.store.stamps("runs/", ("nodes",))
        names = [name for name in (self.store.folders("runs/") if stamps is None else stamps) if is_name(name)]
        present = set(names)
        with self._lock:
            gone = [name for name in self._runs if name not in present]
            for name in gone:
                del self._runs[name]
            for name in names:
                if name not in self._runs:
                    self._runs[name] = ListedRun(Run(self.store, name), {"name": name, **_EMPTY})
            due = [listed for listed in self._runs.values() if self._is_due(listed, stamps, shown)]
        if gone:
            tell([], gone)
        return sorted(due, key=lambda listed: (stamps or {}).get(listed.run.name, ()), reverse=True)

    def _read_in_parts(
        self, due: Sequence[ListedRun], read: Callable[[ListedRun], PacktrainError | None], tell: Tell
    ) -> None:
        """Read runs in parts, and tell what changed after each; raise the error if the store is away."""
        for start, end in pairwise([0, *range(_FIRST_PART, len(due), _PART), len(due)]):
            runs = due[start:end]
            before = [listed.row for listed in runs]
            errors = [error for error in self._pool.map(read, runs) if error is not None]
            absent = [listed.run.name for listed in runs if listed.row["state"] == ABSENT]
            with self._lock:
                for name in absent:
                    self._runs.pop(name, None)
            changed = [listed.row for listed, row in zip(runs, before, strict=True) if listed.row != row]
            tell([row for row in changed if row["state"] != ABSENT], absent)
            if errors:
                raise errors[0]

    def _is_due(self, listed: ListedRun, stamps: dict[str, tuple[int, ...]] | None, shown: Collection[str]) -> bool:
        is_always_due = not listed.is_read or listed.is_busy or listed.run.name in shown
        if stamps is not None:
            stamp = stamps[listed.run.name]
            # A time may be too coarse to tell two changes apart: what changed lately is looked at again.
            is_fresh = bool(stamp) and time.time() - max(stamp) / 1e9 < 3
            is_changed, listed.stamp = listed.stamp != stamp, stamp
            return is_always_due or is_changed or is_fresh
        seconds = _TURN_SECONDS if listed.result else _QUIET_SECONDS
        return is_always_due or time.monotonic() - listed.looked >= seconds

    def _refresh(self, listed: ListedRun) -> PacktrainError | None:
        """Read a run's row anew; return the error if the store is away."""
        try:
            listed.row = _row(listed)
        except PacktrainError as error:
            if is_away(error):
                return error
            listed.row = {**listed.row, "state": DAMAGED, "reason": str(error), "problem": str(error)}
        except Exception as error:
            # A defect that one run's records bring to light must not hide the other runs.
            print(traceback.format_exc(), file=sys.stderr, flush=True)
            reason = f"a defect of the dashboard: {type(error).__name__}"
            listed.row = {**listed.row, "state": DAMAGED, "reason": reason, "problem": reason}
        listed.is_read, listed.looked = True, time.monotonic()
        return None


def _row(listed: ListedRun) -> Row:
    """Read what is new of a run, and return its row."""
    run = Run(listed.run.store, listed.run.name)
    entry = run.store.entry(run.key("job.json"))
    if entry is None:
        return {**listed.row, "state": ABSENT}
    if entry.modified != listed.job_time:  # a new job: `resume --set` changes it, and names are used again
        listed.job_time, listed.run = entry.modified, run
        written = entry.modified.timestamp()
        created = min(listed.created or written, written)
        with suppress(DamagedRecord):  # that time may be the one of a copy, or of `resume --set`
            if first := run.first_launch():
                created = min(created, first.time)
        listed.created = created
    run = listed.run
    listed.result = run.result()
    if listed.result is not None:
        state: State = listed.result.status
        listed.watch = None
    else:
        listed.watch, listed.machines = listed.watch or StateWatch(run), None
        state = listed.watch.look()
    end = listed.end = listed.end or EndFollower(run, is_evaluated(run.job, listed.result))
    problem = None
    try:
        end.read()
    except PacktrainError as error:  # one damaged chunk does not hide the others
        if is_away(error):
            raise
        problem = str(error)
    if listed.watch is not None:
        leases = listed.watch.leases
    else:
        leases = run.leases() if run.job.fleet.dollars_per_hour is not None else []
    status = status_of(run, state, end.recent.points, listed.result, leases)
    cost = status.cost
    try:
        notes = run.notes()
    except PacktrainError as error:
        if is_away(error):
            raise
        notes = Notes()
    return {
        "name": run.name, "state": state, "reason": status.reason, "job": run.job.name, "recipe": run.job.recipe,
        "description": status.description, "step": status.step, "goal": status.goal, "progress": status.progress,
        "units_per_second": _finite(status.units_per_second), "seconds_left": _finite(status.seconds_left),
        "dollars": cost.so_far if cost else None,
        "dollars_left": None if cost is None or cost.expected is None else max(0.0, cost.expected - cost.so_far),
        "loss": _finite(status.loss), "loss_steps": status.loss_steps, "rate": _finite(status.rate),
        "unit": status.unit, "seconds": _finite(status.seconds), "measure": status.measure, "lower": status.lower,
        "score": _score(status.score), "best": _score(end.best(BestBy(status.measure, status.lower))),
        "test": _score(status.test),
        "machines": _machines(listed, state), "created": listed.created,
        "tags": list(notes.tags[:_MAX_TAGS]), "note": notes.text[:_MAX_NOTE], "sweep": sweep_of(run),
        "sparkline": end.losses(_SPARKS), "problem": problem,
    }  # fmt: skip


def _machines(listed: ListedRun, state: State) -> int:
    """Return how many machines work on a run, or worked on it until it ended."""
    if listed.watch is not None:
        alive = sum(listed.watch.is_alive(lease.node) for lease in listed.watch.leases)
        return alive if state == "running" else 0
    if listed.machines is None:
        latest = listed.run.latest_generation()
        listed.machines = len(latest.members) if latest else 0
    return listed.machines


def _score(score: Score | None) -> Row | None:
    return None if score is None or not math.isfinite(score.value) else asdict(score)


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def _add_curve(listed: ListedRun) -> PacktrainError | None:
    """Read the shape of a run's loss; return the error if the store is away."""
    assert listed.end is not None
    try:
        listed.end.read_curve()
    except PacktrainError as error:
        if is_away(error):
            return error
    listed.row = {**listed.row, "sparkline": listed.end.losses(_SPARKS)}
    return None
