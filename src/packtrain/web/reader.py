"""One run as the dashboard reads it: what is new since the last look, and never anything twice.

Streams become columns (table.py), so that a million steps need a hundred megabytes and not ten times that. Log lines
and samples stay in the store; only where they are is remembered.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from packtrain.errors import PacktrainError
from packtrain.report.goodput import Goodput, goodput
from packtrain.run.blocks import PointBlock, decode_points, parts_of
from packtrain.run.chunks import ChunkFollower, lines_of
from packtrain.run.records import Event, Generation, Point, Sample, Telemetry, TelemetrySample, TimeSpent
from packtrain.run.run import Run
from packtrain.store import StoreError
from packtrain.store.records import DamagedRecord, decode_many
from packtrain.web.table import Floats, Numbers, Rows, Table, UseOverTime

KINDS = ("train", "valid", "test", "log")
MAX_READERS = 256
MAX_BYTES = 1 << 30
"""Of all readers together: what was looked at longest ago is forgotten, and read again if it is asked for."""
_MAX_EVENTS = 20_000
_MAX_EVENT_TEXT = 2000  # characters
_KEY_BYTES = 200
_MAX_SPANS, _MIN_SPANS, _ALL_SPANS = 4096, 64, 1 << 20  # of time, of a machine and of all machines together
_MAX_WAITING = 256
_EDITIONS = itertools.count(int(time.time() * 1000))
_PLACE = ("step", "generation", "time")
_GIVEN = {"loss": 0.0, "rate": 0.0, "epoch": 0.0, "elapsed_seconds": 0.0, "step_seconds": 0.0}
TELEMETRY = ("cpu", "memory", "gpu", "gpu_memory", "sent", "received", "disk_read", "disk_written", "disk_free")

Batch = dict[str, Floats]


Layout = tuple[str, int, tuple[str, ...]]
"""Kind, generation and names of points: those that have the same are rows of one matrix."""


def columns_of(numbers: Numbers, layout: Layout, unit: str) -> Batch:
    """Return points as columns in the order of their steps. Each row has step, time, and a number for each name."""
    kind, generation, names = layout
    if (np.diff(numbers[:, 0]) < 0).any():
        numbers = numbers[np.argsort(numbers[:, 0], kind="stable")]
    batch: Batch = {name: numbers[:, place] for place, name in enumerate(names, 2)}
    batch |= {"step": numbers[:, 0], "generation": np.full(len(numbers), float(generation)), "time": numbers[:, 1]}
    if kind == "train" and unit in batch and "step_seconds" in batch:
        seconds = batch["step_seconds"].copy()
        for span in ("start", "evaluation", "save"):  # they come before a step, and are not part of it
            seconds -= batch.get(f"{span}_seconds", 0.0)
        with np.errstate(all="ignore"):
            batch["throughput"] = np.where(seconds > 0, batch[unit] / seconds, np.nan)
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
        self.machines: dict[str, UseOverTime] = {}
        self.newest: dict[str, TelemetrySample] = {}
        self.log_keys: list[str] = []
        self.sample_keys: dict[tuple[str, int], str] = {}
        self.num_checkpoints = 0
        self._starts: dict[int, int] = {}
        self._waiting: list[Numbers] = []  # rows that are yet to be added: many at once take little longer than one
        self._layout: Layout = ("", 0, ())
        self._lost = Table()
        self._spent: dict[tuple[int, int], list[TimeSpent]] = {}
        self._num_events = self._num_samples = 0
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
        tables = sum(table.num_bytes for table in self.tables.values())
        return tables + sum(use.num_bytes for use in self.machines.values()) + _KEY_BYTES * len(self.log_keys)

    def refresh(self, seconds: float, streams: Sequence[str] | None = None) -> None:
        """Read what is new, for about that long; `complete` says if all of it was read."""
        deadline = time.monotonic() + seconds
        with self.lock:
            try:
                self._read_until(deadline, streams or tuple(self._streams))
            finally:
                self._add_waiting()

    def _read_until(self, deadline: float, streams: Sequence[str]) -> None:
        for name in streams:
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
        return Versions(
            f"{self.edition}.{rows}", self._num_events, self._num_samples, len(self.log_keys), len(self.sample_keys),
            self.num_checkpoints,
        )  # fmt: skip

    # Points.

    def _take_points(self, key: str, data: bytes) -> None:
        what = f"{key} in {self.run.store.url}"
        for part in parts_of(data, what):
            if isinstance(part, PointBlock):
                self._wait((part.kind, part.generation, part.names), part.matrix(what))
            elif part.kind == "start":
                self._add_waiting()
                self._start(part.generation, part.step)
            else:
                row = np.array([[part.step, part.time, *part.values.values()]], np.float64)
                self._wait((part.kind, part.generation, tuple(part.values)), row)
                if part.samples:
                    self.sample_keys[part.kind, part.step] = key

    def _wait(self, layout: Layout, rows: Numbers) -> None:
        if layout != self._layout or len(self._waiting) >= _MAX_WAITING:
            self._add_waiting()
            self._layout = layout
        self._waiting.append(rows)

    def _add_waiting(self) -> None:
        if self._waiting:
            rows, self._waiting = np.concatenate(self._waiting), []
            self._add(self._layout[0], columns_of(rows, self._layout, self.unit))

    def _start(self, generation: int, step: int) -> None:
        """Discard what a generation did not continue from."""
        self._starts[generation] = step
        for kind, table in self.tables.items():
            late = (table.all("step") > step) & (table.all("generation") < generation)
            if late.any():
                self.edition = next(_EDITIONS)
                if kind == "train":
                    spans = (name for name in table.names if name in _PLACE or name.endswith("_seconds"))
                    self._lost.append(table.taken(np.flatnonzero(late), spans))
                table.select(np.flatnonzero(~late))
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
        table.select(order[np.append(np.diff(steps) > 0, True)])

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
            last = self.newest[node].time if node in self.newest else -1.0
            new = [one for one in sorted(samples, key=lambda one: one.time) if one.time > last]
            if new:
                rows = [use_of(one.telemetry) for one in new]
                use = self.machines.setdefault(node, UseOverTime(len(TELEMETRY)))
                most = max(_MIN_SPANS, min(_MAX_SPANS, _ALL_SPANS // len(self.machines)))
                numbers = np.array([[row[name] for name in TELEMETRY] for row in rows], float)
                use.append(np.array([one.time for one in new]), numbers, most)
                self._num_samples += len(new)
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
        # By their place, because to look at every step of a long run takes long.
        train = self.tables["train"]
        generations, steps = train.all("generation"), train.all("step")
        begin = 0
        while begin < train.rows:
            end = int(np.searchsorted(generations, generations[begin], "right"))
            after = begin + int(np.searchsorted(steps[begin:end], covered.get(int(generations[begin]), -1), "right"))
            yield from _summed(train, np.arange(after, end))
            begin = max(end, begin + 1)
        generations, steps = self._lost.all("generation"), self._lost.all("step")
        for generation in np.unique(generations):
            is_after = steps > covered.get(int(generation), -1)
            for are_meant in (is_after, ~is_after):
                yield from _summed(self._lost, np.flatnonzero((generations == generation) & are_meant))

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
                points = decode_points(data, f"{key} in {self.run.store.url}")
                return step, next((one.samples for one in points if (one.kind, one.step) == (kind, step)), ())
        return step, ()


def _summed(table: Table, rows: Rows) -> Iterator[Point]:
    """Yield some steps as one: the last of them, with the time of all."""
    if len(rows):
        values = {name: float(np.nansum(table.all(name)[rows])) for name in table.names if name.endswith("_seconds")}
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
