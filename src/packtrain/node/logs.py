"""The output of workers, from files on this machine into the store.

Workers write to files, so that a line is on disk whatever becomes of the agent; the agent follows them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from packtrain.run.chunks import ChunkWriter
from packtrain.run.records import LogLine

_LONGEST_LINE = 10_000
_WORKER_FILE = re.compile(r"/(\d+)/std(out|err)\.log$")


@dataclass
class Tail:
    """A file and how far it has been read."""

    path: Path
    rank: int | None
    stream: Literal["out", "err"]
    offset: int = 0
    rest: bytes = b""

    def lines(self, all_of_it: bool) -> Iterator[str]:
        """Whole lines that have come; with `all_of_it`, also a last one that has no end."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read()
        self.offset += len(data)
        *whole, self.rest = (self.rest + data).split(b"\n")
        if all_of_it and self.rest:
            whole, self.rest = [*whole, self.rest], b""
        for line in whole:
            # A progress bar rewrites its line; what it last said is what a reader wants.
            yield line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")[:_LONGEST_LINE]


Source = tuple[int, int | None, str]
"""Which file a line comes from: generation, rank and stream."""


def source_of(line: LogLine) -> Source:
    return line.generation, line.rank, line.stream


class LogShipper:
    """Follows the files of one launcher. `first_rank` is the global rank of its first worker.

    `shipped` tells how many lines of each file are in the store already: those are passed over.
    """

    def __init__(
        self,
        directory: Path,
        writer: ChunkWriter[LogLine],
        node: str,
        generation: int,
        first_rank: int,
        shipped: Mapping[Source, int] = MappingProxyType({}),
    ) -> None:
        self._directory, self._writer = directory, writer
        self._node, self._generation, self._first_rank = node, generation, first_rank
        self._tails: dict[Path, Tail] = {}
        self._left = dict(shipped)

    def ship(self, all_of_it: bool = False) -> int:
        """Hands new lines to the writer; how many."""
        count = 0
        for path in sorted(self._directory.rglob("*.log")):
            if path not in self._tails:
                self._tails[path] = self._tail(path)
            tail = self._tails[path]
            for text in tail.lines(all_of_it):
                line = LogLine(time.time(), self._generation, self._node, tail.rank, tail.stream, text)
                if self._left.get(source_of(line), 0) > 0:
                    self._left[source_of(line)] -= 1
                else:
                    self._writer.append(line)
                    count += 1
        return count

    def _tail(self, path: Path) -> Tail:
        match = _WORKER_FILE.search(str(path))
        if match is None:  # the launcher's own
            return Tail(path, None, "err")
        return Tail(path, self._first_rank + int(match[1]), "out" if match[2] == "out" else "err")
