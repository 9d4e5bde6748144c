from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from packtrain.node.preemption import SECONDS_VARIABLE, PreemptionNotice, PreemptionWatch


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signals_are_preemption_notices(number: signal.Signals) -> None:
    watch = PreemptionWatch()
    watch.listen()
    os.kill(os.getpid(), number)
    assert watch.notice is not None
    assert number.name in watch.notice.reason
    assert watch.seconds_left() is None


@pytest.mark.parametrize(("said", "left"), [("120", 120.0), ("", None), ("soon", None), ("-1", None)])
def test_the_time_left_after_a_signal_is_what_its_sender_announced(
    said: str, left: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECONDS_VARIABLE, said)
    watch = PreemptionWatch(clock=lambda: 50.0)
    watch.listen()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert watch.seconds_left() == left


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "stuck", ["time.sleep(1000)", "signal.pthread_sigmask(signal.SIG_BLOCK, [15]); time.sleep(1000)"]
)
def test_a_process_whose_main_thread_is_stuck_ends_within_the_time_after_a_signal(stuck: str) -> None:
    """Python goes on sleeping after a signal; and a thread in the kernel, as on a dead mount, takes none."""
    script = f"""
import os, signal, time
from packtrain.node.preemption import PreemptionWatch

def end(reason):
    print(reason, flush=True)
    os._exit(7)

PreemptionWatch(poll_seconds=0.05, end=end).listen()
print("ready", flush=True)
{stuck}
"""
    command, environment = [sys.executable, "-c", script], {**os.environ, SECONDS_VARIABLE: "0.5"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "preemption notice: SIGTERM\n"
        assert process.wait() == 7


def test_a_source_is_asked_until_it_gives_notice_and_errors_are_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    answers = iter([None, OSError("no route"), PreemptionNotice("spot interruption", 120.0)])
    asked = threading.Event()

    def ask() -> PreemptionNotice | None:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        if answer is not None:
            asked.set()
        return answer

    clock = {"now": 50.0}
    watch = PreemptionWatch([ask], lambda: clock["now"], poll_seconds=0.01)
    watch.listen()
    assert asked.wait(30)
    while watch.notice is None:
        threading.Event().wait(0.01)
    clock["now"] += 100
    assert watch.notice == PreemptionNotice("spot interruption", 120.0)
    assert watch.seconds_left() == 20.0
    assert "cannot check for preemption notices: no route" in capsys.readouterr().out


def test_a_notice_that_is_not_certain_does_not_hide_the_one_that_is(capsys: pytest.CaptureFixture[str]) -> None:
    risk, notice = PreemptionNotice("may be taken", certain=False), PreemptionNotice("will be taken", 120.0)
    answers: Iterator[OSError | PreemptionNotice]
    answers = iter([OSError("no route"), OSError("no route"), risk, risk, notice])

    def ask() -> PreemptionNotice | None:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    watch = PreemptionWatch([ask], poll_seconds=0.01)
    watch.listen()
    while watch.notice is None:
        threading.Event().wait(0.01)
    assert (watch.risk, watch.notice) == (risk, notice)
    assert capsys.readouterr().out.count("no route") == 1, "the same error is said once"


def test_only_the_first_notice_counts() -> None:
    watch = PreemptionWatch()
    watch.post(PreemptionNotice("one"))
    watch.post(PreemptionNotice("two", 1.0))
    assert watch.notice == PreemptionNotice("one")
