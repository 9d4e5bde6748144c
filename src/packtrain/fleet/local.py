"""This machine: agents as processes of their own, which go on when the terminal is closed."""

from __future__ import annotations

import builtins
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from packtrain.errors import Mistake
from packtrain.fleet import agents
from packtrain.fleet.fleet import Fleet, Machine, Start, Started, Tell, node_arguments, silent
from packtrain.fleet.remote import end_with_client
from packtrain.node.notices import SECONDS_VARIABLE
from packtrain.places import Local
from packtrain.runs import Run

HERE = "this machine"
_ADDRESS = "127.0.0.1"


class LocalNode(Started):
    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self.log = process, log

    def exit_code(self) -> int | None:
        return self._process.poll()


class LocalFleet(Fleet):
    trains_here = True

    def __init__(self, settings: Local) -> None:
        self._settings = settings

    def plan(self, run: Run) -> builtins.list[Start]:
        arguments = (*node_arguments(run, sys.executable, self._settings), "--address", _ADDRESS)
        return [Start(HERE, arguments)] * self._settings.machines.most

    def start(self, starts: Sequence[Start], tied: bool, tell: Tell = silent) -> builtins.list[Started]:  # noqa: ARG002
        return [start_here(start, tied) for start in starts]

    def list(self, run: Run) -> builtins.list[Machine]:
        found = agents.running(run.name, run.store.url)
        return [Machine(HERE, "running", f"process {process.pid}") for process in found]

    def end(self, run: Run) -> None:
        agents.end(run.name, run.store.url)

    def shell(self, run: Run, machine: str | None) -> tuple[str, ...]:
        if machine not in (None, HERE, socket.gethostname(), *(node.node for node in run.nodes())):
            raise Mistake(f"{run.name} has no machine {machine!r}: it is on this one alone; leave that word out")
        return (os.environ.get("SHELL") or "/bin/sh",)


def start_here(start: Start, tied: bool) -> Started:
    """A process of this machine that writes to a log of its own, or ends with this one."""
    log = agents.log_directory() / f"{uuid.uuid4().hex[:12]}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            start.arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={SECONDS_VARIABLE: f"{agents.END_SECONDS:.0f}", **os.environ},
            start_new_session=True,
            preexec_fn=end_with_client if tied else None,  # noqa: PLW1509 - prctl alone
        )
    return LocalNode(process, log)
