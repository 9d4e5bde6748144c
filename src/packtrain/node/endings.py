"""How a machine's part in a run ends before the goal."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from packtrain.control import say
from packtrain.store import StoreError

POWER_OFF = ("systemctl", "poweroff")


@dataclass(frozen=True)
class Leaving:
    """Why the workers are to end before the goal: a person's stop and the budget end the run, a notice only a part."""

    kind: Literal["stop", "budget", "notice"]
    reason: str


def complain(error: StoreError) -> None:
    say(f"warning: {error}")


def switch_off(wanted: bool, command: Sequence[str] = POWER_OFF) -> None:
    """Ends this machine, where the fleet says so."""
    if wanted:
        say("node: this machine is switched off")
        subprocess.run(command, check=False)
