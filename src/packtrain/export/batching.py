"""Dynamic batching: one thread computes, and takes together the requests that came while it was computing.

wait for a request
gather others with the same settings, until the batch is full or the oldest has waited for the gathering time
compute all of them; if that fails, divide them, so that a bad input fails its own request alone
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Given = TypeVar("Given")
Made = TypeVar("Made")

_MAX_RETRY_SECONDS = 60
_MEMORY = 0.8  # weight of the past in the average time of an input


class QueueFull(Exception):
    """Too many inputs wait. `retry_seconds` is about when they will have been computed."""

    def __init__(self, retry_seconds: int) -> None:
        super().__init__(f"the queue is full; try again in {retry_seconds} s")
        self.retry_seconds = retry_seconds


@dataclass(frozen=True)
class Batched(Generic[Made]):
    """The outputs of one request, and how many inputs were computed together with its own."""

    outputs: list[Made]
    batch_size: int


@dataclass(frozen=True)
class BatchTimes:
    """One computed batch, for metrics."""

    inputs: int
    requests: int
    seconds: float


@dataclass(frozen=True, eq=False)
class _Waiting(Generic[Key, Given, Made]):
    key: Key
    inputs: Sequence[Given]
    future: Future[Batched[Made]]
    since: float


class Batcher(Generic[Key, Given, Made]):
    """Computes requests in a thread of its own, in order of arrival, those with equal keys together.

    `compute` gets a key and inputs, and returns an output for each. `batch` and `queue` are numbers of inputs; a
    request with more inputs than a batch is computed alone.
    """

    def __init__(
        self,
        compute: Callable[[Key, Sequence[Given]], Sequence[Made]],
        batch: int,
        queue: int,
        gather_seconds: float,
        on_batch: Callable[[BatchTimes], None] = lambda _: None,
    ) -> None:
        self._compute, self._batch, self._queue = compute, batch, queue
        self._gather_seconds, self._on_batch = gather_seconds, on_batch
        self._waiting: deque[_Waiting[Key, Given, Made]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._seconds_per_input = 0.0
        self._computing_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._thread.start()

    def submit(self, key: Key, inputs: Sequence[Given]) -> Future[Batched[Made]]:
        """Queue a request; raise QueueFull if its inputs do not fit. Cancel the future if nobody waits for it."""
        future: Future[Batched[Made]] = Future()
        with self._changed:
            if self._num_waiting() + len(inputs) > self._queue:
                # Only now, because it looks at every request: those whose client has left make room.
                self._waiting = deque(one for one in self._waiting if not one.future.cancelled())
                if self._num_waiting() + len(inputs) > self._queue:
                    raise QueueFull(self._retry_seconds())
            self._waiting.append(_Waiting(key, inputs, future, time.monotonic()))
            self._changed.notify()
        return future

    @property
    def num_waiting(self) -> int:
        """The number of inputs that wait, without those that are being computed."""
        with self._changed:
            return self._num_waiting()

    def is_working(self, patience_seconds: float) -> bool:
        """True unless the thread has died, or has computed one batch for longer than this."""
        since = self._computing_since
        return self._thread.is_alive() and (since is None or time.monotonic() - since < patience_seconds)

    def close(self) -> None:
        """Stop after the batch that is being computed, and cancel all that wait."""
        with self._changed:
            self._closed = True
            for one in self._waiting:
                one.future.cancel()
            self._waiting.clear()
            self._changed.notify()

    def _num_waiting(self) -> int:
        return sum(len(one.inputs) for one in self._waiting)

    def _retry_seconds(self) -> int:
        return max(1, min(_MAX_RETRY_SECONDS, math.ceil(self._num_waiting() * self._seconds_per_input)))

    def _run(self) -> None:
        while group := self._gathered():
            # From here on a future cannot be cancelled, and its client may leave without effect on the others.
            group = [one for one in group if one.future.set_running_or_notify_cancel()]
            if group:
                self._computing_since = time.monotonic()
                self._settle(group)
                self._computing_since = None

    def _gathered(self) -> list[_Waiting[Key, Given, Made]]:
        """Wait for requests; return those of the next batch, or none if the batcher was closed."""
        with self._changed:
            while not self._closed:
                if not self._waiting:
                    self._changed.wait()
                    continue
                # Requests that came during the last batch have waited for long enough: they do not wait again.
                pause = self._waiting[0].since + self._gather_seconds - time.monotonic()
                if self._num_waiting() >= self._batch or pause <= 0:
                    return self._taken()
                self._changed.wait(pause)
            return []

    def _taken(self) -> list[_Waiting[Key, Given, Made]]:
        first = self._waiting.popleft()
        taken, left, size = [first], deque[_Waiting[Key, Given, Made]](), len(first.inputs)
        for one in self._waiting:
            if one.key == first.key and size + len(one.inputs) <= self._batch:
                taken.append(one)
                size += len(one.inputs)
            else:
                left.append(one)
        self._waiting = left
        return taken

    def _settle(self, group: Sequence[_Waiting[Key, Given, Made]]) -> None:
        inputs = [one for request in group for one in request.inputs]
        started = time.monotonic()
        try:
            outputs = iter(self._compute(group[0].key, inputs))
            answers = [Batched([next(outputs) for _ in request.inputs], len(inputs)) for request in group]
        except Exception as error:
            if len(group) == 1:
                group[0].future.set_exception(error)
                return
            # Halves, not one by one: what failed is mostly one input, or a batch too large for the memory.
            middle = len(group) // 2
            self._settle(group[:middle])
            self._settle(group[middle:])
            return
        seconds = time.monotonic() - started
        each = seconds / max(1, len(inputs))
        self._seconds_per_input = _MEMORY * self._seconds_per_input + (1 - _MEMORY) * each
        # First: whoever has an answer finds it in the metrics.
        self._on_batch(BatchTimes(len(inputs), len(group), seconds))
        for request, answer in zip(group, answers, strict=True):
            request.future.set_result(answer)
