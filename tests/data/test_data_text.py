from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from packtrain.data.text import pad
from packtrain.pack.shard import Ragged

Rows = list[list[int]]


def naive(rows: Rows, ids: list[int], filler: int) -> Rows:
    chosen = [rows[number] for number in ids]
    longest = max([1, *map(len, chosen)])
    return [row + [filler] * (longest - len(row)) for row in chosen]


@st.composite
def rows_and_ids(draw: st.DrawFn) -> tuple[Rows, list[int]]:
    rows = draw(st.lists(st.lists(st.integers(0, 2**16 - 1), max_size=7), min_size=1, max_size=9))
    return rows, draw(st.lists(st.integers(0, len(rows) - 1), max_size=12))


@given(rows_and_ids(), st.integers(0, 9))
def test_rows_stand_side_by_side_filled_up_to_the_longest(drawn: tuple[Rows, list[int]], filler: int) -> None:
    rows, ids = drawn
    padded = pad(Ragged.from_rows(rows, np.dtype("<u2")), np.array(ids, np.int64), filler)
    assert padded.dtype == np.int64
    assert padded.shape[0] == len(ids)
    assert padded.tolist() == naive(rows, ids, filler)


def test_no_rows_make_an_empty_batch_with_a_position() -> None:
    column = Ragged.from_rows([[1, 2]], np.dtype("<u2"))
    assert pad(column, np.array([], np.int64), 0).shape == (0, 1)


def test_a_padded_batch_can_be_written_to_without_touching_the_column() -> None:
    column = Ragged.from_rows([[1, 2], [3, 4]], np.dtype("<i8"))
    pad(column, np.array([0, 1]), 0)[:] = 9
    assert column.values.tolist() == [1, 2, 3, 4]
