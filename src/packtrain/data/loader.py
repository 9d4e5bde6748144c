"""Batches made ahead of their use by a thread, in the order that data.order decides."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packtrain.data.order import Ids, epoch_batches, mixed_epoch, pieces, share

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Position:
    """How far training has come: the next global batch is number `batch` of `epoch`."""

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class Loaded:
    """One rank's part of a global batch, in pieces that are computed one after the other.

    `ids` and `own_cost` are of the part, `cost` and `samples` of the whole; `at` is its position, `after` the one
    behind it.
    """

    pieces: tuple[Arrays, ...]
    ids: Ids
    cost: int
    own_cost: int
    samples: int
    at: Position
    after: Position
    batches_in_epoch: int


@dataclass(frozen=True)
class Order:
    """All that decides which samples come when, whatever the number of workers.

    `budget` says what the batches of an epoch may cost; `lengths` are the positions that samples take when they are
    padded; `sources` the numbers of samples of each source, and `weights` how often an epoch goes through each.
    """

    costs: NDArray[Any]
    likeness: NDArray[Any]
    budget: Callable[[int], int]
    seed: int
    lengths: NDArray[Any] | None = None
    sources: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()

    def batches(self, epoch: int) -> list[Ids]:
        ids = mixed_epoch(self.sources, self.weights, self.seed, epoch) if self.sources else None
        return epoch_batches(self.costs, self.likeness, self.budget(epoch), self.seed, epoch, ids, self.lengths)


def parts(
    order: Order,
    collate: Callable[[Ids, int], Arrays],
    start: Position,
    rank: int,
    num_ranks: int,
    piece_budget: int | None = None,
    fetching: Callable[[Ids, int], AbstractContextManager[None]] = lambda _, __: nullcontext(),
    alike: bool = False,
) -> Iterator[Loaded]:
    """This rank's part of every global batch from `start` on, without end.

    `collate` makes arrays of samples as they are seen in an epoch; a part that costs more than `piece_budget` comes
    in pieces, the same number on all ranks if they are to be `alike`: then some may be empty. Inside `fetching`, the
    samples are used in the order that it was told.
    """

    def pieces_of(batch: Ids) -> list[Ids]:
        own = pieces(share(batch, rank, num_ranks), order.costs, piece_budget)
        if not alike:
            return own
        others = (pieces(share(batch, other, num_ranks), order.costs, piece_budget) for other in range(num_ranks))
        return own + [batch[:0]] * (max(map(len, others)) - len(own))

    epoch, first = start.epoch, start.batch
    while True:
        batches = order.batches(epoch)
        mine = [share(ids, rank, num_ranks) for ids in batches]
        with fetching(np.concatenate(mine[first:] or [np.zeros(0, np.int64)]), epoch):
            for number in range(first, len(batches)):
                last = number + 1 == len(batches)
                yield Loaded(
                    tuple(collate(piece, epoch) for piece in pieces_of(batches[number])),
                    mine[number],
                    int(order.costs[batches[number]].sum()),
                    int(order.costs[mine[number]].sum()),
                    len(batches[number]),
                    Position(epoch, number),
                    Position(epoch + 1, 0) if last else Position(epoch, number + 1),
                    len(batches),
                )
        epoch, first = epoch + 1, 0


class Loader:
    """Keeps `ahead` batches ready. An error while making one is raised where it would have been used."""

    def __init__(self, source: Iterator[Loaded], ahead: int = 4) -> None:
        self._ready: queue.Queue[Loaded | BaseException] = queue.Queue(ahead)
        self._failure: BaseException | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(source,), name="loader", daemon=True)
        self._thread.start()

    def _work(self, source: Iterator[Loaded]) -> None:
        try:
            for loaded in source:
                if not self._offer(loaded):
                    return
            raise RuntimeError("there are no more batches")
        except BaseException as error:
            self._offer(error)

    def _offer(self, item: Loaded | BaseException) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False

    def next(self) -> Loaded:
        if self._failure is None:
            item = self._take()
            if isinstance(item, Loaded):
                return item
            self._failure = item
        raise self._failure

    def _take(self) -> Loaded | BaseException:
        while not self._closed.is_set():
            try:
                return self._ready.get(timeout=0.2)
            except queue.Empty:
                continue
        return RuntimeError("the loader is closed")

    def close(self) -> None:
        self._closed.set()
        with suppress(queue.Empty):
            while True:
                self._ready.get_nowait()  # so that the thread need not wait for room to find out
        self._thread.join()
