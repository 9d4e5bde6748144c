"""What machines do about stores and disks that refuse, and about one another, on a clock that only the test moves."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from packtrain.errors import Mistake
from packtrain.node import agent as agent_module
from packtrain.node import program as program_module
from packtrain.node.agent import Trouble
from packtrain.run.checkpoint import commit
from packtrain.run.records import Point, Result
from packtrain.store import Store, StoreError
from packtrain.train.control import Control
from parts.agents import Company, Make, look_through
from parts.faulty import FaultyStore
from parts.runs import program_job

REFUSED = StoreError("s3://b: the session token is not valid (any more)")


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def told(company: Company) -> list[str]:
    for agent in company.agents:
        agent._events.flush()
    return [event.text for event in company.run.events().read()]


# Stores.


def test_a_refusal_at_the_start_is_for_the_person_to_mend() -> None:
    for error in (REFUSED, OSError(errno.ENOSPC, "full")):
        with pytest.raises(type(error)):
            Trouble().count(error)
    Trouble().count(StoreError("the store is away", temporary=True))


def test_a_refusal_later_on_is_tried_again_after_pauses_that_grow(capsys: pytest.CaptureFixture[str]) -> None:
    trouble = Trouble()
    trouble.over()
    pauses = []
    for _ in range(7):
        trouble.count(REFUSED)
        pauses.append(trouble.seconds)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert "not valid (any more); the agent tries again in 30 s" in capsys.readouterr().out
    trouble.count(StoreError("the store is away", temporary=True))
    assert trouble.seconds == 4
    trouble.over()
    assert trouble.seconds == 0


def test_workers_outlive_a_refused_request(make: Make, directory_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module.NoticeBoard, "listen", lambda _self: None)
    company = make(1, 0)
    store = FaultyStore(directory_store)
    store.url = directory_store.url
    agent = company.add(store)
    agent._clock = time.monotonic
    working = threading.Thread(target=agent.work)
    working.start()
    try:
        until(agent._is_working)
        assert agent._attempt is not None
        launch, seen = agent._attempt.launch, len(store.operations)
        store.fault = lambda operation, _key: REFUSED if operation == "list" else None
        until(lambda: sum(operation == "list" for operation, _ in store.operations[seen:]) >= 2)
        store.refuse()
        assert working.is_alive()
        assert launch is not None
        assert launch.poll() is None
    finally:
        company.run.finish(Result("stopped", "enough", 0, 0.0))
        agent._hurry = agent._over = True
        working.join()
        company.agents.clear()


def until(condition: Callable[[], bool]) -> None:
    """Waits for another thread; the test's own time limit ends what never comes."""
    while not condition():
        threading.Event().wait(0.01)


# Disks.


def test_a_program_goes_on_where_a_commit_finds_the_disk_full(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    company = make(1, 1, program_job, checkpoint={"every": "1 s"})
    company.wait(8)
    [agent] = company.agents
    assert agent._attempt is not None
    (agent._attempt.directories.checkpoints / "model").write_text("x")
    monkeypatch.setattr(program_module.shutil, "copyfile", full)
    monkeypatch.setattr(agent._program, "_last", -1e9)
    company.wait(5)
    assert agent._is_working()
    assert any("could not be committed: [Errno 28]" in text for text in told(company))


def test_a_program_whose_last_words_find_the_disk_full_has_not_finished(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    company = make(1, 1, program_job)
    company.wait(8)
    [agent] = company.agents
    assert agent._attempt is not None
    (agent._attempt.directories.checkpoints / "model").write_text("x")
    with monkeypatch.context() as patch:
        patch.setattr(program_module.shutil, "copyfile", full)
        company.end_workers(0)
        company.wait(5)
    assert company.run.result() is None
    assert company.causes() == ["start", "disk"]


def test_a_machine_that_cannot_start_its_workers_for_want_of_space_says_so(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    company = make(1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(agent_module, "begin", full)
        company.wait(5)
        assert company.causes()[:2] == ["start", "disk"]
    company.wait(5)
    result = company.run.result()
    assert result is None or "free some space" in result.reason


def test_workers_that_cannot_be_asked_to_stop_are_asked_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    company = make(1, 1)
    company.wait(8)
    [agent] = company.agents
    attempt = agent._attempt
    assert attempt is not None
    with monkeypatch.context() as patch:
        patch.setattr(Control, "ask_to_stop", full)
        company.run.request_stop("enough")
        company.wait(3)
        assert not attempt.control.stop_requested()
    company.wait(2)
    assert attempt.control.stop_requested()


# While a checkpoint is brought back.


@pytest.mark.parametrize("by", ["stop", "notice"])
def test_who_has_to_go_does_not_wait_for_a_checkpoint(make: Make, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    held = threading.Event()
    monkeypatch.setattr(program_module.ProgramCheckpoints, "restore", lambda _self: held.wait(60))
    company = make(1, 1, program_job)
    [agent] = company.agents
    try:
        while agent._attempt is None:
            company.now += 1
            agent._lease.renew()
            agent.look()
        if by == "stop":
            company.run.request_stop("enough")
        else:
            company.give_notice(agent)
        agent.look()
        assert agent._over
        assert agent._attempt is None
        result = company.run.result()
        assert (result is not None and result.status == "stopped") == (by == "stop")
    finally:
        held.set()


def test_a_run_whose_checkpoints_cannot_be_used_has_failed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def restore(_: object) -> None:
        raise Mistake("none of the 2 checkpoints of job-1 can be used: x is damaged")

    monkeypatch.setattr(program_module.ProgramCheckpoints, "restore", restore)
    company = make(1, 1, program_job)
    company.wait(8)
    result = company.run.result()
    assert result is not None
    assert (result.status, result.reason) == ("failed", "none of the 2 checkpoints of job-1 can be used: x is damaged")


# Machines.


def test_a_machine_that_fails_twice_is_left_out_while_there_are_enough_others(make: Make, tmp_path: Path) -> None:
    company = make("2..3", 3)
    company.wait(10)
    for _ in range(2):
        assert company.members() == [0, 1, 2]
        company.fail(company.agents[1], "CUDA driver initialization failed")
        company.wait(14)
    assert company.members() == [0, 2]
    (tmp_path / "w").write_bytes(b"x")
    commit(company.run, 100, 3, None, {"w": tmp_path / "w"})
    writer = company.run.point_writer("000003-rank-0")
    writer.append(Point("train", 3, 1, time.time() - 3600, {}))
    writer.flush()
    company.wait(60)
    assert company.members() == [0, 2], "it is not taken in again either"
    assert company.run.result() is None
    [text] = [text for text in told(company) if "ended two generations" in text]
    assert "CUDA driver initialization failed" in text
    company.kill(company.agents[2])
    company.wait(30)
    assert company.members() == [0, 1], "better than none"


def test_a_machine_that_is_left_out_stays_so_when_another_decides(make: Make) -> None:
    company = make("2..4", 4)
    company.wait(10)
    for _ in range(2):
        assert company.members() == [0, 1, 2, 3]
        company.fail(company.agents[1], "CUDA driver initialization failed")
        company.wait(14)
    assert company.members() == [0, 2, 3]
    assert [one.culprit for one in company.run.generations()] == [None, company.agents[1].name, company.agents[1].name]
    company.kill(company.agents[0])
    company.wait(40)
    assert company.members() == [2, 3]


def test_machines_that_fail_in_turn_all_stay(make: Make) -> None:
    company = make("1..2", 2)
    company.wait(10)
    for agent in company.agents:
        company.fail(agent, "it broke")
        company.wait(14)
        assert company.members() == [0, 1]


# Budgets.


def test_a_machine_that_comes_back_holds_to_what_is_left_of_the_runs_time(make: Make) -> None:
    company = make(2, 2, budget={"hours": 10})
    company.wait(10)
    for _ in range(9):
        company.now += 3600
        for agent in company.there():
            agent._lease.renew()
    for agent in company.agents:
        company.kill(agent)
    late = company.add()
    company.wait(60)
    assert len(company.causes()) == 1, "one alone cannot go on"
    assert late._deadline._at is not None
    assert late._deadline._at - company.now == pytest.approx(3600, abs=100)


def test_dollars_are_not_kept_back_for_machines_that_are_lost(make: Make) -> None:
    company = make("1..4", 4, budget={"dollars": 4.0})
    company.wait(10)
    for agent in company.agents[1:]:
        company.kill(agent)
    company.wait(40)
    latest = company.run.latest_generation()
    assert latest is not None
    assert len(latest.members) == 1
    assert latest.seconds_left == pytest.approx(4 * 3600, abs=300)


def test_a_machine_is_done_with_a_result_or_without_time_but_not_with_a_notice(make: Make) -> None:
    company = make(1, 2, budget={"hours": 1})
    first, second = company.agents
    first._deadline.close()
    assert not first.has_done_its_part
    company.give_notice(second)
    look_through(second)
    assert second._over
    assert not second.has_done_its_part
    company.run.finish(Result("finished", "done", 1, 1.0))
    look_through(first)
    assert first.has_done_its_part
    second._deadline.close()  # or it would end this process
    company.now += 3600
    assert second.has_done_its_part
