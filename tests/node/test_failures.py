"""Failures of stores, disks and machines, on a clock that only the test moves."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packtrain.errors import Mistake
from packtrain.node import node as node_module
from packtrain.node import program as program_module
from packtrain.node.node import RetryPolicy
from packtrain.node.preemption import PreemptionWatch
from packtrain.node.workers import WorkerGroup
from packtrain.run.checkpoint import commit
from packtrain.run.records import FleetLaunch, Point, Result
from packtrain.store import Store, StoreError
from packtrain.train.control import Control
from parts.faulty import FaultyStore
from parts.nodes import Cluster, Make, look_until_settled
from parts.runs import MEASURED, program_job

LAUNCH = FleetLaunch(1.0, "me@here", {"local": {}})
REFUSED = StoreError("s3://b: the session token is not valid (any more)")
HANG = "step 7 has taken 9 s (usually 0.1 s); treating it as a hang"


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def told(cluster: Cluster) -> list[str]:
    for node in cluster.nodes:
        node.events.flush()
    return [event.text for event in cluster.run.events().read()]


# Stores.


def test_a_permanent_failure_before_the_first_success_is_raised() -> None:
    for error in (REFUSED, OSError(errno.ENOSPC, "full")):
        with pytest.raises(type(error)):
            RetryPolicy().failed(error)
    RetryPolicy().failed(StoreError("the store is away", temporary=True))


def test_a_later_failure_is_retried_after_growing_pauses(capsys: pytest.CaptureFixture[str]) -> None:
    retry = RetryPolicy()
    retry.succeeded()
    pauses = []
    for _ in range(7):
        retry.failed(REFUSED)
        pauses.append(retry.seconds)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert "not valid (any more); retrying in 30 s" in capsys.readouterr().out
    retry.failed(StoreError("the store is away", temporary=True))
    assert retry.seconds == 4
    retry.succeeded()
    assert retry.seconds == 0


def test_workers_keep_running_when_the_store_refuses_a_request(
    make: Make, directory_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PreemptionWatch, "listen", lambda _self: None)
    cluster = make(1, 0)
    store = FaultyStore(directory_store)
    store.url = directory_store.url
    node = cluster.add(store, lambda: 20 * time.monotonic())
    working = threading.Thread(target=node.work)
    working.start()
    try:
        until(lambda: node.is_working)
        assert node.group is not None
        launcher, seen = node.group.launcher, len(store.operations)
        store.fault = lambda operation, _key: REFUSED if operation == "list" else None
        until(lambda: sum(operation == "list" for operation, _ in store.operations[seen:]) >= 2)
        store.refuse()
        assert working.is_alive()
        assert launcher is not None
        assert launcher.poll() is None
    finally:
        cluster.run.finish(Result("stopped", "enough", 0, 0.0))
        node.is_over = True
        working.join()
        cluster.nodes.clear()


def test_a_node_gives_up_on_a_store_that_does_not_come_back_for_a_day(
    make: Make, directory_store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert node_module.STORE_HOURS == 24
    monkeypatch.setattr(node_module, "STORE_HOURS", 0.0001)
    monkeypatch.setattr(PreemptionWatch, "listen", lambda _self: None)
    cluster = make(1, 0)
    store = FaultyStore(directory_store)
    node = cluster.add(store, time.monotonic)
    store.refuse("list", "find", "put", "put_if_absent")
    node.work()
    cluster.nodes.clear()
    assert node.has_done_its_part, "the machine is shut down if the job says so"
    assert f"failure: {store.url} has not answered for 0.0001 hours; giving up" in capsys.readouterr().out


def test_a_node_that_leaves_does_not_try_for_minutes_to_put_its_last_records_into_a_store_that_is_away(
    make: Make, directory_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "_END_SECONDS", 0.05)
    monkeypatch.setattr(PreemptionWatch, "listen", lambda _self: None)
    ended, tells, store = threading.Event(), list[tuple[str, bool]](), FaultyStore(directory_store)

    def end(reason: str, power_off: bool) -> None:
        tells.append((reason, power_off))
        ended.set()

    def try_for_minutes(operation: str, _key: str) -> StoreError:
        if operation == "put":
            ended.wait(10)
        return StoreError("the store is away", temporary=True)

    monkeypatch.setattr(node_module, "exit_immediately", end)
    cluster = make(1, 0)
    node = cluster.add(store, time.monotonic)
    store.fault = try_for_minutes
    cluster.preempt(node)
    node.work()
    cluster.nodes.clear()
    assert tells == [("the cloud wants it back", False)]


def test_a_node_whose_time_is_up_does_not_wait_for_workers_that_cannot_be_killed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those that are in the kernel, on a dead mount."""
    ended, watches, listening = threading.Event(), list[Any](), PreemptionWatch.__init__

    def keep(watch: PreemptionWatch, *arguments: Any, **options: Any) -> None:
        watches.append(options["end"])
        listening(watch, *arguments, **options)

    monkeypatch.setattr(PreemptionWatch, "__init__", keep)
    monkeypatch.setattr(node_module, "LAST_KILL_SECONDS", 0.01)
    monkeypatch.setattr(node_module, "exit_immediately", lambda *_, **__: ended.set())
    cluster = make(1, 1)
    cluster.wait(10)
    group, [end] = cluster.nodes[0].group, watches
    assert group is not None
    assert group.launcher is not None
    monkeypatch.setattr(group.launcher, "kill", lambda: ended.wait(10))
    ending = threading.Thread(target=end, args=("preemption notice: SIGTERM",))
    ending.start()
    assert ended.wait(5)
    ending.join()


def until(condition: Callable[[], bool]) -> None:
    """Waits for another thread; the test's own time limit ends what never comes."""
    while not condition():
        threading.Event().wait(0.01)


@pytest.mark.parametrize("launched", [False, True], ids=["by a service", "by a person"])
def test_only_a_node_that_a_person_launches_gets_all_restarts_again(make: Make, launched: bool) -> None:
    cluster = make(1, 1)
    cluster.run.record_launch(LAUNCH)
    cluster.wait(8)
    for _ in range(3):
        cluster.fail(cluster.nodes[0])
        cluster.wait(8)
    cluster.kill(cluster.nodes[0])
    if launched:
        cluster.run.record_launch(LAUNCH)
    again = cluster.add()
    cluster.wait(30)
    assert cluster.causes() == ["start", *["program"] * 3, "resumed"]
    cluster.fail(again)
    cluster.wait(8)
    result = cluster.run.result()
    assert (None if result is None else result.reason) == (None if launched else "it broke (after 3 restarts)")


def test_a_clean_up_that_fails_for_now_is_tried_again(make: Make, directory_store: Store) -> None:
    cluster, store = make(1, 0), FaultyStore(directory_store)
    node = cluster.add(store)
    left = cluster.run.key("checkpoints/000000005-000001-abc/files/model")
    cluster.wait(8)
    directory_store.put(left, b"x")
    away, failed = StoreError("the store is away", temporary=True), list[str]()

    def fail_once(operation: str, key: str) -> StoreError | None:
        if operation == "delete" and key == left and not failed:
            failed.append(key)
            return away
        return None

    store.fault = fail_once
    cluster.end_workers(1)
    cluster.wait(8)
    until(lambda: bool(failed) and not directory_store.exists(left))
    assert cluster.causes() == ["start", "program"]
    assert node.is_working


# Disks.


def test_a_program_keeps_running_when_a_commit_finds_the_disk_full(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = make(1, 1, program_job, checkpoint={"every": "1 s"})
    cluster.wait(8)
    [node] = cluster.nodes
    assert node.group is not None
    (node.group.directories.checkpoints / "model").write_text("x")
    monkeypatch.setattr(shutil, "copyfile", full)
    cluster.wait(5)
    assert node.is_working
    assert any("could not be committed: [Errno 28]" in text for text in told(cluster))


def test_a_program_whose_last_commit_finds_the_disk_full_has_not_finished(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make(1, 1, program_job)
    cluster.wait(8)
    [node] = cluster.nodes
    assert node.group is not None
    (node.group.directories.checkpoints / "model").write_text("x")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full)
        cluster.end_workers(0)
        cluster.wait(5)
    assert cluster.run.result() is None
    assert cluster.causes() == ["start", "disk"]


def test_a_machine_without_disk_space_to_start_workers_says_so(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = make(1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(WorkerGroup, "create", full)
        cluster.wait(5)
        assert cluster.causes()[:2] == ["start", "disk"]
    cluster.wait(5)
    result = cluster.run.result()
    assert result is None or "free some space" in result.reason


def test_a_stop_that_cannot_be_written_is_written_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = make(1, 1)
    cluster.wait(8)
    [node] = cluster.nodes
    group = node.group
    assert group is not None
    with monkeypatch.context() as patch:
        patch.setattr(Control, "request_stop", full)
        cluster.run.request_stop("enough")
        cluster.wait(3)
        assert not group.control.stop_requested()
    cluster.wait(2)
    assert group.control.stop_requested()


# During a restore.


@pytest.mark.parametrize("by", ["stop", "preemption"])
def test_a_leaving_node_does_not_wait_for_a_restore(make: Make, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    held = threading.Event()
    monkeypatch.setattr(program_module.ProgramCheckpoints, "restore", lambda *_: held.wait(60))
    cluster = make(1, 1, program_job)
    [node] = cluster.nodes
    try:
        while node.group is None:
            cluster.now += 1
            node.lease.renew()
            node.look()
        if by == "stop":
            cluster.run.request_stop("enough")
        else:
            cluster.preempt(node)
        node.look()
        assert node.is_over
        assert cluster.nodes[0].group is None
        result = cluster.run.result()
        assert (result is not None and result.status == "stopped") == (by == "stop")
    finally:
        held.set()


def test_a_run_without_a_usable_checkpoint_fails(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def restore(*_: object) -> None:
        raise Mistake("none of the 2 checkpoints of job-1 can be used: x is damaged")

    monkeypatch.setattr(program_module.ProgramCheckpoints, "restore", restore)
    cluster = make(1, 1, program_job)
    cluster.wait(8)
    result = cluster.run.result()
    assert result is not None
    assert (result.status, result.reason) == ("failed", "none of the 2 checkpoints of job-1 can be used: x is damaged")


# Machines.


def test_a_machine_that_fails_twice_is_excluded_while_there_are_enough_others(make: Make, tmp_path: Path) -> None:
    cluster = make("2..3", 3)
    cluster.wait(10)
    for _ in range(2):
        assert cluster.members() == [0, 1, 2]
        cluster.fail(cluster.nodes[1], "CUDA driver initialization failed")
        cluster.wait(14)
    assert cluster.members() == [0, 2]
    (tmp_path / "w").write_bytes(b"x")
    commit(cluster.run, 100, 3, None, {"w": tmp_path / "w"})
    writer = cluster.run.point_writer("000003-rank-0")
    writer.append(Point("train", 3, 1, time.time() - 3600, MEASURED))
    writer.flush()
    cluster.wait(60)
    assert cluster.members() == [0, 2], "it is not taken in again either"
    assert cluster.run.result() is None
    [text] = [text for text in told(cluster) if "failed two generations" in text]
    assert "CUDA driver initialization failed" in text
    cluster.kill(cluster.nodes[2])
    cluster.wait(30)
    assert cluster.members() == [0, 1], "better than none"


def test_an_excluded_machine_stays_excluded_when_another_node_proposes(make: Make) -> None:
    cluster = make("2..4", 4)
    cluster.wait(10)
    for _ in range(2):
        assert cluster.members() == [0, 1, 2, 3]
        cluster.fail(cluster.nodes[1], "CUDA driver initialization failed")
        cluster.wait(14)
    assert cluster.members() == [0, 2, 3]
    assert [one.culprit for one in cluster.run.generations()] == [None, cluster.nodes[1].name, cluster.nodes[1].name]
    cluster.kill(cluster.nodes[0])
    cluster.wait(40)
    assert cluster.members() == [2, 3]


def test_machines_that_fail_in_turn_are_not_excluded(make: Make) -> None:
    cluster = make("1..2", 2)
    cluster.wait(10)
    for node in cluster.nodes:
        cluster.fail(node, "it broke")
        cluster.wait(14)
        assert cluster.members() == [0, 1]


@pytest.mark.parametrize("dark", [0, 1])
def test_a_machine_that_waited_for_one_without_power_is_not_blamed(make: Make, dark: int) -> None:
    """Its patience ends before the lease of the one that is gone."""
    cluster = make(2, 2)
    cluster.wait(10)
    innocent = cluster.nodes[1 - dark]
    for _ in range(2):
        [gone] = [cluster.nodes[number] for number in cluster.members() if cluster.nodes[number] is not innocent]
        cluster.kill(gone)
        cluster.fail(innocent, HANG, cause="hang")
        cluster.add()
        cluster.add()
        cluster.wait(40)
        latest = cluster.run.latest_generation()
        assert latest is not None
        assert (latest.cause, latest.reason) == ("machine", f"failure: machine {gone.name} was lost")
        assert latest.culprit == gone.name
        assert f"{gone.name} stopped renewing its lease" in told(cluster)
        assert innocent.name in [member.node for member in latest.members], "two others could replace it"
    assert cluster.causes() == ["start", "machine", "machine"]
    assert "failed two generations" not in " ".join(told(cluster))


def test_a_hang_that_no_lost_machine_explains_is_nobodys_fault(make: Make) -> None:
    cluster = make("1..2", 2)
    cluster.wait(10)
    for _ in range(2):
        cluster.fail(cluster.nodes[1], HANG, cause="hang")
        cluster.wait(14)
        assert cluster.members() == [0, 1]
    assert cluster.causes() == ["start", "hang", "hang"]
    assert [one.culprit for one in cluster.run.generations()] == [None, None, None]


def test_hangs_count_as_failures_whoever_caused_them(make: Make) -> None:
    cluster = make("1..2", 2)
    cluster.wait(10)
    for _ in range(4):
        assert cluster.run.result() is None
        cluster.fail(cluster.nodes[1], HANG, cause="hang")
        cluster.wait(14)
    result = cluster.run.result()
    assert result is not None
    assert (result.status, result.reason) == ("failed", f"{HANG} (after 3 restarts)")


# Budgets.


def test_a_machine_that_joins_late_keeps_to_what_is_left_of_the_budget(make: Make) -> None:
    cluster = make(2, 2, budget={"hours": 10})
    cluster.wait(10)
    for _ in range(9):
        cluster.now += 3600
        for node in cluster.there():
            node.lease.renew()
    for node in cluster.nodes:
        cluster.kill(node)
    late = cluster.add()
    cluster.wait(60)
    assert len(cluster.causes()) == 1, "one alone cannot go on"
    assert late.deadline.seconds_left == pytest.approx(3600, abs=100)


def test_no_dollars_are_reserved_for_lost_machines(make: Make) -> None:
    cluster = make("1..4", 4, budget={"dollars": 4.0})
    cluster.wait(10)
    for node in cluster.nodes[1:]:
        cluster.kill(node)
    cluster.wait(40)
    latest = cluster.run.latest_generation()
    assert latest is not None
    assert len(latest.members) == 1
    assert latest.seconds_left == pytest.approx(4 * 3600, abs=300)


def test_a_machine_is_done_with_a_result_or_past_the_deadline_but_not_when_preempted(make: Make) -> None:
    cluster = make(1, 2, budget={"hours": 1})
    first, second = cluster.nodes
    first.deadline.close()
    assert not first.has_done_its_part
    cluster.preempt(second)
    look_until_settled(second)
    assert second.is_over
    assert not second.has_done_its_part
    cluster.run.finish(Result("finished", "done", 1, 1.0))
    look_until_settled(first)
    assert cluster.nodes[0].has_done_its_part
    second.deadline.close()  # or it would end this process
    cluster.now += 3600
    assert cluster.nodes[1].has_done_its_part
