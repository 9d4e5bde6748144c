from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from packtrain.system import cache_directory
from packtrain.train.control import Control, WorkerError


def test_a_request_to_stop_is_seen_by_whoever_shares_the_directory(tmp_path: Path) -> None:
    agent, worker = Control(tmp_path / "control"), Control(tmp_path / "control")
    assert not worker.asked_to_stop()
    agent.ask_to_stop()
    agent.ask_to_stop()
    assert worker.asked_to_stop()


def test_an_agent_knows_that_its_workers_have_made_a_step(tmp_path: Path) -> None:
    agent, worker = Control(tmp_path / "control"), Control(tmp_path / "control")
    assert not agent.is_under_way()
    worker.tell_under_way()
    worker.tell_under_way()
    assert agent.is_under_way()


def test_a_step_is_made_also_where_it_cannot_be_told(tmp_path: Path) -> None:
    control = Control(tmp_path / "control")
    (tmp_path / "control").rmdir()
    control.tell_under_way()
    assert not control.is_under_way()


def test_without_errors_there_are_none(tmp_path: Path) -> None:
    assert Control(tmp_path).errors() == []


def test_errors_are_told_as_they_were_the_first_in_time_first(tmp_path: Path) -> None:
    told = [WorkerError(2, "späte\nZeilen", False, 2.0), WorkerError(10, "", False, 1.0)]
    for error in told:
        Control(tmp_path).tell_error(error)
    assert Control(tmp_path).errors() == told[::-1]


def test_an_error_that_is_hopeless_comes_before_those_it_caused(tmp_path: Path) -> None:
    cause, consequence = (
        WorkerError(3, "the pack is not there", True, 2.0),
        WorkerError(0, "connection closed", False, 1.0),
    )
    for error in (consequence, cause):
        Control(tmp_path).tell_error(error)
    assert Control(tmp_path).errors() == [cause, consequence]


def test_an_error_tells_its_cause_and_step_where_they_are_known(tmp_path: Path) -> None:
    plain, known = WorkerError(0, "a", False, 1.0), WorkerError(1, "b", False, 2.0, cause="memory", step=7)
    for error in (plain, known):
        Control(tmp_path).tell_error(error)
    assert (plain.cause, plain.step) == ("program", None)
    assert Control(tmp_path).errors() == [plain, known]


def test_an_error_that_is_half_written_is_not_there_yet(tmp_path: Path) -> None:
    control = Control(tmp_path)
    (tmp_path / "error-0.part").write_text('{"rank": 0,')
    assert control.errors() == []


def test_the_cache_lies_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACKTRAIN_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_directory() == Path("/home/somebody/.cache/packtrain")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_directory() == Path("/cache/packtrain")
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path


def test_a_log_that_cannot_be_written_ends_nothing() -> None:
    with Path("/dev/full").open("wb") as full:
        script = "from packtrain.system import say; say('one'); say('two'); raise SystemExit(7)"
        assert subprocess.run([sys.executable, "-u", "-c", script], stdout=full).returncode == 7
