"""The output of this machine's workers on the node's own, which is all that `kubectl logs` or Slurm's file show."""

from __future__ import annotations

import fcntl
import struct
import sys
import termios
import threading
from contextlib import suppress
from queue import Full, Queue

from packtrain.process import say
from packtrain.run.records import LogLine

LIMIT_BYTES = 10_000_000  # what keeps the node's output, such as a file of Slurm, may have no limit of its own
_MAX_WAITING = 10_000
_CLOSE_SECONDS, _ROOM_SECONDS = 5.0, 0.1


class OutputEcho:
    """Prints lines in a thread: their reader may be slow or stuck, and the node must not wait for it.

    Half of a pipe stays free for the node's own lines, which it prints itself.
    """

    def __init__(self, run: str, limit_bytes: int = LIMIT_BYTES) -> None:
        self._run, self._bytes_left = run, limit_bytes
        self._waiting: Queue[str | None] = Queue(_MAX_WAITING)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._print, name="echo", daemon=True)
        self._thread.start()

    def add(self, line: LogLine) -> None:
        if self._bytes_left <= 0:
            return
        text = line.labeled
        self._bytes_left -= len(text) + 1
        if self._bytes_left <= 0:
            text = f"worker output is truncated here; see `packtrain logs {self._run}` for the rest"
        with suppress(Full):  # the store has every line
            self._waiting.put_nowait(text.replace("\n", "\\n"))

    def close(self) -> None:
        self._closing.set()
        with suppress(Full):
            self._waiting.put(None, timeout=_CLOSE_SECONDS)
        self._thread.join(_CLOSE_SECONDS)

    def _print(self) -> None:
        while (text := self._waiting.get()) is not None:
            while not (has_room := _has_room()) and not self._closing.wait(_ROOM_SECONDS):
                pass
            if has_room:
                say(text)


def _has_room() -> bool:
    """True unless standard output is a pipe that is half full."""
    try:
        output = sys.stdout.fileno()
        size = fcntl.fcntl(output, fcntl.F_GETPIPE_SZ)
        (unread,) = struct.unpack("i", fcntl.ioctl(output, termios.FIONREAD, bytes(4)))
    except (OSError, ValueError):  # no pipe
        return True
    return bool(unread < size // 2)
