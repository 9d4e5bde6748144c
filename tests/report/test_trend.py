from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest

from packtrain.report.trend import bucketed, noise_of, percentile, student_95, trend


def test_a_line_is_found_exactly() -> None:
    line = trend([(x, 3.0 - 0.5 * x) for x in range(10)])
    assert line is not None
    assert line.slope == pytest.approx(-0.5)
    assert line.error == pytest.approx(0.0, abs=1e-12)
    assert line.at(20.0) == pytest.approx(-7.0)


def test_the_interval_of_a_slope_has_the_truth_in_it_nineteen_times_of_twenty() -> None:
    chance = np.random.default_rng(3)
    hits = []
    for _ in range(400):
        line = trend([(float(x), 0.2 * x + float(chance.normal(0, 1))) for x in range(8)])
        assert line is not None
        hits.append(line.low <= 0.2 <= line.slope + line.error)
    assert 0.91 <= fmean(hits) <= 0.98


@pytest.mark.parametrize("points", [[], [(1.0, 1.0)], [(1.0, 1.0), (2.0, 2.0)], [(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)]])
def test_few_points_have_no_trend(points: list[tuple[float, float]]) -> None:
    assert trend(points) is None


def test_intervals_shrink_with_the_number_of_points() -> None:
    widths = [student_95(freedom) for freedom in range(1, 60)]
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] == pytest.approx(2.0, abs=0.01)


def test_noise_is_measured_on_a_slope_with_a_jump_in_it() -> None:
    chance = np.random.default_rng(4)
    values = [0.5 * x + (100 if x > 150 else 0) + float(chance.normal(0, 0.3)) for x in range(300)]
    assert noise_of(values) == pytest.approx(0.3, rel=0.15)
    assert noise_of([1.0, 2.0]) == 0.0


def test_percentiles_are_interpolated() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0, 5.0], 0.5) == 3.0
    assert percentile([0.0, 10.0], 0.95) == pytest.approx(9.5)
    assert percentile([7.0], 0.99) == 7.0


def test_buckets_ignore_single_outliers() -> None:
    points = [(float(x), 1000.0 if x == 5 else 1.0) for x in range(30)]
    assert bucketed(points, 3) == [(4.5, 1.0), (14.5, 1.0), (24.5, 1.0)]
    assert bucketed(points[:2], 9) == points[:2]
