"""What a worker writes down: events, points, TensorBoard files; in the background."""

from __future__ import annotations

import time

from packtrain.chunks import Flusher
from packtrain.runs import Event, Point, Run
from packtrain.store import StoreError
from packtrain.train.tensorboard import TensorBoardWriter


class Books:
    """Every rank can tell what happens to it; only the first records points, which are the same on all."""

    def __init__(self, run: Run, generation: int, rank: int) -> None:
        self._generation, self._rank = generation, rank
        writer = f"{generation:06d}-rank-{rank}"
        self._events, self._points = run.event_writer(writer), run.point_writer(writer)
        self._tensorboard = TensorBoardWriter(run, generation)
        self._flusher = Flusher([self._events, self._points, self._tensorboard], self._complain)

    def tell(self, kind: str, text: str) -> None:
        print(f"{kind}: {text}", flush=True)
        self._events.append(Event(time.time(), kind, text, self._generation))

    def record(self, point: Point) -> None:
        if self._rank == 0:
            self._points.append(point)
            self._tensorboard.append(point)

    def flush_points(self) -> None:
        self._points.flush()

    def close(self) -> None:
        self._flusher.close()  # first: from here on nobody else flushes
        try:
            self._tensorboard.flush(now=True)
        except StoreError as error:
            self._complain(error)

    def _complain(self, error: StoreError) -> None:
        print(f"warning: {error}", flush=True)
