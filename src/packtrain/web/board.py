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
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from itertools import pairwise
from typing import Any

from packtrain.errors import PacktrainError
from packtrain.job.part import is_name
from packtrain.observe.history import RECENT_STEPS, RecentPoints
from packtrain.observe.measure import BestBy, Score, best_score
from packtrain.observe.status import is_evaluated, status_of
from packtrain.run.checkpoint import committed, is_scored
from packtrain.run.chunks import ChunkFollower, chunk_keys
from packtrain.run.liveness import State, StateWatch
from packtrain.run.points import parts_of
from packtrain.run.records import Notes, Point, Result, loss_name
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
_DIRECTORY_READS, _BUCKET_READS = 16, 6
_MAX_CHUNKS = 1000  # that are read to find the last evaluation
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


class Sparkline:
    """A few losses from all over a run, evenly spaced: its shape, not its values."""

    def __init__(self) -> None:
        self._points: list[tuple[int, float | None]] = []
        self._every = 1  # steps between two of them, at least

    def add(self, step: int, loss: float) -> None:
        if self._points and step < self._points[-1][0]:  # a restart has discarded steps
            self._points = [point for point in self._points if point[0] < step]
        if self._points and step < self._points[-1][0] + self._every:
            return
        self._points.append((step, _finite(loss)))
        if len(self._points) > _SPARKS:
            self._points = self._points[::2]
            self._every = max(self._every * 2, (self._points[-1][0] - self._points[0][0]) // _SPARKS)

    def extend(self, later: Sparkline) -> None:
        for step, loss in later._points:
            self.add(step, math.nan if loss is None else loss)

    @property
    def losses(self) -> list[float | None]:
        return [loss for _, loss in self._points]


@dataclass
class ListedRun:
    """A run as the list has it, with what is needed to read only what is new."""

    run: Run
    row: Row
    stamp: tuple[int, ...] | None = None
    looked: float = 0.0
    is_read: bool = False
    made: datetime | None = None
    """When the job was written that the row is made from."""
    created: float | None = None
    result: Result | None = None
    recent: RecentPoints = field(default_factory=lambda: RecentPoints("train"))
    follower: ChunkFollower | None = None
    watch: StateWatch | None = None
    best: Score | None = None
    machines: int | None = None
    """Those of the last generation of a run that has ended."""
    sparks: Sparkline = field(default_factory=Sparkline)
    unsampled: list[str] = field(default_factory=list)
    """The chunks that the sparkline is yet to be made from."""

    @property
    def is_busy(self) -> bool:
        if self.row["state"] == "waiting":  # somebody has just started it, or it was forgotten
            return time.time() - (self.created or 0.0) < _STARTING_SECONDS
        return self.row["state"] in ("running", LOADING)


class Board:
    """The rows, the thread that keeps them up to date while somebody looks, and those who want to hear of changes."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.away: str | None = None
        """Why the store cannot be read now."""
        self._runs: dict[str, ListedRun] = {}
        self._lock, self._looking = threading.Lock(), threading.Lock()
        self._looked = 0.0
        self._list_again = 0.0
        # A disk answers at once; a bucket is slow to answer one request, but answers many at the same time.
        self._pool = ThreadPoolExecutor(2 if store.is_directory else 16, thread_name_prefix="rows")

    def rows(self) -> list[Row]:
        """Return all rows, the newest run first."""
        with self._lock:
            found = [listed.row for listed in self._runs.values()]
        return sorted(found, key=lambda row: (row["created"] or float("inf"), row["name"]), reverse=True)

    def row(self, name: str) -> Row | None:
        with self._lock:
            listed = self._runs.get(name)
        return None if listed is None else listed.row

    def run(self, name: str) -> Run | None:
        with self._lock:
            listed = self._runs.get(name)
        return None if listed is None else listed.run

    def refresh(self, name: str) -> None:
        """Read one row now, if it is known and was not read yet."""
        with self._lock:
            listed = self._runs.get(name)
        if listed is not None and not listed.is_read:
            self._refresh(listed)

    def machines(self, name: str) -> StateWatch | None:
        with self._lock:
            listed = self._runs.get(name)
        return None if listed is None else listed.watch

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
            self._looked = time.monotonic()

    def _look(self, tell: Tell, shown: Collection[str]) -> None:
        started = time.monotonic()
        if started >= self._list_again:
            due = self._list(tell, shown)
            now = time.monotonic()
            share = _LIST_SHARE_ASIDE if shown else _LIST_SHARE
            self._list_again = now + min(_QUIET_SECONDS, (now - started) / share)
        else:
            with self._lock:
                due = [one for one in self._runs.values() if one.is_busy or one.run.name in shown]
        self._each(due, self._refresh, tell)
        # Last, because it is many reads: first all runs are listed.
        self._each([one for one in due if one.unsampled], _add_sparks, tell)

    def _list(self, tell: Tell, shown: Collection[str]) -> list[ListedRun]:
        """Find out which runs there are, and return those that may have changed, the newest first."""
        stamps = self.store.stamps("runs/", ("nodes",))
        names = [name for name in (self.store.folders("runs/") if stamps is None else stamps) if is_name(name)]
        known = set(names)
        with self._lock:
            gone = [name for name in self._runs if name not in known]
            for name in gone:
                del self._runs[name]
            for name in names:
                if name not in self._runs:
                    self._runs[name] = ListedRun(Run(self.store, name), {"name": name, **_EMPTY})
            due = [one for one in self._runs.values() if self._is_due(one, stamps, shown)]
        if gone:
            tell([], gone)
        return sorted(due, key=lambda one: (stamps or {}).get(one.run.name, ()), reverse=True)

    def _each(self, due: Sequence[ListedRun], read: Callable[[ListedRun], PacktrainError | None], tell: Tell) -> None:
        """Read runs in parts, and tell what changed after each; raise the error if the store is away."""
        for start, end in pairwise([0, *range(_FIRST_PART, len(due), _PART), len(due)]):
            part = due[start:end]
            before = [one.row for one in part]
            errors = [error for error in self._pool.map(read, part) if error is not None]
            absent = [one.run.name for one in part if one.row["state"] == ABSENT]
            with self._lock:
                for name in absent:
                    self._runs.pop(name, None)
            changed = [one.row for one, old in zip(part, before, strict=True) if one.row != old]
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
    if entry.modified != listed.made:  # a new job: `resume --set` changes it, and names are used again
        listed.made, listed.run = entry.modified, run
        listed.created = min(listed.created or entry.modified.timestamp(), entry.modified.timestamp(), _launched(run))
    run = listed.run
    listed.result = run.result()
    if listed.result is not None:
        state: State = listed.result.status
        listed.watch = None
    else:
        listed.watch, listed.machines = listed.watch or StateWatch(run), None
        state = listed.watch.look()
    problem = _read_points(listed)
    if listed.watch is not None:
        leases = listed.watch.leases
    else:
        leases = run.leases() if run.job.fleet.dollars_per_hour is not None else []
    status = status_of(run, state, listed.recent.points, listed.result, leases)
    _find_best(listed, BestBy(status.measure, status.lower))
    cost = status.cost
    return {
        "name": run.name, "state": state, "reason": status.reason, "job": run.job.name, "recipe": run.job.recipe,
        "description": status.description, "step": status.step, "goal": status.goal, "progress": status.progress,
        "units_per_second": _finite(status.units_per_second), "seconds_left": _finite(status.seconds_left),
        "dollars": cost.so_far if cost else None,
        "dollars_left": None if cost is None or cost.expected is None else max(0.0, cost.expected - cost.so_far),
        "loss": _finite(status.loss), "loss_steps": status.loss_steps, "rate": _finite(status.rate),
        "unit": status.unit, "seconds": _finite(status.seconds), "measure": status.measure, "lower": status.lower,
        "score": _score(status.score), "best": _score(listed.best), "test": _score(status.test),
        "machines": _machines(listed, state), "created": listed.created, **_notes(run), "sweep": sweep_of(run),
        "sparkline": listed.sparks.losses, "problem": problem,
    }  # fmt: skip


def _launched(run: Run) -> float:
    """Return when a run was first started, or infinity: the time of its job is that of a copy, or of `resume --set`."""
    first = None
    with suppress(DamagedRecord):
        first = run.first_launch()
    return math.inf if first is None else first.time


def _machines(listed: ListedRun, state: State) -> int:
    """Return how many machines work on a run, or worked on it until it ended."""
    if listed.watch is not None:
        alive = sum(listed.watch.is_alive(lease.node) for lease in listed.watch.leases)
        return alive if state == "running" else 0
    if listed.machines is None:
        latest = listed.run.latest_generation()
        listed.machines = len(latest.members) if latest else 0
    return listed.machines


def _find_best(listed: ListedRun, measure: BestBy) -> None:
    """Keep the best score of the evaluations: at first that of the best checkpoint, because they are not all read."""
    evaluations = [point for point in listed.recent.points if point.kind == "valid" and measure.name in point.values]
    if listed.best is None and evaluations:
        for kept in committed(listed.run):
            if is_scored(kept) and kept.score is not None:
                values = {measure.name: -kept.score if measure.lower else kept.score}
                listed.best = best_score(
                    measure, [replace(evaluations[-1], step=kept.step, values=values)], listed.best
                )
    listed.best = best_score(measure, evaluations, listed.best)


def _score(score: Score | None) -> Row | None:
    return None if score is None or not math.isfinite(score.value) else asdict(score)


def _notes(run: Run) -> Row:
    try:
        notes = run.notes()
    except PacktrainError as error:
        if is_away(error):
            raise
        notes = Notes()
    return {"tags": list(notes.tags[:_MAX_TAGS]), "note": notes.text[:_MAX_NOTE]}


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def _read_points(listed: ListedRun) -> str | None:
    """Read the end of the metrics at first, then what is new; return what is damaged."""
    run = listed.run
    try:
        if listed.follower is None:
            listed.unsampled = chunk_keys(run.store, run.key("metrics"))
            listed.follower = ChunkFollower(run.store, run.key("metrics"), listed.unsampled)
            listed.recent = RecentPoints(run.job.step_kind)
            _read_last_points(listed)
            return None
        for key, data in listed.follower.take():
            for part in parts_of(data, f"{key} in {run.store.url}"):
                listed.recent.add(part, f"{key} in {run.store.url}")
            for step, loss in _losses(run, key, data):
                listed.sparks.add(step, loss)
    except PacktrainError as error:
        if is_away(error):
            raise
        return str(error)
    return None


def _read_last_points(listed: ListedRun) -> None:
    """Read the last steps and the last evaluation, from no more chunks than that takes."""
    run, is_sought = listed.run, is_evaluated(listed.run.job, listed.result)
    for key in listed.unsampled[:-_MAX_CHUNKS:-1]:
        source = f"{key} in {run.store.url}"
        for part in parts_of(run.store.find(key) or b"", source):
            listed.recent.add(part, source)
            is_sought = is_sought and part.kind != "valid"
        if len(listed.recent.steps) >= RECENT_STEPS and not is_sought:
            break


def _read_sparks(listed: ListedRun) -> None:
    """Read some lines from all over the metrics: a few objects of a directory, and fewer of a bucket."""
    run, keys = listed.run, listed.unsampled
    listed.unsampled = []
    most = _DIRECTORY_READS if run.store.is_directory else _BUCKET_READS
    if len(keys) > most:
        keys = [keys[index * len(keys) // most] for index in range(most)]
    each = max(1, _SPARKS // max(1, len(keys)))
    live, listed.sparks = listed.sparks, Sparkline()
    for key in keys:
        losses = _losses(run, key, run.store.find(key) or b"")
        for step, loss in losses[:: max(1, len(losses) // each)][:each]:
            listed.sparks.add(step, loss)
    listed.sparks.extend(live)


def _losses(run: Run, key: str, data: bytes) -> list[tuple[int, float]]:
    """Return the steps of a chunk, and the loss of each."""
    losses: list[tuple[int, float]] = []
    source = f"{key} in {run.store.url}"
    for part in parts_of(data, source):
        name = loss_name(part.values if isinstance(part, Point) else part.names)
        if name is None or part.kind != run.job.step_kind:
            continue
        if isinstance(part, Point):
            losses.append((part.step, part.values[name]))
        else:
            numbers = part.matrix(source)
            values = numbers[:, part.names.index(name) + 2].tolist()
            losses += zip(numbers[:, 0].astype(int).tolist(), values, strict=True)
    return losses


def _add_sparks(listed: ListedRun) -> PacktrainError | None:
    """Read a run's sparkline; return the error if the store is away."""
    try:
        _read_sparks(listed)
    except PacktrainError as error:
        if is_away(error):
            return error
    listed.row = {**listed.row, "sparkline": listed.sparks.losses}
    return None
