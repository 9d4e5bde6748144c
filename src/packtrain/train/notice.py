"""Signals that ask a worker to commit and leave. The handler sets a flag; the loop looks at it once a step."""

from __future__ import annotations

import signal
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
