"""Dollars so far and expected, from leases and pace."""

from __future__ import annotations

from typing import Any

import pytest

from packtrain.job import Job
from packtrain.observe.history import goal_step, progress, seconds_to_goal
from packtrain.observe.status import Cost, cost_of
from packtrain.run.records import Lease, Point
from parts.runs import MEASURED, a_lease, program_job, recipe_job


def priced(**fields: Any) -> Job:
    return recipe_job(fleet={"local": {"machines": "1..2"}, "price": 2.0}, train={"duration": "100 steps"}, **fields)


def steps(*measured: tuple[int, float]) -> list[Point]:
    """Return steps at these elapsed seconds, 10 of them in an epoch."""
    return [
        Point("train", 1, step, 0.0, {**MEASURED, "elapsed_seconds": seconds, "epoch": step / 10})
        for step, seconds in measured
    ]


def rented(name: str, hours: float, **fields: Any) -> Lease:
    return a_lease(name, machine_seconds=hours * 3600, **{"dollars_per_hour": 2.0, **fields})


def test_machines_that_are_gone_were_paid_for_too() -> None:
    leases = [rented("a", 1.0), rented("b", 0.5), rented("c", 3.0, left=True, dollars_per_hour=10.0)]
    cost = cost_of(priced(), leases, True, [])
    assert cost == Cost(so_far=33.0, per_hour=4.0, expected=None, budget=None)


def test_a_run_is_expected_to_keep_its_pace() -> None:
    # 40 steps took 40 minutes on two machines: 60 more take an hour.
    cost = cost_of(priced(), [rented("a", 1.0), rented("b", 1.0)], True, steps((0, 0.0), (40, 2400.0)))
    assert cost is not None
    assert cost.expected == pytest.approx(4.0 + 4.0)
    assert cost.line == "$4.00 so far, $4.00 per hour, $8.00 expected"


def test_no_more_than_the_budget_is_expected() -> None:
    job = priced(budget={"dollars": 5.0})
    cost = cost_of(job, [rented("a", 1.0), rented("b", 1.0)], True, steps((0, 0.0), (40, 2400.0)))
    assert cost is not None
    assert cost.line == "$4.00 so far, $4.00 per hour, $5.00 expected, 80% of the budget of $5.00"


def test_a_run_that_has_ended_costs_no_more() -> None:
    cost = cost_of(priced(), [rented("a", 1.0)], False, steps((0, 0.0), (100, 2400.0)))
    assert cost is not None
    assert (cost.per_hour, cost.expected, cost.line) == (0.0, None, "$2.00")


def test_a_machine_that_died_is_not_paid_for_twice() -> None:
    leases = [rented(name, 1.0) for name in ("dead", "a", "b")]
    cost = cost_of(priced(), leases, True, [])
    assert cost is not None
    assert cost.per_hour == 4.0


def test_without_a_price_there_is_no_cost() -> None:
    assert cost_of(recipe_job(), [a_lease("a", machine_seconds=3600.0)], True, []) is None


def test_a_run_that_moved_to_machines_without_a_price_has_cost_what_it_cost() -> None:
    cost = cost_of(recipe_job(), [rented("a", 2.0, left=True), a_lease("b", machine_seconds=3600.0)], True, [])
    assert cost == Cost(so_far=4.0, per_hour=0.0, expected=None, budget=None)


@pytest.mark.parametrize(
    ("duration", "seconds"), [("100 steps", 3600.0), ("5 epochs", 600.0), ("1 h", 1200.0), ("10 min", 0.0)]
)
def test_the_time_left_is_known_for_every_unit_of_the_duration(duration: str, seconds: float) -> None:
    job = recipe_job(train={"duration": duration})
    assert seconds_to_goal(job, steps((0, 0.0), (40, 2400.0))) == pytest.approx(seconds)


def test_one_step_or_a_program_shows_no_pace() -> None:
    assert seconds_to_goal(recipe_job(), steps((1, 60.0))) is None
    assert seconds_to_goal(recipe_job(), []) is None
    assert seconds_to_goal(program_job(), steps((0, 0.0), (40, 2400.0))) is None


@pytest.mark.parametrize(
    ("duration", "goal", "done"), [("100 steps", 100, 0.04), ("5 epochs", 50, 0.08), ("40 s", None, 0.1)]
)
def test_the_last_step_is_known_of_steps_and_epochs(duration: str, goal: int | None, done: float) -> None:
    job, last = recipe_job(train={"duration": duration}), steps((4, 4.0))[0]
    assert goal_step(job, last) == goal
    assert progress(job, [last]) == pytest.approx(done)
    assert goal_step(job, None) == (100 if "steps" in duration else None)


def test_a_program_has_no_last_step() -> None:
    assert (goal_step(program_job(), None), progress(program_job(), [])) == (None, None)


def test_later_epochs_with_larger_batches_have_fewer_steps() -> None:
    phases = [
        {"until": "1 epochs", "rate": [0.1, 0.1]},
        {"until": "3 epochs", "rate": [0.1, 0.1], "batch": "8 samples"},
    ]
    job = recipe_job(train={"duration": "3 epochs", "schedule": {"phases": phases}})
    assert goal_step(job, steps((4, 4.0))[0]) == 10 + 5 + 5
