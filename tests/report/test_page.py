from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from packtrain.report.page import HEIGHT, WIDTH, Series, line_chart, nice_ticks

Points = list[tuple[float, float]]
sizes = st.floats(-1e300, 1e300)


def elements(chart: str, tag: str) -> list[dict[str, str]]:
    return [dict(one.attrib) for one in ElementTree.fromstring(chart).iter(tag)]  # noqa: S314


def places(chart: str) -> list[tuple[float, float]]:
    """Return the coordinates of all lines and dots of a chart."""
    lines = [pair.split(",") for line in elements(chart, "polyline") for pair in line["points"].split()]
    dots = [(dot["cx"], dot["cy"]) for dot in elements(chart, "circle")]
    return [(float(x), float(y)) for x, y in [*lines, *dots]]


def inside(chart: str) -> bool:
    return all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in places(chart))


# Ticks.


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (1.3, 8.9, [0, 2, 4, 6, 8, 10]),
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0, 0.3, [0, 0.1, 0.2, 0.3]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (0, 9e-16, [0, 2e-16, 4e-16, 6e-16, 8e-16, 1e-15]),
        (100, 3000, [0, 1000, 2000, 3000]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high) == ticks


@given(sizes, sizes)
@example(0.0, 5e-324)
@example(1.0, math.nextafter(1.0, 2.0))
@example(1e300, -1e300)
@example(0.0, 0.0)
@example(-7.0, -7.0)
def test_ticks_are_few_finite_and_increasing_and_enclose_the_values(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    ticks = nice_ticks(low, high)
    assert 2 <= len(ticks) <= 10
    assert all(math.isfinite(tick) for tick in ticks)
    assert ticks == sorted(ticks)
    slack = 1e-9 * max(abs(low), abs(high), 1e-290)
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack


# Charts.


def test_a_chart_without_finite_points_is_empty() -> None:
    assert line_chart("loss", []) == ""
    assert line_chart("loss", [Series("training", [])]) == ""
    assert line_chart("loss", [Series("training", [(1.0, math.nan), (2.0, math.inf)], marked=True)]) == ""


def test_larger_values_are_drawn_further_right_and_further_up() -> None:
    chart = line_chart("score", [Series("bleu", [(0, 0.0), (50, 5.0), (100, 10.0)], marked=True)])
    [line] = elements(chart, "polyline")
    (x0, y0), (x1, y1), (x2, y2) = places(chart)[:3]
    assert x0 < x1 < x2
    assert y0 > y1 > y2
    assert x1 == pytest.approx((x0 + x2) / 2)
    assert y1 == pytest.approx((y0 + y2) / 2)
    assert line["class"] == "line s0"
    assert len(elements(chart, "circle")) == 3


def test_an_empty_series_has_neither_line_nor_legend() -> None:
    chart = line_chart("loss", [Series("training", [(1, 2.0), (2, 1.0)]), Series("validation", [])])
    assert len(elements(chart, "polyline")) == 1
    assert "validation" not in chart


def test_the_legend_shows_the_last_value_of_each_line() -> None:
    chart = line_chart("loss", [Series("training", [(1, 2.0), (2, 1.25)]), Series("validation", [(2, 1.5)])])
    assert re.findall(r'<span class="key s(\d)">(\w+) <b>([\d.]+)</b>', chart) == [
        ("0", "training", "1.25"),
        ("1", "validation", "1.5"),
    ]


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("count", [5, 2000])
def test_nan_and_infinity_are_left_out(marked: bool, count: int) -> None:
    strange = {1: math.nan, 2: math.inf, 3: -math.inf, count - 1: math.nan}
    points = [(float(x), strange.get(x, 1.0 + x / count)) for x in range(count)]
    chart = line_chart("loss", [Series("training", points, marked)])
    assert "nan" not in chart
    assert "inf" not in chart
    assert places(chart)
    assert inside(chart)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats()), max_size=20))
def test_no_finite_value_is_drawn_outside_the_chart(measured: Points) -> None:
    finite = [(x, y) for x, y in measured if math.isfinite(y) and abs(y) < 1e300]
    chart = line_chart("loss", [Series("training", finite, marked=True)])
    assert bool(chart) == bool(finite)
    if chart:
        assert inside(chart)
        assert len(elements(chart, "circle")) == len(finite)


@pytest.mark.parametrize("points", [[(7.0, 3.0)], [(7.0, 3.0), (8.0, 3.0)], [(7.0, 0.0), (7.0, 1.0)]])
def test_a_single_point_a_flat_line_and_a_vertical_line_can_be_drawn(points: Points) -> None:
    chart = line_chart("loss", [Series("training", points)])
    assert len(places(chart)) == len(points)
    assert inside(chart)


def test_all_text_of_a_chart_is_escaped() -> None:
    chart = line_chart('<script>"t"', [Series("<script>n", [(1, 1.0)], marked=True)], x_label="<script>x")
    assert "<script>" not in chart
    assert chart.count("&lt;script&gt;") >= 4
    assert elements(chart, "svg")[0]["aria-label"] == '<script>"t"'
