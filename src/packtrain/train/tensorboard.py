"""Scalars as TensorBoard event files in the run's folder: each flush is a file, read in the order of names."""

from __future__ import annotations

import io
import time

from packtrain.runs import Point, Run

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
