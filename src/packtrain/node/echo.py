"""The output of this machine's workers on the node's own, which is all that `kubectl logs` or Slurm's file show."""

from __future__ import annotations

import threading
from contextlib import suppress
from queue import Full, Queue

from packtrain.run.records import LogLine
from packtrain.system import say

LIMIT_BYTES = 10_000_000  # what keeps the node's output, such as a file of Slurm, may have no limit of its own
_MAX_WAITING = 10_000
_CLOSE_SECONDS = 5.0


class OutputEcho:
    """Prints lines in a thread: their reader may be slow or stuck, and the node must not wait for it."""

    def __init__(self, run: str, limit_bytes: int = LIMIT_BYTES) -> None:
        self._run, self._bytes_left = run, limit_bytes
        self._waiting: Queue[str | None] = Queue(_MAX_WAITING)
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
        with suppress(Full):
            self._waiting.put(None, timeout=_CLOSE_SECONDS)
        self._thread.join(_CLOSE_SECONDS)

    def _print(self) -> None:
        while (text := self._waiting.get()) is not None:
            say(text)
