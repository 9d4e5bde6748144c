from __future__ import annotations

from fractions import Fraction
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.train.progress import (
    MAX_SAVE_INTERVAL,
    MIN_SAVE_INTERVAL,
    Progress,
    Recurring,
    reached,
    save_interval,
)
from packtrain.units import Duration


def at(value: float, unit: str = "steps") -> Progress:
    return Progress(**{"step" if unit == "steps" else unit: value})  # type: ignore[arg-type]


def fired(every: Duration, values: list[float]) -> list[float]:
    """Where it is due in a run that begins, or goes on, at the first of the values; it takes no time itself."""
    recurring = Recurring(every, values[0] if every.unit == "seconds" else 0.0)
    return [now for before, now in pairwise(values) if recurring.due(at(before, every.unit), at(now, every.unit))]


def fired_in_time(every: float, ends: list[float], takes: float, start: float = 0.0) -> list[float]:
    """As the loop has it: it hears of a step's clock after the next step, and of none right after what was due.

    `ends` is when steps would end if nothing came in between.
    """
    recurring = Recurring(Duration(every, "seconds"), start)
    before, clock, spent, answers, fresh = start, start, 0.0, [], True
    for end in ends:
        now = before if fresh else clock
        clock = end + spent
        fresh = recurring.due(at(before, "seconds"), at(now, "seconds"))
        if fresh:
            answers.append(now)
            spent += takes
            recurring.restart()
        before = now
    return answers


def test_an_interval_in_steps_is_due_at_each_multiple() -> None:
    assert fired(Duration(3, "steps"), list(range(11))) == [3, 6, 9]


def test_nothing_is_due_at_the_start() -> None:
    assert fired(Duration(5, "steps"), [0, 1]) == []
    assert fired(Duration(1, "steps"), [0, 1]) == [1]


def test_without_an_interval_nothing_is_ever_due() -> None:
    assert not Recurring(None, 7.0).due(at(0), at(1_000_000))


@pytest.mark.parametrize("batches", [3, 7, 10, 25, 49, 1000])
@pytest.mark.parametrize(
    "every", [Fraction(1, 10), Fraction(3, 10), Fraction(1, 100), Fraction(11, 10), Fraction(1, 3)]
)
def test_rounding_skips_no_multiple_of_a_fraction_of_an_epoch(batches: int, every: Fraction) -> None:
    exact = [Fraction(number, batches) for number in range(12 * batches)]
    values = [number // batches + number % batches / batches for number in range(12 * batches)]
    wanted = [values[number] for number in range(1, len(exact)) if exact[number] // every > exact[number - 1] // every]
    assert fired(Duration(float(every), "epochs"), values) == wanted


def test_an_interval_in_time_stays_due_until_it_is_done() -> None:
    assert fired(Duration(10, "seconds"), [0.0, 4.0, 9.9, 10.1, 19.0]) == [10.1, 19.0]


def test_an_interval_in_time_counts_from_the_end_of_the_last_occurrence() -> None:
    """What is due at 10 is begun at 12, when that is known, and ends at 18; the next clock is that of 20."""
    seconds = [float(number) for number in range(2, 60, 2)]
    assert fired_in_time(10, seconds, takes=6) == [10.0, 30.0, 50.0, 70.0]


@pytest.mark.parametrize("takes", [0.0, 0.1, 0.25, 3.0])
def test_an_evaluation_longer_than_its_interval_still_lets_training_continue(takes: float) -> None:
    steps = [0.02 * number for number in range(1, 200)]
    answers = fired_in_time(0.2, steps, takes)
    assert 15 <= len(answers) <= 18, "every ten steps, and a step or two to hear of the clock"


def test_a_resumed_run_counts_time_from_the_previous_multiple() -> None:
    assert fired_in_time(600, [1190.0, 1195.0, 1201.0, 1300.0], 0.0, start=1150.0) == [1201.0]


@settings(deadline=None)
@given(st.integers(1, 50), st.lists(st.integers(0, 60), min_size=1, max_size=40))
def test_each_multiple_is_due_exactly_once_whatever_the_step_size(every: int, sizes: list[int]) -> None:
    values = list(accumulate(sizes, initial=0))
    for before, now in pairwise(values):
        multiples = [one for one in range(before + 1, now + 1) if one % every == 0]
        assert bool(fired(Duration(every, "steps"), [before, now])) == bool(multiples)


@settings(deadline=None)
@given(
    st.floats(0.01, 100, allow_nan=False),
    st.lists(st.floats(0, 50, allow_nan=False), min_size=1, max_size=40),
    st.floats(0, 500),
)
def test_an_interval_in_time_is_never_due_early(every: float, pauses: list[float], takes: float) -> None:
    answers = fired_in_time(every, list(accumulate(pauses)), takes)
    assert all(later - earlier >= (takes + every) * (1 - 1e-9) for earlier, later in pairwise(answers))


@settings(deadline=None)
@given(
    st.integers(1, 20),
    st.lists(st.integers(1, 30), min_size=2, max_size=30),
    st.data(),
)
def test_a_resumed_run_is_due_at_the_same_steps_as_an_uninterrupted_one(
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


@pytest.mark.parametrize(("goal", "epoch", "batch", "batches"), [(1.36, 1, 9, 25), (2.28, 2, 7, 25), (0.3, 0, 3, 10)])
def test_rounding_does_not_miss_a_goal_in_fractions_of_an_epoch(
    goal: float, epoch: int, batch: int, batches: int
) -> None:
    assert reached(Duration(goal, "epochs"), at(epoch + batch / batches, "epochs"))
    assert not reached(Duration(goal, "epochs"), at(epoch + (batch - 1) / batches, "epochs"))


def test_the_save_interval_grows_with_the_cost_of_a_save_and_shrinks_with_failures() -> None:
    assert save_interval(2.0, 1.0, 0, 3600.0) == pytest.approx((2 * 2.0 * (4 * 3600 + 3600)) ** 0.5)
    assert save_interval(2.0, 1.0, 4, 3600.0) == pytest.approx((2 * 2.0 * 5 * 3600 / 5) ** 0.5)
    assert save_interval(0.0, 100.0, 0, 0.0) == 200.0
    assert save_interval(8.0, 1.0, 0, 0.0) == pytest.approx(2 * save_interval(2.0, 1.0, 0, 0.0))


@settings(deadline=None)
@given(st.floats(0, 1e4), st.floats(0, 1e4), st.integers(0, 1000), st.floats(0, 1e7))
def test_the_save_interval_stays_within_its_bounds(save: float, commit: float, failures: int, elapsed: float) -> None:
    interval = save_interval(save, commit, failures, elapsed)
    assert MIN_SAVE_INTERVAL <= interval <= MAX_SAVE_INTERVAL
    assert interval >= min(MAX_SAVE_INTERVAL, 2 * commit), "one is not begun before the one ahead of it is committed"
