from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from packtrain.errors import Mistake
from packtrain.report import frame
from packtrain.report.frame import frame_of, library_of
from packtrain.run.records import Point
from parts.runs import MEASURED

POINTS = [
    Point("start", 1, 0, 9.0, {}),
    Point("valid", 1, 2, 30.0, {"bleu": 4.0, "loss": 5.0}),  # recorded before its step, and belongs to its row
    Point("train", 1, 1, 10.0, {**MEASURED, "loss": 7.0}),
    Point("train", 1, 2, 20.0, {**MEASURED, "loss": math.nan}),
    Point("test", 1, 2, 40.0, {"bleu": 3.0}),
]


def test_a_row_is_a_step_and_a_column_a_measurement(needs_pandas: None) -> None:
    import pandas as pd

    table = frame_of(POINTS, "pandas")
    assert list(table["step"]) == [1, 2]
    assert list(table["time"]) == [pd.Timestamp(10, unit="s", tz="UTC"), pd.Timestamp(20, unit="s", tz="UTC")]
    assert table["valid.bleu"].dropna().tolist() == [4.0]
    assert table["test.bleu"].dropna().tolist() == [3.0]
    names = list(table.columns)
    assert names[:4] == ["step", "generation", "time", "train.loss"]
    assert names.index("train.loss") < names.index("train.rate") < names.index("valid.loss") < names.index("test.bleu")


def test_a_gap_is_null_in_polars_and_a_loss_that_is_not_a_number_is_nan(needs_polars: None) -> None:
    import polars as pl

    table = frame_of(POINTS, "polars")
    assert table["valid.bleu"].to_list() == [None, 4.0]
    assert table["train.loss"].is_nan().to_list() == [False, True]
    assert table.schema["time"] == pl.Datetime("us", "UTC")


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_run_without_steps_is_an_empty_table(needs_pandas: None, needs_polars: None, library: frame.Library) -> None:
    table = frame_of([], library)
    assert (len(table), list(table.columns)) == (0, ["step", "generation", "time"])


@pytest.mark.parametrize(
    ("installed", "wanted", "used"),
    [
        (("pandas", "polars"), None, "pandas"),
        (("pandas", "polars"), "polars", "polars"),
        (("polars",), None, "polars"),
    ],
)
def test_the_library_that_is_installed_is_used(
    installed: tuple[str, ...], wanted: str | None, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame, "find_spec", lambda name: SimpleNamespace() if name in installed else None)
    assert library_of(wanted) == used


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (None, "needs pandas or polars: pip install pandas"),
        ("polars", "needs polars: pip install polars"),
        ("panda", "did you mean 'pandas'?"),
    ],
)
def test_a_library_that_is_missing_is_named_in_one_line(
    wanted: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame, "find_spec", lambda _: None)
    with pytest.raises(Mistake) as caught:
        library_of(wanted)
    assert words in str(caught.value)
