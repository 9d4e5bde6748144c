"""Which samples make up global batch k of an epoch: pure functions of the seed, the epoch and the samples' costs.

Nothing here knows how many workers there are. Random numbers are the raw words of a counter-based
generator, sorted, so that the order does not depend on the version of NumPy either.
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

NO_SAMPLES = "an epoch has no samples; raise the weights of its sources, or add data"

_POOL_BATCHES = 100  # batches' worth of samples sorted by likeness together: little padding, little bias
_SHELL = 1 << 32  # more than any difference of two lengths, on either side
_PADDED = 4  # times the budget: the most positions of a batch, with those that are filled up


@unique
class Stream(IntEnum):
    """What random words are for: the last of their counters, so that no two purposes get the same ones.

    A number, once used, stays what it is: runs that go on must see what they saw.
    """

    SAMPLES = 1
    BATCHES = 2
    AUGMENTATION = 3
    MIX = 4
    DECODING = 5
    CAPTIONS = 6
    TRAINING = 7


def philox_words(count: int, seed: int, *counters: int, turn: int = 0) -> NDArray[np.uint64]:
    """`count` random words that depend on the seed, up to three counters and the turn alone."""
    counter = np.zeros(4, np.uint64)
    counter[1 : 1 + len(counters)] = counters
    generator = np.random.Philox(key=np.array([seed, turn], np.uint64), counter=counter)
    return np.asarray(generator.random_raw(count), np.uint64)


def permutation(count: int, seed: int, *counters: int) -> Ids:
    return np.argsort(philox_words(count, seed, *counters), kind="stable")


def draws(count: int, weight: float) -> int:
    """How many samples of a source an epoch has."""
    return round(weight * count)


def mixed_epoch(source_counts: Sequence[int], weights: Sequence[float], seed: int, epoch: int) -> Ids:
    """The samples of an epoch, shuffled. Samples are numbered through the sources.

    With a weight of 1 each sample of a source comes exactly once. Other weights make round(weight * count) draws:
    as many whole passes as that has, and for the rest samples that differ from each other and from epoch to epoch.
    """
    if len(source_counts) != len(weights):
        raise ValueError(f"{len(source_counts)} sources have {len(weights)} weights")
    drawn = [np.zeros(0, np.int64)]
    first = 0
    for source, (count, weight) in enumerate(zip(source_counts, weights, strict=True)):
        passes, rest = divmod(draws(count, weight), max(1, count))
        drawn += [np.arange(first, first + count)] * passes
        if rest:
            drawn.append(first + permutation(count, seed, epoch, source, Stream.MIX)[:rest])
        first += count
    ids = np.concatenate(drawn)
    return ids[permutation(len(ids), seed, epoch, Stream.SAMPLES)]


def turns_of(ids: Ids) -> Ids:
    """How many times each of the ids has come before in their row."""
    order = np.argsort(ids, kind="stable")
    places, ordered = np.arange(len(ids)), ids[order]
    is_first = np.ones(len(ids), bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    turns = np.empty(len(ids), np.int64)
    turns[order] = places - np.maximum.accumulate(np.where(is_first, places, 0))
    return turns


def likeness(source: NDArray[np.int64], target: NDArray[np.int64]) -> NDArray[np.int64]:
    """Pairs of these lengths that stand together when sorted by this need little padding on either side.

    A path through all pairs of lengths on which neighbours differ little: shells whose longer side is equal, each
    from the shortest source to the shortest target, and every other one the way back.
    """
    longer = np.maximum(source, target)
    return longer * _SHELL + np.where(longer % 2, target - source, source - target)


def epoch_batches(
    costs: NDArray[Any],
    likeness: NDArray[Any],
    budget: int,
    seed: int,
    epoch: int,
    ids: Ids | None = None,
    lengths: NDArray[Any] | None = None,
) -> list[Ids]:
    """The epoch's global batches: all of `ids`, samples of near `likeness` together, `budget` of cost at most.

    `ids` are the shuffled samples of the epoch (mixed_epoch); without them, every sample comes once. A batch of
    which each sample takes as many positions as the longest of `lengths` has at most four times the budget of them,
    or in proportion more where samples are longer than they cost. A sample that is more than that, or costs
    more than the budget, makes a batch of its own: nothing is dropped.
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
        pool = pool[np.argsort(likeness[pool], kind="stable")]
        edges = _edges(costs[pool], budget, None if lengths is None else lengths[pool], most_positions)
        batches += [pool[edge:end] for edge, end in pairwise(edges)]
    return [batches[k] for k in permutation(len(batches), seed, epoch, Stream.BATCHES)]


def _edges(costs: NDArray[Any], budget: int, lengths: NDArray[Any] | None, most_positions: float) -> list[int]:
    """Where consecutive runs begin whose costs sum to at most `budget`, and after them the end."""
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


def share(batch: Ids, rank: int, num_ranks: int) -> Ids:
    """A rank's part of a global batch: every num_ranks-th sample, so that lengths are alike on all ranks."""
    return batch[rank::num_ranks]


def pieces(ids: Ids, costs: NDArray[Any], budget: int | None) -> list[Ids]:
    """A part of a batch in consecutive pieces of at most that cost; one sample at the least, and one piece of none."""
    if budget is None or not len(ids):
        return [ids]
    return [ids[start:end] for start, end in pairwise(_edges(costs[ids], budget, None, 0.0))]


def block(count: int, rank: int, num_ranks: int) -> range:
    """A rank's contiguous part of `count` things; some may be empty, none is counted twice."""
    return range(count * rank // num_ranks, count * (rank + 1) // num_ranks)
