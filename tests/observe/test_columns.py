from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.observe.columns import BLOCK, MAX_NAMES, Table, UseOverTime, as_json, thinned


def filled(losses: np.ndarray, each: int = 1000) -> Table:
    table = Table()
    for start in range(0, len(losses), each):
        part = losses[start : start + each]
        table.append({"step": np.arange(start, start + len(part), dtype=float), "loss": part})
    return table


@pytest.mark.parametrize("rows", [1, 99, 3 * BLOCK, 20 * BLOCK + 7])
def test_few_points_keep_the_lowest_and_the_highest_value(rows: int) -> None:
    losses = np.random.default_rng(rows).normal(size=rows)
    table = filled(losses)
    kept = table.thinned("loss", 0, rows, 100)
    assert len(kept) <= 104
    assert (np.diff(kept) > 0).all()
    assert {losses.argmin(), losses.argmax(), 0, rows - 1} <= set(kept.tolist())


def test_every_part_of_a_curve_keeps_its_extremes() -> None:
    losses = np.random.default_rng(1).normal(size=BLOCK * 100)
    kept = filled(losses).thinned("loss", 0, len(losses), 202)
    for part in np.array_split(np.arange(len(losses)), 100):
        assert {part[losses[part].argmin()], part[losses[part].argmax()]} <= set(kept.tolist())


def test_as_many_points_are_drawn_as_were_asked_for() -> None:
    losses = np.random.default_rng(3).normal(size=BLOCK * 12)
    kept = filled(losses).thinned("loss", 0, len(losses), 1000)
    assert len(kept) > 900 and np.diff(kept).max() < 20


def test_a_part_of_a_curve_can_be_asked_for() -> None:
    losses = np.random.default_rng(2).normal(size=BLOCK * 50)
    kept = filled(losses).thinned("loss", 300, 9000, 100)
    inner = losses[300:9000]
    assert kept[0] == 300 and kept[-1] == 8999
    assert {300 + inner.argmin(), 300 + inner.argmax()} <= set(kept.tolist())


def test_a_stretch_without_numbers_stays_visible() -> None:
    losses = np.ones(40 * BLOCK)
    losses[10 * BLOCK : 30 * BLOCK] = np.nan
    table = filled(losses)
    shown = table.all("loss")[table.thinned("loss", 0, len(losses), 100)]
    assert 10 < np.isnan(shown).sum() < 90


def test_a_measurement_that_some_steps_lack_has_no_gaps() -> None:
    table = Table()
    table.append({"step": np.arange(3.0), "loss": np.ones(3)})
    table.append({"step": np.arange(3.0, 6.0), "loss": np.ones(3), "save_seconds": np.array([np.nan, 2.0, np.nan])})
    assert table.thinned("save_seconds", 0, 6, 100).tolist() == [4]


def test_rows_that_are_cut_do_not_come_back() -> None:
    table = filled(np.arange(5.0 * BLOCK))
    table.thinned("loss", 0, table.rows, 10)
    table.select(np.arange(BLOCK + 1))
    assert (table.rows, table.last("loss")) == (BLOCK + 1, BLOCK)
    table.append({"step": np.array([1e6]), "loss": np.array([-1.0])})
    assert table.thinned("loss", 0, table.rows, 10)[-1] == BLOCK + 1


@pytest.mark.parametrize("rows", [1, 700, 200 * BLOCK + 13])
def test_means_of_parts_add_up_to_the_whole(rows: int) -> None:
    seconds = np.random.default_rng(rows).random(rows)
    table = filled(seconds)
    last, means = table.means(["loss"], 100)
    counts = np.diff(np.append(-1, last))
    assert len(last) <= 100 and last[-1] == rows - 1
    assert (means["loss"] * counts).sum() == pytest.approx(seconds.sum(), rel=1e-5)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(width=32), max_size=3000), st.integers(2, 200), st.integers(1, 700))
def test_any_numbers_can_be_thinned_and_sent(numbers: list[float], points: int, each: int) -> None:
    table = filled(np.array(numbers), each)
    rows = table.thinned("loss", 0, table.rows, points) if numbers else np.zeros(0, int)
    sent = as_json(table.all("loss")[rows])
    assert len(sent) <= max(points, 4) + 2
    finite = [one for one in numbers if np.isfinite(one)]
    if finite:
        assert min(finite) == pytest.approx(min(one for one in sent if one is not None), rel=1e-5)
        assert max(finite) == pytest.approx(max(one for one in sent if one is not None), rel=1e-5)


def bytes_of_names(count: int) -> int:
    """Return the memory of a table to which each row has brought a name of its own, twice."""
    tracemalloc.start()
    table = Table()
    for row in range(2 * count):
        table.append({"step": np.array([float(row)]), f"name-{row % count}": np.array([1.0])})
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert table.all(f"name-{count - 1}")[[count - 1, -1]].tolist() == [1, 1]
    assert table.thinned("name-0", 0, table.rows, 100).tolist() == [0, count]
    return size


def test_memory_grows_with_the_numbers_and_not_with_names_times_rows() -> None:
    assert bytes_of_names(2000) < 2.5 * bytes_of_names(1000)


def test_names_beyond_the_limit_are_left_out() -> None:
    table = Table()
    table.append({f"name-{number}": np.array([1.0]) for number in range(MAX_NAMES + 5)})
    assert (table.rows, len(table.names)) == (1, MAX_NAMES)


def test_rows_of_a_measurement_that_some_lack_are_put_in_another_order() -> None:
    table = Table()
    table.append({"step": np.arange(3.0), "loss": np.ones(3)})
    table.append({"step": np.arange(3.0, 6.0), "accuracy": np.arange(3.0, 6.0)})
    table.select(np.array([5, 0, 3]))
    assert table.all("step").tolist() == [5, 0, 3]
    assert table.all("accuracy")[[0, 2]].tolist() == [5, 3] and np.isnan(table.all("accuracy")[1])
    assert table.thinned("accuracy", 0, 3, 10).tolist() == [0, 2]
    table.append({"step": np.array([9.0]), "accuracy": np.array([9.0])})
    assert table.thinned("accuracy", 1, 4, 10).tolist() == [2, 3]


def test_use_over_time_keeps_its_mean_in_few_spans() -> None:
    use = UseOverTime(2)
    for start in range(0, 10_000, 100):
        times = np.arange(start, start + 100, 2.0)
        use.append(times, np.stack([times, np.full(50, np.nan)], 1), 64)
    assert 32 <= len(use.times) <= 64 and use.times[-1] == 9998
    assert (np.diff(use.times) > 0).all()
    assert use.means[:-1, 0].mean() == pytest.approx(use.times[-2] / 2, rel=0.02)
    assert np.isnan(use.means[:, 1]).all()


def test_use_over_time_is_thinned_to_parts_that_stay_the_same() -> None:
    use = UseOverTime(2)
    use.append(np.arange(40.0), np.stack([np.arange(40.0), np.full(40, np.nan)], 1), 64)
    times, means = use.thinned(10)
    assert times.tolist() == [*range(3, 40, 4)]
    assert means.tolist() == [[first + 1.5, 0] for first in range(0, 40, 4)]
    use.append(np.array([40.0]), np.array([[7.0, 1.0]]), 64)
    assert use.thinned(11)[1][:10].tolist() == [[first + 1.5, 0] for first in range(0, 40, 4)]


# Lines of points.


def test_a_short_line_is_drawn_unchanged() -> None:
    points = [(float(x), float(x * x)) for x in range(300)]
    assert thinned(points, 300) == points


@given(st.integers(301, 3000))
def test_a_long_line_keeps_its_ends_and_its_extremes_in_order(count: int) -> None:
    points = [(float(x), float((x * 7919) % 1009)) for x in range(count)]
    few = thinned(points, 300)
    assert len(few) <= 302
    assert {
        points[0],
        points[-1],
        min(points, key=lambda point: point[1]),
        max(points, key=lambda point: point[1]),
    } <= {*few}
    assert few == sorted(few)
    assert set(few) <= set(points)
