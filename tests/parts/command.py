"""Commands in the process of the tests, which has already imported what they need, and in one of their own."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from packtrain.cli import main

Packtrain = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def packtrain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Packtrain:
    """Call `packtrain` in this process and in the test's directory; `lines` come from standard input."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str | Path, lines: str | bytes = "") -> subprocess.CompletedProcess[str]:
        given = lines if isinstance(lines, bytes) else lines.encode()
        monkeypatch.setattr(sys, "argv", ["packtrain", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        capfd.readouterr()
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        return subprocess.CompletedProcess(arguments, code, *capfd.readouterr())

    return call


def in_a_process(*words: str | Path, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "packtrain", *map(str, words)]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True)


def assert_refused(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr
