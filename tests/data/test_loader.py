from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.handmade import NAME, Remote, put_pack
from packtrain.data.loader import Arrays, LoadedBatch, Loader, Order, Position, RankBatches
from packtrain.data.order import Ids
from packtrain.data.pack import Pack
from packtrain.errors import Mistake
from packtrain.store import StoreError
from parts.faulty import FaultyStore

COSTS = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8])
ORDER = Order(COSTS, COSTS, budget=lambda _: 10, seed=1)
PATIENCE_SECONDS = 90


def collate(ids: Ids, epoch: int, repeats: Ids) -> Arrays:
    return {"ids": ids, "epoch": np.array(epoch)}


def batches(start: Position, count: int, rank: int = 0, num_ranks: int = 1) -> list[LoadedBatch]:
    return list(islice(RankBatches(ORDER, collate, start, rank, num_ranks), count))


def seen(loaded: list[LoadedBatch]) -> list[list[int]]:
    return [one.micro_batches[0]["ids"].tolist() for one in loaded]


def loader_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "loader"}


@given(st.integers(0, 20), st.integers(1, 3))
def test_a_loader_that_starts_at_a_position_returns_the_batches_after_it(before: int, num_ranks: int) -> None:
    whole = batches(Position(), before + 10, 0, num_ranks)
    start = whole[before - 1].after if before else Position()
    later = batches(start, 10, 0, num_ranks)
    assert seen(later) == seen(whole[before:])
    assert [(one.cost, one.after) for one in later] == [(one.cost, one.after) for one in whole[before:]]


def test_every_epoch_has_every_sample_once() -> None:
    in_epoch = len(ORDER.batches(0))
    loaded = batches(Position(), in_epoch)
    assert sorted(chain.from_iterable(seen(loaded))) == list(range(len(COSTS)))
    assert [one.after for one in loaded[:-1]] == [Position(0, number) for number in range(1, in_epoch)]
    assert loaded[-1].after == Position(1, 0)
    assert seen(batches(Position(1, 0), 3)) == [ids.tolist() for ids in ORDER.batches(1)[:3]]


def test_ranks_share_a_batch_and_agree_on_its_cost_and_position() -> None:
    whole = batches(Position(), 8)
    shares = [batches(Position(), 8, rank, 3) for rank in range(3)]
    for number, one in enumerate(whole):
        mine = [share[number] for share in shares]
        assert sorted(chain.from_iterable(seen(mine))) == sorted(one.micro_batches[0]["ids"].tolist())
        assert {(part.cost, part.samples, part.after) for part in mine} == {(one.cost, one.samples, one.after)}


def test_a_batch_has_its_cost_its_samples_and_the_number_of_batches() -> None:
    for one, ids in zip(batches(Position(), 3), ORDER.batches(0), strict=False):
        assert one.cost == COSTS[ids].sum()
        assert one.samples == len(ids)
        assert one.batches_in_epoch == len(ORDER.batches(0))


def test_samples_are_collated_with_the_number_of_their_epoch() -> None:
    in_epoch = len(ORDER.batches(0))
    epochs = [one.micro_batches[0]["epoch"].item() for one in batches(Position(), in_epoch + 1)]
    assert epochs == [0] * in_epoch + [1]


def test_the_budget_may_change_with_the_epoch() -> None:
    order = Order(COSTS, COSTS, lambda epoch: (10, 20)[epoch], seed=1)
    first, second = order.batches(0), order.batches(1)
    assert max(COSTS[ids].sum() for ids in first) <= 10 < max(COSTS[ids].sum() for ids in second) <= 20
    loaded = list(islice(RankBatches(order, collate, Position(), 0, 1), len(first) + len(second)))
    assert [one.batches_in_epoch for one in loaded] == [len(first)] * len(first) + [len(second)] * len(second)
    assert loaded[-1].after == Position(2, 0)


@given(st.integers(1, 12), st.integers(1, 4))
def test_micro_batches_make_up_the_part_of_a_rank_and_stay_within_their_cost(budget: int, num_ranks: int) -> None:
    whole = list(islice(RankBatches(ORDER, collate, Position(), 0, num_ranks), 6))
    divided = list(islice(RankBatches(ORDER, collate, Position(), 0, num_ranks, budget), 6))
    for one, other in zip(whole, divided, strict=True):
        pieces = [piece["ids"] for piece in other.micro_batches]
        assert np.concatenate(pieces).tolist() == one.micro_batches[0]["ids"].tolist() == other.ids.tolist()
        assert all(COSTS[piece].sum() <= budget or len(piece) == 1 for piece in pieces)
        assert (one.cost, one.own_cost, one.samples) == (other.cost, other.own_cost, other.samples)
        assert other.own_cost == sum(COSTS[piece].sum() for piece in pieces)


@given(st.integers(1, 12), st.integers(1, 5))
def test_with_equal_counts_all_ranks_have_the_same_number_of_micro_batches(budget: int, num_ranks: int) -> None:
    shares = [
        list(islice(RankBatches(ORDER, collate, Position(), rank, num_ranks, budget, equal_counts=True), 6))
        for rank in range(num_ranks)
    ]
    for of_ranks in zip(*shares, strict=True):
        assert len({len(part.micro_batches) for part in of_ranks}) == 1
        ids = [piece["ids"] for part in of_ranks for piece in part.micro_batches]
        assert len(np.concatenate(ids)) == of_ranks[0].samples


def test_a_rank_without_samples_has_one_empty_micro_batch() -> None:
    few = Order(np.ones(2, np.int64), np.arange(2), lambda _: 2, seed=1)
    [loaded] = islice(RankBatches(few, collate, Position(), 2, 3, 1), 1)
    assert [len(piece["ids"]) for piece in loaded.micro_batches] == [0]
    assert (loaded.own_cost, loaded.cost) == (0, 2)


def endless() -> Iterator[LoadedBatch]:
    return RankBatches(ORDER, collate, Position(), 0, 1)


def test_a_loader_returns_the_batches_in_order() -> None:
    loader = Loader(endless())
    try:
        assert seen([loader.next() for _ in range(20)]) == seen(batches(Position(), 20))
    finally:
        loader.close()


def test_only_a_few_batches_are_loaded_ahead() -> None:
    made: list[int] = []
    full = threading.Event()

    def source() -> Iterator[LoadedBatch]:
        for number, loaded in enumerate(endless()):
            made.append(number)
            if number == 3:
                full.set()
            yield loaded

    loader = Loader(source(), ahead=3)
    try:
        assert full.wait(PATIENCE_SECONDS)
        assert made == [0, 1, 2, 3]  # three wait in the queue and the fourth before it
        assert loader.ready == 3
        loader.next()
        assert loader.ready in (2, 3)
    finally:
        loader.close()
    assert len(made) <= 5


def test_an_error_is_raised_where_the_batch_would_have_been_used() -> None:
    def failing(ids: Ids, epoch: int, repeats: Ids) -> Arrays:
        raise ValueError("a sample that cannot be read")

    def source() -> Iterator[LoadedBatch]:
        yield from batches(Position(), 2)
        yield from RankBatches(ORDER, failing, Position(), 0, 1)

    loader = Loader(source())
    try:
        assert seen([loader.next(), loader.next()]) == seen(batches(Position(), 2))
        for _ in range(3):  # and again wherever somebody asks for more
            with pytest.raises(ValueError, match="a sample that cannot be read"):
                loader.next()
    finally:
        loader.close()


@pytest.mark.parametrize("used", [0, 3])
def test_closing_ends_the_thread_also_when_the_queue_is_full(used: int) -> None:
    before = loader_threads()
    full = threading.Event()

    def source() -> Iterator[LoadedBatch]:
        for number, loaded in enumerate(endless()):
            if number > used:
                full.set()
            yield loaded

    loader = Loader(source(), ahead=1)
    for _ in range(used):
        loader.next()
    assert full.wait(PATIENCE_SECONDS)
    assert loader_threads() - before
    loader.close()
    assert loader_threads() == before


def test_closing_after_an_unread_error_ends_the_thread() -> None:
    before = loader_threads()

    def source() -> Iterator[LoadedBatch]:
        yield from batches(Position(), 2)
        raise ValueError("too late")

    loader = Loader(source(), ahead=1)
    loader.close()
    assert loader_threads() == before


@settings(max_examples=5)
@given(st.integers(1, 4))
def test_a_loader_can_be_closed_twice(ahead: int) -> None:
    before = loader_threads()
    loader = Loader(endless(), ahead)
    loader.close()
    loader.close()
    assert loader_threads() == before


def test_a_closed_loader_raises_without_waiting() -> None:
    loader = Loader(endless())
    loader.close()
    with pytest.raises(RuntimeError, match="the loader is closed"):
        loader.next()


def test_closing_ends_the_wait_for_a_batch() -> None:
    begun, go_on = threading.Event(), threading.Event()
    told: list[BaseException] = []

    def stuck() -> Iterator[LoadedBatch]:
        begun.set()
        go_on.wait(PATIENCE_SECONDS)
        yield from endless()

    loader = Loader(stuck())

    def wait() -> None:
        try:
            loader.next()
        except RuntimeError as error:
            told.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert begun.wait(PATIENCE_SECONDS)
    closing = threading.Thread(target=loader.close)
    closing.start()
    waiting.join(PATIENCE_SECONDS)
    assert [str(error) for error in told] == ["the loader is closed"]
    go_on.set()
    closing.join(PATIENCE_SECONDS)
    assert not closing.is_alive()


def test_a_source_that_ends_is_an_error() -> None:
    loader = Loader(iter(batches(Position(), 1)))
    try:
        loader.next()
        with pytest.raises(RuntimeError, match="the source has no more batches"):
            loader.next()
    finally:
        loader.close()


class Asked(Exception):
    pass


def test_pulse_is_called_while_waiting_and_its_error_loses_no_batch() -> None:
    go_on = threading.Event()
    calls: list[int] = []

    def stuck() -> Iterator[LoadedBatch]:
        go_on.wait(PATIENCE_SECONDS)
        yield from endless()

    def pulse() -> None:
        calls.append(len(calls))
        if len(calls) == 3:
            raise Asked

    loader = Loader(stuck())
    try:
        with pytest.raises(Asked):
            loader.next(pulse)
        assert len(calls) == 3
        go_on.set()
        assert seen([loader.next() for _ in range(3)]) == seen(batches(Position(), 3))
    finally:
        loader.close()


def test_closing_does_not_wait_for_a_store_that_does_not_answer() -> None:
    begun, answer = threading.Event(), threading.Event()
    waited: list[bool] = []

    def unanswered(ids: Ids, epoch: int, repeats: Ids) -> Arrays:
        begun.set()
        waited.append(answer.wait(PATIENCE_SECONDS))
        return collate(ids, epoch, repeats)

    loader = Loader(RankBatches(ORDER, unanswered, Position(), 0, 1))
    assert begun.wait(PATIENCE_SECONDS)
    loader.close()
    assert not waited
    left = loader_threads()
    answer.set()
    for thread in left:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive(), "it ends when the store answers"


class Away:
    """A store that fails so many times, from the third use on."""

    def __init__(self, failures: int, temporary: bool = True) -> None:
        self._left, self._used, self._temporary = failures, 0, temporary
        self.failed = threading.Event()

    def __call__(self, ids: Ids, epoch: int, repeats: Ids) -> Arrays:
        self._used += 1
        if self._used > 2 and self._left:
            self._left -= 1
            self.failed.set()
            raise StoreError("s3://b: no answer", temporary=self._temporary)
        return collate(ids, epoch, repeats)


def test_an_unreachable_store_delays_the_batches_and_does_not_change_them(capsys: pytest.CaptureFixture[str]) -> None:
    state = random.getstate()
    loader = Loader(RankBatches(ORDER, Away(4), Position(), 0, 1, micro_batch_cost=3), pause_seconds=0.01)
    try:
        loaded = [loader.next() for _ in range(20)]
    finally:
        loader.close()
    assert random.getstate() == state, "the random numbers of a model must not depend on the store"
    wanted = list(islice(RankBatches(ORDER, collate, Position(), 0, 1, micro_batch_cost=3), 20))
    assert [[piece["ids"].tolist() for piece in one.micro_batches] for one in loaded] == [
        [piece["ids"].tolist() for piece in one.micro_batches] for one in wanted
    ]
    assert [one.at for one in loaded] == [one.at for one in wanted]
    first, second = capsys.readouterr().out.splitlines()
    assert first == "data: waiting for the store: s3://b: no answer"
    assert second.startswith("data: store is back after ")


def test_prefetching_starts_when_an_unreachable_store_is_back() -> None:
    told: list[int] = []
    failing = Away(3)

    @contextmanager
    def fetching(ids: Ids, epoch: int) -> Iterator[None]:
        for _ in range(3):
            failing(ids, epoch, 0 * ids)
        told.append(epoch)
        try:
            yield
        finally:
            told.append(-epoch)

    in_epoch = len(ORDER.batches(0))
    loader = Loader(RankBatches(ORDER, collate, Position(1, 0), 0, 1, fetching=fetching), ahead=1, pause_seconds=0.01)
    try:
        assert seen([loader.next() for _ in range(in_epoch)]) == seen(batches(Position(1, 0), in_epoch))
    finally:
        loader.close()
    assert told[:2] == [1, -1]


def test_shards_are_read_when_an_unreachable_store_is_back(tmp_path: Path) -> None:
    remote = FaultyStore(Remote(tmp_path / "store"))
    rows = [[number] for number in range(12)]
    put_pack(remote, rows, 1)
    split = Pack(remote, NAME, tmp_path / "cache").split("train")

    def read(ids: Ids, _: int, __: Ids) -> Arrays:
        return {"ids": np.array([split.column("tokens")[one][0] for one in ids.tolist()], np.int64)}

    def fetching(ids: Ids, _: int) -> AbstractContextManager[None]:
        return split.prefetched(split.order_of_use(ids))

    remote.refuse("get_file")
    loader = Loader(RankBatches(ORDER, read, Position(), 0, 1, fetching=fetching), pause_seconds=0.01)
    waits: list[int] = []

    def pulse() -> None:
        waits.append(1)
        if len(waits) == 2:
            remote.refuse()

    try:
        assert seen([loader.next(pulse) for _ in range(8)]) == seen(batches(Position(), 8))
    finally:
        loader.close()
    assert len(waits) >= 2


def test_a_lasting_store_error_is_raised_without_a_retry() -> None:
    loader = Loader(RankBatches(ORDER, Away(1, temporary=False), Position(), 0, 1))
    try:
        assert len([loader.next(), loader.next()]) == 2
        with pytest.raises(StoreError, match="no answer"):
            loader.next()
    finally:
        loader.close()


def test_a_store_that_stays_unreachable_is_an_error() -> None:
    loader = Loader(RankBatches(ORDER, Away(10**6), Position(), 0, 1), pause_seconds=0.01, store_seconds=0.1)
    try:
        assert len([loader.next(), loader.next()]) == 2
        with pytest.raises(StoreError, match="no answer"):
            loader.next()
    finally:
        loader.close()


def test_closing_ends_the_wait_for_the_store() -> None:
    before = loader_threads()
    away = Away(10**6)
    loader = Loader(RankBatches(ORDER, away, Position(), 0, 1), pause_seconds=100.0)
    assert away.failed.wait(PATIENCE_SECONDS)
    loader.close()
    assert loader_threads() == before


def test_prefetching_stops_after_an_error() -> None:
    over = threading.Event()

    @contextmanager
    def fetching(_: Ids, __: int) -> Iterator[None]:
        try:
            yield
        finally:
            over.set()

    loader = Loader(RankBatches(ORDER, Away(1, temporary=False), Position(), 0, 1, fetching=fetching))
    try:
        assert over.wait(PATIENCE_SECONDS)
    finally:
        loader.close()


@pytest.mark.parametrize(
    "order",
    [
        Order(np.ones(40, np.int64), np.arange(40), lambda _: 4, 1, sources=(40,), weights=(0.01,)),
        Order(np.ones(0, np.int64), np.arange(0), lambda _: 4, 1),
    ],
    ids=["weights that round to nothing", "no data"],
)
def test_an_epoch_without_samples_is_a_mistake(order: Order) -> None:
    loader = Loader(RankBatches(order, collate, Position(), 0, 1))
    try:
        with pytest.raises(Mistake, match=r"^data\.train: an epoch has no samples; raise the weights of the sources"):
            loader.next()
    finally:
        loader.close()


def test_sources_are_repeated_by_their_weights() -> None:
    order = Order(COSTS, COSTS, lambda _: 10, 1, sources=(4, 8), weights=(2.0, 0.5))
    times = np.bincount(np.concatenate(order.batches(0)), minlength=len(COSTS))
    assert times[:4].tolist() == [2, 2, 2, 2]
    assert sorted(times[4:].tolist()) == [0] * 4 + [1] * 4
    assert [ids.tolist() for ids in order.batches(0)] != [ids.tolist() for ids in order.batches(1)]


TWICE = Order(COSTS, COSTS, lambda _: 10, 1, sources=(4, 8), weights=(2.0, 1.0))


def in_turns(start: Position, rank: int, num_ranks: int, piece: int | None = None) -> Iterator[LoadedBatch]:
    def collate_repeats(ids: Ids, epoch: int, repeats: Ids) -> Arrays:
        return {**collate(ids, epoch, repeats), "repeats": repeats}

    return RankBatches(TWICE, collate_repeats, start, rank, num_ranks, piece)


def test_a_sample_that_occurs_twice_in_an_epoch_has_two_turns() -> None:
    epoch = list(islice(in_turns(Position(), 0, 1), len(TWICE.batches(0))))
    seen = [pair for one in epoch for pair in zip(one.ids.tolist(), one.repeats.tolist(), strict=True)]
    assert sorted(seen) == sorted([*((sample, 0) for sample in range(12)), *((sample, 1) for sample in range(4))])


@given(st.integers(0, 15), st.integers(1, 4), st.sampled_from([None, 1, 6]))
def test_turns_are_the_same_for_any_ranks_micro_batches_and_start(
    before: int, num_ranks: int, piece: int | None
) -> None:
    whole = list(islice(in_turns(Position(), 0, 1), before + 6))
    start = whole[before - 1].after if before else Position()
    for rank in range(num_ranks):
        for mine, one in zip(islice(in_turns(start, rank, num_ranks, piece), 6), whole[before:], strict=True):
            assert mine.repeats.tolist() == one.repeats[rank::num_ranks].tolist()
            assert np.concatenate([part["repeats"] for part in mine.micro_batches]).tolist() == mine.repeats.tolist()


def test_sources_of_weight_one_change_nothing() -> None:
    order = Order(COSTS, COSTS, lambda _: 10, 1, sources=(4, 8), weights=(1.0, 1.0))
    assert [ids.tolist() for ids in order.batches(3)] == [ids.tolist() for ids in ORDER.batches(3)]


def test_an_order_bounds_the_positions_of_a_padded_batch() -> None:
    lengths = np.ones(100, np.int64)
    lengths[5] = 1000
    order = Order(np.ones(100, np.int64), lengths, lambda _: 50, 1, lengths)
    assert [5] in [ids.tolist() for ids in order.batches(0)]
