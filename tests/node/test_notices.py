from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from packtrain.node import preemption as notices
from packtrain.node.preemption import Notice, NoticeBoard


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(notices, "POLL_SECONDS", 0.01)
    before = {number: signal.getsignal(number) for number in notices._SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signals_are_notices(number: signal.Signals) -> None:
    board = NoticeBoard()
    board.listen()
    os.kill(os.getpid(), number)
    assert board.notice is not None
    assert number.name in board.notice.reason
    assert board.seconds_left() is None


@pytest.mark.parametrize(("said", "left"), [("120", 120.0), ("", None), ("soon", None), ("-1", None)])
def test_a_signal_leaves_as_long_as_whoever_sends_it_waits(
    said: str, left: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(notices.SECONDS_VARIABLE, said)
    board = NoticeBoard(clock=lambda: 50.0)
    board.listen()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert board.seconds_left() == left


def test_a_fleet_is_asked_until_it_says_so_and_trouble_is_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    answers = iter([None, OSError("no route"), Notice("spot interruption", 120.0)])
    asked = threading.Event()

    def ask() -> Notice | None:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        if answer is not None:
            asked.set()
        return answer

    clock = {"now": 50.0}
    board = NoticeBoard([ask], lambda: clock["now"])
    board.listen()
    assert asked.wait(30)
    while board.notice is None:
        threading.Event().wait(0.01)
    clock["now"] += 100
    assert board.notice == Notice("spot interruption", 120.0)
    assert board.seconds_left() == 20.0
    assert "does not answer: no route" in capsys.readouterr().out


def test_the_first_notice_holds() -> None:
    board = NoticeBoard()
    board.post(Notice("one"))
    board.post(Notice("two", 1.0))
    assert board.notice == Notice("one")
