"""Load batches ahead of their use, in a thread, in the order that data.order decides.

`RankBatches` says which samples a rank loads, and in which order; `Loader` runs it in a thread and keeps a few batches
ready. The order depends on the seed and the epoch alone, so that a resumed run sees what it would have seen.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packtrain.backoff import Backoff
from packtrain.data.order import NO_SAMPLES, Ids, draws, epoch_batches, micro_batches, mixed_epoch, repeats_of, share
from packtrain.errors import FieldMistake
from packtrain.process import say
from packtrain.store import StoreError

Arrays = dict[str, NDArray[Any]]

STORE_SECONDS = 600.0  # how long to wait for a store: the watchdog lets a worker wait as long for its data
_POLL_SECONDS = 0.2  # between two looks at a flag while waiting for the queue
_CLOSE_SECONDS = 2.0  # for the thread to end; if it waits for the store, that can take a minute
_MAX_PAUSE_SECONDS = 15.0


@dataclass(frozen=True)
class Position:
    """The place of a global batch in the run: number `batch` of `epoch`."""

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class LoadedBatch:
    """One rank's part of a global batch, in micro-batches.

    `ids`, `repeats` and `own_cost` belong to the part, `cost` and `samples` to the whole batch; `at` is its position,
    `after` the next one. A turn is the number of times that a sample came before in the epoch.
    """

    micro_batches: tuple[Arrays, ...]
    ids: Ids
    repeats: Ids
    cost: int
    own_cost: int
    samples: int
    at: Position
    after: Position
    batches_in_epoch: int


@dataclass(frozen=True)
class Order:
    """Everything that decides the order of samples. The number of workers is not part of it.

    `budget` returns the largest cost of a batch in an epoch; `lengths` are the positions that padded samples take;
    `sources` the number of samples of each source, and `weights` how many times an epoch passes over each. Every
    `group` samples of a batch in a row belong together, and are loaded by one rank in one micro-batch.
    """

    costs: NDArray[Any]
    sort_keys: NDArray[Any]
    budget: Callable[[int], int]
    seed: int
    lengths: NDArray[Any] | None = None
    sources: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    group: int = 1

    def batches(self, epoch: int) -> list[Ids]:
        """Return the global batches of an epoch, at least one."""
        ids = mixed_epoch(self.sources, self.weights, self.seed, epoch) if self.sources else None
        budget = self.budget(epoch)
        batches = epoch_batches(self.costs, self.sort_keys, budget, self.seed, epoch, ids, self.lengths)
        if not batches:
            raise FieldMistake("data.train", NO_SAMPLES)
        return batches

    def repeats(self, batches: list[Ids]) -> list[Ids]:
        """Return for each sample of the batches how many times it came before in the epoch."""
        # Usually no source is passed over more than once: then there is no need to sort all samples.
        if all(draws(count, weight) <= count for count, weight in zip(self.sources, self.weights, strict=True)):
            return [np.zeros(len(batch), np.int64) for batch in batches]
        ends = np.cumsum([len(batch) for batch in batches])
        return np.split(repeats_of(np.concatenate(batches)), ends[:-1])


@dataclass(eq=False)
class RankBatches(Iterator[LoadedBatch]):
    """This rank's part of every global batch from `start` on, without end.

    `collate` makes arrays from the ids of samples, the epoch and their repeats. A part that costs more than
    `micro_batch_cost` is divided; with `equal_counts` all ranks have the same number of micro-batches, some of them
    empty. `fetching` is told the samples of an epoch in the order of their use, and prefetches them.

    After an error, `next` repeats the load that failed: no batch is skipped. A generator would be finished.
    """

    order: Order
    collate: Callable[[Ids, int, Ids], Arrays]
    start: Position
    rank: int
    num_ranks: int
    micro_batch_cost: int | None = None
    fetching: Callable[[Ids, int], AbstractContextManager[None]] = lambda _, __: nullcontext()
    equal_counts: bool = False

    def __post_init__(self) -> None:
        self._at = self.start
        self._batches: list[Ids] | None = None  # of the epoch
        self._repeats: list[Ids] = []
        self._prefetching: ExitStack | None = None

    def __next__(self) -> LoadedBatch:
        while True:
            epoch, number = self._at.epoch, self._at.batch
            if self._batches is None:
                self._batches = self.order.batches(epoch)
                self._repeats = self.order.repeats(self._batches)
            # Here and not before the first batch, so that a store that fails is retried as it is for a batch.
            if self._prefetching is None:
                ids = [np.zeros(0, np.int64), *map(self._share, self._batches[number:])]
                with ExitStack() as stack:
                    stack.enter_context(self.fetching(np.concatenate(ids), epoch))
                    self._prefetching = stack.pop_all()
            if number < len(self._batches):
                loaded = self._load(self._batches, self._repeats[number])
                self._at = Position(epoch, number + 1)
                return loaded
            self.close()  # the prefetching of an epoch ends when the next one begins
            self._at, self._batches = Position(epoch + 1), None

    def _load(self, batches: list[Ids], repeats: Ids) -> LoadedBatch:
        at, batch = self._at, batches[self._at.batch]
        ids, ids_repeats = self._share(batch), self._share(repeats)
        is_last = at.batch + 1 == len(batches)
        # Every rank computes the counts of all others by itself: nothing has to be exchanged.
        order, ranks = self.order, range(self.num_ranks) if self.equal_counts else [self.rank]
        divided = {
            rank: micro_batches(
                share(batch, rank, self.num_ranks, order.group), order.costs, self.micro_batch_cost, order.group
            )
            for rank in ranks
        }
        count = max(map(len, divided.values()))
        rank_batches = divided[self.rank] + [batch[:0]] * (count - len(divided[self.rank]))
        ends = np.cumsum([len(micro_batch) for micro_batch in rank_batches])
        with_repeats = zip(rank_batches, np.split(ids_repeats, ends[:-1]), strict=True)
        return LoadedBatch(
            tuple(self.collate(micro_batch, at.epoch, turns) for micro_batch, turns in with_repeats),
            ids,
            ids_repeats,
            int(order.costs[batch].sum()),
            int(order.costs[ids].sum()),
            len(batch),
            at,
            Position(at.epoch + 1, 0) if is_last else Position(at.epoch, at.batch + 1),
            len(batches),
        )

    def _share(self, batch: Ids) -> Ids:
        return share(batch, self.rank, self.num_ranks, self.order.group)

    def close(self) -> None:
        if self._prefetching is not None:
            self._prefetching.close()
            self._prefetching = None


class Loader:
    """A thread that keeps `ahead` batches ready.

    An error while loading a batch is raised by the `next` that would have returned it. A store that does not answer is
    not an error yet: the batch is tried again for some minutes.
    """

    def __init__(
        self,
        source: Iterator[LoadedBatch],
        ahead: int = 4,
        pause_seconds: float = 1.0,
        store_seconds: float = STORE_SECONDS,
    ) -> None:
        self._pause_seconds, self._store_seconds = pause_seconds, store_seconds
        self._ready: queue.Queue[LoadedBatch | BaseException] = queue.Queue(ahead)
        self._failure: BaseException | None = None  # the error that ended the thread
        self._closed = threading.Event()
        # A daemon: a thread that waits for a store must not keep the process from exiting.
        self._thread = threading.Thread(target=self._work, args=(source,), name="loader", daemon=True)
        self._thread.start()

    def _work(self, source: Iterator[LoadedBatch]) -> None:
        try:
            while self._offer(self._load(source)):
                pass
        except BaseException as error:
            # Behind the batches that are ready: a step whose data is there does not fail.
            self._offer(error)
        finally:
            # By this thread, which runs the generator: another one could not close it while it runs.
            if isinstance(source, RankBatches):
                source.close()

    def _load(self, source: Iterator[LoadedBatch]) -> LoadedBatch:
        """Return the next batch, waiting for the store if it does not answer."""
        started, limit = time.monotonic(), self._store_seconds
        backoff = Backoff(self._pause_seconds, _MAX_PAUSE_SECONDS, limit_seconds=limit)
        missing: StoreError | None = None
        while True:
            tried = time.monotonic()
            try:
                loaded = next(source)
            except StopIteration:
                raise missing or RuntimeError("the source has no more batches") from None
            except StoreError as error:
                if not error.temporary:
                    raise
                if missing is None:
                    say(f"data: waiting for the store: {error}")
                missing = error
            else:
                if missing is not None:
                    say(f"data: store is back after {time.monotonic() - started:.0f} s")
                return loaded
            failed = time.monotonic()
            pause = backoff.next_pause()
            # The next try may take as long as this one did, and must end within the limit too. Waiting on the flag, and
            # not with sleep, lets `close` end the pause.
            if pause is None or failed - started + pause + (failed - tried) > limit or self._closed.wait(pause):
                raise missing

    def _offer(self, item: LoadedBatch | BaseException) -> bool:
        """Put an item into the queue as soon as there is room; return False if the loader was closed."""
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=_POLL_SECONDS)
                return True
            except queue.Full:
                continue
        return False

    def next(self, pulse: Callable[[], object] = lambda: None) -> LoadedBatch:
        """Return the next batch. While there is none, call `pulse` every fifth of a second.

        An error that `pulse` raises ends the wait, and no batch is lost: the next call returns it.
        """
        if self._failure is None:
            item = self._take(pulse)
            if isinstance(item, LoadedBatch):
                return item
            self._failure = item  # kept: the thread has ended, and every later call must fail too
        raise self._failure

    def poll(self) -> LoadedBatch | None:
        """Return the next batch if it is ready; an error is left for `next` to raise."""
        with suppress(queue.Empty):
            if self._failure is None:
                item = self._ready.get_nowait()
                if isinstance(item, LoadedBatch):
                    return item
                self._failure = item
        return None

    def _take(self, pulse: Callable[[], object]) -> LoadedBatch | BaseException:
        while not self._closed.is_set():
            try:
                return self._ready.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                pulse()
        return RuntimeError("the loader is closed")

    @property
    def ready(self) -> int:
        """The number of batches that `next` returns without waiting, or more if one arrives meanwhile."""
        return self._ready.qsize()

    def close(self) -> None:
        self._closed.set()
        with suppress(queue.Empty):
            while True:
                self._ready.get_nowait()  # makes room, so that a thread in `put` sees the flag without a delay
        self._thread.join(_CLOSE_SECONDS)
