"""One run as the dashboard reads it: what is new since the last look, and never anything twice.

Streams become columns (table.py), so that a million steps need a hundred megabytes and not ten times that. Log lines
and samples stay in the store; only where they are is remembered.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from packtrain.errors import PacktrainError
from packtrain.report.goodput import Goodput, goodput
from packtrain.run.chunks import ChunkFollower, lines_of
from packtrain.run.records import (
    MAX_NUMBER,
    DamagedRecord,
    Event,
    Generation,
    Point,
    Sample,
    Telemetry,
    TelemetrySample,
    TimeSpent,
    decode,
    decode_many,
)
from packtrain.run.run import Run
from packtrain.store import StoreError
from packtrain.web.table import Floats, Rows, Table

KINDS = ("train", "valid", "test", "log")
MAX_READERS = 256
MAX_BYTES = 1 << 30
"""Of all readers together: what was looked at longest ago is forgotten, and read again if it is asked for."""
_MAX_EVENTS = 20_000
_MAX_EVENT_TEXT = 2000  # characters
_KEY_BYTES = 200
_MAX_NAMES = 1000  # of a program's numbers
_LAST_TIME = 253402300799.0
_EDITIONS = itertools.count(int(time.time() * 1000))
_PLACE = ("step", "generation", "time")
_GIVEN = {"loss": 0.0, "rate": 0.0, "epoch": 0.0, "elapsed_seconds": 0.0, "step_seconds": 0.0}
TELEMETRY = ("cpu", "memory", "gpu", "gpu_memory", "sent", "received", "disk_read", "disk_written", "disk_free")

Batch = dict[str, Floats]


@dataclass(frozen=True)
class PointChunk:
    """The points of one chunk: steps of training as columns, of a recipe or a program, all others as records."""

    kind: Literal["train", "log"]
    steps: Batch
    others: list[Point]


def read_points(data: bytes, what: str, unit: str) -> PointChunk:
    """Read a chunk of points a few times faster than by records, which it falls back on to name what is wrong."""
    try:
        found = from_json(lines_of(data))
        kind: Literal["train", "log"] = "log" if any(one["kind"] == "log" for one in found) else "train"
        steps = [one for one in found if one["kind"] == kind]
        columns = _columns(steps, unit) if kind == "train" else _log_columns(steps)
        if len(steps) == len(found):
            return PointChunk(kind, columns, [])
        lines = [line for line, one in zip(data.splitlines(), found, strict=True) if one["kind"] != kind]
        return PointChunk(kind, columns, [decode(Point, line, what) for line in lines])
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        decode_many(Point, lines_of(data), what)
        raise DamagedRecord(f"{what} is damaged, or from another version") from error


def _columns(steps: Sequence[Mapping[str, Any]], unit: str) -> Batch:
    if not steps:
        return {}
    batch = _places(steps) | _by_name([one["values"] for one in steps])
    if not np.all(np.isfinite(batch["epoch"]) & ~np.isnan(batch["step_seconds"])):
        raise ValueError("a step lacks measurements")
    seconds = batch["step_seconds"].copy()
    for span in ("start", "evaluation", "save"):  # they come before a step, and are not part of it
        seconds -= np.nan_to_num(batch.get(f"{span}_seconds", np.zeros(1)))
    if unit in batch:
        with np.errstate(all="ignore"):
            batch["throughput"] = np.where(seconds > 0, batch[unit] / seconds, np.nan)
    return _in_order(batch)


def _log_columns(steps: Sequence[Mapping[str, Any]]) -> Batch:
    """Return the numbers of a program, as far as there is room for their names."""
    values = _by_name([one["values"] for one in steps])
    kept = {name: numbers for name, numbers in list(values.items())[:_MAX_NAMES] if name not in _PLACE}
    return _in_order(kept | _places(steps))


def _in_order(batch: Batch) -> Batch:
    order = np.argsort(batch["step"], kind="stable")
    return {name: numbers[order] for name, numbers in batch.items()}


def _places(steps: Sequence[Mapping[str, Any]]) -> Batch:
    batch: Batch = {name: np.fromiter((one[name] for one in steps), np.float64, len(steps)) for name in _PLACE}
    ranges = (("step", MAX_NUMBER), ("generation", MAX_NUMBER), ("time", _LAST_TIME))
    if not all(np.all((batch[name] >= 0) & (batch[name] <= most)) for name, most in ranges):
        raise ValueError("a number is out of range")
    return batch


def _by_name(rows: Sequence[Mapping[str, float]]) -> Batch:
    """Turn mappings into columns. Most have the same names in the same order: those are taken together."""
    alike: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        alike[tuple(row)].append(number)
    batch: Batch = {}
    for names, numbers in alike.items():
        values = np.array([list(rows[number].values()) for number in numbers], np.float64)
        for column, name in enumerate(names):
            if name not in batch:
                batch[name] = np.full(len(rows), np.nan)
            batch[name][numbers] = values[:, column]
    return batch


@dataclass(frozen=True)
class Versions:
    """Numbers that change when a page has something new to ask for."""

    points: str
    events: int
    machines: int
    logs: int
    samples: int
    checkpoints: int


class RunReader:
    """The streams of a run, as far as they were read. Thread-safe: one thread reads, others wait."""

    def __init__(self, run: Run) -> None:
        self.run, self.lock = run, threading.RLock()
        self.unit = _unit_of(run)
        self.tables: dict[str, Table] = {kind: Table() for kind in KINDS}
        self.edition = next(_EDITIONS)
        """Another one after rows that a page may have seen were discarded."""
        self.complete = False
        self.problem: str | None = None
        self.events: list[Event] = []
        self.machines: dict[str, Table] = {}
        self.newest: dict[str, TelemetrySample] = {}
        self.log_keys: list[str] = []
        self.sample_keys: dict[tuple[str, int], str] = {}
        self.num_checkpoints = 0
        self._starts: dict[int, int] = {}
        self._lost = Table()
        self._spent: dict[tuple[int, int], list[TimeSpent]] = {}
        self._num_events = 0
        self._logs = ChunkFollower(run.store, run.key("logs"))
        streams: dict[str, Callable[[str, bytes], None]] = {
            "events": self._take_events,
            "metrics": self._take_points,
            "telemetry": self._take_telemetry,
            "time": self._take_time_spent,
        }
        self._streams = {name: (ChunkFollower(run.store, run.key(name)), take) for name, take in streams.items()}

    @property
    def num_bytes(self) -> int:
        return sum(table.num_bytes for table in (*self.tables.values(), *self.machines.values())) + 200 * len(
            self.log_keys
        )

    def refresh(self, seconds: float, streams: Sequence[str] | None = None) -> None:
        """Read what is new, for about that long; `complete` says if all of it was read."""
        deadline = time.monotonic() + seconds
        with self.lock:
            for name in streams or self._streams:
                follower, take = self._streams[name]
                for key, data in follower.take():
                    try:
                        take(key, data)
                    except PacktrainError as error:  # one damaged chunk does not hide the others
                        self.problem = str(error)
                    if time.monotonic() > deadline:
                        self.complete = self.complete and name != "metrics"
                        return
                if name == "metrics":
                    self.complete = True

    def look(self, seconds: float) -> Versions:
        """Read what is new and say which parts have changed."""
        with self.lock:
            self.refresh(seconds)
            self.refresh_logs()
            self.num_checkpoints = len(self.run.store.folders(self.run.key("checkpoints/")))
            return self.versions

    def refresh_logs(self) -> list[str]:
        """Return the chunks of lines, which are read when someone looks at them."""
        with self.lock:
            self.log_keys += self._logs.take_keys()
            return list(self.log_keys)

    @property
    def versions(self) -> Versions:
        rows = ".".join(str(table.rows) for table in self.tables.values())
        telemetry = sum(table.rows for table in self.machines.values())
        return Versions(
            f"{self.edition}.{rows}", self._num_events, telemetry, len(self.log_keys), len(self.sample_keys),
            self.num_checkpoints,
        )  # fmt: skip

    # Points.

    def _take_points(self, key: str, data: bytes) -> None:
        steps = read_points(data, f"{key} in {self.run.store.url}", self.unit)
        for point in steps.others:
            if point.kind == "start":
                self._start(point.generation, point.step)
        if steps.steps:
            self._add(steps.kind, steps.steps)
        for point in steps.others:
            if point.kind == "start":
                continue
            values = {name: np.array([value]) for name, value in point.values.items()}
            at = {"step": point.step, "generation": point.generation, "time": point.time}
            self._add(point.kind, {name: np.array([float(value)]) for name, value in at.items()} | values)
            if point.samples:
                self.sample_keys[point.kind, point.step] = key

    def _start(self, generation: int, step: int) -> None:
        """Discard what a generation did not continue from."""
        self._starts[generation] = step
        for kind, table in self.tables.items():
            late = (table.all("step") > step) & (table.all("generation") < generation)
            if late.any():
                self.edition = next(_EDITIONS)
                kept = table.taken(np.flatnonzero(~late))
                if kind == "train":
                    self._lost.append(table.taken(np.flatnonzero(late)))
                table.cut(0)
                table.append(kept)
        for kind, at in [one for one in self.sample_keys if one[1] > step]:
            del self.sample_keys[kind, at]

    def _add(self, kind: str, batch: Batch) -> None:
        generation = int(batch["generation"][0])
        lowest = min((step for number, step in self._starts.items() if number > generation), default=None)
        if lowest is not None:
            outlived = batch["step"] <= lowest
            if kind == "train":
                self._lost.append({name: numbers[~outlived] for name, numbers in batch.items()})
            batch = {name: numbers[outlived] for name, numbers in batch.items()}
        table = self.tables[kind]
        if not len(batch["step"]):
            return
        is_repeated = len(batch["step"]) > 1 and bool((np.diff(batch["step"]) == 0).any())
        if batch["step"][0] > table.last("step") and not is_repeated:
            table.append(batch)
            return
        # Late, or measured again: put every step in its place, and keep the measurement of the newest generation.
        self.edition = next(_EDITIONS)
        table.append(batch)
        order = np.lexsort((table.all("generation"), table.all("step")))
        steps = table.all("step")[order]
        kept = table.taken(order[np.append(np.diff(steps) > 0, True)])
        table.cut(0)
        table.append(kept)

    # Other streams.

    def _take_events(self, key: str, data: bytes) -> None:
        found = decode_many(Event, lines_of(data), f"{key} in {self.run.store.url}")
        self._num_events += len(found)
        short = (replace(one, text=one.text[:_MAX_EVENT_TEXT]) for one in found)
        self.events = sorted([*self.events, *short], key=lambda event: event.time)[-_MAX_EVENTS:]

    def _take_telemetry(self, key: str, data: bytes) -> None:
        found = decode_many(TelemetrySample, lines_of(data), f"{key} in {self.run.store.url}")
        by_node: defaultdict[str, list[TelemetrySample]] = defaultdict(list)
        for sample in found:
            by_node[sample.node].append(sample)
        for node, samples in by_node.items():
            table = self.machines.setdefault(node, Table())
            new = [one for one in sorted(samples, key=lambda one: one.time) if one.time > table.last("time")]
            if new:
                rows = [use_of(one.telemetry) for one in new]
                times = {"time": np.array([one.time for one in new])}
                table.append(times | {name: np.array([row[name] for row in rows], float) for name in TELEMETRY})
                self.newest[node] = new[-1]

    def _take_time_spent(self, key: str, data: bytes) -> None:
        """Keep what goodput needs: the first record of each generation, and the sum of the others."""
        for record in decode_many(TimeSpent, lines_of(data), f"{key} in {self.run.store.url}"):
            place = (record.generation if record.rank == 0 else 0, record.rank)
            known = self._spent.setdefault(place, [])
            if len(known) < 2:
                known.append(record)
                continue
            rest = known[1]
            names = {**rest.seconds, **record.seconds}
            seconds = {name: rest.seconds.get(name, 0.0) + record.seconds.get(name, 0.0) for name in names}
            newest = max(rest, record, key=lambda one: one.time)
            known[1] = replace(newest, seconds=seconds)

    # Answers.

    def goodput(self, generations: Sequence[Generation]) -> Goodput:
        with self.lock:
            spent = [record for records in self._spent.values() for record in records]
            return goodput(generations, list(self._unaccounted(spent)), spent)

    def _unaccounted(self, spent: Sequence[TimeSpent]) -> Iterator[Point]:
        """Yield the points that goodput needs: starts, and the sums of steps after the last record and of lost ones."""
        for generation, step in self._starts.items():
            yield Point("start", generation, step, self._time_of(generation), {})
        covered = {one.generation: one.step for one in sorted(spent, key=lambda one: one.time) if one.rank == 0}
        for table in (self.tables["train"], self._lost):
            for generation in np.unique(table.all("generation")):
                own = table.all("generation") == generation
                after = table.all("step") > covered.get(int(generation), -1)
                yield from _summed(table, own & after)
                if table is self._lost:
                    yield from _summed(table, own & ~after)

    def _time_of(self, generation: int) -> float:
        table = self.tables["train"]
        row = int(np.searchsorted(table.all("generation"), generation))
        return float(table.all("time")[row]) if row < table.rows else 0.0

    def axis(self, kind: str, x: str, rows: Rows) -> Floats:
        """Return the x of some rows. Evaluations do not have an epoch: it is that of the step."""
        table, train = self.tables[kind], self.tables["train"]
        if x != "epoch" or kind in ("train", "log"):
            return table.all(x)[rows]
        if not train.rows:
            return np.full(len(rows), np.nan)
        return np.interp(table.all("step")[rows], train.all("step"), train.all("epoch"))

    def names(self) -> list[str]:
        """Return the names of all series that the run has."""
        with self.lock:
            return [
                f"{kind}.{name}" for kind, table in self.tables.items() for name in table.names if name not in _PLACE
            ]

    def samples(self, step: int | None) -> tuple[int, Sequence[Sample]] | list[int]:
        """Return the steps that have samples, or the samples of one of them."""
        with self.lock:
            keys = dict(self.sample_keys)
        if step is None:
            return sorted({at for _, at in keys})
        for kind in ("test", "valid"):
            key = keys.get((kind, step))
            data = None if key is None else self.run.store.find(key)
            if data is not None:
                points = decode_many(Point, lines_of(data), f"{key} in {self.run.store.url}")
                return step, next((one.samples for one in points if (one.kind, one.step) == (kind, step)), ())
        return step, ()


def _summed(table: Table, are_meant: NDArray[np.bool_]) -> Iterator[Point]:
    """Yield some steps as one: the last of them, with the time of all."""
    rows = np.flatnonzero(are_meant)
    if len(rows):
        values = {
            name: float(np.nansum(column.values[rows]))
            for name, column in table.columns.items()
            if name.endswith("_seconds")
        }
        generation, step, time_of = (float(table.all(name)[rows[-1]]) for name in ("generation", "step", "time"))
        yield Point("train", int(generation), int(step), time_of, {**_GIVEN, **values})


def _unit_of(run: Run) -> str:
    """Return what a batch is counted in; nothing if the job is damaged: the row says so."""
    try:
        return run.job.train.batch.unit if run.job.recipe else ""
    except DamagedRecord:
        return ""


def use_of(telemetry: Telemetry) -> dict[str, float | None]:
    """Return the numbers of a machine that are drawn over time; None for those that it does not have."""
    gpus = telemetry.gpus
    memory = sum(gpu.memory_bytes for gpu in gpus)
    return {
        "cpu": telemetry.cpu_fraction,
        "memory": telemetry.memory_fraction,
        "gpu": sum(gpu.used_fraction for gpu in gpus) / len(gpus) if gpus else None,
        "gpu_memory": sum(gpu.memory_used_bytes for gpu in gpus) / memory if memory else None,
        "sent": telemetry.sent_bytes_per_second,
        "received": telemetry.received_bytes_per_second,
        "disk_read": telemetry.disk_read_bytes_per_second,
        "disk_written": telemetry.disk_written_bytes_per_second,
        "disk_free": float(telemetry.disk_free_bytes),
    }


class Readers:
    """The readers of the runs that were looked at last, within a limit of memory."""

    def __init__(self) -> None:
        self._readers: OrderedDict[str, RunReader] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, run: Run) -> RunReader:
        with self._lock:
            known = self._readers.get(run.name)
            if known is None:
                known = self._readers[run.name] = RunReader(run)
            self._readers.move_to_end(run.name)
            while len(self._readers) > 1 and (
                len(self._readers) > MAX_READERS or sum(one.num_bytes for one in self._readers.values()) > MAX_BYTES
            ):
                self._readers.popitem(last=False)
            return known

    def forget(self, name: str) -> None:
        with self._lock:
            self._readers.pop(name, None)


def is_away(error: PacktrainError) -> bool:
    """True if the store cannot be reached now: that concerns all runs."""
    return isinstance(error, StoreError) and error.temporary
