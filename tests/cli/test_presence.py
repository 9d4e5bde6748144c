"""What is said about the machines of a run to whoever follows it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from packtrain.cli import follow as following
from packtrain.cli import presence
from packtrain.cli.follow import Follower, follow
from packtrain.cli.presence import ASK_SECONDS, Presence, in_words, is_over
from packtrain.errors import EXIT_UNFINISHED, NotFinished
from packtrain.fleet import Machine
from packtrain.fleet.local import LocalFleet
from packtrain.run.records import Event
from packtrain.run.run import Run
from packtrain.store import Store, StoreError
from packtrain.units import Machines
from parts.runs import a_lease, new_run, program_job

TWO = Machines(2, 2)


@pytest.mark.parametrize(
    ("alive", "machines", "said"),
    [
        (2, None, None),
        (1, [Machine("a", "running"), Machine("b", "ended")], "waits for 1 of 2 machines: 1 running, 1 ended"),
        (0, [Machine("a", "unreachable"), Machine("b", "ended")], "waits for 2 of 2 machines: 1 unreachable, 1 ended"),
        (0, [Machine("7", "PENDING", "Resources")], "waits for 2 of 2 machines: 1 PENDING (Resources)"),
        (0, None, "waits for 2 of 2 machines"),
        (1, [], "waits for 1 of 2 machines"),
    ],
)
def test_what_a_run_waits_for_is_said(alive: int, machines: list[Machine] | None, said: str | None) -> None:
    word = in_words(alive, TWO, machines, "job-1")
    assert (word.text if word else None) == said
    assert word is None or not word.none_left


@pytest.mark.parametrize(
    "machines", [[], [Machine("a", "ended")], [Machine("a", "COMPLETED"), Machine("b", "TIMEOUT")]]
)
def test_nobody_who_is_left_is_said_with_what_to_do(machines: list[Machine]) -> None:
    word = in_words(0, TWO, machines, "job-1")
    assert word is not None
    assert word.none_left
    assert "`packtrain resume job-1`" in word.text


@pytest.mark.parametrize(
    ("state", "over"),
    [("RUNNING", False), ("COMPLETING", False), ("COMPLETED COMPLETING", True), ("unreachable", False)],
)
def test_a_job_that_is_queued_again_is_not_over(state: str, over: bool) -> None:
    assert is_over(state) == over


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def seen(watcher: Presence, clock: Clock, seconds: float, each: Callable[[], None] = lambda: None) -> str:
    """What is said after that time, with a look every two seconds."""
    word = None
    for _ in range(int(seconds / 2)):
        clock.now += 2
        each()
        word = watcher.look()
        if watcher._asking is not None:
            watcher._asking.result()
    return word.text if word is not None else ""


def test_the_fleet_is_asked_when_too_few_are_there_and_not_before(
    directory_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    here = [Machine("this machine", "running")]

    def machines(_: LocalFleet, run: Run) -> list[Machine]:
        asked.append(run.name)
        return here

    monkeypatch.setattr(LocalFleet, "list", machines)
    run, clock = new_run(directory_store, program_job(fleet={"local": {"machines": 2}})), Clock()
    watcher = Presence(run, clock)
    assert seen(watcher, clock, ASK_SECONDS - 2) == ""
    assert not asked
    assert seen(watcher, clock, 6) == "waits for 2 of 2 machines: 1 running"
    renewals = iter(range(1000))

    def renew() -> None:
        for name in "ab":
            run.renew(a_lease(name, next(renewals)))

    assert seen(watcher, clock, 60, renew) == ""
    assert len(asked) == 1
    here.clear()  # and nobody renews any more
    assert "no machine is left" in seen(watcher, clock, 20 + ASK_SECONDS)
    assert not watcher.in_vain
    seen(watcher, clock, ASK_SECONDS + 4)
    assert watcher.in_vain


def test_following_a_run_that_nobody_works_on_ends_with_what_to_do(
    directory_store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(presence, "ASK_SECONDS", 0.0)
    monkeypatch.setattr(following, "_POLL_SECONDS", 0.01)
    with pytest.raises(NotFinished, match="no machine is left: `packtrain resume job-1`") as ended:
        follow(new_run(directory_store), [], foreground=False)
    assert ended.value.exit_code == EXIT_UNFINISHED
    assert "no machine is left" in capsys.readouterr().out, "it is said as soon as it is known"


def test_a_store_that_is_away_ends_the_following_and_not_the_run(
    directory_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: Run) -> None:
        raise StoreError("the store does not answer", temporary=True)

    monkeypatch.setattr(Run, "result", away)
    with pytest.raises(NotFinished, match="does not answer; the run may go on: `packtrain show job-1`"):
        follow(new_run(directory_store), [], foreground=False)


def test_a_program_is_shown_to_run_once_it_does(directory_store: Store) -> None:
    run = new_run(directory_store)
    follower = Follower(run, [], following.console())
    assert "starting" in follower._line()
    events = run.event_writer("a")
    events.append(Event(0.0, "generation", "1 begins with 1 worker (start)", 1))
    events.flush()
    follower._read()
    assert "running for" in follower._line()
