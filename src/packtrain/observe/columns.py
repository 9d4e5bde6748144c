"""Columns of numbers that grow at their end, and few points of them that show the same picture as all.

Rows are in the order of training. Per block of `BLOCK` numbers each column keeps where the lowest and the highest are,
and their sum, once that was asked for: to draw a million steps is to look at some thousand numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 256
Numbers = NDArray[np.float64]
Floats = NDArray[Any]
"""Of either precision."""
Rows = NDArray[np.int64]

MAX_NAMES = 10_000
"""Of the columns of a table: a program may log numbers of any names."""
_OBJECT_BYTES = 600  # of the objects of a column
_EXACT = ("step", "generation", "time", "epoch", "elapsed_seconds")  # as x they need more digits than a curve
_MEASURED = ("loss", "rate", "gradient_norm")  # at every step: NaN is what came out, and not that it is missing


class GrowingColumn:
    """One measurement: a number for every row or, with `rows`, for those only. Blocks are of its own numbers."""

    def __init__(self, exact: bool, values: Floats | None = None, rows: Rows | None = None) -> None:
        self.values: Floats = np.empty(0, np.float64 if exact else np.float32) if values is None else values
        self.rows = rows
        self.count = len(self.values)
        self._settled: tuple[Rows, Rows, Numbers] | None = None

    @property
    def num_bytes(self) -> int:
        blocks = sum(array.nbytes for array in self._settled or ())
        return _OBJECT_BYTES + self.values.nbytes + blocks + (0 if self.rows is None else self.rows.nbytes)

    @property
    def all(self) -> Floats:
        return self.values[: self.count]

    def rows_of(self, places: Rows) -> Rows:
        return places if self.rows is None else self.rows[places]

    def places(self, begin: int, end: int) -> tuple[int, int]:
        """Return where the numbers of these rows are."""
        if self.rows is None:
            return min(begin, self.count), min(end, self.count)
        low, high = np.searchsorted(self.rows[: self.count], [begin, end])
        return int(low), int(high)

    def append(self, numbers: Floats, first: int, is_measured: bool) -> None:
        """Add the numbers of rows from `first` on; unless `is_measured`, NaN says that a row has none."""
        rows = np.arange(first, first + len(numbers))
        if not is_measured and (missing := np.isnan(numbers)).any():
            numbers, rows = numbers[~missing], rows[~missing]
        if self.rows is None and len(rows) and (rows[0] != self.count or rows[-1] - rows[0] != len(rows) - 1):
            self.rows = np.arange(len(self.values))
        end = self.count + len(numbers)
        if end > len(self.values):  # a column of few numbers stays small: a program may have thousands of names
            self.values = np.resize(self.values, max(end, 2 * self.count))
            self.rows = None if self.rows is None else np.resize(self.rows, len(self.values))
        with np.errstate(over="ignore"):  # beyond float32 is infinite, and drawn as a gap
            self.values[self.count : end] = numbers
        if self.rows is not None:
            self.rows[self.count : end] = rows
        self.count = end

    def settled(self) -> tuple[Rows, Rows, Numbers]:
        """Return the places of the lowest and highest number of each whole block, and its sum."""
        low, high, sums = self._settled or (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
        settled, blocks = len(sums), self.count // BLOCK
        if settled < blocks:
            values = self.values[settled * BLOCK : blocks * BLOCK].reshape(-1, BLOCK)
            finite = np.isfinite(values)
            first = np.arange(settled, blocks) * BLOCK
            low = np.append(low, first + np.where(finite, values, np.inf).argmin(1))
            high = np.append(high, first + np.where(finite, values, -np.inf).argmax(1))
            sums = np.append(sums, np.where(finite, values, 0).sum(1, dtype=np.float64))
        self._settled = low, high, sums
        return self._settled


class Table:
    """Columns by name. Rows that lack a measurement take no memory in its column."""

    def __init__(self) -> None:
        self.rows = 0
        self.columns: dict[str, GrowingColumn] = {}

    @property
    def num_bytes(self) -> int:
        return sum(column.num_bytes for column in self.columns.values())

    @property
    def names(self) -> list[str]:
        return list(self.columns)

    def last(self, name: str) -> float:
        return float(self.all(name)[-1]) if self.rows else -np.inf

    def all(self, name: str) -> Floats:
        """Return a column; NaN for every row that lacks it."""
        column = self.columns.get(name)
        if column is not None and column.rows is None and column.count == self.rows:
            return column.all
        filled = np.full(self.rows, np.nan, np.float64 if column is None else column.values.dtype)
        if column is not None:
            filled[column.rows_of(np.arange(column.count))] = column.all
        return filled

    def append(self, values: Mapping[str, Floats]) -> None:
        """Add rows: as many as each of these columns has. Names beyond `MAX_NAMES` are left out."""
        for name, numbers in values.items():
            if name not in self.columns:
                if len(self.columns) >= MAX_NAMES:
                    continue
                self.columns[name] = GrowingColumn(name in _EXACT)
            self.columns[name].append(numbers, self.rows, name in _MEASURED)
        self.rows += len(next(iter(values.values())))

    def select(self, chosen: Rows) -> None:
        """Keep these rows, in this order."""
        place = np.full(self.rows, -1)
        place[chosen] = np.arange(len(chosen))
        columns = {}
        for name, column in self.columns.items():
            rows = place[column.rows_of(np.arange(column.count))]
            order = np.argsort(rows, kind="stable")[np.count_nonzero(rows < 0) :]
            if len(order):
                has_all = len(order) == len(chosen)
                columns[name] = GrowingColumn(name in _EXACT, column.all[order], None if has_all else rows[order])
        self.columns, self.rows = columns, len(chosen)

    def copied(self, rows: Rows, names: Iterable[str]) -> dict[str, Floats]:
        """Return copies of some rows of these columns."""
        return {name: self.all(name)[rows] for name in names}

    def thinned(self, name: str, begin: int, end: int, points: int) -> Rows:
        """Return at most about that many rows of a column, among them lowest and highest of every part of the range."""
        column = self.columns[name]
        first, last = column.places(begin, end)
        if last - first <= points:
            return column.rows_of(np.arange(first, last))
        first_block, last_block = -(-first // BLOCK), last // BLOCK
        # The lowest and highest of blocks, unless they would be fewer points than were asked for.
        if 2 * (last_block - first_block) >= points:
            low, high, _ = column.settled()
            inner = np.concatenate([low[first_block:last_block], high[first_block:last_block]])
            before, after = np.arange(first, first_block * BLOCK), np.arange(last_block * BLOCK, last)
            places = np.unique(np.concatenate([before, inner, after, [first, last - 1]]))
        else:
            places = np.arange(first, last)
        rows = column.rows_of(places)
        return rows if len(rows) <= points else extremes(rows, column.values[places], begin, end, points)

    def means(self, names: Sequence[str], points: int) -> tuple[Rows, dict[str, Numbers]]:
        """Return the last row of each of at most that many parts, and the means in it; a gap counts as 0."""
        starts, counts = _equal_ranges(self.rows, points)
        sums_by_name = {}
        for name in names:
            column = self.columns[name]
            if counts.max(initial=0) >= BLOCK and column.rows is None and column.count == self.rows:
                _, _, block_sums = column.settled()
                remaining = np.nan_to_num(column.all[len(block_sums) * BLOCK :], posinf=0.0, neginf=0.0)
                sums = np.add.reduceat(np.append(block_sums, remaining.sum(dtype=np.float64)), starts // BLOCK)
            else:
                finite = np.nan_to_num(self.all(name), posinf=0.0, neginf=0.0)
                sums = np.add.reduceat(finite, starts, dtype=np.float64) if self.rows else np.zeros(0)
            sums_by_name[name] = sums / counts
        return starts + counts - 1, sums_by_name


def _equal_ranges(rows: int, limit: int) -> tuple[Rows, Rows]:
    """Return the start of each of at most that many parts of rows, and its size.

    It is the same power of two for all but the last, so that complete parts stay the same as rows are added.
    """
    size = 1
    while rows > limit * size:
        size *= 2
    starts = np.arange(0, rows, size)
    return starts, np.diff(np.append(starts, rows))


class UseOverTime:
    """The use of a machine as means of equal spans of time: a run of months takes no more memory than one of hours.

    A row of `means` has a number for each resource. A span lasts `seconds`, which doubles when spans become too many.
    """

    def __init__(self, resources: int) -> None:
        self.seconds = 1.0
        self.times: Numbers = np.zeros(0)
        """Of the last sample of each span."""
        self.means: NDArray[np.float32] = np.zeros((0, resources), np.float32)
        self._counts: Rows = np.zeros(0, np.int64)

    @property
    def num_bytes(self) -> int:
        return _OBJECT_BYTES + self.times.nbytes + self.means.nbytes + self._counts.nbytes

    def append(self, times: Numbers, rows: Numbers, count: int) -> None:
        """Add samples in the order of time, and keep at most that many spans."""
        self.times, self.means = np.append(self.times, times), np.append(self.means, rows.astype(np.float32), 0)
        self._counts = np.append(self._counts, np.ones(len(times), np.int64))
        self._merge()
        while len(self.times) > count:
            self.seconds *= 2
            self._merge()

    def thinned(self, points: int) -> tuple[Numbers, Numbers]:
        """Return the last time of each of at most that many parts, and the means in it; a gap counts as 0."""
        starts, counts = _equal_ranges(len(self.times), points)
        sums = np.add.reduceat(np.nan_to_num(self.means), starts, 0, np.float64)
        return self.times[starts + counts - 1], sums / counts[:, None]

    def _merge(self) -> None:
        starts = np.flatnonzero(np.diff(self.times // self.seconds, prepend=-1.0))
        weighted = np.add.reduceat(self.means * self._counts[:, None], starts, 0, np.float64)
        self._counts = np.add.reduceat(self._counts, starts)
        self.times = self.times[np.append(starts[1:], len(self.times)) - 1]
        self.means = (weighted / self._counts[:, None]).astype(np.float32)


def extremes(rows: Rows, values: Floats, begin: int, end: int, points: int) -> Rows:
    """Return the rows of the lowest and the highest value in each of equal parts of [begin, end), first and last row.

    A part without a finite number keeps one row, so that it is seen to be missing.
    """
    ranges = max(1, (points - 2) // 2)
    range_of_row = (rows - begin) * ranges // max(1, end - begin)
    finite = np.isfinite(values)
    order = np.lexsort((values[finite], range_of_row[finite]))
    sorted_part, sorted_rows = range_of_row[finite][order], rows[finite][order]
    edge = np.flatnonzero(np.diff(sorted_part)) + 1
    lows = sorted_rows[np.append(0, edge)] if len(sorted_rows) else sorted_rows
    highs = sorted_rows[np.append(edge - 1, len(sorted_rows) - 1)] if len(sorted_rows) else sorted_rows
    present, first = np.unique(range_of_row, return_index=True)
    empty = rows[first[~np.isin(present, sorted_part)]]
    return np.unique(np.concatenate([lows, highs, empty, rows[:1], rows[-1:]]))


def thinned(points: Sequence[tuple[float, float]], limit: int) -> list[tuple[float, float]]:
    """Return at most about that many of the points of a line, as `Table.thinned` chooses them."""
    if len(points) <= limit:
        return list(points)
    rows = extremes(np.arange(len(points)), np.array([y for _, y in points]), 0, len(points), limit)
    return [points[row] for row in rows.tolist()]


def as_json(numbers: Iterable[float]) -> list[float | None]:
    """Return numbers that JSON can write, with null for those that are not finite, and no more digits than are seen."""
    array = np.asarray(numbers, np.float64)
    with np.errstate(all="ignore"):
        scale = 10.0 ** (6 - np.floor(np.log10(np.abs(array))))
        short = np.where(np.isfinite(scale) & (scale > 0), np.round(array * scale) / scale, array)
        short = np.where(np.isfinite(short), short, array)
    finite_places = np.isfinite(array)
    if finite_places.all():
        return short.tolist()  # type: ignore[no-any-return]
    return [
        number if is_known else None for number, is_known in zip(short.tolist(), finite_places.tolist(), strict=True)
    ]
