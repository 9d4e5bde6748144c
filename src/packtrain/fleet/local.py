"""This machine: agents as processes of their own, which go on when the terminal is closed."""

from __future__ import annotations

import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from packtrain.control import cache_directory, end_with_parent
from packtrain.fleet.fleet import Fleet, Start, Started
from packtrain.job import Local
from packtrain.runs import Run

_ADDRESS = "127.0.0.1"


class LocalNode(Started):
    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self.log = process, log

    def exit_code(self) -> int | None:
        return self._process.poll()


class LocalFleet(Fleet):
    def __init__(self, settings: Local) -> None:
        self._settings = settings

    def plan(self, run: Run) -> list[Start]:
        arguments = (
            sys.executable, "-m", "packtrain", "node", run.name, "--store", run.store.url, "--address", _ADDRESS,
        )  # fmt: skip
        return [Start("this machine", arguments)] * self._settings.machines

    def start(self, starts: Sequence[Start], tied: bool) -> list[Started]:
        logs = cache_directory() / "agents"
        logs.mkdir(parents=True, exist_ok=True)
        nodes: list[Started] = []
        for start in starts:
            log = logs / f"{uuid.uuid4().hex[:12]}.log"
            with log.open("wb") as output:
                process = subprocess.Popen(
                    start.arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_end_with_client if tied else None,  # noqa: PLW1509 - prctl alone
                )
            nodes.append(LocalNode(process, log))
        return nodes


def _end_with_client() -> None:
    end_with_parent(signal.SIGTERM)
