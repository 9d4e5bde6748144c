"""Starts the workers of a program in place of torch's launcher, which needs torch and tells every worker a rank.

It does the same otherwise: the output of each worker goes to files; when one fails, or a signal asks for it, all get
SIGTERM and half a minute later SIGKILL; and it reports which worker failed in the launcher's words.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

PLAIN = "--plain"  # tells the fork server that nothing it starts needs torch
_GRACE_SECONDS = 30.0
_LOOK_SECONDS = 0.05
_REPORT = "the first worker to fail:\n  rank      : {} (local_rank: {})\n  exitcode  : {} (pid: {})"


def run_workers(command: Sequence[str], variables: Sequence[Mapping[str, str]], logs: Path) -> None:
    """Run a worker for each mapping of variables, until all have exited; exit with 1 if one failed or a signal came."""
    signals: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        signals.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    workers = [_start(command, own, logs / str(place)) for place, own in enumerate(variables)]
    while not signals and _failed(workers) is None and any(worker.poll() is None for worker in workers):
        time.sleep(_LOOK_SECONDS)
    failed = _failed(workers)  # not as the loop saw it: the last one may have exited between its two questions
    _end(workers)
    if failed is not None:
        rank, worker = variables[failed].get("RANK", failed), workers[failed]
        print(_REPORT.format(rank, failed, worker.returncode, worker.pid), file=sys.stderr)
    if failed is not None or signals:
        sys.exit(1)


def _start(command: Sequence[str], variables: Mapping[str, str], folder: Path) -> subprocess.Popen[bytes]:
    folder.mkdir()
    with (folder / "stdout.log").open("wb") as out, (folder / "stderr.log").open("wb") as err:
        return subprocess.Popen(command, env={**os.environ, **variables}, stdout=out, stderr=err)


def _failed(workers: Sequence[subprocess.Popen[bytes]]) -> int | None:
    return next((place for place, worker in enumerate(workers) if worker.poll() not in (None, 0)), None)


def _end(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        worker.terminate()
    until = time.monotonic() + _GRACE_SECONDS
    while any(worker.poll() is None for worker in workers) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
    for worker in workers:
        worker.kill()
        worker.wait()
