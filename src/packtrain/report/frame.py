"""The metrics of a run as a DataFrame of pandas or polars: one row per step, one column per measurement."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np

from packtrain.errors import Mistake, nearest
from packtrain.run.records import Point

Library = Literal["pandas", "polars"]
_LIBRARIES: tuple[Library, ...] = ("pandas", "polars")  # the first that is installed is used
_KINDS = ("train", "valid", "test", "log")
_ROW = ("step", "generation", "time")


class MetricColumns:
    """Rows of numbers in which most columns have gaps: a step has no scores unless it was evaluated."""

    def __init__(self, points: Iterable[Point]) -> None:
        self.steps, self.generations, self.times = array("q"), array("q"), array("d")
        self._values: dict[str, tuple[array[int], array[float]]] = {}  # by name: rows, and their values
        for point in in_order(points):
            if not self.steps or self.steps[-1] != point.step:
                self.steps.append(point.step)
                self.generations.append(point.generation)
                self.times.append(point.time)
            for name, value in point.values.items():
                column = f"log.{name}" if point.kind == "log" and name in _ROW else point.column(name)
                rows, values = self._values.setdefault(column, (array("q"), array("d")))
                rows.append(len(self.steps) - 1)
                values.append(value)

    def names(self) -> list[str]:
        """Return the names in the order of training, validation and test, the losses first."""
        return sorted(self._values, key=_place)

    def filled(self, name: str) -> tuple[np.ndarray[Any, np.dtype[np.float64]], np.ndarray[Any, np.dtype[np.bool_]]]:
        """Return a column and where it has a value; NaN elsewhere."""
        rows, values = (np.array(column_array) for column_array in self._values[name])
        column, present = np.full(len(self.steps), np.nan), np.zeros(len(self.steps), dtype=bool)
        column[rows], present[rows] = values, True
        return column, present


def _place(name: str) -> tuple[int, bool]:
    kind = name.partition(".")[0]
    return _KINDS.index(kind if kind in _KINDS else "log"), not name.endswith(".loss")


def in_order(points: Iterable[Point]) -> list[Point]:
    """Return the measurements by step, an evaluation after its step: it has the step's epoch, and the row its time."""
    measured = (point for point in points if point.kind != "start")
    return sorted(measured, key=lambda point: (point.step, _KINDS.index(point.kind)))


def library_of(library: str | None) -> Library:
    """Return the library to use: the one that was asked for, or the first that is installed."""
    if library is not None and library not in _LIBRARIES:
        raise Mistake(f"metrics(library={library!r}): unknown library; {nearest(library, _LIBRARIES)}")
    chosen = next(
        (candidate for candidate in _LIBRARIES if library in (None, candidate) and find_spec(candidate)), None
    )
    if chosen is None:
        libraries = library or "pandas or polars"
        raise Mistake(f"metrics() needs {libraries}: pip install {library or 'pandas'}; points() needs neither")
    return chosen


def frame_of(points: Iterable[Point], library: Library) -> Any:
    """Return a DataFrame with the columns step, generation, time (UTC), and one such as train.loss or valid.bleu each.

    A gap is NaN in pandas and null in polars; there, NaN is a measurement that was not a number.
    """
    columns = MetricColumns(points)
    steps, generations = np.array(columns.steps, dtype=np.int64), np.array(columns.generations, dtype=np.int64)
    times = (np.array(columns.times) * 1e6).astype("datetime64[us]")
    if library == "pandas":
        import pandas as pd

        row_columns = {"step": steps, "generation": generations, "time": pd.to_datetime(times, utc=True)}
        return pd.DataFrame({**row_columns, **{name: columns.filled(name)[0] for name in columns.names()}})
    import polars as pl

    series = [pl.Series("step", steps), pl.Series("generation", generations)]
    series.append(pl.Series("time", times).dt.replace_time_zone("UTC"))
    for name in columns.names():
        values, present = columns.filled(name)
        series.append(pl.select(pl.when(pl.Series(present)).then(pl.Series(values)).alias(name)).to_series())
    return pl.DataFrame(series)
