"""A command in a terminal: with a person who types an answer, or of a certain width."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from unittest.mock import patch

_STYLES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class FakeTerminal(io.StringIO):
    """A stream that says that it is a terminal; quicker than one, and with whatever width the environment says."""

    def isatty(self) -> bool:
        return True


def shown_at(width: int, show: Callable[[], object]) -> list[str]:
    """Call in this process what prints, and return the lines as a terminal of that width would get them, unstyled."""
    terminal = FakeTerminal()
    environment = patch.dict(os.environ, COLUMNS=str(width), LINES="40", TERM="xterm")
    with environment, patch.object(sys, "stdout", terminal), suppress(SystemExit):  # how commands end
        show()
    return [line.rpartition("\r")[2] for line in _STYLES.sub("", terminal.getvalue()).split("\n")]


def in_terminal(arguments: Sequence[str], answer: str) -> tuple[int, str]:
    """Run a command of Packtrain as in a terminal, type the answer, and return the exit code and the output."""
    outer, inner = pty.openpty()
    command = [sys.executable, "-m", "packtrain", *arguments]
    process = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner)
    os.close(inner)
    os.write(outer, f"{answer}\n".encode())
    shown = b""
    try:
        while data := os.read(outer, 4096):
            shown += data
    except OSError:  # how the end of a terminal looks on Linux
        pass
    os.close(outer)
    return process.wait(120), shown.decode()
