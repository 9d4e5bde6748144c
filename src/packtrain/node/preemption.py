"""Notices that this machine is to leave: signals, and whatever a fleet can ask its cloud about.

A handler only sets a flag; everything else happens at the agent's next look at the world.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Literal

from packtrain.errors import EXIT_UNFINISHED
from packtrain.node.lease import hurried
from packtrain.run.records import Event
from packtrain.run.run import Run
from packtrain.store import StoreError
from packtrain.system import say

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


# How a machine's part in a run ends before the goal.


POWER_OFF = ("systemctl", "poweroff")
_OFF_SECONDS = 60.0


@dataclass(frozen=True)
class Leaving:
    """Why the workers are to end before the goal: a person's stop and the budget end the run, a notice only a part."""

    kind: Literal["stop", "budget", "notice"]
    reason: str


def complain(error: StoreError) -> None:
    say(f"warning: {error}")


def go_through(*steps: Callable[[], object]) -> None:
    """One after the other, whatever one of them raises."""
    for step in steps:
        try:
            step()
        except Exception as error:
            say(f"warning: {type(error).__name__}: {error}")


def say_why(run: Run, error: Exception) -> None:
    """What an agent died of, for those who cannot look at its machine any more."""
    machine = socket.gethostname()
    writer = hurried(run).event_writer(f"{machine.lower()[:40]}-{uuid.uuid4().hex[:8]}")
    writer.append(Event(time.time(), "failure", f"the agent on {machine} ended: {type(error).__name__}: {error}"))
    go_through(writer.flush)


def end_at_once(reason: str, power_off: bool) -> None:
    """The end of this process, and of the machine where the fleet says so, with nobody told about it."""
    try:
        say(f"failed: {reason}, and the store does not answer")
        switch_off(power_off)
    finally:
        os._exit(EXIT_UNFINISHED)


def switch_off(wanted: bool, command: Sequence[str] = POWER_OFF) -> bool:
    """Ends this machine, where the fleet says so: by the command, or by sudo where that needs no password.

    Raises nothing; whether it ended well.
    """
    if not wanted:
        return False
    say("machine: this machine is switched off")
    for tried in (command, ("sudo", "-n", *command)):
        words = " ".join(tried)
        try:
            code = subprocess.run(tried, check=False, timeout=_OFF_SECONDS).returncode
        except (OSError, subprocess.SubprocessError) as error:
            say(f"warning: `{words}`: {error}")
            continue
        if code == 0:
            return True
        say(f"warning: `{words}` ended with exit code {code}")
    say("failed: this machine could not be switched off and goes on costing: end it by hand")
    return False
