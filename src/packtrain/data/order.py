"""The samples of global batch k of an epoch: pure functions of the seed, the epoch and the costs of samples.

The number of workers plays no role. Orders come from sorting the raw words of a counter-based generator, so that they
do not depend on the version of NumPy either.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from enum import IntEnum, unique
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

NO_SAMPLES = "an epoch has no samples; raise the weights of the sources, or add data"

_POOL_BATCHES = 100  # batches whose samples are sorted together: more means less padding, but less random batches
_SHELL = 1 << 32  # larger than any difference of two lengths
_PADDED = 4  # times the budget: the most positions of a batch, with padding


@unique
class Stream(IntEnum):
    """The purpose of random words: one of their counters, so that no two purposes get the same words.

    A number never changes once it is used: a resumed run must see the same words.
    """

    SAMPLES = 1
    BATCHES = 2
    AUGMENTATION = 3
    MIX = 4
    DECODING = 5
    CAPTIONS = 6
    TRAINING = 7
    OPERATIONS = 8
    ERASING = 9
    PAIRS = 10


def philox_words(count: int, seed: int, *counters: int, turn: int = 0) -> NDArray[np.uint64]:
    """Return `count` random words that depend only on the seed, up to three counters and the turn."""
    counter = np.zeros(4, np.uint64)
    counter[1 : 1 + len(counters)] = counters
    generator = np.random.Philox(key=np.array([seed, turn], np.uint64), counter=counter)
    return np.asarray(generator.random_raw(count), np.uint64)


_LOW = np.uint64(2**32 - 1)
_HALF = np.uint64(32)
_MULTIPLIERS = np.array([0xD2E7470EE14C6C93, 0xCA5A826395121157], np.uint64)[:, None, None]
_KEY_STEPS = np.array([0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B], np.uint64)[:, None, None]
_BLOCK, _ROUNDS = 4, 10


def philox_rows(count: int, seed: int, turns: Ids, first: int, second: Ids, third: int) -> NDArray[np.uint64]:
    """Return, for each of many turns and second counters, the words of `philox_words`, bit for bit.

    NumPy makes one generator for one counter, which takes longer than its words; this is Philox4x64-10 on arrays.
    """
    blocks = -(-count // _BLOCK)
    shape = (2, len(second), blocks)
    # The counters that are multiplied in a round, and the others; NumPy increments before its first block.
    multiplied, unmultiplied, key = (np.empty(shape, np.uint64) for _ in range(3))
    multiplied[0], multiplied[1] = np.arange(1, blocks + 1), second.astype(np.uint64)[:, None]
    unmultiplied[0], unmultiplied[1] = first, third
    key[0], key[1] = seed, turns.astype(np.uint64)[:, None]
    low_factor, high_factor = _MULTIPLIERS & _LOW, _MULTIPLIERS >> _HALF
    for _ in range(_ROUNDS):
        low, high = multiplied & _LOW, multiplied >> _HALF
        # The upper 64 of 128 bits, from products of halves.
        middle = high * low_factor + (low * low_factor >> _HALF)
        upper = high * high_factor + (middle >> _HALF) + (low * high_factor + (middle & _LOW) >> _HALF)
        lower = multiplied * _MULTIPLIERS
        multiplied, unmultiplied = upper[::-1] ^ unmultiplied ^ key, lower[::-1]
        key = key + _KEY_STEPS
    words = np.stack([multiplied[0], unmultiplied[0], multiplied[1], unmultiplied[1]], axis=-1)
    return words.reshape(len(second), blocks * _BLOCK)[:, :count]


def permutation(count: int, seed: int, *counters: int) -> Ids:
    return np.argsort(philox_words(count, seed, *counters), kind="stable")


def draws(count: int, weight: float) -> int:
    """Return the number of samples that an epoch takes from a source."""
    return round(weight * count)


def mixed_epoch(source_counts: Sequence[int], weights: Sequence[float], seed: int, epoch: int) -> Ids:
    """Return the samples of an epoch, shuffled. Samples are numbered across all sources.

    With a weight of 1 each sample of a source occurs exactly once. Other weights make round(weight * count) draws:
    whole passes first, and for the rest samples that differ from each other and from epoch to epoch.
    """
    if len(source_counts) != len(weights):
        raise ValueError(f"{len(source_counts)} sources have {len(weights)} weights")
    drawn = [np.zeros(0, np.int64)]  # so that no sources at all still concatenate
    first = 0
    for source, (count, weight) in enumerate(zip(source_counts, weights, strict=True)):
        passes, remainder = divmod(draws(count, weight), max(1, count))
        drawn += [np.arange(first, first + count)] * passes
        if remainder:
            drawn.append(first + permutation(count, seed, epoch, source, Stream.MIX)[:remainder])
        first += count
    ids = np.concatenate(drawn)
    return ids[permutation(len(ids), seed, epoch, Stream.SAMPLES)]


def repeats_of(ids: Ids) -> Ids:
    """Return for each id how many times it occurs before in the array."""
    order = np.argsort(ids, kind="stable")
    places, ordered = np.arange(len(ids)), ids[order]
    is_first = np.ones(len(ids), bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    repeats = np.empty(len(ids), np.int64)
    repeats[order] = places - np.maximum.accumulate(np.where(is_first, places, 0))
    return repeats


def sort_keys(source: NDArray[np.int64], target: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return sort keys for pairs of these lengths: neighbors need little padding on either side.

    The order is a path through all pairs of lengths on which neighbors differ little: shells of equal longer side,
    each from the shortest source to the shortest target, and every other one backwards.
    """
    longer = np.maximum(source, target)
    return longer * _SHELL + np.where(longer % 2, target - source, source - target)


def epoch_batches(
    costs: NDArray[Any],
    sort_keys: NDArray[Any],
    budget: int,
    seed: int,
    epoch: int,
    ids: Ids | None = None,
    lengths: NDArray[Any] | None = None,
) -> list[Ids]:
    """Return the epoch's global batches: samples of similar `sort_keys` together, each batch at most `budget` of cost.

    `ids` are the shuffled samples of the epoch (mixed_epoch); by default every sample occurs once. With `lengths`, a
    padded batch has at most four times the budget of positions, or proportionally more if samples are longer than
    they cost. A sample that exceeds a limit by itself makes a batch of its own: nothing is dropped.
    """
    if ids is None:
        ids = mixed_epoch([len(costs)], [1.0], seed, epoch)
    if not len(ids):
        return []
    mean_cost = max(1.0, float(np.mean(costs[ids])))
    per_pool = max(1, int(_POOL_BATCHES * budget / mean_cost))
    most_positions = 0.0
    if lengths is not None:
        most_positions = _PADDED * budget * max(1.0, float(np.mean(lengths[ids])) / mean_cost)
    batches: list[Ids] = []
    for start in range(0, len(ids), per_pool):
        pool = ids[start : start + per_pool]
        pool = pool[np.argsort(sort_keys[pool], kind="stable")]
        edges = _edges(costs[pool], budget, None if lengths is None else lengths[pool], most_positions)
        batches += [pool[edge:end] for edge, end in pairwise(edges)]
    return [batches[k] for k in permutation(len(batches), seed, epoch, Stream.BATCHES)]


def _edges(costs: NDArray[Any], budget: int, lengths: NDArray[Any] | None, most_positions: float) -> list[int]:
    """Return the starts of consecutive runs whose costs sum to at most `budget`, and the end."""
    total: list[int] = np.cumsum(costs, dtype=np.int64).tolist()
    edges = [0]
    used = 0
    while (start := edges[-1]) < len(total):
        end = max(start + 1, bisect_right(total, used + budget, start))
        if lengths is not None and (end - start) * lengths[start:end].max() > most_positions:
            positions = np.maximum.accumulate(lengths[start:end]) * np.arange(1, end - start + 1)
            end = start + max(1, int(np.searchsorted(positions, most_positions, side="right")))
        edges.append(end)
        used = total[end - 1]
    return edges


def share(batch: Ids, rank: int, num_ranks: int, group: int = 1) -> Ids:
    """Return a rank's part of a global batch: every num_ranks-th sample, so that all ranks get similar lengths.

    Every `group` samples in a row stay together: one rank has them, however many there are.
    """
    ids: Ids = batch[np.arange(len(batch)) // group % num_ranks == rank]
    return ids


def micro_batches(ids: Ids, costs: NDArray[Any], budget: int | None, group: int = 1) -> list[Ids]:
    """Divide ids into consecutive micro-batches of at most that cost, or of one group; no ids make an empty one."""
    if budget is None or not len(ids):
        return [ids]
    grouped = np.add.reduceat(costs[ids], np.arange(0, len(ids), group))
    edges = [group * edge for edge in _edges(grouped, budget, None, 0.0)]
    return [ids[start:end] for start, end in pairwise(edges)]


def block(count: int, rank: int, num_ranks: int) -> range:
    """Return a rank's contiguous part of `count` items; the parts of all ranks cover each item once."""
    return range(count * rank // num_ranks, count * (rank + 1) // num_ranks)


def spread(count: int, size: int) -> Ids:
    """Choose `size` of `count` ids, evenly spaced and always the same, so that scores are comparable."""
    size = min(count, size)
    return np.arange(size, dtype=np.int64) * count // max(1, size)
