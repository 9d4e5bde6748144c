"""The records of a worker: events, metrics, time spent, TensorBoard files, traces. Written in the background."""

from __future__ import annotations

import gzip
import io
import shutil
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from packtrain.process import say
from packtrain.run.chunks import Flushable, Flusher
from packtrain.run.outputs import trace_key
from packtrain.run.records import Event, EventKind, Point, TimeSpent
from packtrain.run.run import Run, worker_writer
from packtrain.store import StoreError

_SECONDS_BETWEEN_TIMES = 10.0
_MAX_PICTURES, _MAX_PENDING_PICTURES = 2000, 64  # of one worker in one generation; each has at most 32 kB
_SECONDS_BETWEEN_TENSORBOARD_FILES = 30.0  # each flush is a file: objects in a bucket cannot be appended to
_SKIPPED_STEPS = 3  # the first ones fill caches and choose kernels
_WARM_UP_STEPS = 2  # recorded and thrown away: the profiler's own start would be in them
_RECORDING = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


class Clock:
    """Accounts for a worker's time: a chain of marks without gaps, so that the spans add up to the time that passed.

    `communication` is the part of the gradient sync that did not overlap with computing; `wait` is the part of it in
    which other ranks were still computing or waiting for data.
    """

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._spans: defaultdict[str, float] = defaultdict(float)

    def mark(self, span: str) -> None:
        """Attribute the time since the last mark to `span`."""
        time_now = time.perf_counter()
        self._spans[span] += time_now - self._last
        self._last = time_now

    def add(self, span: str, seconds: float) -> None:
        """Attribute time from before this clock existed."""
        self._spans[span] += seconds

    def spent(self, span: str) -> float:
        """Return the seconds of a span since the last `take`; on a GPU, those that it has already passed."""
        return self._spans[span]

    def take(self) -> dict[str, float]:
        """Return the seconds of every span since the last call."""
        spans, self._spans = dict(self._spans), defaultdict(float)
        return spans


class DeviceClock(Clock):
    """A clock for a GPU, which runs asynchronously: marks are events in its queue.

    An event is read once the device has passed it; until then its span counts toward a later step.
    """

    def __init__(self) -> None:
        super().__init__()
        self._passed = self._event()
        self._marks: deque[tuple[str, torch.cuda.Event]] = deque()

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self, span: str) -> None:
        self._marks.append((span, self._event()))  # only queued: asking for the time would make the host wait

    def spent(self, span: str) -> float:
        self._read()
        return super().spent(span)

    def take(self) -> dict[str, float]:
        self._read()
        return super().take()

    def _read(self) -> None:
        while self._marks and self._marks[0][1].query():
            span, event = self._marks.popleft()
            self._spans[span] += self._passed.elapsed_time(event) / 1000
            self._passed = event


def peak_gpu_bytes() -> tuple[int, int]:
    """Return the most memory that tensors took on this worker's GPU, and that torch held for them; 0 without a GPU."""
    if not torch.cuda.is_initialized():
        return 0, 0
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def clock_of(device: torch.device) -> Clock:
    return DeviceClock() if device.type == "cuda" else Clock()


class Recorder:
    """Every rank records its events and its time. Points are equal on all ranks, so only the first records them."""

    def __init__(self, run: Run, generation: int, rank: int) -> None:
        self._generation, self._rank = generation, rank
        writer = worker_writer(generation, rank)
        self._events, self._points = run.event_writer(writer), run.point_writer(writer)
        self._times = run.time_spent_writer(writer)
        self._spent: Counter[str] = Counter()
        self._spent_at = time.monotonic()
        self._tensorboard, self._pictures = TensorBoardWriter(run, generation), PictureWriter(run)
        self._outputs = OutputWriter(run)
        # Pictures and outputs last: nobody else waits for them.
        writers: list[Flushable] = [self._events, self._points, self._times, self._tensorboard]
        self._flusher = Flusher([*writers, self._pictures, self._outputs], self._warn)

    def event(self, kind: EventKind, text: str) -> None:
        say(f"{kind}: {text}")
        self._events.append(Event(time.time(), kind, text, self._generation))

    def point(self, point: Point) -> None:
        if self._rank == 0:
            self._points.append(point)
            self._tensorboard.append(point)

    def pictures(self, pictures: Mapping[str, bytes]) -> None:
        """Record JPEGs of samples, by their digests; every rank records those that it has."""
        self._pictures.add(pictures)

    def output(self, name: str, path: Path) -> None:
        """Put a file into the outputs of the run, compressed, and remove it."""
        self._outputs.add(name, path)

    def time_spent(self, step: int, seconds: Mapping[str, float], at_once: bool = False) -> None:
        """Add to where the time went; a record is written every few seconds, or `at_once`."""
        self._spent.update(seconds)
        # A record of every step would be as large as the metrics, from every rank.
        if at_once or time.monotonic() - self._spent_at > _SECONDS_BETWEEN_TIMES:
            who = self._generation, self._rank
            self._times.append(TimeSpent(time.time(), *who, step, dict(self._spent), *peak_gpu_bytes()))
            self._spent.clear()
            self._spent_at = time.monotonic()

    def flush_points(self) -> None:
        self._points.flush()

    def close(self) -> None:
        self._flusher.close()  # first: from here on nothing else flushes
        try:
            self._tensorboard.flush(at_once=True)
        except StoreError as error:
            self._warn(error)

    def _warn(self, error: StoreError) -> None:
        say(f"warning: {error}")


class PictureWriter:
    """Puts every picture once. A store that is away costs pictures, never memory."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._known: set[str] = set()  # put, or about to be
        self._pending: dict[str, bytes] = {}
        self._changing = threading.Lock()

    def add(self, pictures: Mapping[str, bytes]) -> None:
        with self._changing:
            for digest in pictures.keys() - self._known:
                if len(self._known) < _MAX_PICTURES and len(self._pending) < _MAX_PENDING_PICTURES:
                    self._pending[digest] = pictures[digest]
                    self._known.add(digest)

    def flush(self) -> None:
        with self._changing:
            pending = dict(self._pending)
        for digest, jpeg in pending.items():
            self._run.put_picture(jpeg)
            with self._changing:
                del self._pending[digest]


class OutputWriter:
    """Puts files into the outputs of a run. A store that is away keeps them waiting; a full disk loses them."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._waiting: deque[tuple[str, Path]] = deque()

    def add(self, name: str, path: Path) -> None:
        self._waiting.append((name, path))

    def flush(self) -> None:
        while self._waiting:
            name, path = self._waiting[0]
            packed = path.with_name(f"{path.name}.gz")
            try:
                with path.open("rb") as file, gzip.open(packed, "wb", compresslevel=6) as target:
                    shutil.copyfileobj(file, target)
            except OSError as error:
                self._waiting.popleft()
                packed.unlink(missing_ok=True)
                raise StoreError(f"{name} is lost: {error}") from error
            self._run.store.put_file(trace_key(self._run, name), packed)
            self._waiting.popleft()
            path.unlink()
            packed.unlink()


class TensorBoardWriter:
    """Scalars as TensorBoard event files in the run's folder: each flush is a file, and names sort by time."""

    def __init__(self, run: Run, generation: int) -> None:
        self._run, self._generation = run, generation
        self._started = int(time.time())
        self._files = 0
        self._pending: list[Point] = []
        self._flushed = time.monotonic()

    def append(self, point: Point) -> None:
        self._pending.append(point)

    def flush(self, at_once: bool = False) -> None:
        elapsed = time.monotonic() - self._flushed
        if not self._pending or not (at_once or elapsed > _SECONDS_BETWEEN_TENSORBOARD_FILES):
            return
        points = list(self._pending)
        name = f"events.out.tfevents.{self._started}.{self._run.name}.{self._generation:06d}.{self._files:06d}"
        self._run.store.put(self._run.key(f"tensorboard/{name}"), encode_events(points))
        # Only what was put: the loop may have appended more meanwhile.
        del self._pending[: len(points)]
        self._files += 1
        self._flushed = time.monotonic()


def encode_events(points: list[Point]) -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    # TensorBoard expects this event at the start of every file.
    writer.write(Event(wall_time=points[0].time, file_version="brain.Event:2").SerializeToString())
    for point in points:
        values = [Summary.Value(tag=f"{point.kind}/{name}", simple_value=value) for name, value in point.values.items()]
        event = Event(wall_time=point.time, step=point.step, summary=Summary(value=values))
        writer.write(event.SerializeToString())
    return buffer.getvalue()


class StepProfile:
    """Records `steps` steps after the first few, or fewer if the run ends, and writes them to `path`.

    Call `step` after every step. It calls `on_written` when the file is there.
    """

    def __init__(self, steps: int, device: torch.device, path: Path, on_written: Callable[[], None]) -> None:
        self._path, self._on_written, self._is_written = path, on_written, False
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profiler: profile | None = profile(
            activities=self._activities,
            schedule=schedule(skip_first=_SKIPPED_STEPS, wait=0, warmup=_WARM_UP_STEPS, active=steps, repeat=1),
            on_trace_ready=self._write,
            record_shapes=True,
            profile_memory=True,
        )
        self._profiler.start()

    def step(self) -> None:
        if self._profiler is not None:
            self._profiler.step()
            if self._is_written:
                self.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing meanwhile: an evaluation has more operations than many steps."""
        profiler = self._profiler
        if profiler is None or profiler.current_action not in _RECORDING:
            yield
            return
        profiler.toggle_collection_dynamic(False, self._activities)
        try:
            yield
        finally:
            profiler.toggle_collection_dynamic(True, self._activities)

    def close(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()  # writes what was recorded, if that has not been done
        self._profiler = None  # frees what it recorded

    def _write(self, profiler: profile) -> None:
        profiler.export_chrome_trace(str(self._path))
        self._is_written = True
        self._on_written()
