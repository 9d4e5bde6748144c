from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from packtrain.train.control import NOTICES

# Waits as torch's own code does: no handler of Python's is heard until it returns.
WAITS_OUTSIDE_PYTHON = """
import ctypes, os, signal
from packtrain.train.control import Notice

notice = Notice().listen()
{before}
with notice.at_once():
    print("waits", flush=True)
    {within}
print("goes on", flush=True)
signal.raise_signal(signal.SIGTERM)
print("heard", notice.given, flush=True)
"""


def started(before: str = "", within: str = "pass") -> subprocess.Popen[str]:
    script = WAITS_OUTSIDE_PYTHON.format(before=before, within=within)
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", NOTICES)
def test_a_worker_that_waits_for_others_in_vain_ends_when_it_is_asked_to(number: signal.Signals) -> None:
    process = started(within="ctypes.CDLL(None).sleep(600)")
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    process.send_signal(number)
    assert process.wait(timeout=90) == -number
    process.stdout.close()


def test_one_that_was_asked_before_does_not_begin_to_wait() -> None:
    process = started(before="signal.raise_signal(signal.SIGUSR1)")
    assert process.communicate(timeout=90) == ("", None)
    assert process.returncode == -signal.SIGTERM


def test_afterwards_a_signal_is_a_notice_again() -> None:
    process = started()
    assert process.communicate(timeout=90) == ("waits\ngoes on\nheard True\n", None)
    assert process.returncode == 0
