from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from packtrain.data.order import Ids, block, epoch_batches, permutation, philox_words, share
from packtrain.pack.bitext import read_bitext
from packtrain.pack.vocabulary import Vocabulary

EXAMPLES = Path(__file__).parents[2] / "examples/data/en-de"

Samples = tuple[NDArray[np.int64], NDArray[np.int64]]
seeds = st.integers(0, 2**63 - 1)
budgets = st.integers(1, 60)


@st.composite
def samples(draw: st.DrawFn) -> Samples:
    """Costs and likenesses of some samples."""
    costs = draw(st.lists(st.integers(0, 40), max_size=80))
    likeness = draw(st.lists(st.integers(0, 5), min_size=len(costs), max_size=len(costs)))
    return np.array(costs, np.int64), np.array(likeness, np.int64)


def lists(batches: list[Ids]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


@given(samples(), budgets, seeds, st.integers(0, 1000))
def test_every_sample_comes_exactly_once_in_an_epoch(drawn: Samples, budget: int, seed: int, epoch: int) -> None:
    costs, likeness = drawn
    batches = lists(epoch_batches(costs, likeness, budget, seed, epoch))
    assert sorted(chain.from_iterable(batches)) == list(range(len(costs)))
    assert all(batches)


@given(samples(), budgets, seeds)
def test_a_batch_is_within_the_budget_unless_one_sample_is_not(drawn: Samples, budget: int, seed: int) -> None:
    costs, likeness = drawn
    for batch in epoch_batches(costs, likeness, budget, seed, 0):
        assert costs[batch].sum() <= budget or len(batch) == 1


@given(samples(), budgets, seeds, st.integers(1, 9))
def test_the_shares_of_all_ranks_put_together_are_the_batch(
    drawn: Samples, budget: int, seed: int, num_ranks: int
) -> None:
    for batch in epoch_batches(*drawn, budget, seed, 0):
        shares = [share(batch, rank, num_ranks) for rank in range(num_ranks)]
        assert sorted(np.concatenate(shares).tolist()) == sorted(batch.tolist())
        sizes = [len(one) for one in shares]
        assert max(sizes) - min(sizes) <= 1


@given(samples(), budgets, seeds, st.integers(0, 1000))
def test_the_same_seed_and_epoch_make_the_same_batches(drawn: Samples, budget: int, seed: int, epoch: int) -> None:
    once, again = (lists(epoch_batches(*drawn, budget, seed, epoch)) for _ in range(2))
    assert once == again


def test_another_seed_or_epoch_makes_other_batches() -> None:
    costs = np.full(200, 3)
    orders = [lists(epoch_batches(costs, costs, 30, seed, epoch)) for seed, epoch in ((1, 0), (1, 1), (2, 0), (2, 1))]
    assert all(one != other for number, one in enumerate(orders) for other in orders[:number])


def test_no_samples_make_no_batches() -> None:
    nothing = np.array([], np.int64)
    assert epoch_batches(nothing, nothing, 10, 1, 0) == []


def test_alike_samples_share_a_batch_and_batches_come_in_no_order_of_likeness() -> None:
    likeness = np.arange(1000) % 10
    batches = epoch_batches(np.ones(1000, np.int64), likeness, 100, 1, 0)
    kinds = [set(likeness[batch].tolist()) for batch in batches]
    assert [len(kind) for kind in kinds] == [1] * 10
    order = [kind.pop() for kind in kinds]
    assert order != sorted(order)


def test_batches_are_filled_as_far_as_they_can_be() -> None:
    costs = np.full(64, 2)
    assert [len(batch) for batch in epoch_batches(costs, costs, 17, 1, 0)].count(8) == 8


# The numbers themselves: a run that goes on after an upgrade of NumPy must see the same samples.


def test_random_words_are_these_for_ever() -> None:
    assert philox_words(4, 1, 2, 3, 4).tolist() == [
        0xDCF4D738DF02B64D, 0x3EFC4C154A31F3D0, 0x86C2A65BA1EAB221, 0xD586A53DA4D6FAFD
    ]  # fmt: skip


def test_permutations_are_these_for_ever() -> None:
    assert permutation(10, 1).tolist() == [3, 5, 2, 9, 7, 0, 8, 6, 1, 4]
    assert permutation(10, 7, 3, 1).tolist() == [2, 5, 9, 8, 7, 6, 0, 3, 4, 1]


def test_batches_are_these_for_ever() -> None:
    costs = np.array([3, 1, 4, 1, 5, 9, 2, 6])
    assert lists(epoch_batches(costs, costs, 10, 1, 0)) == [[3, 1, 6, 0], [5], [2, 4], [7]]


@given(st.integers(0, 200), seeds, st.integers(0, 2**40), st.integers(0, 9))
def test_a_permutation_has_every_number_once(count: int, seed: int, epoch: int, counter: int) -> None:
    assert sorted(permutation(count, seed, epoch, counter).tolist()) == list(range(count))


def test_words_depend_on_the_seed_and_on_each_counter() -> None:
    places = [(1,), (2,), (1, 1), (1, 0, 1), (1, 0, 0, 1), (1, 1, 1, 1)]
    assert len({philox_words(1, *place)[0] for place in places}) == len(places)


def test_more_words_begin_with_the_same_ones() -> None:
    assert philox_words(100, 5, 6)[:3].tolist() == philox_words(3, 5, 6).tolist()


# Blocks.


@given(st.integers(0, 300), st.integers(1, 20))
def test_blocks_cut_everything_into_consecutive_parts(count: int, num_ranks: int) -> None:
    blocks = [list(block(count, rank, num_ranks)) for rank in range(num_ranks)]
    assert list(chain.from_iterable(blocks)) == list(range(count))
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1


# Padding.


def padding(lengths: NDArray[np.int64], batches: list[Ids]) -> float:
    """The part of the batches' positions that holds nothing."""
    return 1 - lengths.sum() / sum(len(batch) * int(lengths[batch].max()) for batch in batches)


@pytest.fixture(scope="module")
def lengths() -> Samples:
    """The lengths of 10,000 sources and targets of the example's corpus."""
    pairs = list(read_bitext((str(EXAMPLES / "train.en.gz"), str(EXAMPLES / "train.de.gz"))))[:10_000]
    vocabulary = Vocabulary.fit((text for pair in pairs for text in (pair.source, pair.target)), 4000)
    sources, targets = ([pair.source for pair in pairs], [pair.target for pair in pairs])
    source, target = ([len(row) + 1 for row in vocabulary.encode(texts)] for texts in (sources, targets))
    return np.array(source), np.array(target)


@pytest.mark.parametrize("budget", [640, 2560])
def test_little_of_a_batch_of_the_example_is_padding(
    lengths: Samples, budget: int, record_property: Callable[[str, object], None]
) -> None:
    source, target = lengths
    batches = epoch_batches(target, target * (1 << 20) + source, budget, 1, 0)
    record_property("source padding", f"{padding(source, batches):.1%}")
    assert padding(target, batches) < 0.1
    assert padding(source, batches) < 0.4
