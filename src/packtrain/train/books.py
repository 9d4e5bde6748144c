"""What a worker writes down: events, points, where its time went, TensorBoard files; in the background."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

from packtrain.chunks import Flusher
from packtrain.control import say
from packtrain.runs import Event, Point, Run, Spent
from packtrain.store import StoreError
from packtrain.train.tensorboard import TensorBoardWriter

_SPENT_SECONDS = 10.0


class Books:
    """Every rank tells what happens to it and where its time goes. Points are the same on all ranks."""

    def __init__(self, run: Run, generation: int, rank: int) -> None:
        self._generation, self._rank = generation, rank
        writer = f"{generation:06d}-rank-{rank}"
        self._events, self._points = run.event_writer(writer), run.point_writer(writer)
        self._times = run.spent_writer(writer)
        self._spent: Counter[str] = Counter()
        self._spent_at = time.monotonic()
        self._tensorboard = TensorBoardWriter(run, generation)
        self._flusher = Flusher([self._events, self._points, self._times, self._tensorboard], self._complain)

    def tell(self, kind: str, text: str) -> None:
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
            self._times.append(Spent(time.time(), self._generation, self._rank, step, dict(self._spent)))
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
