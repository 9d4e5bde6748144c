"""How a machine's part in a run ends before the goal."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from packtrain.control import say
from packtrain.errors import EXIT_UNFINISHED
from packtrain.node.lease import hurried
from packtrain.runs import Event, Run
from packtrain.store import StoreError

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
    say("node: this machine is switched off")
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
