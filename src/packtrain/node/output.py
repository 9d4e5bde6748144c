"""The output of this machine's workers: in files, from there in the store, and on the node's own output.

Workers write to files, so that a line is on disk whatever happens to the node; the node follows the files.
"""

from __future__ import annotations

import fcntl
import re
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Full, Queue
from types import MappingProxyType
from typing import Literal

from packtrain.process import say
from packtrain.run.chunks import ChunkWriter
from packtrain.run.records import LogLine

LIMIT_BYTES = 10_000_000  # what keeps the node's output, such as a file of Slurm, may have no limit of its own
_MAX_WAITING = 10_000
_CLOSE_SECONDS, _ROOM_SECONDS = 5.0, 0.1
_MAX_LINE = 10_000
_WORKER_FILE = re.compile(r"/(\d+)/std(out|err)\.log$")

LogSource = tuple[int, int | None, str]
"""The file that a line comes from: generation, rank and stream."""


def source_of(line: LogLine) -> LogSource:
    return line.generation, line.rank, line.stream


@dataclass
class FileTail:
    """A file, and how far it has been read."""

    path: Path
    rank: int | None
    stream: Literal["out", "err"]
    offset: int = 0
    unfinished: bytes = b""

    def lines(self, is_complete: bool) -> Iterator[str]:
        """Yield new lines, and if the file is complete, a last one without a newline."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read()
        self.offset += len(data)
        *lines, self.unfinished = (self.unfinished + data).split(b"\n")
        if is_complete and self.unfinished:
            lines, self.unfinished = [*lines, self.unfinished], b""
        # A progress bar rewrites its line: only its last state is kept. It may be days until the line ends.
        self.unfinished = self.unfinished[self.unfinished.rstrip(b"\r").rfind(b"\r") + 1 :]
        for line in lines:
            yield line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")[:_MAX_LINE]


class LogShipper:
    """Sends the output of one launcher and its workers to the store. `first_rank` is the rank of the first worker.

    `shipped` is the number of lines of each file that the store already has; these are skipped. `echo` gets the others.
    """

    def __init__(
        self,
        directory: Path,
        writer: ChunkWriter[LogLine],
        node: str,
        generation: int,
        first_rank: int,
        shipped: Mapping[LogSource, int] = MappingProxyType({}),
        echo: Callable[[LogLine], None] = lambda _: None,
    ) -> None:
        self._directory, self._writer = directory, writer
        self._node, self._generation, self._first_rank = node, generation, first_rank
        self._tails: dict[Path, FileTail] = {}
        self._to_skip, self._echo = dict(shipped), echo

    def ship(self, is_complete: bool = False) -> int:
        """Hand new lines to the writer, and return how many."""
        count, seen_at = 0, time.time()  # one time for all: how they followed each other is not known
        # Listed every time: the launcher creates the files of its workers when it starts them.
        for path in sorted(self._directory.rglob("*.log")):
            if path not in self._tails:
                self._tails[path] = self._tail(path)
            tail = self._tails[path]
            for text in tail.lines(is_complete):
                line = LogLine(seen_at, self._generation, self._node, tail.rank, tail.stream, text)
                if self._to_skip.get(source_of(line), 0) > 0:
                    self._to_skip[source_of(line)] -= 1
                else:
                    self._writer.append(line)
                    self._echo(line)
                    count += 1
        return count

    def _tail(self, path: Path) -> FileTail:
        match = _WORKER_FILE.search(str(path))
        if match is None:  # the launcher's own
            return FileTail(path, None, "err")
        return FileTail(path, self._first_rank + int(match[1]), "out" if match[2] == "out" else "err")


class OutputEcho:
    """Prints lines on the node's own output, which is all that `kubectl logs` or Slurm's file show.

    In a thread: their reader may be slow or stuck, and the node must not wait for it.

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
