"""The process of the first node that mirrors a run to MLflow, which may hang or be away without delaying the node."""

from __future__ import annotations

import subprocess
import sys

from packtrain.process import say
from packtrain.run.run import Run

_FINISH_SECONDS = 90.0  # for the last steps and the report; the process gives up before


class MirrorProcess:
    """`packtrain mirror` for a run whose job asks for it. It reads the store, as everybody does."""

    def __init__(self, run: Run, node: str) -> None:
        self._run, self._node = run, node
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, unless it is running; it ends when the run does, or when another node is the first."""
        uri = self._run.job.report.mlflow
        if uri is None or (self._process is not None and self._process.poll() is None):
            return
        store = self._run.store
        command = [sys.executable, "-P", "-m", "packtrain", "mirror", self._run.name, "--store", store.url]
        command += [] if store.identity is None else ["--store-id", store.identity]
        # Of the job that this node was told to run, not of the one that the store has by now.
        command += ["--mlflow", uri, "--node", self._node]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        except OSError as error:
            say(f"warning: cannot start the mirror to MLflow: {error}")

    def finish(self) -> None:
        """Wait until it has mirrored the end of the run, or has given up."""
        if self._process is not None:
            try:
                self._process.wait(_FINISH_SECONDS)
            except subprocess.TimeoutExpired:
                say("warning: the mirror to MLflow takes too long")

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
