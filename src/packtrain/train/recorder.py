"""What a worker writes down: events, points, where its time went, TensorBoard files; in the background."""

from __future__ import annotations

import io
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping

import torch

from packtrain.run.chunks import Flusher
from packtrain.run.records import Event, EventKind, Point, TimeSpent
from packtrain.run.run import Run
from packtrain.store import StoreError
from packtrain.system import say

_SPENT_SECONDS = 10.0


class Books:
    """Every rank tells what happens to it and where its time goes. Points are the same on all ranks."""

    def __init__(self, run: Run, generation: int, rank: int) -> None:
        self._generation, self._rank = generation, rank
        writer = f"{generation:06d}-rank-{rank}"
        self._events, self._points = run.event_writer(writer), run.point_writer(writer)
        self._times = run.time_spent_writer(writer)
        self._spent: Counter[str] = Counter()
        self._spent_at = time.monotonic()
        self._tensorboard = TensorBoardWriter(run, generation)
        self._flusher = Flusher([self._events, self._points, self._times, self._tensorboard], self._complain)

    def tell(self, kind: EventKind, text: str) -> None:
        say(f"{kind}: {text}")
        self._events.append(Event(time.time(), kind, text, self._generation))

    def record(self, point: Point) -> None:
        if self._rank == 0:
            self._points.append(point)
            self._tensorboard.append(point)

    def spend(self, step: int, seconds: Mapping[str, float], now: bool = False) -> None:
        """Adds to where the time went; it is written every few seconds."""
        self._spent.update(seconds)
        if now or time.monotonic() - self._spent_at > _SPENT_SECONDS:
            self._times.append(TimeSpent(time.time(), self._generation, self._rank, step, dict(self._spent)))
            self._spent.clear()
            self._spent_at = time.monotonic()

    def flush_points(self) -> None:
        self._points.flush()

    def close(self) -> None:
        self._flusher.close()  # first: from here on nobody else flushes
        try:
            self._tensorboard.flush(now=True)
        except StoreError as error:
            self._complain(error)

    def _complain(self, error: StoreError) -> None:
        say(f"warning: {error}")


# Where a worker's time goes: every moment belongs to the span that is named when it ends.


SPANS = (
    "start", "data", "forward", "backward", "exchange", "wait", "optimizer", "save", "evaluation", "other",
)  # fmt: skip


class Clock:
    """A chain of marks: nothing between two of them is left out, so the spans add up to the time that passed.

    `exchange` is what of the exchange of gradients computing did not hide; `wait` the part of it in which others were
    still computing, and what others waited for their data.
    """

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._spans: defaultdict[str, float] = defaultdict(float)

    def mark(self, span: str) -> None:
        """The time since the last mark was spent on `span`."""
        now = time.perf_counter()
        self._spans[span] += now - self._last
        self._last = now

    def add(self, span: str, seconds: float) -> None:
        """Time from before this clock was made."""
        self._spans[span] += seconds

    def spent(self, span: str) -> float:
        """The seconds of a span since they were last taken, as far as they are known."""
        return self._spans[span]

    def take(self) -> dict[str, float]:
        """The seconds of every span since the last call."""
        taken, self._spans = dict(self._spans), defaultdict(float)
        return taken


class DeviceClock(Clock):
    """The same on a GPU, which works behind the program's back: marks are set in its own queue of work.

    A mark is read when the device has passed it; until then its span counts for a later step.
    """

    def __init__(self) -> None:
        super().__init__()
        self._passed = self._event()
        self._marks: deque[tuple[str, torch.cuda.Event]] = deque()

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def mark(self, span: str) -> None:
        self._marks.append((span, self._event()))

    def spent(self, span: str) -> float:
        self._read()
        return super().spent(span)

    def take(self) -> dict[str, float]:
        self._read()
        return super().take()

    def _read(self) -> None:
        while self._marks and self._marks[0][1].query():  # type: ignore[no-untyped-call]
            span, event = self._marks.popleft()
            self._spans[span] += self._passed.elapsed_time(event) / 1000
            self._passed = event


def clock_of(device: torch.device) -> Clock:
    return DeviceClock() if device.type == "cuda" else Clock()


# Scalars as TensorBoard event files in the run's folder: each flush is a file, read in the order of names.


_SECONDS_BETWEEN_FILES = 30.0


class TensorBoardWriter:
    def __init__(self, run: Run, generation: int) -> None:
        self._run, self._generation = run, generation
        self._started = int(time.time())
        self._files = 0
        self._pending: list[Point] = []
        self._flushed = time.monotonic()

    def append(self, point: Point) -> None:
        self._pending.append(point)

    def flush(self, now: bool = False) -> None:
        if not self._pending or not (now or time.monotonic() - self._flushed > _SECONDS_BETWEEN_FILES):
            return
        points = list(self._pending)
        name = f"events.out.tfevents.{self._started}.{self._run.name}.{self._generation:06d}.{self._files:06d}"
        self._run.store.put(self._run.key(f"tensorboard/{name}"), encode(points))
        del self._pending[: len(points)]
        self._files += 1
        self._flushed = time.monotonic()


def encode(points: list[Point]) -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    writer.write(Event(wall_time=points[0].time, file_version="brain.Event:2").SerializeToString())
    for point in points:
        values = [Summary.Value(tag=f"{point.kind}/{name}", simple_value=value) for name, value in point.values.items()]
        event = Event(wall_time=point.time, step=point.step, summary=Summary(value=values))
        writer.write(event.SerializeToString())
    return buffer.getvalue()
