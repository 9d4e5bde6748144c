from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from packtrain.system import cache_directory
from packtrain.train.control import EXIT_STUCK, SAVING, STOP_SIGNALS, Control, WorkerError


def test_workers_see_a_stop_request_of_their_node(tmp_path: Path) -> None:
    agent, worker = Control(tmp_path / "control"), Control(tmp_path / "control")
    assert not worker.stop_requested()
    agent.request_stop()
    agent.request_stop()
    assert worker.stop_requested()


def test_one_worker_takes_a_request_to_commit(tmp_path: Path) -> None:
    agent, worker, other = (Control(tmp_path / "control") for _ in range(3))
    assert not worker.take_commit_request()
    agent.request_commit()
    assert worker.take_commit_request()
    assert not other.take_commit_request()


def test_a_node_sees_that_its_workers_made_a_step(tmp_path: Path) -> None:
    agent, worker = Control(tmp_path / "control"), Control(tmp_path / "control")
    assert not agent.has_stepped()
    worker.report_step()
    worker.report_step()
    assert agent.has_stepped()


def test_a_step_that_cannot_be_reported_does_not_fail(tmp_path: Path) -> None:
    control = Control(tmp_path / "control")
    (tmp_path / "control").rmdir()
    control.report_step()
    assert not control.has_stepped()


def test_a_new_control_directory_has_no_errors(tmp_path: Path) -> None:
    assert Control(tmp_path).errors() == []


def test_errors_are_read_back_unchanged_in_order_of_time(tmp_path: Path) -> None:
    told = [WorkerError(2, "späte\nZeilen", False, 2.0), WorkerError(10, "", False, 1.0)]
    for error in told:
        Control(tmp_path).report_error(error)
    assert Control(tmp_path).errors() == told[::-1]


def test_a_fatal_error_comes_before_the_errors_it_caused(tmp_path: Path) -> None:
    cause, consequence = (
        WorkerError(3, "the pack is not there", True, 2.0),
        WorkerError(0, "connection closed", False, 1.0),
    )
    for error in (consequence, cause):
        Control(tmp_path).report_error(error)
    assert Control(tmp_path).errors() == [cause, consequence]


def test_an_error_carries_its_cause_and_step_if_known(tmp_path: Path) -> None:
    plain, known = WorkerError(0, "a", False, 1.0), WorkerError(1, "b", False, 2.0, cause="memory", step=7)
    for error in (plain, known):
        Control(tmp_path).report_error(error)
    assert (plain.cause, plain.step) == ("program", None)
    assert Control(tmp_path).errors() == [plain, known]


def test_a_half_written_error_is_ignored(tmp_path: Path) -> None:
    control = Control(tmp_path)
    (tmp_path / "error-0.part").write_text('{"rank": 0,')
    assert control.errors() == []


def test_the_cache_directory_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACKTRAIN_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    assert cache_directory() == tmp_path / "home" / ".cache" / "packtrain"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "packtrain"
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path


@pytest.mark.usefixtures("processes")
def test_a_log_that_cannot_be_written_does_not_end_the_process() -> None:
    with Path("/dev/full").open("wb") as full:
        script = "from packtrain.process import say; say('one'); say('two'); raise SystemExit(7)"
        assert subprocess.run([sys.executable, "-u", "-c", script], stdout=full).returncode == 7


# Waits as torch's own code does: no handler of Python's is heard until it returns.
WAITS_OUTSIDE_PYTHON = """
import ctypes, os, signal
from packtrain.train.control import StopSignal

notice = StopSignal().listen()
{before}
with notice.fatal():
    print("waits", flush=True)
    {within}
print("goes on", flush=True)
signal.raise_signal(signal.SIGTERM)
print("heard", notice.received, flush=True)
"""


def started(before: str = "", within: str = "pass") -> subprocess.Popen[str]:
    script = WAITS_OUTSIDE_PYTHON.format(before=before, within=within)
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_ends_a_worker_that_waits_for_a_dead_peer(number: signal.Signals) -> None:
    process = started(within="ctypes.CDLL(None).sleep(600)")
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    process.send_signal(number)
    assert process.wait(timeout=90) == -number
    process.stdout.close()


STUCK = """
import ctypes, time
from packtrain.train.control import StopSignal

signals = StopSignal().listen()
signals.end_if_stuck(lambda: 0.2, lambda: print("kept", flush=True))
lock = (ctypes.c_char * 64)()
wait = ctypes.CDLL(None).pthread_mutex_lock
wait(lock)
print("waits", flush=True)
{wait}
print("heard", signals.received, flush=True)
"""


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("wait", "said", "code"),
    [("wait(lock)", "kept\n", EXIT_STUCK), ("while not signals.received: time.sleep(0.1)", "heard True\n", 0)],
    ids=["stuck in C", "in Python"],
)
def test_a_worker_that_cannot_hear_a_signal_ends_when_its_work_is_kept(wait: str, said: str, code: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", STUCK.format(wait=wait)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    process.send_signal(signal.SIGTERM)
    assert [*process.communicate(timeout=90)] == [said, None]
    assert process.returncode == code


@pytest.mark.usefixtures("processes")
def test_a_worker_signaled_before_the_rendezvous_ends_instead_of_waiting() -> None:
    process = started(before="signal.raise_signal(signal.SIGUSR1)")
    assert [*process.communicate(timeout=90)] == ["", None]
    assert process.returncode == -signal.SIGTERM


@pytest.mark.usefixtures("processes")
def test_after_the_rendezvous_a_signal_only_sets_a_flag() -> None:
    process = started()
    assert [*process.communicate(timeout=90)] == ["waits\ngoes on\nheard True\n", None]
    assert process.returncode == 0


@pytest.mark.usefixtures("processes")
def test_a_checkpoint_is_being_committed_while_its_worker_lives(tmp_path: Path) -> None:
    control = Control(tmp_path)
    assert not control.is_saving()
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    (tmp_path / f"{SAVING.format(gone.pid)}x").mkdir()
    assert not control.is_saving()
    (tmp_path / f"{SAVING.format(os.getpid())}x").mkdir()
    assert control.is_saving()
