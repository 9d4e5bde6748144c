"""News of a store for pages that are open: server-sent events, from one thread that looks all the time.

Nobody listens, nobody asks: then nothing is read.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import suppress
from typing import Any

from packtrain.errors import PacktrainError
from packtrain.web.query import RefusedRequest
from packtrain.web.reader import Readers
from packtrain.web.run_list import Row, RunList

_TICK_SECONDS = 1.8
_COMMENT_SECONDS = 15.0
_RUN_SECONDS = 0.3  # that one look reads of a run whose history is long
_MAX_STREAMS = 64


class News:
    """Looks at the store every 1.8 s while a page is open, and tells every page what has changed."""

    def __init__(self, runs: RunList) -> None:
        self.runs, self.readers = runs, Readers()
        self._listeners: dict[asyncio.Queue[str | None], tuple[str, ...]] = {}
        self._versions: dict[str, dict[str, str]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake, self._over = threading.Event(), threading.Event()
        self._asked = 0.0
        self._told_away: str | None = None
        self._first = threading.Event()
        self._thread = threading.Thread(target=self._work, name="news", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._wake.set()
        for queue in list(self._listeners):
            queue.put_nowait(None)

    def ask(self) -> None:
        """Have the store looked at now, and for some seconds: somebody asked something."""
        is_new = time.monotonic() - self._asked > 2 * _TICK_SECONDS and not self._listeners
        self._asked = time.monotonic()
        if is_new:
            self._first.clear()
            self._wake.set()

    def wait_for_first(self, seconds: float) -> None:
        self._first.wait(seconds)

    def listen(self, runs: tuple[str, ...]) -> AsyncIterator[str]:
        """Return server-sent events until the server ends. Refused here, before the answer has begun with a 200."""
        if len(self._listeners) >= _MAX_STREAMS:
            raise RefusedRequest(503, "too many pages are open; close some")
        return self._events(runs)

    async def _events(self, runs: tuple[str, ...]) -> AsyncIterator[str]:
        queue: asyncio.Queue[str | None] = asyncio.Queue(1000)
        self._listeners[queue] = runs
        self._wake.set()
        try:
            yield ": hello\n\n"
            yield _event("runs", {"rows": self.runs.rows(), "gone": []})
            yield _event("store", {"error": self.runs.away})
            for name in runs:
                if name in self._versions:
                    yield _event("run", {"run": name, "versions": self._versions[name]})
            while True:
                try:
                    text = await asyncio.wait_for(queue.get(), _COMMENT_SECONDS)
                except TimeoutError:
                    text = ": still here\n\n"
                if text is None or queue.full():  # a page that does not read; it comes back and starts anew
                    return
                yield text
        finally:
            del self._listeners[queue]

    def _work(self) -> None:
        while not self._over.is_set():
            if self._listeners or time.monotonic() - self._asked < 10 * _TICK_SECONDS:
                try:
                    shown = {name for names in list(self._listeners.values()) for name in names}
                    self.runs.look(self._tell_rows, shown)
                    if self.runs.away != self._told_away:  # the store has gone away, or is back
                        self._told_away = self.runs.away
                        self._tell(_event("store", {"error": self._told_away}), None)
                    self._first.set()
                    self._look_at_runs(shown)
                except Exception:
                    # A defect in one look must not end all later ones.
                    print(traceback.format_exc(), file=sys.stderr, flush=True)
                self._first.set()
                self._wake.wait(_TICK_SECONDS)
            else:
                self._wake.wait()
            self._wake.clear()

    def _look_at_runs(self, shown: Collection[str]) -> None:
        """Read what is new of the runs that pages show."""
        for name in [name for name in self._versions if name not in shown]:
            del self._versions[name]
        for name in shown:
            listed = self.runs.find(name)
            if listed is None:
                continue
            with suppress(PacktrainError):  # the row says what is wrong, or the event that the store is away
                versions = self.readers.of(listed.run).look(_RUN_SECONDS)
                if self._versions.get(name) != versions:
                    self._versions[name] = versions
                    self._tell(_event("run", {"run": name, "versions": versions}), name)

    def _tell_rows(self, rows: Sequence[Row], gone: Sequence[str]) -> None:
        self._first.set()  # the newest runs, which a page shows first
        for name in gone:
            self.readers.forget(name)
        if rows or gone:
            self._tell(_event("runs", {"rows": list(rows), "gone": list(gone)}), None)

    def _tell(self, text: str, run: str | None) -> None:
        def put() -> None:
            for queue, names in list(self._listeners.items()):
                if run is None or run in names:
                    with suppress(asyncio.QueueFull):
                        queue.put_nowait(text)

        if self._loop is not None and not self._over.is_set():
            with suppress(RuntimeError):  # the loop has just ended
                self._loop.call_soon_threadsafe(put)


def _event(kind: str, value: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps(value, ensure_ascii=True, allow_nan=False)}\n\n"
