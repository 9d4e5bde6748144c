from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.train.pace import LEAST_SECONDS, MOST_SECONDS, Progressed, due, fraction, reached, save_interval
from packtrain.units import Duration


def at(value: float, unit: str = "steps") -> Progressed:
    other = {"steps": 0, "epochs": 0.0, "seconds": 0.0}
    return Progressed(**{**other, unit: value})  # type: ignore[arg-type]


def fired(every: Duration, values: list[float]) -> list[float]:
    return [now for before, now in pairwise(values) if due(every, at(before, every.unit), at(now, every.unit))]


def test_every_so_many_steps_means_at_each_multiple() -> None:
    assert fired(Duration(3, "steps"), list(range(11))) == [3, 6, 9]


def test_nothing_is_due_at_the_start() -> None:
    assert not due(Duration(5, "steps"), at(0), at(1))
    assert due(Duration(1, "steps"), at(0), at(1))


def test_a_time_is_due_at_the_first_step_after_it() -> None:
    assert fired(Duration(10, "seconds"), [0.0, 4.0, 9.9, 10.1, 19.0, 20.0, 55.0]) == [10.1, 20.0, 55.0]


@settings(deadline=None)
@given(st.integers(1, 50), st.lists(st.integers(0, 60), min_size=1, max_size=40))
def test_each_multiple_that_is_passed_is_answered_once_whatever_the_size_of_steps(every: int, sizes: list[int]) -> None:
    values = list(accumulate(sizes, initial=0))
    for before, now in pairwise(values):
        multiples = [one for one in range(before + 1, now + 1) if one % every == 0]
        assert due(Duration(every, "steps"), at(before), at(now)) == bool(multiples)


@settings(deadline=None)
@given(
    st.floats(0.01, 100, allow_nan=False),
    st.lists(st.floats(0, 50, allow_nan=False), min_size=1, max_size=40),
)
def test_of_times_too_none_is_answered_twice_and_none_forgotten(every: float, pauses: list[float]) -> None:
    values = list(accumulate(pauses, initial=0.0))
    answers = fired(Duration(every, "seconds"), values)
    assert len(answers) <= values[-1] / every + 1
    assert len({now // every for now in answers}) == len(answers)
    assert {now // every for now in answers} == {now // every for now in values} - {0.0}


@settings(deadline=None)
@given(
    st.integers(1, 20),
    st.lists(st.integers(1, 30), min_size=2, max_size=30),
    st.data(),
)
def test_a_run_that_is_resumed_anywhere_answers_as_one_that_was_not(
    every: int, sizes: list[int], data: st.DataObject
) -> None:
    """There is no state but how far the run has come."""
    values: list[float] = list(accumulate(sizes, initial=0))
    cut = data.draw(st.integers(0, len(values) - 1))
    wanted = Duration(every, "steps")
    assert fired(wanted, values[: cut + 1]) + fired(wanted, values[cut:]) == fired(wanted, values)


@pytest.mark.parametrize("unit", ["steps", "epochs", "seconds"])
def test_a_goal_is_reached_in_its_own_unit(unit: str) -> None:
    goal = Duration(10, unit)
    assert not reached(goal, at(9, unit))
    assert reached(goal, at(10, unit))
    assert reached(goal, at(11, unit))
    for other in {"steps", "epochs", "seconds"} - {unit}:
        assert not reached(goal, at(1000, other))


def test_a_fraction_grows_to_one() -> None:
    assert [fraction(Duration(4, "epochs"), at(done, "epochs")) for done in (0, 1, 4, 9)] == [0.0, 0.25, 1.0, 1.0]


def test_saves_are_the_further_apart_the_longer_one_takes_and_the_closer_the_more_fails() -> None:
    assert save_interval(2.0, 1.0, 0, 3600.0) == pytest.approx((2 * 2.0 * (4 * 3600 + 3600)) ** 0.5)
    assert save_interval(2.0, 1.0, 4, 3600.0) == pytest.approx((2 * 2.0 * 5 * 3600 / 5) ** 0.5)
    assert save_interval(8.0, 1.0, 0, 0.0) == pytest.approx(2 * save_interval(2.0, 1.0, 0, 0.0))


@settings(deadline=None)
@given(st.floats(0, 1e4), st.floats(0, 1e4), st.integers(0, 1000), st.floats(0, 1e7))
def test_saves_are_never_too_close_nor_too_far_apart(save: float, commit: float, failures: int, elapsed: float) -> None:
    interval = save_interval(save, commit, failures, elapsed)
    assert LEAST_SECONDS <= interval <= MOST_SECONDS
    assert interval >= min(MOST_SECONDS, 2 * commit), "one is not begun before the one ahead of it is committed"
