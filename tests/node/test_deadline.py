from __future__ import annotations

import threading
from typing import Any

import pytest

from packtrain.job import Budget, Fleet
from packtrain.node.deadline import Deadline, first_bound, in_words, seconds_left
from packtrain.node.endings import switch_off
from parts.runs import a_node


def fleet(**fields: Any) -> Fleet:
    return Fleet.model_validate({"local": {"machines": "1..4"}, "price": 2.0, **fields})


def test_without_a_budget_there_is_no_deadline() -> None:
    assert seconds_left(Budget(), fleet(), [a_node("a")], 1e9) is None
    assert first_bound(Budget(), fleet()) is None


def test_hours_are_those_of_the_run() -> None:
    assert seconds_left(Budget(hours=2), fleet(), [a_node("a"), a_node("b")], 3600.0) == 3600.0
    assert seconds_left(Budget(hours=1), fleet(), [], 9999.0) == 0.0


def test_dollars_are_paid_for_every_machine_also_for_those_that_are_gone() -> None:
    nodes = [
        a_node("a", machine_seconds=1800.0),
        a_node("b", machine_seconds=1800.0),
        a_node("c", machine_seconds=3600.0, left=True),
    ]
    # 8 dollars are 4 machine hours; 2 are used; two machines use up the rest in one hour.
    assert seconds_left(Budget(dollars=8), fleet(), nodes, 1800.0) == 3600.0
    assert seconds_left(Budget(dollars=8, hours=1), fleet(), nodes, 1800.0) == 1800.0


def test_a_machine_alone_holds_to_its_share() -> None:
    assert first_bound(Budget(dollars=8), fleet()) == 3600.0
    assert first_bound(Budget(dollars=8, hours=0.5), fleet()) == 1800.0


def test_the_budget_is_told_as_the_job_has_it() -> None:
    assert in_words(Budget(dollars=60, hours=24)) == "the budget of 24 hours and 60 dollars is used up"


def test_it_warns_before_and_ends_at_the_deadline() -> None:
    told: list[str] = []
    over = threading.Event()

    def end() -> None:
        told.append("end")
        over.set()

    deadline = Deadline(lambda: told.append("warn"), end)
    deadline.hold(1000.0)
    assert not deadline.is_near
    deadline.hold(0.2)
    assert over.wait(30)
    assert told == ["warn", "end"]
    assert deadline.is_near


def test_the_margin_grows_with_the_time_up_to_a_few_minutes() -> None:
    clock = {"now": 0.0}
    deadline = Deadline(lambda: None, lambda: None, lambda: clock["now"])
    for seconds, near in ((100.0, 90.0), (100_000.0, 99_700.0)):
        clock["now"] = 0.0
        deadline.hold(seconds)
        clock["now"] = near - 1
        assert not deadline.is_near
        clock["now"] = near
        assert deadline.is_near
    deadline.close()


def test_a_machine_is_switched_off_only_where_the_fleet_says_so(tmp_path: Any) -> None:
    switch_off(False, ("touch", str(tmp_path / "off")))
    assert not (tmp_path / "off").exists()
    switch_off(True, ("touch", str(tmp_path / "off")))
    assert (tmp_path / "off").exists()


def test_dollars_without_a_price_are_refused() -> None:
    from packtrain.job import Job

    with pytest.raises(ValueError, match=r"give fleet\.price"):
        Job.model_validate({"name": "a", "program": ["train.py"], "budget": {"dollars": 1}})
