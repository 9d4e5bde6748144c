"""Holds mpirun while a run goes on, and ends it when what it waits for will not come.

    python -m packtrain.fleet.keeper --run RUN --store STORE --least 2 -- mpirun ...

mpirun waits for a machine that lost its power as if it were there; if it notices, it ends all the others. Here the
leases say who is lost: a run that can go on without goes on, and mpirun ends when the run has, or when too few
machines are left for it. What it left of itself on this machine ends with it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType

import psutil

from packtrain.control import say
from packtrain.errors import PacktrainError
from packtrain.fleet.agents import END_SECONDS
from packtrain.fleet.remote import end_with_client
from packtrain.node.generations import LeaseWatch
from packtrain.runs import LEASE_SECONDS, Run
from packtrain.store import open_store

LEAVE_SECONDS = 10.0  # for mpirun to see by itself that all agents have left
REPLACE_SECONDS = 20.0  # for somebody to start another machine by hand
# For mpirun alone, so that it never ends the others; its helpers on the machines still notice when this one is gone.
_KEEPALIVE = {"OMPI_MCA_oob_tcp_keepalive_time": "0", "OMPI_MCA_plm_rsh_pass_environ_mca_params": "0"}


@dataclass
class Judge:
    """Says when mpirun waits in vain: `why` is a reason to end it that has held for long enough."""

    least: int
    watch: LeaseWatch = field(default_factory=LeaseWatch)
    _began: bool = False
    _since: tuple[str, float] = ("", 0.0)

    def there(self, now: float) -> int:
        return sum(not self.watch.lost(name, now) for name, node in self.watch.nodes.items() if not node.left)

    def why(self, ended: bool, now: float) -> str | None:
        self._began = self._began or any(self.watch.alive(name, now) for name in self.watch.nodes)
        there = self.there(now)
        reason, patience = "", 0.0
        if ended and there == 0:
            reason, patience = "the run has ended", LEAVE_SECONDS
        elif not ended and self._began and there < self.least:
            reason, patience = f"{there} of the {self.least} machines that the run needs are left", REPLACE_SECONDS
        if reason != self._since[0]:
            self._since = (reason, now)
        return reason if reason and now - self._since[1] >= patience else None


def keep(command: Sequence[str], run: Run, least: int) -> int:
    """The exit code of the command, which ends with this process and gets the signals that this one gets."""
    process = subprocess.Popen(
        command,
        env={**os.environ, **_KEEPALIVE},
        preexec_fn=end_with_client,  # noqa: PLW1509 - prctl alone
    )

    def pass_on(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, pass_on)
    judge = Judge(least)
    while process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(LEASE_SECONDS)
        with suppress(PacktrainError):  # a store that is away says nothing
            judge.watch.observe(run.nodes(), time.monotonic())
            why = judge.why(run.result() is not None, time.monotonic())
            if why is not None and process.poll() is None:
                say(f"mpirun: ends, for {why}")
                _end(process, run, judge)
    return process.returncode


def _end(process: subprocess.Popen[bytes], run: Run, judge: Judge) -> None:
    """Agents that are there commit and leave; mpirun, and its connections to machines that are gone, then end."""
    process.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + END_SECONDS
    while process.poll() is None and time.monotonic() < deadline and judge.there(time.monotonic()):
        time.sleep(LEASE_SECONDS / 2)
        with suppress(PacktrainError):
            judge.watch.observe(run.nodes(), time.monotonic())
    with suppress(psutil.NoSuchProcess, subprocess.TimeoutExpired):
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait(LEAVE_SECONDS)
        for one in family:
            with suppress(psutil.NoSuchProcess):
                one.kill()


def main(given: Sequence[str]) -> int:
    place = list(given).index("--")
    parser = argparse.ArgumentParser(prog="packtrain.fleet.keeper")
    parser.add_argument("--run", required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--least", type=int, required=True)
    options = parser.parse_args(given[:place])
    return keep(given[place + 1 :], Run(open_store(options.store), options.run), options.least)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
