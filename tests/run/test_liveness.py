"""Liveness of machines: by watching their leases, and at one look."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.errors import PacktrainError
from packtrain.files import FileLock
from packtrain.node.directory import NodeDirectory
from packtrain.run import liveness
from packtrain.run.checkpoint import commit
from packtrain.run.liveness import (
    DOUBT_SECONDS,
    LEASE_LOST_SECONDS,
    WATCH_SECONDS,
    LeaseAge,
    LeaseWatch,
    State,
    StateWatch,
    attempt,
    fail_launch,
    finish_unattended,
    holds_lock,
    node_directory,
    state_by,
    state_now,
    state_of,
    states_now,
    store_time,
    was_left_before_launch,
    watch_states,
    without_nodes,
)  # fmt: skip
from packtrain.run.records import FleetLaunch, Lease, Result
from packtrain.run.run import Run
from packtrain.store import Store, StoreError, open_store
from packtrain.store.records import DamagedRecord
from packtrain.system import this_client
from parts.faulty import FaultyStore
from parts.runs import a_generation, a_lease, new_run, write_files


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
    watch.observe([a_lease("a", 6)], 63.0)
    assert not watch.alive("a", 63.0)
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


def test_a_node_has_renewed_since_a_moment_if_that_was_seen_later() -> None:
    watch = looked((0.0, [a_lease("a", 5), a_lease("b", 5)]), (2.0, [a_lease("a", 6), a_lease("b", 5)]))
    assert watch.renewed_since("a", 1.9)
    assert not watch.renewed_since("a", 2.0)
    assert not watch.renewed_since("b", -1.0), "it was seen only once"
    assert not watch.renewed_since("c", -1.0)


def test_nodes_that_may_be_alive_remain() -> None:
    looks = ([a_lease("a", 5), a_lease("b", 5), a_lease("c", 5)], [a_lease("a", 6), a_lease("c", 6, left=True)])
    watch = looked((0.0, looks[0]), (2.0, looks[1]))
    assert (watch.count_alive(2.0), watch.count_remaining(2.0)) == (1, 2)
    assert (watch.count_alive(LOST), watch.count_remaining(LOST)) == (1, 1)
    assert (watch.count_alive(2.0 + LOST), watch.count_remaining(2.0 + LOST)) == (0, 0)


def test_a_pause_of_four_seconds_between_two_looks_is_not_blindness() -> None:
    renewed = (0.0, [a_lease("a", 5)]), (2.0, [a_lease("a", 6)])
    watch = looked(*renewed, (6.0, [a_lease("a", 6)]))
    assert watch.alive("a", 6.0)
    watch = looked(*renewed, (6.5, [a_lease("a", 6)]))
    assert not watch.alive("a", 6.5), "it may have died meanwhile"
    assert not watch.lost("a", 2.4 + LOST)
    assert watch.lost("a", 2.5 + LOST)


def test_a_node_that_returns_after_it_has_left_must_renew_to_be_alive() -> None:
    watch = looked(*((float(now), [a_lease("a", now, left=now == 2)]) for now in range(4)))
    assert not watch.alive("a", 3.0)
    assert not watch.lost("a", 3.0)
    watch.observe([a_lease("a", 4)], 4.0)
    assert watch.alive("a", 4.0)


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


def test_a_run_that_cannot_be_read_does_not_hide_the_others(directory_store: Store) -> None:
    runs = [new_run(directory_store) for _ in range(3)]
    directory_store.put(runs[0].key("result.json"), b"{")
    damaged, waiting, finished = runs
    finished.finish(Result("finished", "", 1, 1.0))
    error, *states = watch_states(runs)
    assert isinstance(error, DamagedRecord)
    assert states == ["waiting", "finished"]
    error, *states = states_now(runs)
    assert isinstance(error, DamagedRecord)
    assert states == ["waiting", "finished"]
    assert (state_of(finished), state_now(waiting)) == ("finished", "waiting")
    for state in (state_of, state_now):
        with pytest.raises(DamagedRecord):
            state(damaged)


def test_a_run_whose_leases_cannot_be_read_does_not_hide_the_others(directory_store: Store) -> None:
    store = FaultyStore(directory_store)
    runs = [new_run(directory_store) for _ in range(2)]
    refused = StoreError("permission denied")
    store.fault = lambda operation, key: refused if operation == "list" and key.startswith(runs[0].folder) else None
    runs = [Run(store, run.name) for run in runs]
    runs[1].renew(a_lease("a", left=True))
    assert watch_states(runs, seconds=0.0) == [refused, "interrupted"]


def never(_: float) -> None:
    raise AssertionError("there is nothing to wait for")


def test_a_watch_ends_once_no_run_is_left_to_watch(directory_store: Store) -> None:
    store = FaultyStore(directory_store)
    runs = [Run(store, new_run(directory_store).name) for _ in range(2)]
    refused = StoreError("permission denied")
    store.fault = lambda operation, key: refused if operation == "list" and key.startswith(runs[0].folder) else None
    assert watch_states(runs, sleep=never) == [refused, "waiting"]


def test_a_watch_ends_when_its_time_is_up(directory_store: Store) -> None:
    """Each run has nodes of its own: a name that another run does not have has not just joined."""
    runs = [new_run(directory_store) for _ in range(2)]
    for run, name in zip(runs, "ab", strict=True):
        run.renew(a_lease(name))
    assert watch_states(runs, seconds=0.0, clock=lambda: 5.0, sleep=never) == ["interrupted", "interrupted"]


def test_a_store_that_is_away_concerns_all_runs() -> None:
    def fail(error: PacktrainError) -> str:
        raise error

    refused, away = StoreError("permission denied"), StoreError("the store is away", temporary=True)
    assert attempt(lambda: "an answer") == "an answer"
    assert attempt(partial(fail, refused)) is refused
    with pytest.raises(StoreError, match="the store is away"):
        attempt(partial(fail, away))


# Launches.


def placed(run: Run, key: str, seconds: float) -> None:
    """Date an object back."""
    os.utime(Path(run.store.url, run.key(key)), (1_700_000_000 - seconds,) * 2)


def launched(run: Run, *seconds: float) -> None:
    for number, ago in enumerate(seconds, 1):
        run.record_launch(FleetLaunch(0.0, "client", {}))
        placed(run, f"launches/{number:06d}.json", ago)


@pytest.fixture
def quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "watch_states", partial(watch_states, seconds=0.1, poll_seconds=0.02))


@pytest.mark.parametrize(
    ("left", "launches", "state"),
    [
        ([], [], "waiting"),
        ([60], [], "interrupted"),
        ([60], [90], "interrupted"),
        ([60], [60], "interrupted"),
        ([60], [30], "waiting"),
        ([60], [30, 90], "waiting"),
        ([20, 60], [30], "interrupted"),
    ],
)
def test_a_run_without_nodes_is_waiting_if_it_was_launched_since(
    directory_store: Store, left: list[int], launches: list[int], state: State
) -> None:
    run = new_run(directory_store)
    for ago in left:
        run.renew(a_lease(f"n{ago}", left=True))
        placed(run, f"nodes/n{ago}.json", ago)
    launched(run, *launches)
    assert without_nodes(run) == state


@pytest.mark.usefixtures("quick_watch")
@pytest.mark.parametrize(
    ("launches", "was_left"),
    [
        ([10], True),
        ([90, 10], True),
        ([60, 10], True),
        ([30, 10], False),  # the machines of the launch before have yet to join
    ],
)
def test_a_run_was_left_if_all_nodes_of_earlier_launches_are_gone(
    directory_store: Store, launches: list[int], was_left: bool
) -> None:
    run = new_run(directory_store)
    run.renew(a_lease("a", left=True))
    placed(run, "nodes/a.json", 60)
    launched(run, *launches)
    assert was_left_before_launch(run) == was_left


@pytest.mark.usefixtures("quick_watch")
def test_a_run_that_nobody_has_joined_or_that_is_over_was_not_left(directory_store: Store) -> None:
    run = new_run(directory_store)
    launched(run, 10)
    assert not was_left_before_launch(run)
    run.renew(a_lease("a", left=True))
    placed(run, "nodes/a.json", 5)
    assert was_left_before_launch(run)
    run.finish(Result("finished", "", 1, 1.0))
    assert not was_left_before_launch(run)


# A launch that started nothing.


def test_a_run_whose_launch_failed_has_failed(directory_store: Store) -> None:
    run = new_run(directory_store)
    run.record_launch(FleetLaunch(0.0, this_client(), {}))
    fail_launch(run, "failed", "no such host")
    assert run.result() == Result("failed", "no such host", 0, 0.0)
    assert [launch.failed for launch in run.launches()] == [True]


@pytest.mark.usefixtures("quick_watch")
def test_a_run_whose_second_launch_failed_has_failed_at_its_last_step(directory_store: Store, tmp_path: Path) -> None:
    run = new_run(directory_store)
    launched(run, 90)
    run.renew(a_lease("a", left=True, used_seconds=60.0))
    placed(run, "nodes/a.json", 60)
    commit(run, 5, 1, None, write_files(tmp_path / "saved", {"file": b"x"}))
    run.record_launch(FleetLaunch(0.0, this_client(), {}))
    fail_launch(run, "failed", "no such host")
    assert run.result() == Result("failed", "no such host", 5, 60.0)


def test_a_launch_that_is_tried_again_does_not_end_its_run_until_the_last_try(directory_store: Store) -> None:
    run = new_run(directory_store)
    for is_last_try in (False, True):
        assert run.result() is None
        run.record_launch(FleetLaunch(0.0, this_client(), {}))
        fail_launch(run, "failed", "no such host", is_last_try=is_last_try)
    assert run.result() is not None


@pytest.mark.parametrize("joined", [True, False])
def test_a_failed_launch_does_not_end_a_run_that_others_work_on_or_have_launched(
    joined: bool, directory_store: Store
) -> None:
    run = new_run(directory_store)
    run.record_launch(FleetLaunch(0.0, "somebody@else", {}))
    if joined:
        aged(run, a_lease("a"), 1)
    fail_launch(run, "failed", "no such host")
    run.record_launch(FleetLaunch(0.0, this_client(), {}))
    fail_launch(run, "failed", "no such host")
    assert run.result() is None
    assert not run.launches()[0].failed


# A stop that no machine can carry out.


def test_a_run_without_machines_is_stopped_where_it_is(directory_store: Store, tmp_path: Path) -> None:
    run = new_run(directory_store)
    (tmp_path / "file").write_bytes(b"x")
    commit(run, 5, 1, None, {"f": tmp_path / "file"})
    for name, used_seconds in (("a", 60.0), ("b", 40.0)):
        aged(run, a_lease(name, used_seconds=used_seconds), 3600)
    run.propose(a_generation(1))
    run.propose(replace(a_generation(2), step=5))
    names = ["000000007-000001-aaa", "000000008-000002-bbb"]
    for name in names:
        directory_store.put(run.key(f"checkpoints/{name}/files/f"), b"x")
    unfinished, other = (Path(directory_store.url, one.key(".tmp-1")) for one in (run, new_run(directory_store)))
    for path in (unfinished, other):
        path.write_bytes(b"x")
    assert finish_unattended(run)
    stopped = "stopped by user while no machine was working on it"
    assert run.result() == Result("stopped", stopped, 5, 60.0)
    folders = directory_store.folders(run.key("checkpoints/"))
    assert [name in folders for name in names] == [False, True], "the last generation may still commit"
    assert not unfinished.exists()
    assert other.exists(), "another run may be writing it"


def test_a_run_that_no_machine_has_joined_is_stopped_before_its_first_step(directory_store: Store) -> None:
    run = new_run(directory_store)
    directory_store.put(run.key("checkpoints/000000007-000001-aaa/files/f"), b"x")
    assert finish_unattended(run)
    result = run.result()
    assert result is not None
    assert (result.status, result.step, result.seconds) == ("stopped", 0, 0.0)
    assert directory_store.folders(run.key("checkpoints/")) == ["000000007-000001-aaa"]


def test_a_run_that_a_machine_works_on_is_not_stopped_here(directory_store: Store) -> None:
    run = new_run(directory_store)
    aged(run, a_lease("a"), 1)
    assert not finish_unattended(run)
    assert run.result() is None


def test_a_stopped_run_has_its_result_even_if_nothing_can_be_removed(directory_store: Store) -> None:
    run = new_run(directory_store)
    store = FaultyStore(directory_store)
    store.refuse("remove_unfinished")
    assert finish_unattended(Run(store, run.name))
    assert run.result() is not None


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
        (LeaseAge(LEASE_LOST_SECONDS, one_clock=True), True),
        (LeaseAge(LEASE_LOST_SECONDS + 1, one_clock=True), None),
        (LeaseAge(LEASE_LOST_SECONDS + 2, one_clock=True), None),
        (LeaseAge(LEASE_LOST_SECONDS + 3, one_clock=True), False),
        (LeaseAge(1.0, one_clock=False), True),
        (LeaseAge(-2.0, one_clock=False), True),  # object stores keep times to the second
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


def test_only_an_exclusive_lock_shows_that_a_node_runs(directory_store: Store) -> None:
    run = new_run(directory_store)
    assert holds_lock(run, "a") is None, "it was never here"
    lock = NodeDirectory.create(run, "a").lock
    assert holds_lock(run, "a") is True
    lock.close()
    path = node_directory(run, "a") / "lock"
    reader = FileLock(path, shared=True)
    assert holds_lock(run, "a") is False, "another reader looks at the same time"
    reader.close()
    path.unlink()
    assert holds_lock(run, "a") is None


def test_a_node_of_another_machine_is_not_judged_by_a_lock_in_a_shared_directory(
    directory_store: Store, watched: Watched
) -> None:
    run = new_run(directory_store)
    lock = NodeDirectory.create(run, "a").lock
    aged(run, a_lease("a"), 3600)
    assert holds_lock(run, "a") is True
    assert states_now([run], watched) == ["interrupted"]
    assert watched.names == []
    lock.close()


def test_at_one_look_the_leases_in_a_bucket_have_the_clock_that_was_asked(
    directory_store: Store, watched: Watched
) -> None:
    bucket = FaultyStore(directory_store)
    bucket.is_directory = False
    run = Run(bucket, new_run(directory_store).name)
    aged(run, a_lease("a"), LEASE_LOST_SECONDS + 8)
    assert states_now([run], watched) == ["interrupted"]
    assert watched.names == []
    assert {key.startswith(run.folder) for operation, key in bucket.operations if operation == "list"} == {True}


def test_a_store_that_loses_what_was_written_has_no_clock(
    directory_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_store, "entry", lambda _: None)
    assert store_time(directory_store) is None


def test_the_clock_of_a_store_is_read_by_writing_to_it(directory_store: Store) -> None:
    now = store_time(directory_store)
    assert now is not None
    assert abs(now - datetime.now(UTC)) < timedelta(minutes=10)
    assert directory_store.list("scratch/") == []
    store = FaultyStore(directory_store)
    store.refuse("put")
    assert store_time(store) is None


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


def test_a_lease_of_this_machine_is_judged_by_the_clock_of_this_machine(directory_store: Store) -> None:
    here = replace(a_lease("a"), hostname=socket.gethostname())
    run = new_run(directory_store)
    aged(run, here, LEASE_LOST_SECONDS + 8)
    assert StateWatch(run).look() == "interrupted"
    bucket = FaultyStore(directory_store)
    bucket.is_directory = False
    elsewhere = Run(bucket, new_run(directory_store).name)
    aged(elsewhere, a_lease("a"), LEASE_LOST_SECONDS + 8)
    assert StateWatch(elsewhere).look() == "running", "the clock of the bucket may be behind"


def test_a_reader_that_stays_judges_by_age_until_a_lease_could_be_lost(directory_store: Store) -> None:
    run, now = new_run(directory_store), [0.0]
    watch = StateWatch(run, lambda: now[0])
    for moment in (0.0, 3.0, 6.0, 9.0, LEASE_LOST_SECONDS):
        now[0] = moment
        aged(run, a_lease("a"), 1)
        assert watch.look() == "running"
    now[0] += 0.5
    assert watch.look() == "interrupted"


def test_a_reader_that_stays_reads_only_the_leases_that_were_renewed(directory_store: Store) -> None:
    store = FaultyStore(directory_store)
    run = Run(store, new_run(directory_store).name)
    for key in ("nodes/note.txt", "nodes/deep/er.json"):
        directory_store.put(run.key(key), b"{")
    for ago, node in enumerate("abc"):
        aged(run, a_lease(node), ago)
    watch = StateWatch(run)

    def read() -> list[str]:
        store.operations.clear()
        watch.look()
        return sorted(key for operation, key in store.operations if operation == "find")

    assert not watch.is_alive("a"), "nothing was looked at"
    assert read() == [run.lease_key(node) for node in "abc"]
    assert {key for operation, key in store.operations if operation == "list"} == {run.key("nodes/")}
    assert read() == []
    aged(run, a_lease("b", 2), 5)
    assert read() == [run.lease_key("b")]
    assert [(lease.node, lease.renewal) for lease in watch.leases] == [("a", 0), ("b", 2), ("c", 0)]


def test_a_look_reads_a_limited_number_of_leases_and_the_next_one_the_rest(directory_store: Store) -> None:
    run = new_run(directory_store)
    for number in range(70):
        run.renew(a_lease(f"n{number:02d}"))
    watch = StateWatch(run)
    counts = []
    for _ in range(3):
        watch.look()
        counts.append(len(watch.leases))
    assert counts == [64, 70, 70]
