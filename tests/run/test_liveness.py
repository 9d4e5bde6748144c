"""Liveness of machines: by watching their leases, and at one look."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.errors import PacktrainError
from packtrain.node.directory import NodeDirectory
from packtrain.run.liveness import (
    DOUBT_SECONDS,
    LEASE_LOST_SECONDS,
    WATCH_SECONDS,
    LeaseAge,
    LeaseWatch,
    State,
    StateWatch,
    state_by,
    state_now,
    states_now,
    watch_states,
)  # fmt: skip
from packtrain.run.records import FleetLaunch, Lease, Result
from packtrain.run.run import Run
from packtrain.store import Store, open_store
from parts.runs import a_lease, new_run


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))


LOST = 12.0


def looked(*looks: tuple[float, list[Lease]]) -> LeaseWatch:
    watch = LeaseWatch(LOST)
    for now, leases in looks:
        watch.observe(leases, now)
    return watch


# Leases.


def test_one_look_does_not_say_whether_a_node_is_alive() -> None:
    watch = looked((0.0, [a_lease("a", 5)]))
    assert not watch.alive("a", 1.0)
    assert not watch.lost("a", 1.0)


def test_a_node_that_was_seen_to_renew_its_lease_is_alive() -> None:
    watch = looked((0.0, [a_lease("a", 5)]), (2.0, [a_lease("a", 6)]))
    assert watch.alive("a", 2.0 + LOST - 0.1)
    assert not watch.lost("a", 2.0 + LOST - 0.1)


def test_a_node_that_does_not_renew_for_too_long_is_lost() -> None:
    still = [(now, [a_lease("a", 6)]) for now in (2.0, 5.0, 8.0, 11.0, 13.0)]
    watch = looked((0.0, [a_lease("a", 5)]), *still)
    assert watch.lost("a", 2.0 + LOST)
    assert not watch.alive("a", 2.0 + LOST)


def test_time_in_which_the_reader_could_not_look_does_not_count() -> None:
    """A store that was away is no sign that others are dead, nor that they live."""
    watch = looked((0.0, [a_lease("a", 5)]), (2.0, [a_lease("a", 6)]), (62.0, [a_lease("a", 6)]))
    assert not watch.lost("a", 62.0)
    assert not watch.alive("a", 62.0)
    assert watch.lost("a", 62.0 + LOST)
    watch.observe([a_lease("a", 7)], 64.0)
    assert watch.alive("a", 64.0)


def test_a_node_that_never_renewed_is_lost_after_the_same_time() -> None:
    watch = looked((100.0, [a_lease("a", 5)]))
    assert watch.lost("a", 100.0 + LOST)


def test_a_node_that_leaves_is_lost_immediately() -> None:
    watch = looked((0.0, [a_lease("a", 5)]), (2.0, [a_lease("a", 6)]), (3.0, [a_lease("a", 7, left=True)]))
    assert watch.lost("a", 3.0)
    assert not watch.alive("a", 3.0)


def test_a_node_without_a_lease_is_lost() -> None:
    assert LeaseWatch(LOST).lost("a", 0.0)
    assert not LeaseWatch(LOST).alive("a", 0.0)


def test_a_lost_node_that_renews_again_is_alive_again() -> None:
    watch = looked((0.0, [a_lease("a", 5)]), (2.0, [a_lease("a", 6)]), (60.0, [a_lease("a", 7)]))
    assert watch.alive("a", 61.0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 3.9), st.integers(0, 3), st.booleans()), max_size=12), st.floats(0, 20))
def test_age_is_judged_by_the_readers_clock_alone(looks: list[tuple[float, int, bool]], after: float) -> None:
    """The counter's value does not matter, only how long ago this reader saw it change."""
    watch, now, changed, before, renewed = LeaseWatch(LOST), 0.0, None, None, False
    for pause, renewal, left in looks:
        now += pause
        watch.observe([a_lease("a", renewal, left=left)], now)
        if left:
            changed, before, renewed = None, None, False
        elif renewal != before:
            renewed = before is not None or renewed
            changed, before = now, renewal
    now += after
    assert watch.lost("a", now) == (changed is None or now - changed >= LOST)
    assert watch.alive("a", now) == (changed is not None and renewed and now - changed < LOST)


# States by watching.


def quick_state(run: Run) -> State | PacktrainError:
    return watch_states([run], seconds=0.6, poll_seconds=0.025)[0]


@contextmanager
def renewing(run: Run, node: Lease) -> Iterator[None]:
    over = threading.Event()

    def work() -> None:
        renewal = node.renewal
        while not over.wait(0.05):
            renewal += 1
            run.renew(a_lease(node.node, renewal))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_run_whose_node_renews_its_lease_is_running(any_store: Store) -> None:
    run = new_run(any_store)
    run.renew(a_lease("a"))
    with renewing(run, a_lease("a")):
        assert quick_state(run) == "running"


def test_a_run_whose_lease_is_not_renewed_is_interrupted(any_store: Store) -> None:
    run = new_run(any_store)
    run.renew(a_lease("a", renewal=5))
    assert quick_state(run) == "interrupted"


def test_a_run_that_is_launched_again_is_waiting_until_a_node_joins(directory_store: Store) -> None:
    run = new_run(directory_store)
    run.renew(a_lease("a", left=True))
    before = Path(directory_store.url, run.lease_key("a"))
    os.utime(before, (before.stat().st_mtime - 60,) * 2)
    assert (state_now(run), StateWatch(run).look()) == ("interrupted", "interrupted")
    run.record_launch(FleetLaunch(0.0, "client", {}))
    assert (state_now(run), quick_state(run), StateWatch(run).look()) == ("waiting", "waiting", "waiting")
    launched = Path(directory_store.url, run.key("launches/000001.json"))
    os.utime(launched, (launched.stat().st_mtime - 60,) * 2)
    run.renew(a_lease("b", left=True))
    assert (state_now(run), quick_state(run)) == ("interrupted", "interrupted")


def test_a_node_that_leaves_while_it_is_watched_does_not_count_as_alive(directory_store: Store) -> None:
    run = new_run(directory_store)
    run.renew(a_lease("a", renewal=5))
    timer = threading.Timer(0.1, lambda: run.renew(a_lease("a", renewal=6, left=True)))
    timer.start()
    assert quick_state(run) == "interrupted"
    timer.join()


def test_a_run_that_no_machine_has_joined_is_waiting(any_store: Store) -> None:
    assert quick_state(new_run(any_store)) == "waiting"


def test_a_run_that_is_resumed_is_running_once_a_new_machine_has_joined(directory_store: Store) -> None:
    run = new_run(directory_store)
    run.renew(a_lease("a", renewal=5, left=True))
    timer = threading.Timer(0.1, lambda: run.renew(a_lease("b")))
    timer.start()
    assert quick_state(run) == "running"
    timer.join()


@pytest.mark.parametrize("status", ["finished", "failed", "stopped"])
def test_the_state_of_a_run_with_a_result_is_its_status(directory_store: Store, status: str) -> None:
    run = new_run(directory_store)
    run.renew(a_lease("a"))
    run.finish(Result(status, "", 1, 1.0))  # type: ignore[arg-type]
    assert quick_state(run) == status


def test_many_runs_are_watched_together(directory_store: Store) -> None:
    """Time is counted in the watcher's own pauses, not measured."""
    runs = [new_run(directory_store) for _ in range(6)]
    for run in runs:
        run.renew(a_lease("a"))
    runs[0].finish(Result("finished", "", 1, 1.0))
    clock = {"now": 0.0, "pauses": 0}

    def sleep(seconds: float) -> None:
        clock["now"] += seconds
        clock["pauses"] += 1
        runs[2].renew(a_lease("a", renewal=int(clock["pauses"])))

    states = watch_states(runs, clock=lambda: clock["now"], sleep=sleep)
    assert states == ["finished", "interrupted", "running", "interrupted", "interrupted", "interrupted"]
    assert clock["now"] < 2 * WATCH_SECONDS


# States at one look.


@dataclass
class Watched:
    """Remembers the runs that had to be watched; says that they are interrupted."""

    names: list[str] = field(default_factory=list)

    def __call__(self, runs: Sequence[Run]) -> list[State | PacktrainError]:
        self.names.extend(run.name for run in runs)
        return ["interrupted"] * len(runs)


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.mark.parametrize(
    ("age", "alive"),
    [
        (LeaseAge(1.0, one_clock=True), True),
        (LeaseAge(-5.0, one_clock=True), True),  # renewed after the time was asked for
        (LeaseAge(LEASE_LOST_SECONDS + 1, one_clock=True), None),
        (LeaseAge(LEASE_LOST_SECONDS + 3, one_clock=True), False),
        (LeaseAge(1.0, one_clock=False), True),
        (LeaseAge(-5.0, one_clock=False), None),  # its clock is ahead
        (LeaseAge(LEASE_LOST_SECONDS + 3, one_clock=False), None),  # lost, or its clock is behind
        (LeaseAge(DOUBT_SECONDS + 1, one_clock=False), False),
        (LeaseAge(None, one_clock=True), None),
        (LeaseAge(1.0, one_clock=True, holds_lock=False), False),
        (LeaseAge(3600.0, one_clock=True, holds_lock=True), True),
    ],
)
def test_the_age_of_a_lease_says_whether_its_node_is_alive_or_leaves_a_doubt(age: LeaseAge, alive: bool | None) -> None:
    assert age.is_alive() is alive


def test_a_run_with_one_live_machine_is_running_and_one_in_doubt_has_to_be_watched() -> None:
    works, lost, unknown = LeaseAge(1.0, True), LeaseAge(3600.0, True), LeaseAge(None, True)
    assert state_by([lost, unknown, works]) == "running"
    assert state_by([lost, unknown]) is None
    assert state_by([lost]) == "interrupted"
    assert state_by([]) == "interrupted", "all have left"
    assert state_by(None) == "waiting"


def aged(run: Run, node: Lease, seconds: float) -> None:
    run.renew(node)
    path = Path(run.store.url) / run.key(f"nodes/{node.node}.json")
    os.utime(path, (time.time() - seconds,) * 2)


def test_many_runs_are_judged_at_one_look_and_only_doubts_are_watched(directory_store: Store, watched: Watched) -> None:
    runs = [new_run(directory_store) for _ in range(36)]
    for number, run in enumerate(runs):
        if number % 4 == 0:
            run.finish(Result("finished", "", 1, 1.0))
        elif number % 4 == 1:
            aged(run, a_lease("a"), 3600)
        elif number % 4 == 2:
            aged(run, a_lease("a"), 1)
    aged(runs[5], a_lease("a"), 30)  # of another machine, whose clock may be behind
    told = states_now(runs, watched)
    assert told == ["finished", "interrupted", "running", "waiting"] * 9
    assert watched.names == [runs[5].name]
    assert directory_store.list("scratch/") == []


def test_a_node_on_this_machine_is_judged_by_its_lock(directory_store: Store, watched: Watched) -> None:
    """Its lease may be newer than its death, or older because the store cannot be reached."""
    run = new_run(directory_store)
    node = a_lease("here-1")
    node = Lease(**{**node.__dict__, "hostname": socket.gethostname()})
    directory = NodeDirectory.create(run, node.node)
    aged(run, node, 3600)
    assert states_now([run], watched) == ["running"]
    directory.lock.close()
    run.renew(node)
    assert states_now([run], watched) == ["interrupted"]
    assert watched.names == []


def test_in_a_bucket_all_leases_have_the_clock_of_the_server(s3_store: Store, watched: Watched) -> None:
    run = new_run(s3_store)
    run.renew(a_lease("a"))
    assert states_now([run, new_run(s3_store)], watched) == ["running", "waiting"]
    assert watched.names == []


def test_runs_in_a_store_that_cannot_be_written_are_watched(directory_store: Store, watched: Watched) -> None:
    run = new_run(directory_store)
    aged(run, a_lease("a"), 3600)
    assert states_now([run], watched, clock_of=lambda _: None) == ["interrupted"]
    assert watched.names == [run.name]
    assert states_now([]) == []
    assert open_store(run.store.url).list("scratch/") == []


# Look by look.


def test_a_reader_that_stays_sees_a_run_start_stop_and_continue(directory_store: Store) -> None:
    run, now = new_run(directory_store), [0.0]
    watch = StateWatch(run, lambda: now[0])
    assert watch.look() == "waiting"
    run.renew(a_lease("a", 1))
    assert (watch.look(), watch.is_alive("a")) == ("running", True)
    while now[0] < 2 * LEASE_LOST_SECONDS:
        now[0] += 1.0
        state = watch.look()
    assert (state, watch.is_alive("a")) == ("interrupted", False)
    aged(run, a_lease("a", 2), -5.0)  # a file system's clock may be too coarse to tell two renewals apart
    assert watch.look() == "running"
    run.renew(a_lease("a", 3, left=True))
    assert (watch.look(), [lease.left for lease in watch.leases]) == ("interrupted", [True])


def test_a_reader_that_stays_knows_at_once_that_an_old_lease_is_of_no_one(directory_store: Store) -> None:
    run = new_run(directory_store)
    aged(run, a_lease("a"), DOUBT_SECONDS + 10)
    assert StateWatch(run).look() == "interrupted"


def test_looking_at_a_run_writes_nothing(directory_store: Store) -> None:
    run = new_run(directory_store)
    run.renew(a_lease("a"))
    before = directory_store.list()
    StateWatch(run).look()
    assert directory_store.list() == before
