"""What a program says to its node and asks of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import packtrain
from packtrain.train import program
from packtrain.train.control import STOP_SIGNALS, Control, StopSignal


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Control]:
    monkeypatch.setenv("PACKTRAIN_CONTROL", str(tmp_path / "control"))
    monkeypatch.setattr(program, "_signal", StopSignal())
    before = {number: signal.signal(number, signal.SIG_DFL) for number in STOP_SIGNALS}
    yield Control(tmp_path / "control")
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("rank", "asked"), [("0", True), ("1", False)])
def test_rank_0_can_ask_for_a_commit(control: Control, monkeypatch: pytest.MonkeyPatch, rank: str, asked: bool) -> None:
    monkeypatch.setenv("RANK", rank)
    packtrain.checkpoint()
    assert control.take_commit_request() is asked


def test_a_stop_is_seen_by_the_request_and_by_the_signal_which_no_longer_ends_the_program(control: Control) -> None:
    assert not packtrain.stop_requested()
    os.kill(os.getpid(), signal.SIGTERM)
    assert packtrain.stop_requested()


def test_a_stop_request_is_seen_also_if_the_program_handles_the_signal_itself(control: Control) -> None:
    own = lambda _number, _frame: None  # noqa: E731
    signal.signal(signal.SIGTERM, own)
    assert not packtrain.stop_requested()
    assert signal.getsignal(signal.SIGTERM) is own
    control.request_stop()
    assert packtrain.stop_requested()


def test_without_packtrain_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACKTRAIN_CONTROL", raising=False)
    packtrain.checkpoint()
    assert not packtrain.stop_requested()
