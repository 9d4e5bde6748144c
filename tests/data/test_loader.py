from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import chain, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.data.loader import Arrays, Loaded, Loader, Order, Position, parts
from packtrain.data.order import Ids

COSTS = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8])
ORDER = Order(COSTS, COSTS, budget=lambda _: 10, seed=1)
PATIENCE_SECONDS = 30


def collate(ids: Ids, epoch: int) -> Arrays:
    return {"ids": ids, "epoch": np.array(epoch)}


def batches(start: Position, count: int, rank: int = 0, num_ranks: int = 1) -> list[Loaded]:
    return list(islice(parts(ORDER, collate, start, rank, num_ranks), count))


def seen(loaded: list[Loaded]) -> list[list[int]]:
    return [one.pieces[0]["ids"].tolist() for one in loaded]


def loader_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "loader"}


# What is loaded.


@given(st.integers(0, 20), st.integers(1, 3))
def test_whoever_starts_at_a_position_sees_what_followed_it(before: int, num_ranks: int) -> None:
    whole = batches(Position(), before + 10, 0, num_ranks)
    start = whole[before - 1].after if before else Position()
    later = batches(start, 10, 0, num_ranks)
    assert seen(later) == seen(whole[before:])
    assert [(one.cost, one.after) for one in later] == [(one.cost, one.after) for one in whole[before:]]


def test_an_epoch_follows_the_other_and_each_has_every_sample_once() -> None:
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
        assert sorted(chain.from_iterable(seen(mine))) == sorted(one.pieces[0]["ids"].tolist())
        assert {(part.cost, part.samples, part.after) for part in mine} == {(one.cost, one.samples, one.after)}


def test_a_batch_says_its_cost_its_samples_and_how_many_there_are() -> None:
    for one, ids in zip(batches(Position(), 3), ORDER.batches(0), strict=False):
        assert one.cost == COSTS[ids].sum()
        assert one.samples == len(ids)
        assert one.batches_in_epoch == len(ORDER.batches(0))


def test_samples_are_seen_as_they_are_in_their_epoch() -> None:
    in_epoch = len(ORDER.batches(0))
    epochs = [one.pieces[0]["epoch"].item() for one in batches(Position(), in_epoch + 1)]
    assert epochs == [0] * in_epoch + [1]


def test_the_budget_may_change_with_the_epoch() -> None:
    order = Order(COSTS, COSTS, lambda epoch: (10, 20)[epoch], seed=1)
    first, second = order.batches(0), order.batches(1)
    assert max(COSTS[ids].sum() for ids in first) <= 10 < max(COSTS[ids].sum() for ids in second) <= 20
    loaded = list(islice(parts(order, collate, Position(), 0, 1), len(first) + len(second)))
    assert [one.batches_in_epoch for one in loaded] == [len(first)] * len(first) + [len(second)] * len(second)
    assert loaded[-1].after == Position(2, 0)


# In pieces.


@given(st.integers(1, 12), st.integers(1, 4))
def test_a_part_in_pieces_is_the_same_part_and_each_piece_is_small_enough(budget: int, num_ranks: int) -> None:
    whole = list(islice(parts(ORDER, collate, Position(), 0, num_ranks), 6))
    divided = list(islice(parts(ORDER, collate, Position(), 0, num_ranks, budget), 6))
    for one, other in zip(whole, divided, strict=True):
        pieces = [piece["ids"] for piece in other.pieces]
        assert np.concatenate(pieces).tolist() == one.pieces[0]["ids"].tolist() == other.ids.tolist()
        assert all(COSTS[piece].sum() <= budget or len(piece) == 1 for piece in pieces)
        assert (one.cost, one.own_cost, one.samples) == (other.cost, other.own_cost, other.samples)
        assert other.own_cost == sum(COSTS[piece].sum() for piece in pieces)


@given(st.integers(1, 12), st.integers(1, 5))
def test_where_ranks_meet_in_every_piece_all_have_as_many(budget: int, num_ranks: int) -> None:
    shares = [
        list(islice(parts(ORDER, collate, Position(), rank, num_ranks, budget, alike=True), 6))
        for rank in range(num_ranks)
    ]
    for of_ranks in zip(*shares, strict=True):
        assert len({len(part.pieces) for part in of_ranks}) == 1
        ids = [piece["ids"] for part in of_ranks for piece in part.pieces]
        assert len(np.concatenate(ids)) == of_ranks[0].samples


def test_a_rank_without_samples_has_one_empty_piece() -> None:
    few = Order(np.ones(2, np.int64), np.arange(2), lambda _: 2, seed=1)
    [loaded] = islice(parts(few, collate, Position(), 2, 3, 1), 1)
    assert [len(piece["ids"]) for piece in loaded.pieces] == [0]
    assert (loaded.own_cost, loaded.cost) == (0, 2)


# Ahead of its use.


def endless() -> Iterator[Loaded]:
    return parts(ORDER, collate, Position(), 0, 1)


def test_a_loader_gives_the_batches_in_order() -> None:
    loader = Loader(endless())
    try:
        assert seen([loader.next() for _ in range(20)]) == seen(batches(Position(), 20))
    finally:
        loader.close()


def test_batches_are_made_ahead_but_not_without_end() -> None:
    made: list[int] = []
    full = threading.Event()

    def source() -> Iterator[Loaded]:
        for number, loaded in enumerate(endless()):
            made.append(number)
            if number == 3:
                full.set()
            yield loaded

    loader = Loader(source(), ahead=3)
    try:
        assert full.wait(PATIENCE_SECONDS)
        assert made == [0, 1, 2, 3]  # three wait in the queue and the fourth before it
        loader.next()
    finally:
        loader.close()
    assert len(made) <= 5


def test_an_error_is_raised_where_the_batch_would_have_been_used() -> None:
    def failing(ids: Ids, epoch: int) -> Arrays:
        raise ValueError("a sample that cannot be read")

    def source() -> Iterator[Loaded]:
        yield from batches(Position(), 2)
        yield from parts(ORDER, failing, Position(), 0, 1)

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

    def source() -> Iterator[Loaded]:
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


def test_closing_after_an_error_nobody_asked_for_ends_the_thread() -> None:
    before = loader_threads()

    def source() -> Iterator[Loaded]:
        yield from batches(Position(), 2)
        raise ValueError("too late")

    loader = Loader(source(), ahead=1)
    loader.close()
    assert loader_threads() == before


@settings(max_examples=5)
@given(st.integers(1, 4))
def test_closing_twice_is_closing_once(ahead: int) -> None:
    before = loader_threads()
    loader = Loader(endless(), ahead)
    loader.close()
    loader.close()
    assert loader_threads() == before


def test_a_closed_loader_gives_nothing_and_keeps_nobody_waiting() -> None:
    loader = Loader(endless())
    loader.close()
    with pytest.raises(RuntimeError, match="the loader is closed"):
        loader.next()


def test_who_waits_for_a_batch_is_told_when_the_loader_is_closed() -> None:
    begun, go_on = threading.Event(), threading.Event()
    told: list[BaseException] = []

    def stuck() -> Iterator[Loaded]:
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


def test_a_source_that_ends_is_an_error_and_not_a_silence() -> None:
    loader = Loader(iter(batches(Position(), 1)))
    try:
        loader.next()
        with pytest.raises(RuntimeError, match="there are no more batches"):
            loader.next()
    finally:
        loader.close()


# Mixes and limits.


def test_an_order_goes_through_its_sources_by_their_weights() -> None:
    order = Order(COSTS, COSTS, lambda _: 10, 1, sources=(4, 8), weights=(2.0, 0.5))
    times = np.bincount(np.concatenate(order.batches(0)), minlength=len(COSTS))
    assert times[:4].tolist() == [2, 2, 2, 2]
    assert sorted(times[4:].tolist()) == [0] * 4 + [1] * 4
    assert [ids.tolist() for ids in order.batches(0)] != [ids.tolist() for ids in order.batches(1)]


def test_sources_of_weight_one_change_nothing() -> None:
    order = Order(COSTS, COSTS, lambda _: 10, 1, sources=(4, 8), weights=(1.0, 1.0))
    assert [ids.tolist() for ids in order.batches(3)] == [ids.tolist() for ids in ORDER.batches(3)]


def test_an_order_bounds_the_positions_of_a_padded_batch() -> None:
    lengths = np.ones(100, np.int64)
    lengths[5] = 1000
    order = Order(np.ones(100, np.int64), lengths, lambda _: 50, 1, lengths)
    assert [5] in [ids.tolist() for ids in order.batches(0)]
