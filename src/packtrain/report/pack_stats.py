"""The numbers of a pack: samples, what was left out, and how lengths, sizes and classes are distributed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packtrain.pack.kind import kind_of
from packtrain.pack.manifest import Manifest, Split
from packtrain.pack.shard import Columns
from packtrain.report.page import nice_ticks

ColumnsOf = Callable[[str], Iterable[Columns]]
"""The shards of a split, in order. Each is read once, so they need not all be open at the same time."""

_BINS = 24


@dataclass(frozen=True)
class Bar:
    name: str
    count: int


@dataclass(frozen=True)
class Measure:
    """How one number is distributed over the samples of a split."""

    name: str
    minimum: int
    median: int
    mean: float
    percentile_95: int
    maximum: int
    bins: tuple[Bar, ...]


@dataclass(frozen=True)
class SplitStats:
    """`classes` has the number of samples of each class, the largest first."""

    name: str
    split: Split
    measures: tuple[Measure, ...] = ()
    classes: tuple[Bar, ...] = ()


@dataclass(frozen=True)
class PackStats:
    manifest: Manifest
    vocabulary_sizes: tuple[int, ...]
    splits: tuple[SplitStats, ...]


def stats_of(manifest: Manifest, columns: ColumnsOf, vocabulary_sizes: Sequence[int] = ()) -> PackStats:
    splits = []
    numbers_of = kind_of(manifest.kind).measures()
    for name, split in manifest.splits.items():
        counts: dict[str, Counter[int]] = {title: Counter() for title in numbers_of}
        labels: Counter[int] = Counter()
        for shard in columns(name):  # one pass for all numbers: a pack may be larger than memory
            for title, numbers in numbers_of.items():
                count(numbers(shard), counts[title])
            if manifest.classes:
                count(shard.plain["label"], labels)
        measures = tuple(measure(title, counter) for title, counter in counts.items() if counter)
        classes = [Bar(label, labels[number]) for number, label in enumerate(manifest.classes)]
        splits.append(SplitStats(name, split, measures, tuple(sorted(classes, key=lambda bar: -bar.count))))
    return PackStats(manifest, tuple(vocabulary_sizes), tuple(splits))


def count(numbers: NDArray[Any], into: Counter[int]) -> None:
    """Add up how often each number occurs: an exact distribution that stays small, however many samples there are."""
    values, counts = np.unique(numbers, return_counts=True)
    into.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))


def measure(name: str, counted: Counter[int]) -> Measure:
    values = np.array(sorted(counted), np.int64)
    counts = np.array([counted[value] for value in values.tolist()], np.int64)
    ends = np.cumsum(counts)
    # A percentile is the smallest number that at least this share of the samples does not exceed.
    median, high, top = (int(values[np.searchsorted(ends, share * ends[-1] - 1e-9)]) for share in (0.5, 0.95, 0.99))
    mean = float((values * counts).sum() / ends[-1])
    return Measure(name, int(values[0]), median, mean, high, int(values[-1]), _bins(values, counts, top))


def _bins(values: NDArray[np.int64], counts: NDArray[np.int64], top: int) -> tuple[Bar, ...]:
    """Return equal bins with round edges from the minimum to `top`; larger values are in the last one."""
    # `top` is the 99th percentile: one extreme value would otherwise squeeze all others into a single bin.
    ticks = nice_ticks(float(values[0]), float(top), _BINS)
    width = max(1, round(ticks[1] - ticks[0]))
    first = int(values[0]) // width
    heights = np.bincount(np.minimum(values, top) // width - first, counts).astype(np.int64).tolist()
    starts = [(first + number) * width for number in range(len(heights))]
    names = [f"{start:,} to {start + width - 1:,}" if width > 1 else f"{start:,}" for start in starts]
    if values[-1] >= starts[-1] + width:
        names[-1] = f"{starts[-1]:,} or more"
    return tuple(map(Bar, names, heights))
