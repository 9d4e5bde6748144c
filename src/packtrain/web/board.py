"""All runs of a store as rows of a list, kept up to date at a cost that depends on what changes.

A finished run is read once. In a directory, folders tell by their times that something in them has changed; in a
bucket, runs that work are looked at every second and the others in turn.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from packtrain.errors import PacktrainError
from packtrain.job import Job
from packtrain.job.part import is_name
from packtrain.report.cost import seconds_to_goal
from packtrain.report.summary import overview_of, units_per_second
from packtrain.run.chunks import ChunkFollower, lines_of
from packtrain.run.liveness import State, StateWatch
from packtrain.run.records import MAX_RECORD_BYTES, Notes, Point, Result, decode, decode_many
from packtrain.run.run import Run, surviving
from packtrain.store import Store
from packtrain.web.reader import is_away

Row = dict[str, Any]

LOADING, DAMAGED = "loading", "damaged"
"""States of a row that are not those of a run: not read yet, and not readable (`reason` says why)."""
_RECENT_STEPS = 50
_SPARKS = 40
_THREADS = 8
_TURN_SECONDS = 60.0  # in which a bucket's finished runs are looked at once, ...
_QUIET_SECONDS = 10.0  # ... and those on which no machine works
_EMPTY: Row = {
    "state": LOADING, "reason": "", "job": "", "recipe": None, "description": "", "step": None, "goal": None,
    "progress": None, "loss": None, "rate": None, "units_per_second": None, "unit": "", "seconds": None,
    "seconds_left": None, "dollars": None, "dollars_left": None, "measure": "", "score": None, "best": None,
    "machines": None, "created": None, "tags": [], "note": "", "sweep": None, "sparkline": [], "problem": None,
}  # fmt: skip


@dataclass
class ListedRun:
    """A run as the list has it, with what is needed to read only what is new."""

    run: Run
    row: Row
    stamp: tuple[int, ...] | None = None
    looked: float = 0.0
    is_read: bool = False
    created: float | None = None
    result: Result | None = None
    points: list[Point] = field(default_factory=list)
    follower: ChunkFollower | None = None
    watch: StateWatch | None = None
    best: float | None = None
    sparks: list[float | None] = field(default_factory=list)

    @property
    def is_busy(self) -> bool:
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
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="rows")

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

    def machines(self, name: str) -> StateWatch | None:
        with self._lock:
            listed = self._runs.get(name)
        return None if listed is None else listed.watch

    def look(self, tell: Callable[[Sequence[Row], Sequence[str]], None] = lambda *_: None) -> None:
        """Read what has changed, and tell the changed rows, in several parts if there are many, and the runs gone."""
        with self._looking:
            try:
                self._look(tell)
                self.away = None
            except PacktrainError as error:
                self.away = str(error)
            self._looked = time.monotonic()

    def _look(self, tell: Callable[[Sequence[Row], Sequence[str]], None]) -> None:
        stamps = self.store.stamps("runs/", ("nodes",))
        names = [name for name in (self.store.folders("runs/") if stamps is None else stamps) if is_name(name)]
        with self._lock:
            gone = [name for name in self._runs if name not in set(names)]
            for name in gone:
                del self._runs[name]
            for name in names:
                if name not in self._runs:
                    self._runs[name] = ListedRun(Run(self.store, name), {"name": name, **_EMPTY})
            due = [one for one in self._runs.values() if self._is_due(one, stamps)]
        if gone:
            tell([], gone)
        due.sort(key=lambda one: (stamps or {}).get(one.run.name, ()), reverse=True)  # the newest first
        errors = []
        for start in range(0, len(due), 4 * _THREADS):
            part = due[start : start + 4 * _THREADS]
            before = [one.row for one in part]
            errors += [error for error in self._pool.map(self._refresh, part) if error is not None]
            absent = [one.run.name for one in part if one.row["state"] == "absent"]
            with self._lock:
                for name in absent:
                    self._runs.pop(name, None)
            changed = [one.row for one, old in zip(part, before, strict=True) if one.row != old]
            if changed:
                tell([row for row in changed if row["state"] != "absent"], absent)
            if errors:
                raise errors[0]

    def _is_due(self, listed: ListedRun, stamps: dict[str, tuple[int, ...]] | None) -> bool:
        now = time.monotonic()
        if stamps is not None:
            stamp = stamps[listed.run.name]
            # A time may be too coarse to tell two changes apart: what changed lately is looked at again.
            is_fresh = stamp and time.time() - max(stamp) / 1e9 < 3
            is_due = not listed.is_read or listed.is_busy or listed.stamp != stamp or bool(is_fresh)
            listed.stamp = stamp
            return is_due
        seconds = 0.0 if listed.is_busy else _TURN_SECONDS if listed.result else _QUIET_SECONDS
        return not listed.is_read or now - listed.looked >= seconds

    def _refresh(self, listed: ListedRun) -> PacktrainError | None:
        """Read a run's row anew; return the error if the store is away."""
        try:
            listed.row = _row(listed)
        except PacktrainError as error:
            if is_away(error):
                return error
            listed.row = {**listed.row, "state": DAMAGED, "reason": str(error), "problem": str(error)}
        listed.is_read, listed.looked = True, time.monotonic()
        return None


def _row(listed: ListedRun) -> Row:
    run = Run(listed.run.store, listed.run.name)  # the job anew: `resume --set` changes it
    entry = run.store.entry(run.key("job.json"))
    if entry is None:
        return {**listed.row, "state": "absent"}
    if listed.created is not None and not listed.is_read:
        listed.created = None
    listed.created = listed.created or entry.modified.timestamp()
    data = run.store.find(run.key("job.json"), MAX_RECORD_BYTES)
    if data == listed.run._job_data:
        run = listed.run
    listed.run = run
    listed.result = run.result()
    if listed.result is not None:
        state: State = listed.result.status
        listed.watch = None
    else:
        listed.watch = listed.watch or StateWatch(run)
        state = listed.watch.look()
    problem = _read_points(listed, run)
    leases = listed.watch.leases if listed.watch else run.leases() if run.job.fleet.dollars_per_hour is not None else []
    seen = overview_of(run, state, listed.points, listed.result, leases)
    steps = [point for point in listed.points if point.kind == "train"][-_RECENT_STEPS:]
    notes = _notes(run)
    cost, job = seen.cost, run.job
    left = seconds_to_goal(job, steps) if state == "running" else None
    scores = [seen.scores[name] for name in (f"test.{seen.measure}", f"valid.{seen.measure}") if name in seen.scores]
    alive = sum(listed.watch.is_alive(lease.node) for lease in listed.watch.leases) if listed.watch else 0
    return {
        "name": run.name, "state": state, "reason": seen.reason, "job": job.name, "recipe": job.recipe,
        "description": seen.description, "step": seen.step, "goal": seen.goal,
        "progress": 1.0 if state == "finished" else _progress(job, seen.step, steps), "loss": _finite(seen.loss),
        "rate": _finite(seen.rate), "units_per_second": _finite(units_per_second(steps, seen.unit)), "unit": seen.unit,
        "seconds": seen.seconds, "seconds_left": left, "dollars": cost.so_far if cost else None,
        "dollars_left": None if cost is None or cost.expected is None else cost.expected - cost.so_far,
        "measure": seen.measure, "score": _finite(scores[0]) if scores else None, "best": _finite(listed.best),
        "machines": alive if state == "running" else 0, "created": listed.created, "tags": list(notes.tags),
        "note": notes.text, "sweep": None, "sparkline": list(listed.sparks), "problem": problem,
    }  # fmt: skip


def _notes(run: Run) -> Notes:
    try:
        return run.notes()
    except PacktrainError as error:
        if is_away(error):
            raise
        return Notes()


def _progress(job: Job, step: int, steps: Sequence[Point]) -> float | None:
    if job.recipe is None:
        return None
    goal = job.train.duration
    if goal.unit == "steps":
        done = float(step)
    elif not steps:
        return None
    else:
        done = steps[-1].values["elapsed_seconds" if goal.unit == "seconds" else "epoch"]
    return min(1.0, max(0.0, done / goal.value)) if goal.value else None


def _finite(number: float | None) -> float | None:
    return number if number is not None and abs(number) < float("inf") else None


def _read_points(listed: ListedRun, run: Run) -> str | None:
    """Read the end of the metrics at first, then what is new; return what is damaged."""
    try:
        if listed.follower is None:
            follower = ChunkFollower(run.store, run.key("metrics"), at_end=True)
            for _ in follower.take():
                pass
            job = run.job
            evaluated = job.recipe is not None and job.evaluate.every is not None and bool(job.data and job.data.valid)
            listed.points = run.recent_points(_RECENT_STEPS, evaluated)
            listed.sparks = _sparkline(run)
            listed.follower = follower
        else:
            new = [
                point
                for key, data in listed.follower.take()
                for point in decode_many(Point, lines_of(data), f"{key} in {run.store.url}")
            ]
            if new:
                listed.points = _tail(surviving([*listed.points, *new]))
                steps = [point.values["loss"] for point in new if point.kind == "train"]
                if steps:
                    listed.sparks = _thin([*listed.sparks, _finite(steps[-1])])
    except PacktrainError as error:
        if is_away(error):
            raise
        listed.follower = listed.follower or ChunkFollower(run.store, run.key("metrics"), at_end=True)
        return str(error)
    return None


def _tail(points: Sequence[Point]) -> list[Point]:
    """Return the last steps and the last evaluations."""
    steps = [point for point in points if point.kind == "train"][-_RECENT_STEPS:]
    kinds = [[point for point in points if point.kind == kind][-1:] for kind in ("start", "valid", "test")]
    return sorted([*steps, *(point for found in kinds for point in found)], key=lambda one: (one.step, one.generation))


def _sparkline(run: Run) -> list[float | None]:
    """Return some losses from all over the run, from few reads: its shape, not its values."""
    entries = [entry.key for entry in run.store.list(run.key("metrics/")) if entry.key.endswith(".jsonl")]
    most = _SPARKS // 2 if run.store.is_directory else 6
    keys = [entries[index * len(entries) // most] for index in range(most)] if len(entries) > most else entries
    losses: list[float | None] = []
    for key in keys:
        lines = (run.store.find(key) or b"").splitlines()
        each = max(1, _SPARKS // len(keys))
        for line in lines[:: max(1, len(lines) // each)][:each]:
            point = decode(Point, line, f"{key} in {run.store.url}")
            if point.kind == "train":
                losses.append(_finite(point.values["loss"]))
    return _thin(losses)


def _thin(losses: list[float | None]) -> list[float | None]:
    while len(losses) > _SPARKS:
        losses = losses[1::2] if len(losses) % 2 == 0 else losses[::2]
    return losses
