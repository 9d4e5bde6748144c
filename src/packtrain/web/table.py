"""Columns of numbers that grow at their end, and few points of them that show the same picture as all.

Rows are in the order of training. Per block of `BLOCK` rows each column keeps where its lowest and highest values are,
and its sum, once it was asked for: to draw a million steps is to look at some thousand numbers.
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

_EXACT = ("step", "generation", "time", "epoch", "elapsed_seconds")  # as x they need more digits than a curve
_MEASURED = ("loss", "rate", "gradient_norm")  # at every step: NaN is what came out, and not that it is missing


class GrowingColumn:
    """One measurement, a number per row; NaN where a row lacks it, and `gaps` if any does."""

    def __init__(self, exact: bool, capacity: int, gaps: bool) -> None:
        self.values: Floats = np.full(capacity, np.nan, np.float64 if exact else np.float32)
        self.gaps = gaps
        self.low_rows: Rows = np.zeros(0, np.int64)
        self.high_rows: Rows = np.zeros(0, np.int64)
        self.sums: Numbers = np.zeros(0)
        self.counts: Rows = np.zeros(0, np.int64)

    def grow(self, capacity: int) -> None:
        values: Floats = np.full(capacity, np.nan, self.values.dtype)
        values[: len(self.values)] = self.values
        self.values = values

    def cut(self, rows: int) -> None:
        self.values[rows:] = np.nan
        blocks = rows // BLOCK
        self.low_rows, self.high_rows = self.low_rows[:blocks], self.high_rows[:blocks]
        self.sums, self.counts = self.sums[:blocks], self.counts[:blocks]

    def settle(self, rows: int) -> None:
        """Bring what is known per block up to date."""
        known, blocks = len(self.sums), rows // BLOCK
        if known == blocks:
            return
        values = self.values[known * BLOCK : blocks * BLOCK].reshape(-1, BLOCK)
        finite = np.isfinite(values)
        first = np.arange(known, blocks) * BLOCK
        low = first + np.where(finite, values, np.inf).argmin(1)
        high = first + np.where(finite, values, -np.inf).argmax(1)
        self.low_rows, self.high_rows = np.append(self.low_rows, low), np.append(self.high_rows, high)
        self.sums = np.append(self.sums, np.where(finite, values, 0).sum(1, dtype=np.float64))
        self.counts = np.append(self.counts, finite.sum(1))


class Table:
    """Columns by name. All have the same number of rows."""

    def __init__(self) -> None:
        self.rows = 0
        self._capacity = BLOCK
        self.columns: dict[str, GrowingColumn] = {}

    @property
    def num_bytes(self) -> int:
        return sum(column.values.nbytes for column in self.columns.values())

    @property
    def names(self) -> list[str]:
        return list(self.columns)

    def last(self, name: str) -> float:
        return float(self.columns[name].values[self.rows - 1]) if self.rows else -np.inf

    def all(self, name: str) -> Floats:
        """Return a column; NaN for every row if no row has it."""
        if name not in self.columns:
            return np.full(self.rows, np.nan)
        return self.columns[name].values[: self.rows]

    def append(self, values: Mapping[str, Floats]) -> None:
        """Add rows: as many as each of these columns has. Columns that are missing here have a gap."""
        added = len(next(iter(values.values())))
        after = self.rows + added
        if after > self._capacity:
            self._capacity = max(after, 2 * self._capacity)
            for column in self.columns.values():
                column.grow(self._capacity)
        for name, numbers in values.items():
            if name not in self.columns:
                self.columns[name] = GrowingColumn(name in _EXACT, self._capacity, gaps=self.rows > 0)
            column = self.columns[name]
            with np.errstate(over="ignore"):  # beyond float32 is infinite, and drawn as a gap
                column.values[self.rows : after] = numbers
            column.gaps = column.gaps or bool(np.isnan(numbers).any() and name not in _MEASURED)
        for name, column in self.columns.items():
            column.gaps = column.gaps or name not in values
        self.rows = after

    def cut(self, rows: int) -> None:
        """Forget the rows from that one on."""
        if rows < self.rows:
            for column in self.columns.values():
                column.cut(rows)
            self.rows = rows

    def taken(self, rows: Rows) -> dict[str, Floats]:
        """Return copies of some rows of all columns."""
        return {name: column.values[rows] for name, column in self.columns.items()}

    def thinned(self, name: str, begin: int, end: int, points: int) -> Rows:
        """Return at most about that many rows of a column, among them lowest and highest of every part of the range."""
        column = self.columns[name]
        if end - begin <= points and not column.gaps:
            return np.arange(begin, end)
        rows = self._candidates(column, begin, end, points)
        if column.gaps:
            rows = rows[~np.isnan(column.values[rows])]
        return rows if len(rows) <= points else extremes(rows, column.values[rows], begin, end, points)

    def _candidates(self, column: GrowingColumn, begin: int, end: int, points: int) -> Rows:
        first, last = -(-begin // BLOCK), end // BLOCK
        if 2 * (last - first) < points:  # the extremes of blocks would be fewer points than were asked for
            return np.arange(begin, end)
        column.settle(self.rows)
        inner = np.concatenate([column.low_rows[first:last], column.high_rows[first:last]])
        edges = np.array([begin, end - 1])
        return np.unique(np.concatenate([np.arange(begin, first * BLOCK), inner, np.arange(last * BLOCK, end), edges]))

    def means(self, names: Sequence[str], points: int) -> tuple[Rows, dict[str, Numbers]]:
        """Return the last row of each of at most that many parts, and the mean of each column in it; a gap counts as 0.

        Parts have the same size, a power of two, so that those which are complete stay the same as rows are added.
        """
        size = 1
        while self.rows > points * size:
            size *= 2
        starts = np.arange(0, self.rows, size)
        counts = np.diff(np.append(starts, self.rows))
        found = {}
        for name in names:
            if size < BLOCK:
                finite = np.nan_to_num(self.all(name), posinf=0.0, neginf=0.0)
                sums = np.add.reduceat(finite, starts, dtype=np.float64) if self.rows else np.zeros(0)
            else:
                sums = self._block_sums(self.columns[name], starts // BLOCK)
            found[name] = sums / counts
        return starts + counts - 1, found

    def _block_sums(self, column: GrowingColumn, starts: Rows) -> Numbers:
        column.settle(self.rows)
        rest = np.nan_to_num(column.values[len(column.sums) * BLOCK : self.rows], posinf=0.0, neginf=0.0)
        return np.add.reduceat(np.append(column.sums, rest.sum(dtype=np.float64)), starts)


def extremes(rows: Rows, values: Floats, begin: int, end: int, points: int) -> Rows:
    """Return the rows of the lowest and the highest value in each of equal parts of [begin, end), first and last row.

    A part without a finite number keeps one row, so that it is seen to be missing.
    """
    parts = max(1, (points - 2) // 2)
    part = (rows - begin) * parts // max(1, end - begin)
    finite = np.isfinite(values)
    order = np.lexsort((values[finite], part[finite]))
    sorted_part, sorted_rows = part[finite][order], rows[finite][order]
    edge = np.flatnonzero(np.diff(sorted_part)) + 1
    lows = sorted_rows[np.append(0, edge)] if len(sorted_rows) else sorted_rows
    highs = sorted_rows[np.append(edge - 1, len(sorted_rows) - 1)] if len(sorted_rows) else sorted_rows
    known, first = np.unique(part, return_index=True)
    empty = rows[first[~np.isin(known, sorted_part)]]
    return np.unique(np.concatenate([lows, highs, empty, rows[:1], rows[-1:]]))


def as_json(numbers: Iterable[float]) -> list[float | None]:
    """Return numbers that JSON can write, with null for those that are not finite, and no more digits than are seen."""
    array = np.asarray(numbers, np.float64)
    with np.errstate(all="ignore"):
        scale = 10.0 ** (6 - np.floor(np.log10(np.abs(array))))
        short = np.where(np.isfinite(scale) & (scale > 0), np.round(array * scale) / scale, array)
        short = np.where(np.isfinite(short), short, array)
    known = np.isfinite(array)
    if known.all():
        return short.tolist()  # type: ignore[no-any-return]
    return [one if is_known else None for one, is_known in zip(short.tolist(), known.tolist(), strict=True)]
