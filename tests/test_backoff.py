from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from packtrain.backoff import Backoff, SlowAnswers


class Clock:
    """A clock that moves only when somebody sleeps on it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(1, 10, jitter=0)
    assert [backoff.next_pause() for _ in range(6)] == [1, 2, 4, 8, 10, 10]


def test_after_a_success_pauses_start_over() -> None:
    backoff = Backoff(1, 10, jitter=0)
    assert [backoff.next_pause(), backoff.next_pause()] == [1, 2]
    backoff.reset()
    assert backoff.next_pause() == 1


def test_jitter_shortens_a_pause_by_at_most_its_share() -> None:
    assert Backoff(8, 8, jitter=0.5, random=lambda: 0.0).next_pause() == 8
    assert Backoff(8, 8, jitter=0.5, random=lambda: 1.0).next_pause() == 4
    assert Backoff(8, 8, jitter=1, random=lambda: 0.75).next_pause() == 2
    assert len({Backoff(8, 8).next_pause() for _ in range(10)}) > 1


def test_jitter_does_not_slow_the_doubling() -> None:
    backoff = Backoff(1, 100, jitter=1, random=lambda: 0.5)
    assert [backoff.next_pause() for _ in range(4)] == [0.5, 1, 2, 4]


def test_a_single_pause_can_be_bounded_further() -> None:
    backoff = Backoff(1, 30, jitter=0)
    assert [backoff.next_pause() for _ in range(5)] == [1, 2, 4, 8, 16]
    assert backoff.next_pause(longest_seconds=4) == 4
    assert backoff.next_pause() == 8


def test_the_last_try_is_at_the_limit_and_none_comes_after_it() -> None:
    clock = Clock()
    backoff = Backoff(1, 10, jitter=0, limit_seconds=12, clock=clock, sleep=clock.sleep)
    while backoff.wait():
        pass
    assert clock.slept == [1, 2, 4, 5]
    assert backoff.next_pause() is None


def test_the_limit_counts_the_time_that_tries_take_and_starts_over_after_a_success() -> None:
    clock = Clock()
    backoff = Backoff(1, 10, jitter=0, limit_seconds=60, clock=clock, sleep=clock.sleep)
    clock.now += 60
    assert not backoff.wait()
    backoff.reset()
    assert backoff.wait()
    assert clock.slept == [1]


def test_an_answer_is_told_after_the_words_that_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the timer has fired before it is canceled, and its thread has yet to tell."""
    canceled = threading.Event()

    class Fired(threading.Thread):
        def __init__(self, _: float, tell: Callable[..., None], arguments: tuple[object, ...]) -> None:
            super().__init__()
            self._tell, self._arguments = tell, arguments

        def run(self) -> None:
            canceled.wait(60)
            self._tell(*self._arguments)

        def cancel(self) -> None:
            canceled.set()

    told: list[str] = []
    monkeypatch.setattr("packtrain.backoff.Timer", Fired)
    answers = SlowAnswers()
    answers.tell = told.append
    with answers.watched("s3://bucket", 60):
        pass
    assert told == ["s3://bucket does not answer; trying again for up to 60 s", "s3://bucket answers again"]
