"""Work that takes its time: in a thread, so that the agent goes on looking at the world."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Task:
    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._work = work
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self._error = error

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> bool:
        """Whether it ended in that time, one way or another."""
        self._thread.join(seconds)
        return self.is_done

    def result(self) -> None:
        """Waits for the end, and raises what the work raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
