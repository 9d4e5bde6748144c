"""A command in a terminal, with a person who types an answer."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Sequence


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
