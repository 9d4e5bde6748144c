"""What runs are doing, told without waiting."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from packtrain.node.directory import Home
from packtrain.run import liveness as signs
from packtrain.run.liveness import DOUBT_SECONDS, Sign, state_by, states_now
from packtrain.run.records import Lease, Result
from packtrain.run.run import LEASE_LOST_SECONDS, Run
from packtrain.store import Store, open_store
from parts.runs import a_lease, new_run


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs that had to be watched; they turn out to be interrupted."""
    names: list[str] = []

    def watch(runs: list[Run]) -> list[str]:
        names.extend(run.name for run in runs)
        return ["interrupted"] * len(runs)

    monkeypatch.setattr(signs, "states", watch)
    return names


@pytest.mark.parametrize(
    ("sign", "at_work"),
    [
        (Sign(1.0, one_clock=True), True),
        (Sign(-5.0, one_clock=True), True),  # renewed after the time was asked for
        (Sign(LEASE_LOST_SECONDS + 1, one_clock=True), None),
        (Sign(LEASE_LOST_SECONDS + 3, one_clock=True), False),
        (Sign(1.0, one_clock=False), True),
        (Sign(-5.0, one_clock=False), None),  # its clock is ahead
        (Sign(LEASE_LOST_SECONDS + 3, one_clock=False), None),  # lost, or its clock is behind
        (Sign(DOUBT_SECONDS + 1, one_clock=False), False),
        (Sign(None, one_clock=True), None),
        (Sign(1.0, one_clock=True, lives=False), False),
        (Sign(3600.0, one_clock=True, lives=True), True),
    ],
)
def test_a_lease_tells_by_its_age_or_leaves_a_doubt(sign: Sign, at_work: bool | None) -> None:
    assert sign.says() is at_work


def test_one_machine_at_work_is_enough_and_one_in_doubt_has_to_be_watched() -> None:
    works, lost, unknown = Sign(1.0, True), Sign(3600.0, True), Sign(None, True)
    assert state_by([lost, unknown, works]) == "running"
    assert state_by([lost, unknown]) is None
    assert state_by([lost]) == "interrupted"
    assert state_by([]) == "interrupted", "all have left"
    assert state_by(None) == "waiting"


def aged(run: Run, node: Lease, seconds: float) -> None:
    run.renew(node)
    path = Path(run.store.url) / run.key(f"nodes/{node.node}.json")
    os.utime(path, (time.time() - seconds,) * 2)


def test_dozens_of_runs_are_told_apart_and_only_a_doubt_is_watched(directory_store: Store, watched: list[str]) -> None:
    runs = [new_run(directory_store) for _ in range(36)]
    for number, run in enumerate(runs):
        if number % 4 == 0:
            run.finish(Result("finished", "", 1, 1.0))
        elif number % 4 == 1:
            aged(run, a_lease("a"), 3600)
        elif number % 4 == 2:
            aged(run, a_lease("a"), 1)
    aged(runs[5], a_lease("a"), 30)  # of another machine, whose clock may be behind
    told = states_now(runs)
    assert told == ["finished", "interrupted", "running", "waiting"] * 9
    assert watched == [runs[5].name]
    assert directory_store.list("scratch/") == []


def test_an_agent_of_this_machine_is_known_by_its_lock(directory_store: Store, watched: list[str]) -> None:
    """Whatever its lease says: it may be killed a moment ago, or unable to reach the store."""
    run = new_run(directory_store)
    node = a_lease("here-1")
    node = Lease(**{**node.__dict__, "hostname": socket.gethostname()})
    home = Home.make(run, node.node)
    aged(run, node, 3600)
    assert states_now([run]) == ["running"]
    os.close(home._lock)
    run.renew(node)
    assert states_now([run]) == ["interrupted"]
    assert watched == []


def test_a_bucket_has_one_clock_for_all(s3_store: Store, watched: list[str]) -> None:
    run = new_run(s3_store)
    run.renew(a_lease("a"))
    assert states_now([run, new_run(s3_store)]) == ["running", "waiting"]
    assert watched == []


def test_who_may_not_write_watches(directory_store: Store, watched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(directory_store)
    aged(run, a_lease("a"), 3600)
    monkeypatch.setattr(signs, "_store_time", lambda _: None)
    assert states_now([run]) == ["interrupted"]
    assert watched == [run.name]
    assert states_now([]) == []
    assert open_store(run.store.url).list("scratch/") == []
