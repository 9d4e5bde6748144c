"""Starts the workers of a program in place of torch's launcher, which needs torch and tells every worker a rank.

It does the same otherwise: the output of each worker goes to files; when one fails, or a signal asks for it, all get
SIGTERM and half a minute later SIGKILL, with what they have started; and it reports which worker failed in the
launcher's words.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

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
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for place, own_variables in enumerate(variables):
            folder = logs / str(place)
            folder.mkdir()
            with (folder / "stdout.log").open("wb") as out, (folder / "stderr.log").open("wb") as err:
                environment = {**os.environ, **own_variables}
                worker = subprocess.Popen(command, env=environment, stdout=out, stderr=err, start_new_session=True)
                workers.append(worker)
    except OSError:
        _end(workers)
        raise
    while not signals and _failed(workers) is None and any(worker.poll() is None for worker in workers):
        time.sleep(_LOOK_SECONDS)
    failed = _failed(workers)  # not as the loop saw it: the last one may have exited between its two questions
    _end(workers)
    if failed is not None:
        rank, worker = variables[failed].get("RANK", failed), workers[failed]
        print(_REPORT.format(rank, failed, worker.returncode, worker.pid), file=sys.stderr)
    if failed is not None or signals:
        sys.exit(1)


def _failed(workers: Sequence[subprocess.Popen[bytes]]) -> int | None:
    return next((place for place, worker in enumerate(workers) if worker.poll() not in (None, 0)), None)


def _end(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the workers with what they have started: a script does not pass the signal on to its program, nor waits."""
    groups = {worker.pid: _group(worker.pid) for worker in workers if worker.poll() is None}
    members = [process for processes in groups.values() for process in processes]
    _signal(groups, signal.SIGTERM)
    until = time.monotonic() + _GRACE_SECONDS
    # None is reaped before the end: a launcher without workers is one that hangs, to the node.
    while any(map(is_alive, members)) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
    _signal(groups, signal.SIGKILL)
    for worker in workers:
        worker.wait()


def _group(worker: int) -> list[psutil.Process]:
    members = []
    with suppress(psutil.NoSuchProcess):
        leader = psutil.Process(worker)
        for process in (leader, *leader.children(recursive=True)):
            with suppress(ProcessLookupError):
                if os.getpgid(process.pid) == worker:
                    members.append(process)
    return members


def _signal(groups: Iterable[int], number: int) -> None:
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, number)


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
