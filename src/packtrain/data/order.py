"""Which samples make up global batch k of an epoch: pure functions of the seed, the epoch and the samples' costs.

Nothing here knows how many workers there are. Random numbers are the raw words of a counter-based
generator, sorted, so that the order does not depend on the version of NumPy either.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

_SHUFFLE_SAMPLES, _SHUFFLE_BATCHES = 1, 2
_POOL_BATCHES = 100  # batches' worth of samples sorted by likeness together: little padding, little bias


def philox_words(count: int, seed: int, *counters: int) -> NDArray[np.uint64]:
    """`count` random words that depend on the seed and up to three counters alone."""
    counter = np.zeros(4, np.uint64)
    counter[1 : 1 + len(counters)] = counters
    generator = np.random.Philox(key=np.array([seed, 0], np.uint64), counter=counter)
    return np.asarray(generator.random_raw(count), np.uint64)


def permutation(count: int, seed: int, *counters: int) -> Ids:
    return np.argsort(philox_words(count, seed, *counters), kind="stable")


def epoch_batches(costs: NDArray[Any], likeness: NDArray[Any], budget: int, seed: int, epoch: int) -> list[Ids]:
    """The epoch's global batches: every sample once, samples of near `likeness` together, `budget` of cost at most.

    A sample that costs more than the budget makes a batch of its own: nothing is dropped.
    """
    shuffled = permutation(len(costs), seed, epoch, _SHUFFLE_SAMPLES)
    if not len(shuffled):
        return []
    per_pool = max(1, int(_POOL_BATCHES * budget / max(1.0, float(np.mean(costs)))))
    batches: list[Ids] = []
    for start in range(0, len(shuffled), per_pool):
        pool = shuffled[start : start + per_pool]
        batches += _cut(pool[np.argsort(likeness[pool], kind="stable")], costs, budget)
    return [batches[k] for k in permutation(len(batches), seed, epoch, _SHUFFLE_BATCHES)]


def _cut(ids: Ids, costs: NDArray[Any], budget: int) -> list[Ids]:
    """Consecutive runs of `ids` whose costs sum to at most `budget`."""
    total = np.cumsum(costs[ids], dtype=np.int64)
    runs = []
    start, used = 0, 0
    while start < len(ids):
        end = max(start + 1, int(np.searchsorted(total, used + budget, side="right")))
        runs.append(ids[start:end])
        start, used = end, int(total[end - 1])
    return runs


def share(batch: Ids, rank: int, num_ranks: int) -> Ids:
    """A rank's part of a global batch: every num_ranks-th sample, so that lengths are alike on all ranks."""
    return batch[rank::num_ranks]


def block(count: int, rank: int, num_ranks: int) -> range:
    """A rank's contiguous part of `count` things; some may be empty, none is counted twice."""
    return range(count * rank // num_ranks, count * (rank + 1) // num_ranks)
