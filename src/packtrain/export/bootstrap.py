"""Confidence intervals by bootstrap resampling, and a paired test of two models: pure functions of samples.

As SacreBLEU has them (sacrebleu/significance.py), with the same seed and so with the same resamples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from packtrain.recipes.statistics import Floats, Statistic

RESAMPLES = 1000
SEED = 12345
SIGNIFICANT = 0.05
_WEIGHTS = 4_000_000  # of samples in resamples that are held at a time: bounds the memory


@dataclass(frozen=True)
class Interval:
    """The middle 95 % of what resampling the samples gives."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Difference:
    """How much more one model has than another on the same samples, and how likely noise alone gives as much."""

    value: float
    interval: Interval
    p_value: float

    @property
    def is_significant(self) -> bool:
        # Both, because the test is one-sided in effect: it may find a difference whose interval has 0 in it.
        return self.p_value < SIGNIFICANT and 0.0 not in self.interval


def resampled(statistics: Mapping[str, Statistic], resamples: int = RESAMPLES, seed: int = SEED) -> dict[str, Floats]:
    """Return the scores of each resample. Statistics of the same number of samples are resampled alike.

    A resample draws as many samples as there are, with replacement.
    """
    if not statistics:
        return {}
    table = np.concatenate([statistic.rows for statistic in statistics.values()], axis=1)
    count = len(table)
    generator = np.random.default_rng(seed)
    sums = []
    at_once = max(1, _WEIGHTS // max(1, count))
    for start in range(0, resamples, at_once):
        drawn = generator.integers(0, count, size=(min(at_once, resamples - start), count))
        # How often each sample was drawn: multiplying is faster than collecting the rows that were.
        places = drawn + count * np.arange(len(drawn))[:, None]
        weights = np.bincount(places.ravel(), minlength=drawn.size).reshape(drawn.shape)
        sums.append(weights.astype(np.float64) @ table)
    edges = np.cumsum([statistic.rows.shape[1] for statistic in statistics.values()])[:-1]
    columns = np.split(np.concatenate(sums), edges, axis=1)
    return {
        name: statistic.score(column) for (name, statistic), column in zip(statistics.items(), columns, strict=True)
    }


def interval_of(scores: Floats) -> Interval:
    """Return the interval without 1 / 40 of the scores at each end."""
    ordered, cut = np.sort(scores), len(scores) // 40
    return Interval(float(ordered[cut]), float(ordered[len(scores) - cut - 1]))


def widened(difference: Difference, samples: int) -> Interval:
    """Return the interval of a difference with what resampling misses if there are few samples.

    Resamples spread as much as the samples do, which is too little by n / (n - 1), and their middle 95 % is that of a
    normal distribution instead of Student's. One sample cannot show a difference.
    """
    value, low, high = difference.value, difference.interval.low, difference.interval.high
    if samples < 2:
        return Interval(min(0.0, low), max(0.0, high))
    free = samples - 1
    # Student's quantile over the normal one, by Cornish and Fisher's expansion.
    factor = (1 + 1.210 / free + 1.440 / free**2 + 1.304 / free**3) * (samples / free) ** 0.5
    return Interval(value - factor * (value - low), value + factor * (high - value))


def difference_of(scores: Floats, other_scores: Floats, value: float) -> Difference:
    """Compare the scores of two models on the same resamples; `value` is their difference on all samples."""
    gaps = other_scores - scores
    if not gaps.any() and value == 0:
        return Difference(0.0, Interval(0.0, 0.0), 1.0)  # the same outputs: the formula below would find 1 / 1001
    absolute = np.abs(gaps)
    num_larger = int((absolute - absolute.mean() > abs(value)).sum())
    return Difference(value, interval_of(gaps), (num_larger + 1) / (len(gaps) + 1))
