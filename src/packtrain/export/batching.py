"""Dynamic batching: one thread computes, and takes together the requests that came while it was computing.

wait for a request
gather others with the same settings, until the batch is full or the oldest has waited for the gathering time
take an input of each in turn until the batch is full, or would take too long
compute them; if that fails, divide them, so that a bad input fails its own request alone

So a large request is computed in several batches, between those of others; requests with other settings take turns
with it. What nobody waits for any more, because the client has left or the time of the request is over, is left out:
the rest of a request, or a whole batch, which is then abandoned.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Input = TypeVar("Input")
Output = TypeVar("Output")

_MAX_RETRY_SECONDS = 60
_MEMORY = 0.8  # weight of the past in the time of an input of size 1, if it falls
_ROUND_TURNS = 4  # whole turns that a round through all keys takes, however many there are


class QueueFull(Exception):
    """Too many inputs wait. `retry_seconds` is about when they will have been computed."""

    def __init__(self, retry_seconds: int) -> None:
        super().__init__(f"the queue is full; try again in {retry_seconds} s")
        self.retry_seconds = retry_seconds


@dataclass(frozen=True)
class Batched(Generic[Output]):
    """The outputs of one request, in how many batches they were computed, and how many inputs the last of them had."""

    outputs: list[Output]
    batch_size: int
    batches: int = 1


@dataclass(frozen=True)
class BatchTimes:
    """One computed batch, for metrics."""

    inputs: int
    requests: int
    seconds: float


@dataclass(eq=False)
class _Waiting(Generic[Key, Input, Output]):
    """A request. `num_batched` of its inputs are in a batch, or have been, and `outputs` are the computed ones."""

    key: Key
    inputs: Sequence[Input]
    sizes: Sequence[int]
    future: Future[Batched[Output]]
    since: float
    num_batched: int = 0
    batches: int = 0
    outputs: list[Output] = field(default_factory=list)

    @property
    def size_left(self) -> int:
        return sum(self.sizes[self.num_batched :])


@dataclass(frozen=True)
class _BatchShare(Generic[Key, Input, Output]):
    """The inputs of a request that are in a batch."""

    request: _Waiting[Key, Input, Output]
    inputs: Sequence[Input]
    size: int


class Batcher(Generic[Key, Input, Output]):
    """Computes requests in a thread of its own, those with equal keys together.

    `compute` gets a key and inputs, and returns an output for each; it may raise anything once its third argument
    returns False, because nobody waits for them any more. An input has a size, the work to compute it; most
    have 1. `batch` and `queue` are sums of sizes. A batch is smaller if it would take longer than `turn_seconds`, or
    than its share of a round through all keys, by the number of requests; an input that is larger than a batch is
    computed alone.
    """

    def __init__(
        self,
        compute: Callable[[Key, Sequence[Input], Callable[[], bool]], Sequence[Output]],
        batch: int,
        queue: int,
        gather_seconds: float,
        turn_seconds: float,
        on_batch: Callable[[BatchTimes], None] = lambda _: None,
    ) -> None:
        self._compute, self._batch, self._queue = compute, batch, queue
        self._gather_seconds, self._turn_seconds, self._on_batch = gather_seconds, turn_seconds, on_batch
        self._waiting: deque[_Waiting[Key, Input, Output]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._seconds_per_size = 0.0
        self._computing_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._thread.start()

    def submit(self, key: Key, inputs: Sequence[Input], sizes: Sequence[int] = ()) -> Future[Batched[Output]]:
        """Queue a request; raise QueueFull if its inputs do not fit. Cancel the future if nobody waits for it."""
        future: Future[Batched[Output]] = Future()
        request = _Waiting(key, inputs, sizes or [1] * len(inputs), future, time.monotonic())
        with self._changed:
            if self._size_waiting() + request.size_left > self._queue:
                self._forget_done()  # only now, because it looks at every request
                if self._size_waiting() + request.size_left > self._queue:
                    seconds = math.ceil(self._size_waiting() * self._seconds_per_size)
                    raise QueueFull(max(1, min(_MAX_RETRY_SECONDS, seconds)))
            self._waiting.append(request)
            self._changed.notify()
        return future

    def learn_speed(self, size: int, seconds: float) -> None:
        """Expect inputs of this size to take as long again: slower ones at once, faster ones little by little."""
        measured = seconds / max(1, size)
        self._seconds_per_size = max(measured, _MEMORY * self._seconds_per_size + (1 - _MEMORY) * measured)

    @property
    def num_waiting(self) -> int:
        """The sizes of the inputs that wait, without those that are being computed."""
        with self._changed:
            return self._size_waiting()

    @property
    def is_alive(self) -> bool:
        """True until the last batch after `close` has been computed."""
        return self._thread.is_alive()

    def is_working(self, patience_seconds: float) -> bool:
        """True unless the thread has died, or has computed one batch for longer than this."""
        since = self._computing_since
        return self._thread.is_alive() and (since is None or time.monotonic() - since < patience_seconds)

    def close(self) -> None:
        """Stop after the batch that is being computed, and cancel all that wait."""
        with self._changed:
            self._closed = True
            for request in self._waiting:
                request.future.cancel()
            self._waiting.clear()
            self._changed.notify()

    def _size_waiting(self) -> int:
        return sum(request.size_left for request in self._waiting)

    def _forget_done(self) -> None:
        """Leave out requests whose client has left, whose time is over, or one of whose inputs was bad."""
        self._waiting = deque(request for request in self._waiting if not request.future.done())

    def _run(self) -> None:
        while (batch := self._gathered()) is not None:
            if batch:
                self._computing_since = time.monotonic()
                self._settle(batch)
                self._computing_since = None

    def _gathered(self) -> list[_BatchShare[Key, Input, Output]] | None:
        """Wait for requests; return the next batch, or None if the batcher was closed."""
        with self._changed:
            while not self._closed:
                if not self._waiting:
                    self._changed.wait()
                    continue
                # Requests that came during the last batch have waited for long enough: they do not wait again.
                pause = self._waiting[0].since + self._gather_seconds - time.monotonic()
                if self._size_waiting() >= self._batch or pause <= 0:
                    return self._next_batch()
                self._changed.wait(pause)
            return None

    def _next_batch(self) -> list[_BatchShare[Key, Input, Output]]:
        self._forget_done()
        if not self._waiting:
            return []
        key = self._waiting[0].key
        starts = {request: request.num_batched for request in self._waiting if request.key == key}
        turns, size = deque(starts), 0
        seconds = self._turn_seconds * min(1, _ROUND_TURNS * len(starts) / len(self._waiting))
        limit = min(self._batch, seconds / max(self._seconds_per_size, 1e-9))
        while turns:
            request = turns.popleft()
            next_size = request.sizes[request.num_batched]
            if size and size + next_size > limit:
                continue
            size, request.num_batched = size + next_size, request.num_batched + 1
            if request.num_batched < len(request.inputs):
                turns.append(request)
        shares = [
            _BatchShare(
                request, request.inputs[start : request.num_batched], sum(request.sizes[start : request.num_batched])
            )
            for request, start in starts.items()
            if request.num_batched > start
        ]
        self._waiting.rotate(-1)  # of equal keys, another request is the first one next time
        unfinished = [request for request in self._waiting if request.num_batched < len(request.inputs)]
        self._waiting = deque(sorted(unfinished, key=lambda request: request.key == key))  # all other keys come before
        return shares

    def _settle(self, batch: Sequence[_BatchShare[Key, Input, Output]]) -> None:
        def is_wanted() -> bool:
            return not all(share.request.future.done() for share in batch)

        inputs = [value for share in batch for value in share.inputs]
        started = time.monotonic()
        try:
            outputs = iter(self._compute(batch[0].request.key, inputs, is_wanted))
            rows = [[next(outputs) for _ in share.inputs] for share in batch]
        except Exception as error:
            if not is_wanted():
                return
            if len(batch) == 1:
                future = batch[0].request.future
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)
                return
            # Halves, not one by one: what failed is mostly one input, or a batch too large for the memory.
            middle = len(batch) // 2
            self._settle(batch[:middle])
            self._settle(batch[middle:])
            return
        seconds = time.monotonic() - started
        self.learn_speed(sum(share.size for share in batch), seconds)
        # First: whoever has an answer finds it in the metrics.
        self._on_batch(BatchTimes(len(inputs), len(batch), seconds))
        for share, row in zip(batch, rows, strict=True):
            request = share.request
            request.outputs += row
            request.batches += 1
            is_complete = len(request.outputs) == len(request.inputs)
            if is_complete and request.future.set_running_or_notify_cancel():
                request.future.set_result(Batched(request.outputs, len(inputs), request.batches))
