"""Log lines of a run: pages of them, searched in the store, backward from the end or forward from a place.

Lines are never kept. A place is a number of a chunk, in the order in which the reader found them, and of a line in it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from packtrain.run.chunks import lines_of
from packtrain.run.records import LogLine
from packtrain.run.run import Run
from packtrain.store import DamagedObject
from packtrain.store.records import DamagedRecord, decode_many

_LINES_SECONDS = 1.0
_MAX_TEXT = 4000


@dataclass(frozen=True)
class LogQuery:
    search: str = ""
    rank: int | None = None
    stream: str | None = None
    node: str | None = None

    def has(self, line: LogLine) -> bool:
        return (
            (self.rank is None or line.rank == self.rank)
            and (self.stream is None or line.stream == self.stream)
            and (self.node is None or line.node == self.node)
            and (not self.search or self.search in line.text.casefold())
        )


@dataclass(frozen=True)
class LogPlace:
    """Before line `line` of chunk `chunk`, in the order in which the reader found them."""

    chunk: int
    line: int

    def __str__(self) -> str:
        return f"{self.chunk}.{self.line}"


def log_lines(run: Run, key: str) -> list[LogLine]:
    """Return the lines of a chunk; in place of one that is damaged, a line that says so."""
    try:
        data = run.store.find(key)
        if data is None:
            return []
        return decode_many(LogLine, lines_of(data), f"{key} in {run.store.url}")
    except (DamagedRecord, DamagedObject) as error:
        return [LogLine(0.0, 0, key.split("/")[-2], None, "err", str(error))]


def lines_before(
    run: Run, keys: Sequence[str], place: LogPlace | None, query: LogQuery, limit: int
) -> tuple[list[LogLine], LogPlace | None, LogPlace]:
    """Return the last lines before a place, where to ask for earlier ones (None at the start), and where they end."""
    end = place or LogPlace(len(keys), 0)
    matches: list[LogLine] = []
    deadline = time.monotonic() + _LINES_SECONDS
    chunk, stop = min(end.chunk, len(keys) - 1), end.line if end.chunk < len(keys) else None
    while chunk >= 0:
        lines = log_lines(run, keys[chunk])
        for number in reversed(range(len(lines) if stop is None else min(stop, len(lines)))):
            if query.has(lines[number]):
                matches.append(lines[number])
                if len(matches) == limit:
                    is_start = chunk == 0 and number == 0
                    return matches[::-1], None if is_start else LogPlace(chunk, number), end
        chunk, stop = chunk - 1, None
        if time.monotonic() > deadline and chunk >= 0:
            return matches[::-1], LogPlace(chunk + 1, 0), end
    return matches[::-1], None, end


def lines_after(
    run: Run, keys: Sequence[str], place: LogPlace, query: LogQuery, limit: int
) -> tuple[list[LogLine], LogPlace]:
    """Return the first lines from a place on, and where to ask for later ones."""
    matches: list[LogLine] = []
    deadline = time.monotonic() + _LINES_SECONDS
    start = place.line
    for chunk in range(place.chunk, len(keys)):
        lines = log_lines(run, keys[chunk])
        for number in range(start, len(lines)):
            if query.has(lines[number]):
                matches.append(lines[number])
                if len(matches) == limit:
                    return matches, LogPlace(chunk, number + 1)
        start = 0
        if time.monotonic() > deadline:
            return matches, LogPlace(chunk + 1, 0)
    return matches, LogPlace(max(place.chunk, len(keys)), start if place.chunk >= len(keys) else 0)


def shown_line(line: LogLine) -> dict[str, Any]:
    text = line.text if len(line.text) <= _MAX_TEXT else line.text[:_MAX_TEXT] + "…"
    return {**vars(line), "text": text}
