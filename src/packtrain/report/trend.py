"""Statistics of short and noisy series: a line through them with its uncertainty, noise, percentiles, smoothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

_T_95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t for a 95 % interval with 1 to 10 degrees of freedom."""


@dataclass(frozen=True)
class Trend:
    """The least-squares line through points; the slope is in `slope` ± `error` with a probability of 95 %."""

    slope: float
    error: float
    count: int
    x_mean: float
    y_mean: float

    @property
    def low(self) -> float:
        return self.slope - self.error

    def at(self, x: float) -> float:
        return self.y_mean + self.slope * (x - self.x_mean)


def trend(points: Sequence[tuple[float, float]]) -> Trend | None:
    """Fit a line; None with fewer than three points, or if all have the same x."""
    if len(points) < 3:
        return None
    x_mean, y_mean = fmean(x for x, _ in points), fmean(y for _, y in points)
    spread = math.fsum((x - x_mean) ** 2 for x, _ in points)
    if not spread:
        return None
    slope = math.fsum((x - x_mean) * (y - y_mean) for x, y in points) / spread
    residue = math.fsum((y - y_mean - slope * (x - x_mean)) ** 2 for x, y in points)
    freedom = len(points) - 2
    return Trend(slope, student_95(freedom) * math.sqrt(residue / freedom / spread), len(points), x_mean, y_mean)


def student_95(freedom: int) -> float:
    """Return how many standard errors a 95 % interval reaches to each side."""
    return _T_95[freedom - 1] if freedom <= len(_T_95) else 1.96 + 2.5 / freedom


def noise_of(values: Sequence[float]) -> float:
    """Return the standard deviation of the noise in a smooth series: a slope or a slow bend does not count.

    From the second differences, whose variance is six times that of independent noise; by their median, so that a few
    jumps do not count either.
    """
    bends = [abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    return median(bends) / 0.6745 / math.sqrt(6) if bends else 0.0


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which that share of sorted values lies, interpolated."""
    at = share * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


def bucketed(points: Sequence[tuple[float, float]], count: int) -> list[tuple[float, float]]:
    """Return the mean x and the median y of at most `count` equal runs of neighbors."""
    count = min(count, len(points))
    buckets = [points[number * len(points) // count : (number + 1) * len(points) // count] for number in range(count)]
    return [(fmean(x for x, _ in bucket), median(y for _, y in bucket)) for bucket in buckets]
