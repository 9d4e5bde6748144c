"""Followers of a run: they read what is new in its folder since the last look, and never anything twice.

`RunFollower` gathers the streams of a run for views that stay for hours: points become columns (history.py), so does
telemetry; log lines and samples stay in the store, and only where they are is remembered. `RunNews` tells what has just
happened, in order, for views that print it.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import merge

import numpy as np

from packtrain.errors import PacktrainError
from packtrain.observe.columns import UseOverTime
from packtrain.observe.goodput import Goodput, goodput
from packtrain.observe.history import RECENT_STEPS, History, LossCurve, RecentPoints
from packtrain.observe.measure import BestBy, Score, best_score
from packtrain.run.checkpoint import committed, is_scored
from packtrain.run.chunks import ChunkFollower, chunk_keys, lines_of
from packtrain.run.points import decode_points, parts_of
from packtrain.run.records import Event, Generation, LogLine, Point, Sample, Telemetry, TelemetrySample, TimeSpent
from packtrain.run.run import Run
from packtrain.store.records import DamagedRecord, decode_many

TELEMETRY = ("cpu", "memory", "gpu", "gpu_memory", "sent", "received", "disk_read", "disk_written", "disk_free")
_MAX_EVENTS = 20_000
_MAX_EVENT_TEXT = 2000  # characters
_KEY_BYTES = 200
_MAX_END_CHUNKS = 1000  # that are read to find the last evaluation
_DIRECTORY_CHUNKS, _BUCKET_CHUNKS = 16, 6  # that the shape of a curve is made from
_HISTORY_CHUNKS = 50  # of a run that is followed from its middle
_MAX_SPANS, _MIN_SPANS, _ALL_SPANS = 4096, 64, 1 << 20  # of time, of a machine and of all machines together


class RunNews:
    """Reads what a run records from now on. A resumed run has a history that was shown before.

    With `history`, the last chunks of each writer come first, and all events. Of the lines, those of rank 0: the other
    ranks usually print the same, or nothing.
    """

    def __init__(self, run: Run, history: bool = False) -> None:
        self._run = run
        chunks = _HISTORY_CHUNKS if history else 0
        self._events = run.events() if history else run.events().skip()
        self._points, self._lines = run.points().skip(chunks), run.log_lines().skip(chunks)
        self._latest: Generation | None = None
        self._nodes: list[str] = []  # that have or had rank 0: each writes the lines of all its workers

    def read(self, lines: bool) -> list[Event | Point | LogLine]:
        """Return what is new in the order of time; points keep the order of training, whatever the clocks say."""
        events = sorted(self._events.read(), key=lambda event: event.time)
        points = sorted(self._points.read(), key=lambda point: (point.generation, point.step))
        news: list[Sequence[Event | Point | LogLine]] = [events, points, self._read_lines() if lines else []]
        return list(merge(*news, key=lambda record: record.time))

    def _read_lines(self) -> list[LogLine]:
        self._latest = self._run.latest_generation(self._latest)
        if self._latest is not None and self._latest.members[0].node not in self._nodes:
            self._nodes.append(self._latest.members[0].node)
        return [line for line in self._lines.read(self._nodes) if line.rank == 0]


class RunFollower:
    """The streams of a run, as far as they were read. Thread-safe: one thread reads, others wait."""

    def __init__(self, run: Run, streams: Sequence[str] = ("events", "metrics", "telemetry", "time")) -> None:
        self.run, self.lock = run, threading.RLock()
        try:
            self.history = History(run.job.train.batch.unit if run.job.recipe else "", run.job.step_kind)
        except DamagedRecord:  # the status says so
            self.history = History("")
        self.complete = False
        """True once all metrics were read."""
        self.problem: str | None = None
        self.events: list[Event] = []
        self.machines: dict[str, UseOverTime] = {}
        self.newest: dict[str, TelemetrySample] = {}
        self.log_keys: list[str] = []
        self.num_events = self.num_telemetry = 0
        self._spent: dict[tuple[int, int], list[TimeSpent]] = {}
        self._logs = ChunkFollower(run.store, run.key("logs"))
        takers: dict[str, Callable[[str, bytes], None]] = {
            "events": self._take_events,
            "metrics": self._take_points,
            "telemetry": self._take_telemetry,
            "time": self._take_time_spent,
        }
        self._streams = {name: (ChunkFollower(run.store, run.key(name)), takers[name]) for name in streams}

    @property
    def num_bytes(self) -> int:
        return (
            self.history.num_bytes
            + sum(use.num_bytes for use in self.machines.values())
            + _KEY_BYTES * len(self.log_keys)
        )

    def read(self, seconds: float = math.inf, streams: Sequence[str] | None = None) -> None:
        """Read what is new, for about that long; `complete` says if all of the metrics were read."""
        deadline = time.monotonic() + seconds
        with self.lock:
            try:
                self._read_until(deadline, streams or tuple(self._streams))
            finally:
                self.history.settle()

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

    def read_log_keys(self) -> list[str]:
        """Return the chunks of lines, which are read when someone looks at them."""
        with self.lock:
            self.log_keys += self._logs.take_keys()
            return list(self.log_keys)

    def _take_points(self, key: str, data: bytes) -> None:
        source = self._source(key)
        for line in parts_of(data, source):
            self.history.add(line, key, source)

    def _take_events(self, key: str, data: bytes) -> None:
        events = decode_many(Event, lines_of(data), self._source(key))
        self.num_events += len(events)
        short = (replace(event, text=event.text[:_MAX_EVENT_TEXT]) for event in events)
        self.events = sorted([*self.events, *short], key=lambda event: event.time)[-_MAX_EVENTS:]

    def _take_telemetry(self, key: str, data: bytes) -> None:
        by_node: defaultdict[str, list[TelemetrySample]] = defaultdict(list)
        for sample in decode_many(TelemetrySample, lines_of(data), self._source(key)):
            by_node[sample.node].append(sample)
        for node, samples in by_node.items():
            last = self.newest[node].time if node in self.newest else -1.0
            later = [sample for sample in sorted(samples, key=lambda sample: sample.time) if sample.time > last]
            if later:
                rows = [use_of(sample.telemetry) for sample in later]
                use = self.machines.setdefault(node, UseOverTime(len(TELEMETRY)))
                limit = max(_MIN_SPANS, min(_MAX_SPANS, _ALL_SPANS // len(self.machines)))
                numbers = np.array([[row[name] for name in TELEMETRY] for row in rows], float)
                use.append(np.array([sample.time for sample in later]), numbers, limit)
                self.num_telemetry += len(later)
                self.newest[node] = later[-1]

    def _take_time_spent(self, key: str, data: bytes) -> None:
        """Keep what goodput needs: the first record of each generation, and the sum of the others."""
        for record in decode_many(TimeSpent, lines_of(data), self._source(key)):
            place = (record.generation if record.rank == 0 else 0, record.rank)
            records = self._spent.setdefault(place, [])
            if len(records) < 2:
                records.append(record)
                continue
            later = records[1]
            names = {**later.seconds, **record.seconds}
            seconds = {name: later.seconds.get(name, 0.0) + record.seconds.get(name, 0.0) for name in names}
            records[1] = replace(max(later, record, key=lambda spent: spent.time), seconds=seconds)

    def _source(self, key: str) -> str:
        return f"{key} in {self.run.store.url}"

    def goodput(self, generations: Sequence[Generation]) -> Goodput:
        with self.lock:
            spent = [record for records in self._spent.values() for record in records]
            covered = {
                record.generation: record.step
                for record in sorted(spent, key=lambda record: record.time)
                if record.rank == 0
            }
            return goodput(generations, list(self.history.seconds_after(covered)), spent)

    def sampled_steps(self) -> list[int]:
        with self.lock:
            return sorted({step for _, step, _ in self.history.sampled()})

    def samples(self, step: int) -> Sequence[Sample]:
        """Read the samples of an evaluation; of the test split rather than of the validation split."""
        with self.lock:
            chunks = {kind: chunk for kind, sampled_step, chunk in self.history.sampled() if sampled_step == step}
        for kind in ("test", "valid"):
            key = chunks.get(kind)
            data = None if key is None else self.run.store.find(key)
            if key is not None and data is not None:
                points = decode_points(data, self._source(key))
                return next((point.samples for point in points if (point.kind, point.step) == (kind, step)), ())
        return ()


class EndFollower:
    """The end of a run and the shape of its loss, for a list of many runs: of most of them, most is never read."""

    def __init__(self, run: Run, evaluated: bool) -> None:
        """`evaluated`: look for the last evaluation, too."""
        self.recent = RecentPoints(run.job.step_kind)
        self.unread: list[str] = chunk_keys(run.store, run.key("metrics"))
        """The chunks that the curve is yet to be made from."""
        self._run, self._is_sought = run, evaluated
        self._curve = LossCurve(run.job.step_kind)
        self._chunks = ChunkFollower(run.store, run.key("metrics"), self.unread)
        self._is_begun = False
        self._best: Score | None = None

    def read(self) -> None:
        """Read the end at first, from no more chunks than that takes, and then what is new."""
        if self._is_begun:
            for key, data in self._chunks.take():
                source = self._source(key)
                for line in parts_of(data, source):
                    self.recent.add(line, source)
                    self._curve.add(line, source)
            return
        self._is_begun = True
        for key in self.unread[:-_MAX_END_CHUNKS:-1]:
            source = self._source(key)
            for line in parts_of(self._run.store.find(key) or b"", source):
                self.recent.add(line, source)
                self._is_sought = self._is_sought and line.kind != "valid"
            if len(self.recent.steps) >= RECENT_STEPS and not self._is_sought:
                break

    def read_curve(self) -> None:
        """Read some chunks from all over the run: a few objects of a directory, and fewer of a bucket."""
        keys, self.unread = self.unread, []
        count = _DIRECTORY_CHUNKS if self._run.store.is_directory else _BUCKET_CHUNKS
        if len(keys) > count:
            keys = [keys[index * len(keys) // count] for index in range(count)]
        for key in keys:
            source = self._source(key)
            for line in parts_of(self._run.store.find(key) or b"", source):
                self._curve.add(line, source)

    def losses(self, points: int) -> list[float | None]:
        return self._curve.losses(points)

    def best(self, measure: BestBy) -> Score | None:
        """Return the best score of the evaluations: at first that of a checkpoint, because they are not all read."""
        evaluations = [point for point in self.recent.points if point.kind == "valid" and measure.name in point.values]
        if self._best is None and evaluations:
            for checkpoint in committed(self._run):
                if is_scored(checkpoint) and checkpoint.score is not None:
                    values = {measure.name: -checkpoint.score if measure.lower else checkpoint.score}
                    evaluation = replace(evaluations[-1], step=checkpoint.step, values=values)
                    self._best = best_score(measure, [evaluation], self._best)
        self._best = best_score(measure, evaluations, self._best)
        return self._best

    def _source(self, key: str) -> str:
        return f"{key} in {self._run.store.url}"


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
