from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from packtrain.data import order
from packtrain.data.order import (
    Ids,
    Stream,
    block,
    epoch_batches,
    micro_batches,
    mixed_epoch,
    permutation,
    philox_rows,
    philox_words,
    repeats_of,
    share,
    sort_keys,
    spread,
)
from packtrain.pack.bitext import BitextSource
from packtrain.pack.vocabulary import Vocabulary

EXAMPLES = Path(__file__).parents[2] / "examples/data/en-de"

Samples = tuple[NDArray[np.int64], NDArray[np.int64]]
seeds = st.integers(0, 2**63 - 1)
budgets = st.integers(1, 60)


@st.composite
def samples(draw: st.DrawFn) -> Samples:
    """Costs and sort_keys of some samples."""
    costs = draw(st.lists(st.integers(0, 40), max_size=80))
    sort_keys = draw(st.lists(st.integers(0, 5), min_size=len(costs), max_size=len(costs)))
    return np.array(costs, np.int64), np.array(sort_keys, np.int64)


def lists(batches: list[Ids]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


@given(samples(), budgets, seeds, st.integers(0, 1000))
def test_every_sample_comes_exactly_once_in_an_epoch(drawn: Samples, budget: int, seed: int, epoch: int) -> None:
    costs, sort_keys = drawn
    batches = lists(epoch_batches(costs, sort_keys, budget, seed, epoch))
    assert sorted(chain.from_iterable(batches)) == list(range(len(costs)))
    assert all(batches)


@given(samples(), budgets, seeds)
def test_a_batch_is_within_the_budget_unless_one_sample_is_not(drawn: Samples, budget: int, seed: int) -> None:
    costs, sort_keys = drawn
    for batch in epoch_batches(costs, sort_keys, budget, seed, 0):
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


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 4), st.integers(1, 9))
def test_groups_stay_together_on_any_number_of_ranks(count: int, num_ranks: int, group: int, budget: int) -> None:
    batch, costs = np.arange(count), np.ones(count, np.int64)
    shares = [share(batch, rank, num_ranks, group) for rank in range(num_ranks)]
    parts = [part for one in shares for part in micro_batches(one, costs, budget, group)]
    assert sorted(np.concatenate(parts).tolist()) == batch.tolist()
    for part in parts:
        assert len(part) <= max(budget, group)
        firsts = part[::group]
        assert all(first % group == 0 for first in firsts.tolist())
        assert part.tolist() == [one for first in firsts.tolist() for one in range(first, min(first + group, count))]


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


def test_similar_samples_share_a_batch_and_batches_are_shuffled() -> None:
    sort_keys = np.arange(1000) % 10
    batches = epoch_batches(np.ones(1000, np.int64), sort_keys, 100, 1, 0)
    kinds = [set(sort_keys[batch].tolist()) for batch in batches]
    assert [len(kind) for kind in kinds] == [1] * 10
    order = [kind.pop() for kind in kinds]
    assert order != sorted(order)


@pytest.mark.parametrize(("cost", "pool"), [(1, 1000), (2, 500), (4, 250), (5000, 1)])
def test_the_samples_of_a_hundred_batches_are_sorted_together(cost: int, pool: int) -> None:
    """Samples that are alike stay in the order in which they were drawn."""
    count, budget = 2000, 10
    alike = np.arange(count) % 3
    ids = mixed_epoch([count], [1.0], 1, 0).tolist()
    pools = [sorted(ids[start : start + pool], key=lambda sample: sample % 3) for start in range(0, count, pool)]
    size = max(1, budget // cost)
    batches = [part[start : start + size] for part in pools for start in range(0, len(part), size)]
    expected = [batches[number] for number in permutation(len(batches), 1, 0, Stream.BATCHES)]
    assert lists(epoch_batches(np.full(count, cost), alike, budget, 1, 0)) == expected


def test_a_padded_batch_is_filled_up_to_the_limit_of_positions() -> None:
    """With samples no longer than they cost, on average, it is four times the budget: here five times eight."""
    lengths = np.array([0] * 200 + [1] * 780 + [8] * 20)
    batches = epoch_batches(np.ones(1000, np.int64), lengths, 10, 1, 0, None, lengths)
    assert sorted(len(batch) for batch in batches) == [5] * 4 + [10] * 98


def test_batches_are_filled_as_far_as_they_can_be() -> None:
    costs = np.full(64, 2)
    assert [len(batch) for batch in epoch_batches(costs, costs, 17, 1, 0)].count(8) == 8


# The numbers themselves: a run resumed after an upgrade of NumPy must see the same samples.


def test_random_words_never_change() -> None:
    assert philox_words(4, 1, 2, 3, 4).tolist() == [
        0xDCF4D738DF02B64D, 0x3EFC4C154A31F3D0, 0x86C2A65BA1EAB221, 0xD586A53DA4D6FAFD
    ]  # fmt: skip


@given(
    st.integers(0, 20),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**60),
    st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, 2**62)), max_size=5),
)
def test_rows_of_words_are_those_of_each_counter_and_turn(
    count: int, seed: int, epoch: int, places: list[tuple[int, int]]
) -> None:
    ids, turns = (np.array([place[side] for place in places], np.int64) for side in (0, 1))
    rows = philox_rows(count, seed, turns, epoch, ids, Stream.AUGMENTATION)
    assert rows.shape == (len(places), count)
    for row, (sample, turn) in zip(rows, places, strict=True):
        assert row.tolist() == philox_words(count, seed, epoch, sample, Stream.AUGMENTATION, turn=turn).tolist()


def test_permutations_never_change() -> None:
    assert permutation(10, 1).tolist() == [3, 5, 2, 9, 7, 0, 8, 6, 1, 4]
    assert permutation(10, 7, 3, 1).tolist() == [2, 5, 9, 8, 7, 6, 0, 3, 4, 1]


def test_batches_never_change() -> None:
    costs = np.array([3, 1, 4, 1, 5, 9, 2, 6])
    assert lists(epoch_batches(costs, costs, 10, 1, 0)) == [[3, 1, 6, 0], [5], [2, 4], [7]]


@given(st.integers(0, 200), seeds, st.integers(0, 2**40), st.integers(0, 9))
def test_a_permutation_has_every_number_once(count: int, seed: int, epoch: int, counter: int) -> None:
    assert sorted(permutation(count, seed, epoch, counter).tolist()) == list(range(count))


def test_words_depend_on_the_seed_and_on_each_counter() -> None:
    places = [(1,), (2,), (1, 1), (1, 0, 1), (1, 0, 0, 1), (1, 1, 1, 1)]
    assert len({philox_words(1, *place)[0] for place in places}) == len(places)


def test_every_turn_has_other_words_and_turn_0_is_the_default() -> None:
    assert len({philox_words(1, 1, 5, 0, Stream.MIX, turn=turn)[0] for turn in range(100)}) == 100
    assert philox_words(9, 1, 5, 0, 3, turn=0).tolist() == philox_words(9, 1, 5, 0, 3).tolist()


def test_every_stream_has_other_words() -> None:
    assert len({philox_words(1, 1, 5, 0, stream)[0] for stream in Stream}) == len(Stream)


def test_every_caller_names_a_stream() -> None:
    texts = [path.read_text() for path in Path(order.__file__).parents[1].rglob("*.py")]
    drawn = [
        call
        for text in texts
        if "philox_" in text
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        if call.func.id in ("philox_words", "philox_rows", "permutation")
    ]
    streams = [ast.unparse(call.args[-1]) for call in drawn if not isinstance(call.args[-1], ast.Starred)]
    assert sorted(streams) == sorted(f"Stream.{stream.name}" for stream in Stream)


def test_more_words_begin_with_the_same_ones() -> None:
    assert philox_words(100, 5, 6)[:3].tolist() == philox_words(3, 5, 6).tolist()


@given(st.integers(0, 300), st.integers(1, 20))
def test_blocks_cut_everything_into_consecutive_parts(count: int, num_ranks: int) -> None:
    blocks = [list(block(count, rank, num_ranks)) for rank in range(num_ranks)]
    assert list(chain.from_iterable(blocks)) == list(range(count))
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1


# Mixes of sources.

sources = st.lists(
    st.tuples(st.integers(0, 30), st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.5, 2.0, 2.7])), min_size=1, max_size=5
)


@given(st.lists(st.integers(0, 50), max_size=5), seeds, st.integers(0, 1000))
def test_sources_of_weight_one_are_one_plain_permutation(counts: list[int], seed: int, epoch: int) -> None:
    mixed = mixed_epoch(counts, [1.0] * len(counts), seed, epoch)
    assert mixed.tolist() == permutation(sum(counts), seed, epoch, 1).tolist()


@given(sources, seeds, st.integers(0, 1000))
def test_a_source_comes_as_often_as_its_weight_says(drawn: list[tuple[int, float]], seed: int, epoch: int) -> None:
    counts, weights = [count for count, _ in drawn], [weight for _, weight in drawn]
    times = np.bincount(mixed_epoch(counts, weights, seed, epoch), minlength=sum(counts))
    for count, weight, own in zip(counts, weights, np.split(times, np.cumsum(counts)[:-1]), strict=True):
        assert own.sum() == round(weight * count)
        if count:
            assert own.max() - own.min() <= 1  # whole passes, and a part in which nothing comes twice
        if weight == 1.0:
            assert own.tolist() == [1] * count


@given(sources, seeds, st.integers(0, 1000))
def test_a_mix_depends_on_seed_and_epoch_alone(drawn: list[tuple[int, float]], seed: int, epoch: int) -> None:
    counts, weights = [count for count, _ in drawn], [weight for _, weight in drawn]
    once, again = (mixed_epoch(counts, weights, seed, epoch).tolist() for _ in range(2))
    assert once == again


def test_a_partly_drawn_source_differs_by_epoch_and_seed() -> None:
    parts = [set(mixed_epoch([100], [0.5], seed, epoch).tolist()) for seed in (1, 2) for epoch in range(3)]
    assert all(one != other for number, one in enumerate(parts) for other in parts[:number])
    assert len(set().union(*parts)) > 90


def test_two_sources_do_not_draw_the_same_part() -> None:
    mixed = mixed_epoch([100, 100], [0.5, 0.5], 1, 0)
    assert {one for one in mixed.tolist() if one < 100} != {one - 100 for one in mixed.tolist() if one >= 100}


def test_sources_are_mixed_and_not_one_after_the_other() -> None:
    mixed = mixed_epoch([1000, 10], [1.0, 100.0], 1, 0)
    assert 400 < np.count_nonzero(mixed[:1000] >= 1000) < 600


def test_mixes_never_change() -> None:
    assert mixed_epoch([4, 3, 4], [1.0, 2.0, 0.5], 1, 0).tolist() == [6, 9, 0, 2, 10, 3, 6, 5, 1, 4, 4, 5]


@given(st.lists(st.integers(0, 9), max_size=40))
def test_a_turn_is_how_often_a_sample_came_before(ids: list[int]) -> None:
    repeats = repeats_of(np.array(ids, np.int64)).tolist()
    assert repeats == [ids[:place].count(sample) for place, sample in enumerate(ids)]


def test_ids_and_turns_are_whole_numbers() -> None:
    for numbers in (repeats_of(np.array([3, 3, 1])), spread(100, 7), mixed_epoch([], [], 1, 0), permutation(3, 1)):
        assert numbers.dtype == np.int64


def test_every_source_needs_a_weight() -> None:
    with pytest.raises(ValueError, match="2 sources have 1 weights"):
        mixed_epoch([1, 2], [1.0], 1, 0)


@given(samples(), budgets, seeds)
def test_batches_contain_every_drawn_sample(drawn: Samples, budget: int, seed: int) -> None:
    costs, alike = drawn
    half = len(costs) // 2
    ids = mixed_epoch([half, len(costs) - half], [2.0, 0.5], seed, 0)
    batches = epoch_batches(costs, alike, budget, seed, 0, ids)
    assert sorted(chain.from_iterable(lists(batches))) == sorted(ids.tolist())
    assert all(costs[batch].sum() <= budget or len(batch) == 1 for batch in batches)


@given(samples(), budgets, seeds, st.data())
def test_a_padded_batch_has_at_most_four_times_the_budget_of_positions(
    drawn: Samples, budget: int, seed: int, data: st.DataObject
) -> None:
    costs, alike = drawn
    lengths = np.array(data.draw(st.lists(st.integers(0, 400), min_size=len(costs), max_size=len(costs))), np.int64)
    batches = epoch_batches(costs, alike, budget, seed, 0, None, lengths)
    assert sorted(chain.from_iterable(lists(batches))) == list(range(len(costs)))
    longer = max(1.0, lengths.mean() / max(1.0, costs.mean())) if len(costs) else 1.0
    for batch in batches:
        assert len(batch) * lengths[batch].max() <= 4 * budget * longer or len(batch) == 1
        assert costs[batch].sum() <= budget or len(batch) == 1


def test_one_long_source_among_short_targets_does_not_make_a_huge_batch() -> None:
    target = np.full(5000, 3)
    source = np.full(5000, 4)
    source[17] = 1000
    with_it = [
        next(batch for batch in epoch_batches(target, target, 8192, 1, 0, None, limits) if 17 in batch)
        for limits in (None, np.maximum(source, target))
    ]
    unbounded, bounded = (len(batch) * source[batch].max() for batch in with_it)
    assert unbounded > 2_000_000
    assert bounded <= 4 * 8192 * source.mean() / 3


def test_uniformly_long_sources_do_not_make_batches_small() -> None:
    target, source = np.full(1000, 10), np.full(1000, 200)
    batches = epoch_batches(target, target, 500, 1, 0, None, source)
    assert [len(batch) for batch in batches] == [50] * 20


def padding(lengths: Sequence[NDArray[np.int64]], batches: list[Ids]) -> float:
    """The part of the batches' positions that holds nothing."""
    padded = sum(len(batch) * int(side[batch].max()) for batch in batches for side in lengths)
    return 1 - sum(int(side.sum()) for side in lengths) / padded


@pytest.fixture(scope="module")
def lengths(training: None) -> Samples:
    """The lengths of all sources and targets of the example's corpus."""
    pairs = list(
        BitextSource(paths=(str(EXAMPLES / "train.en.gz"), str(EXAMPLES / "train.de.gz"))).pairs(lambda *_: None)
    )
    vocabulary = Vocabulary.fit((text for pair in pairs for text in (pair.source, pair.target)), 4000)
    sources, targets = ([pair.source for pair in pairs], [pair.target for pair in pairs])
    source, target = (np.array([len(row) + 1 for row in vocabulary.encode(texts)]) for texts in (sources, targets))
    return source, target + 1


@pytest.mark.parametrize("budget", [640, 2560, 8192, 16000, 25000])
def test_little_of_a_batch_of_the_example_is_padding(
    lengths: Samples, budget: int, record_property: Callable[[str, object], None]
) -> None:
    source, target = lengths
    order = target - 1, sort_keys(source, target), budget, 1, 0
    batches = epoch_batches(*order, None, np.maximum(source, target))
    record_property("padding", f"{padding(lengths, batches):.1%}")
    assert padding(lengths, batches) < 0.1
    assert lists(batches) == lists(epoch_batches(*order))  # the limit of positions is for other corpora
    filled = [int(target[batch].sum()) - len(batch) for batch in batches]
    assert np.mean(filled) > 0.97 * budget


def test_neighbors_in_the_order_of_likeness_differ_little_in_either_length() -> None:
    source, target = (side.ravel() for side in np.meshgrid(np.arange(1, 60), np.arange(1, 60)))
    order = np.argsort(sort_keys(source, target), kind="stable")
    for side in (source, target):
        assert np.abs(np.diff(side[order])).max() == 1


@given(st.lists(st.tuples(st.integers(1, 2**20), st.integers(1, 2**20)), min_size=2, max_size=2))
def test_likeness_is_equal_only_if_both_lengths_are(pairs: list[tuple[int, int]]) -> None:
    source, target = np.array(pairs, np.int64).T
    one, other = sort_keys(source, target)
    assert (one == other) == (pairs[0] == pairs[1])


def test_pairs_are_sorted_by_their_longer_side_first() -> None:
    source, target = np.array([9, 1, 8, 7, 10]), np.array([1, 9, 8, 7, 1])
    assert np.argsort(sort_keys(source, target)).tolist()[0] == 3
    assert np.argsort(sort_keys(source, target)).tolist()[1] == 2
    assert np.argsort(sort_keys(source, target)).tolist()[-1] == 4


def test_sort_keys_never_change() -> None:
    source, target = np.array([1, 2, 2, 1, 3]), np.array([1, 1, 2, 2, 1])
    shell = 2**32
    assert sort_keys(source, target).tolist() == [shell, 2 * shell + 1, 2 * shell, 2 * shell - 1, 3 * shell - 2]


def test_a_micro_batch_has_single_samples_unless_they_are_grouped() -> None:
    ids, costs = np.array([4, 2, 0, 3]), np.array([1, 9, 2, 1, 2])
    assert lists(micro_batches(ids, costs, 4)) == [[4, 2], [0, 3]]
    assert lists(micro_batches(ids, costs, 1)) == [[4], [2], [0], [3]]
    assert lists(micro_batches(ids, costs, None)) == [[4, 2, 0, 3]]
    assert lists(micro_batches(ids[:0], costs, 4)) == [[]]


@settings(deadline=None)
@given(st.integers(0, 2000), st.integers(0, 2000))
def test_evaluated_ids_are_evenly_spaced_and_unique(count: int, wanted: int) -> None:
    ids = spread(count, wanted).tolist()
    assert len(ids) == min(count, wanted)
    assert ids == sorted(set(ids))
    assert all(0 <= one < count for one in ids)
    if ids:
        gaps = {after - before for before, after in pairwise([*ids, count])}
        assert ids[0] == 0
        assert max(gaps) - min(gaps) <= 1


def test_all_ids_are_chosen_if_all_are_wanted() -> None:
    assert spread(7, 7).tolist() == list(range(7))
    assert spread(7, 100).tolist() == list(range(7))
    assert spread(0, 5).tolist() == []
