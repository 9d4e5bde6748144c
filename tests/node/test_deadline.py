from __future__ import annotations

import errno
import subprocess
import sys
import threading
from typing import Any

import pytest
from typer.testing import CliRunner

from packtrain.cli import app
from packtrain.errors import EXIT_UNFINISHED, NotFound
from packtrain.fleet import fleet_of
from packtrain.job.job import BudgetSettings, FleetSettings
from packtrain.node.deadline import Deadline, left_at_start, seconds_left, used_up
from packtrain.node.preemption import switch_off
from packtrain.store import Store
from parts.runs import a_lease, new_run, recipe_job


def fleet(**fields: Any) -> FleetSettings:
    return FleetSettings.model_validate({"local": {"machines": "1..4"}, "price": 2.0, **fields})


def test_without_a_budget_there_is_no_deadline() -> None:
    assert seconds_left(BudgetSettings(), fleet(), [a_lease("a")], 1e9, 1) is None


def test_hours_are_wall_time_of_the_run() -> None:
    assert seconds_left(BudgetSettings(hours=2), fleet(), [a_lease("a"), a_lease("b")], 3600.0, 2) == 3600.0
    assert seconds_left(BudgetSettings(hours=1), fleet(), [], 9999.0, 1) == 0.0


def test_dollars_are_paid_for_every_machine_also_those_that_are_gone() -> None:
    leases = [
        a_lease("a", machine_seconds=1800.0, dollars_per_hour=2.0),
        a_lease("b", machine_seconds=1800.0, dollars_per_hour=2.0),
        a_lease("c", machine_seconds=3600.0, dollars_per_hour=2.0, left=True),
        a_lease("d", machine_seconds=3600.0, left=True),  # on a fleet that cost nothing
    ]
    # 8 dollars are 4 machine hours; 2 are used; two machines use up the rest in one hour.
    assert seconds_left(BudgetSettings(dollars=8), fleet(), leases, 1800.0, 2) == 3600.0
    assert seconds_left(BudgetSettings(dollars=8, hours=1), fleet(), leases, 1800.0, 2) == 1800.0


def test_a_machine_that_knows_of_no_other_keeps_to_its_share_of_the_budget(directory_store: Store) -> None:
    machines = {"local": {"machines": "1..4"}, "price": 2.0}
    for budget, seconds in (({"dollars": 8}, 3600.0), ({"dollars": 8, "hours": 0.5}, 1800.0), ({}, None)):
        run = new_run(directory_store, recipe_job(fleet=machines, budget=budget))
        assert left_at_start(run, None) == seconds


def test_the_budget_is_named_as_in_the_job() -> None:
    assert used_up(BudgetSettings(dollars=60, hours=24)) == "the budget of 24 hours and 60 dollars is used up"


def test_a_deadline_warns_before_and_ends_at_its_time() -> None:
    told: list[str] = []
    over = threading.Event()

    def end() -> None:
        told.append("end")
        over.set()

    deadline = Deadline(lambda: told.append("warn"), end)
    deadline.set(1000.0)
    assert not deadline.is_near
    deadline.set(0.2)
    assert over.wait(30)
    assert told == ["warn", "end"]
    assert deadline.is_near


def test_a_failing_warning_does_not_delay_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    over = threading.Event()

    def warn() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    Deadline(warn, over.set).set(0.1)
    assert over.wait(30)
    assert "No space left on device" in capsys.readouterr().out


def test_the_margin_before_the_deadline_grows_with_the_budget_up_to_five_minutes() -> None:
    clock = {"now": 0.0}
    deadline = Deadline(lambda: None, lambda: None, lambda: clock["now"])
    for seconds, near in ((100.0, 90.0), (100_000.0, 99_700.0)):
        clock["now"] = 0.0
        deadline.set(seconds)
        clock["now"] = near - 1
        assert not deadline.is_near
        clock["now"] = near
        assert deadline.is_near
    deadline.close()


@pytest.mark.usefixtures("processes")
def test_a_machine_is_shut_down_only_if_the_fleet_says_so(tmp_path: Any) -> None:
    command = ("touch", str(tmp_path / "off"))
    assert not switch_off(False, command)
    assert not (tmp_path / "off").exists()
    assert switch_off(True, command)
    assert (tmp_path / "off").exists()


@pytest.mark.usefixtures("processes")
def test_a_machine_that_cannot_shut_down_tries_sudo_and_says_so(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sudo").write_text(f"#!/bin/sh\necho sudo $@ >> {tmp_path}/asked\nexit 3\n")
    (tmp_path / "sudo").chmod(0o755)
    # Not the person's own path: with a folder that may not be read, nobody knows whether a program is missing.
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert not switch_off(True, ("no-such-systemctl", "poweroff"))
    said = capsys.readouterr().out
    assert (tmp_path / "asked").read_text() == "sudo -n no-such-systemctl poweroff\n"
    assert "`no-such-systemctl poweroff`: [Errno 2]" in said
    assert "`sudo -n no-such-systemctl poweroff` exited with code 3" in said
    assert "shut it down manually" in said


def test_a_run_that_does_not_exist_gets_no_folder(directory_store: Store) -> None:
    assert isinstance(CliRunner().invoke(app, ["node", "typo-1", "--store", directory_store.url]).exception, NotFound)
    assert directory_store.list("") == []


def test_fleets_pass_on_that_machines_shut_down_at_the_end(directory_store: Store) -> None:
    on, off = (
        new_run(directory_store, recipe_job(fleet={"ssh": {"hosts": ["a"], "power_off": wanted}}))
        for wanted in (False, True)
    )
    assert not any("--power-off" in start.arguments[-1] for start in fleet_of(on.job.fleet.kind).plan(on))
    assert all("--power-off" in start.arguments[-1] for start in fleet_of(off.job.fleet.kind).plan(off))


@pytest.mark.usefixtures("processes")
def test_the_process_ends_at_the_deadline_even_if_the_machine_cannot_be_shut_down() -> None:
    script = """
from packtrain.node import preemption
def broken(wanted): raise RuntimeError
preemption.switch_off = broken
preemption.exit_immediately("the budget is used up", True)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (EXIT_UNFINISHED, "")
    assert ended.stdout == "failed: the budget is used up, and the store does not answer\n"


def test_dollars_without_a_price_are_refused() -> None:
    from packtrain.job import Job

    with pytest.raises(ValueError, match=r"requires fleet\.price"):
        Job.model_validate({"name": "a", "program": ["train.py"], "budget": {"dollars": 1}})
