from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from packtrain.data.text import likeness, pad
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


def test_rows_without_a_value_are_all_filler() -> None:
    column = Ragged.from_rows([[], []], np.dtype("<u2"))
    assert pad(column, np.array([1, 0]), 7).tolist() == [[7], [7]]


def test_the_last_row_of_a_column_is_filled_up_like_any_other() -> None:
    column = Ragged.from_rows([[1, 2, 3], [4]], np.dtype("<u2"))
    assert pad(column, np.array([1, 0]), 0).tolist() == [[4, 0, 0], [1, 2, 3]]


# Likeness.


def test_neighbours_on_the_path_of_likeness_differ_little_in_either_length() -> None:
    source, target = (side.ravel() for side in np.meshgrid(np.arange(1, 60), np.arange(1, 60)))
    order = np.argsort(likeness(source, target), kind="stable")
    for side in (source, target):
        assert np.abs(np.diff(side[order])).max() == 1


@given(st.lists(st.tuples(st.integers(1, 2**20), st.integers(1, 2**20)), min_size=2, max_size=2))
def test_pairs_are_as_alike_as_can_be_only_if_both_lengths_are_equal(pairs: list[tuple[int, int]]) -> None:
    source, target = np.array(pairs, np.int64).T
    one, other = likeness(source, target)
    assert (one == other) == (pairs[0] == pairs[1])


def test_pairs_stand_by_their_longer_side_first() -> None:
    source, target = np.array([9, 1, 8, 7, 10]), np.array([1, 9, 8, 7, 1])
    assert np.argsort(likeness(source, target)).tolist()[0] == 3
    assert np.argsort(likeness(source, target)).tolist()[1] == 2
    assert np.argsort(likeness(source, target)).tolist()[-1] == 4
