"""Notices that this machine is to leave: signals, and whatever a fleet can ask its cloud about.

A handler only sets a flag; everything else happens at the agent's next look at the world.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from packtrain.control import say

POLL_SECONDS = 3.0
SECONDS_VARIABLE = "PACKTRAIN_NOTICE_SECONDS"  # how long whoever sends a signal waits before it kills
_SIGNALS = {
    signal.SIGTERM: "SIGTERM",
    signal.SIGINT: "SIGINT",
    signal.SIGUSR1: "SIGUSR1, as Slurm sends before the time limit",
}


@dataclass(frozen=True)
class Notice:
    """Why this machine has to go, and when it will be gone, as far as that is known."""

    reason: str
    seconds: float | None = None


Notices = Callable[[], Notice | None]
"""Asks whoever knows whether this machine is to go; called every few seconds. What it raises counts as no answer."""


def seconds_from(environment: Mapping[str, str]) -> float | None:
    """How long a signal leaves this machine, where whoever started the agent has said so."""
    try:
        seconds = float(environment.get(SECONDS_VARIABLE, ""))
    except ValueError:
        return None
    return seconds if 0 < seconds < float("inf") else None


class NoticeBoard:
    """The first notice that came, from any side."""

    def __init__(self, sources: Sequence[Notices] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._sources, self._clock = sources, clock
        self._notice: Notice | None = None
        self._at = 0.0
        self._signal_seconds: float | None = None
        self._over = threading.Event()

    def listen(self) -> None:
        """From now on signals are notices, and the sources are asked."""
        self._signal_seconds = seconds_from(os.environ)
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)
        if self._sources:
            threading.Thread(target=self._ask, name="notices", daemon=True).start()

    def close(self) -> None:
        self._over.set()

    @property
    def notice(self) -> Notice | None:
        return self._notice

    def seconds_left(self) -> float | None:
        """Until this machine is gone, where the notice said so."""
        if self._notice is None or self._notice.seconds is None:
            return None
        return max(0.0, self._at + self._notice.seconds - self._clock())

    def post(self, notice: Notice) -> None:
        if self._notice is None:
            self._at, self._notice = self._clock(), notice

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        reason = f"this machine is to leave ({_SIGNALS[signal.Signals(number)]})"
        self.post(Notice(reason, self._signal_seconds))

    def _ask(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            for source in self._sources:
                try:
                    notice = source()
                except Exception as error:
                    say(f"warning: a source of notices does not answer: {error}")
                    continue
                if notice is not None:
                    self.post(notice)
                    return
