"""Batches made ahead of their use by a thread, in the order that data.order decides."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packtrain.backoff import Backoff
from packtrain.data.order import NO_SAMPLES, Ids, draws, epoch_batches, mixed_epoch, pieces, share, turns_of
from packtrain.errors import FieldMistake
from packtrain.store import StoreError
from packtrain.system import say

Arrays = dict[str, NDArray[Any]]

_LOOK_SECONDS = 0.2  # how often who waits looks around
_CLOSE_SECONDS = 2.0  # for a thread to end; one that waits for the store can take a minute
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 15.0
STORE_SECONDS = 600.0  # for a store to come back: the watch lets a worker wait as long for its data


@dataclass(frozen=True)
class Position:
    """How far training has come: the next global batch is number `batch` of `epoch`."""

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class Loaded:
    """One rank's part of a global batch, in pieces that are computed one after the other.

    `ids`, their `turns` and `own_cost` are of the part, `cost` and `samples` of the whole; `at` is its position,
    `after` the one behind it. A turn is how many times a sample came before in the epoch.
    """

    pieces: tuple[Arrays, ...]
    ids: Ids
    turns: Ids
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
        """At least one."""
        ids = mixed_epoch(self.sources, self.weights, self.seed, epoch) if self.sources else None
        budget = self.budget(epoch)
        batches = epoch_batches(self.costs, self.likeness, budget, self.seed, epoch, ids, self.lengths)
        if not batches:
            raise FieldMistake("data.train", NO_SAMPLES)
        return batches

    def turns(self, batches: list[Ids]) -> list[Ids]:
        """How many times each sample of an epoch's batches has come before in it."""
        if all(draws(count, weight) <= count for count, weight in zip(self.sources, self.weights, strict=True)):
            return [np.zeros(len(batch), np.int64) for batch in batches]
        ends = np.cumsum([len(batch) for batch in batches])
        return np.split(turns_of(np.concatenate(batches)), ends[:-1])


Work = Callable[[], Loaded | None]


class Parts(Iterator[Loaded]):
    """What the work comes to, one after the other. What failed is tried again by who asks again."""

    def __init__(self, work: Generator[Work]) -> None:
        self._left = work
        self._now: Work | None = None

    def __next__(self) -> Loaded:
        while True:
            if self._now is None:
                self._now = next(self._left)
            made = self._now()
            self._now = None
            if made is not None:
                return made

    def close(self) -> None:
        """Nothing is fetched ahead any more."""
        self._now = None
        self._left.close()


def parts(
    order: Order,
    collate: Callable[[Ids, int, Ids], Arrays],
    start: Position,
    rank: int,
    num_ranks: int,
    piece_budget: int | None = None,
    fetching: Callable[[Ids, int], AbstractContextManager[None]] = lambda _, __: nullcontext(),
    alike: bool = False,
) -> Parts:
    """This rank's part of every global batch from `start` on, without end.

    `collate` makes arrays of samples as they are seen in an epoch, given how many times each has come before in it; a
    part that costs more than `piece_budget` comes in pieces, the same number on all ranks if they are to be `alike`:
    then some may be empty. Inside `fetching`, samples are used in the order that it was told.
    """
    return Parts(_work(order, collate, start, rank, num_ranks, piece_budget, fetching, alike))


def _work(
    order: Order,
    make: Callable[[Ids, int, Ids], Arrays],
    start: Position,
    rank: int,
    num_ranks: int,
    piece_budget: int | None,
    fetching: Callable[[Ids, int], AbstractContextManager[None]],
    alike: bool,
) -> Generator[Work]:
    def pieces_of(batch: Ids) -> list[Ids]:
        own = pieces(share(batch, rank, num_ranks), order.costs, piece_budget)
        if not alike:
            return own
        others = (pieces(share(batch, other, num_ranks), order.costs, piece_budget) for other in range(num_ranks))
        return own + [batch[:0]] * (max(map(len, others)) - len(own))

    def load(batches: list[Ids], turns: list[Ids], at: Position) -> Loaded:
        batch = batches[at.batch]
        mine, own_turns = share(batch, rank, num_ranks), share(turns[at.batch], rank, num_ranks)
        last = at.batch + 1 == len(batches)
        divided = pieces_of(batch)
        turns_of_pieces = np.split(own_turns, np.cumsum([len(piece) for piece in divided])[:-1])
        return Loaded(
            tuple(make(piece, at.epoch, own) for piece, own in zip(divided, turns_of_pieces, strict=True)),
            mine,
            own_turns,
            int(order.costs[batch].sum()),
            int(order.costs[mine].sum()),
            len(batch),
            at,
            Position(at.epoch + 1, 0) if last else Position(at.epoch, at.batch + 1),
            len(batches),
        )

    def fetch(stack: ExitStack, batches: list[Ids], epoch: int) -> None:
        mine = [share(ids, rank, num_ranks) for ids in batches]
        stack.enter_context(fetching(np.concatenate(mine or [np.zeros(0, np.int64)]), epoch))

    epoch, first = start.epoch, start.batch
    while True:
        batches = order.batches(epoch)
        turns = order.turns(batches)
        with ExitStack() as stack:
            yield partial(fetch, stack, batches[first:], epoch)
            for number in range(first, len(batches)):
                yield partial(load, batches, turns, Position(epoch, number))
        epoch, first = epoch + 1, 0


class Loader:
    """Keeps `ahead` batches ready. An error while making one is raised where it would have been used.

    Only a store that is away is no error yet: what needs it is tried again for some minutes.
    """

    def __init__(self, source: Iterator[Loaded], ahead: int = 4) -> None:
        self._ready: queue.Queue[Loaded | BaseException] = queue.Queue(ahead)
        self._failure: BaseException | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(source,), name="loader", daemon=True)
        self._thread.start()

    def _work(self, source: Iterator[Loaded]) -> None:
        try:
            while self._offer(self._made(source)):
                pass
        except BaseException as error:
            self._offer(error)
        finally:
            if isinstance(source, Parts):
                source.close()

    def _made(self, source: Iterator[Loaded]) -> Loaded:
        """The next of the source, as soon as there is a store to make it from."""
        began = time.monotonic()
        backoff = Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, limit_seconds=STORE_SECONDS)
        missing: StoreError | None = None
        while True:
            tried = time.monotonic()
            try:
                loaded = next(source)
            except StopIteration:
                raise missing or RuntimeError("there are no more batches") from None
            except StoreError as error:
                if not error.temporary:
                    raise
                if missing is None:
                    say(f"data: waits for the store: {error}")
                missing = error
            else:
                if missing is not None:
                    say(f"data: goes on after {time.monotonic() - began:.0f} s without the store")
                return loaded
            now = time.monotonic()
            seconds = backoff.next_pause()
            # The next try may take as long as this one did.
            if seconds is None or now - began + seconds + (now - tried) > STORE_SECONDS or self._closed.wait(seconds):
                raise missing

    def _offer(self, item: Loaded | BaseException) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=_LOOK_SECONDS)
                return True
            except queue.Full:
                continue
        return False

    def next(self, pulse: Callable[[], object] = lambda: None) -> Loaded:
        """The next batch. While there is none, `pulse` is called every fifth of a second; what it raises ends the wait
        and loses nothing.
        """
        if self._failure is None:
            item = self._take(pulse)
            if isinstance(item, Loaded):
                return item
            self._failure = item
        raise self._failure

    def _take(self, pulse: Callable[[], object]) -> Loaded | BaseException:
        while not self._closed.is_set():
            try:
                return self._ready.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                pulse()
        return RuntimeError("the loader is closed")

    @property
    def at_hand(self) -> int:
        """How many batches `next` has without waiting, at the least."""
        return self._ready.qsize()

    def close(self) -> None:
        """Ends the thread, or leaves it to end when the store answers: nobody waits for that."""
        self._closed.set()
        with suppress(queue.Empty):
            while True:
                self._ready.get_nowait()  # so that the thread need not wait for room to find out
        self._thread.join(_CLOSE_SECONDS)
