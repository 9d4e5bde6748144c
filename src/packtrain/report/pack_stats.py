"""The numbers of a pack: how many samples its splits have, what was left out, and how lengths and sizes are spread."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from packtrain.pack.manifest import Drops, Kind, Manifest, Split
from packtrain.pack.shard import Columns
from packtrain.report.page import nice_ticks

if TYPE_CHECKING:
    from packtrain.pack.vocabulary import Vocabulary

ColumnsOf = Callable[[str], Iterable[Columns]]
"""The shards of a split, in their order. Each is looked at once, so they need not all be open at a time."""

_BINS = 24


@dataclass(frozen=True)
class Bin:
    """How many values there are from `low` to `high`, both included; the last bin of a measure has all above too."""

    low: int
    high: int
    count: int


@dataclass(frozen=True)
class Measure:
    """A whole number that each sample has, or several of: what it is, and how it is spread over the split."""

    name: str
    unit: str
    count: int
    least: int
    median: int
    mean: float
    percentile_95: int
    most: int
    bins: tuple[Bin, ...]


@dataclass(frozen=True)
class ClassCount:
    name: str
    count: int


@dataclass(frozen=True)
class SplitStats:
    """`classes` has the number of samples of each class, in the manifest's order."""

    name: str
    samples: int
    sources: tuple[int, ...]
    filtered: dict[str, Drops]
    dropped: dict[str, Drops]
    shards: int
    bytes: int
    measures: tuple[Measure, ...]
    classes: tuple[ClassCount, ...] = ()

    @property
    def is_copy(self) -> bool:
        """Whether it has the samples of another split, in another size."""
        return "@" in self.name

    @property
    def largest_class(self) -> ClassCount | None:
        return max(self.classes, key=lambda one: one.count, default=None)

    @property
    def smallest_class(self) -> ClassCount | None:
        return min(self.classes, key=lambda one: one.count, default=None)

    def ranked_classes(self) -> list[ClassCount]:
        """The classes from the largest to the smallest."""
        return sorted(self.classes, key=lambda one: -one.count)


@dataclass(frozen=True)
class PackStats:
    """`vocabulary` and `target_vocabulary` have the numbers of pieces, where there are such."""

    name: str
    kind: Kind
    vocabulary: int | None
    target_vocabulary: int | None
    splits: tuple[SplitStats, ...]


def stats_of(
    manifest: Manifest,
    columns: ColumnsOf,
    vocabulary: Vocabulary | None = None,
    target_vocabulary: Vocabulary | None = None,
) -> PackStats:
    return PackStats(
        name=manifest.name,
        kind=manifest.kind,
        vocabulary=None if vocabulary is None else len(vocabulary),
        target_vocabulary=None if target_vocabulary is None else len(target_vocabulary),
        splits=tuple(_split_stats(name, split, manifest, columns(name)) for name, split in manifest.splits.items()),
    )


def _split_stats(name: str, split: Split, manifest: Manifest, shards: Iterable[Columns]) -> SplitStats:
    tallies = {column: Tally() for column in _MEASURED[manifest.kind]}
    labels = Tally()
    for shard in shards:
        for column, tally in tallies.items():
            tally.add(_MEASURED[manifest.kind][column].numbers(shard))
        if manifest.kind == "labels":
            labels.add(shard.plain["label"])
    measures = (tally.measure(name, _MEASURED[manifest.kind][name].unit) for name, tally in tallies.items())
    return SplitStats(
        name=name,
        samples=split.samples,
        sources=split.sources,
        filtered=split.filtered,
        dropped=split.dropped,
        shards=len(split.shards),
        bytes=sum(shard.bytes for shard in split.shards),
        measures=tuple(measure for measure in measures if measure is not None),
        classes=tuple(ClassCount(one, labels.count(number)) for number, one in enumerate(manifest.classes)),
    )


@dataclass(frozen=True)
class _Measured:
    unit: str
    numbers: Callable[[Columns], NDArray[Any]]


_SIZES = {
    "width": _Measured("pixels", lambda shard: shard.plain["width"]),
    "height": _Measured("pixels", lambda shard: shard.plain["height"]),
}
_MEASURED: dict[Kind, dict[str, _Measured]] = {
    "pairs": {
        "source": _Measured("tokens", lambda shard: shard.ragged["source"].lengths),
        "target": _Measured("tokens", lambda shard: shard.ragged["target"].lengths),
    },
    "labels": _SIZES,
    "captions": {
        **_SIZES,
        "caption": _Measured("tokens", lambda shard: shard.ragged["caption_lengths"].values),
        "captions": _Measured("for each image", lambda shard: shard.ragged["caption_lengths"].lengths),
    },
}


class Tally:
    """Whole numbers and how often each is there: all of a spread, exactly, and small however many there are."""

    def __init__(self) -> None:
        self._values, self._counts = np.empty(0, np.int64), np.empty(0, np.int64)

    def add(self, numbers: NDArray[Any]) -> None:
        more, counts = np.unique(numbers.astype(np.int64), return_counts=True)
        self._values, places = np.unique(np.concatenate([self._values, more]), return_inverse=True)
        weights = np.concatenate([self._counts, counts])
        self._counts = np.bincount(places, weights, len(self._values)).astype(np.int64)

    def count(self, value: int) -> int:
        return int(self._counts[self._values == value].sum())

    def percentile(self, share: float) -> int:
        """The smallest of the numbers that at least this share of all do not exceed."""
        ends = np.cumsum(self._counts)
        return int(self._values[np.searchsorted(ends, share * ends[-1] - 1e-9)])

    def measure(self, name: str, unit: str) -> Measure | None:
        """None if there are no numbers."""
        if not len(self._values):
            return None
        return Measure(
            name=name,
            unit=unit,
            count=int(self._counts.sum()),
            least=int(self._values[0]),
            median=self.percentile(0.5),
            mean=float((self._values * self._counts).sum() / self._counts.sum()),
            percentile_95=self.percentile(0.95),
            most=int(self._values[-1]),
            bins=_binned(self._values, self._counts, self.percentile(0.99)),
        )


def _binned(values: NDArray[np.int64], counts: NDArray[np.int64], top: int) -> tuple[Bin, ...]:
    """Equal bins with round edges from the least value to `top`; what is above goes into the last one."""
    ticks = nice_ticks(float(values[0]), float(top), _BINS)
    width = max(1, round(ticks[1] - ticks[0]))
    first = int(values[0]) // width
    numbers = np.minimum(values, top) // width - first
    heights = np.bincount(numbers, counts).astype(np.int64)
    return tuple(
        Bin(start, start + width - 1, int(height))
        for start, height in zip(range(first * width, (first + len(heights)) * width, width), heights, strict=True)
    )
