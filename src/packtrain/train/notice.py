"""Signals that ask a worker to commit and leave. The handler sets a flag; the loop looks at it once a step."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

NOTICES = (signal.SIGTERM, signal.SIGUSR1)


class Notice:
    def __init__(self) -> None:
        self.given = False

    def listen(self) -> Notice:
        for number in NOTICES:
            signal.signal(number, self._hear)
        return self

    def _hear(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.given = True

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within it a signal ends the process, and so does one that was given before: there is nothing to commit.

        Who waits in torch for a worker that has died hears no handler of Python's.
        """
        for number in NOTICES:
            signal.signal(number, signal.SIG_DFL)
        if self.given:
            os.kill(os.getpid(), NOTICES[0])
        yield
        self.listen()
