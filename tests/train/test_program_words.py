"""What a program says to its node and asks of it."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import packtrain
from packtrain.train import control as control_module
from packtrain.train.control import STOP_SIGNALS, Control, StopSignal


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Control]:
    monkeypatch.setenv("PACKTRAIN_CONTROL", str(tmp_path / "control"))
    monkeypatch.setattr(control_module, "_signal", StopSignal())
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


class Unreadable:
    def __float__(self) -> float:
        raise RuntimeError("no")


@pytest.fixture
def logged(control: Control, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """What the node would read of the program's calls."""
    monkeypatch.setattr(control_module, "_refused", set())
    yield lambda: [json.loads(line) for line in control.numbers.read_text().splitlines()]
    control_module._opened.cache_clear()


def test_numbers_of_any_library_are_logged_under_their_own_names(logged: Callable[[], list[dict[str, Any]]]) -> None:
    packtrain.log(loss=torch.tensor([0.25], requires_grad=True), lr=np.float32(0.5), step=np.int64(7), is_best=True)
    packtrain.log({"val/loss": Fraction(1, 4)}, accuracy=1)
    packtrain.log(loss=math.nan, other=-math.inf, step=torch.tensor(8))
    first, second, third = logged()
    assert (first["step"], first["values"]) == (7, {"loss": 0.25, "lr": 0.5, "is_best": 1.0})
    assert (second["step"], second["values"]) == (None, {"val/loss": 0.25, "accuracy": 1.0})
    assert third["step"] == 8
    assert math.isnan(third["values"]["loss"])


def test_what_is_not_a_number_is_named_once_and_left_out(
    logged: Callable[[], list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        packtrain.log(loss=1.0, text="0.5", many=torch.ones(2), none=None, big=10**400, bad=Unreadable(), step=1)
    packtrain.log(loss=1.0, step="first")
    packtrain.log([1.0], step=2)  # type: ignore[arg-type]
    assert [line["values"] for line in logged()] == [{"loss": 1.0}] * 3
    named = capsys.readouterr().err.splitlines()
    assert len(named) == 7
    assert named[0] == "packtrain.log: 'text' is not a number (str); left out"


def test_only_rank_0_logs_and_only_under_packtrain(
    control: Control, monkeypatch: pytest.MonkeyPatch, logged: Callable[[], list[dict[str, Any]]]
) -> None:
    monkeypatch.setenv("RANK", "1")
    packtrain.log(loss=1.0)
    monkeypatch.delenv("PACKTRAIN_CONTROL")
    monkeypatch.setenv("RANK", "0")
    packtrain.log(loss=1.0)
    assert not control.numbers.exists()


def test_logging_ends_no_program_if_the_disk_does_not_take_it(control: Control, logged: object) -> None:
    control.numbers.mkdir()
    packtrain.log(loss=1.0)


@pytest.mark.usefixtures("processes")
def test_logging_imports_nothing_heavy() -> None:
    script = "import sys, packtrain; packtrain.log(loss=1); assert not {'torch', 'numpy', 'pydantic'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "PACKTRAIN_CONTROL": ""})
