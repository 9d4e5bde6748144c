"""Time to detect a fault, time until the run trains again, and steps lost: what docs/reliability.md promises.

    sudo python benchmarks/faults.py [--json] [--rounds 3] [--only worker node notice host]

The tests' small job on two nodes, with a save every 20 steps. `worker`: SIGKILL of a worker, with nodes on this
machine. `node`: SIGKILL of a node that another replaces. `notice`: SIGTERM to one node of 1..2, as on preemption.
`host`: the machine of the rendezvous loses power; machines are network namespaces (tests/parts/hosts.py), one of which
may continue alone; needs root. A fault is detected when a node reports it. Lost steps are those that are repeated.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import psutil

import bench
from packtrain.run.run import Run
from parts.host_run import make_host_run
from parts.hosts import hosts, missing
from parts.sandbox import Sandbox, kill, make_sandbox

PATIENCE_SECONDS = 300.0
SAVE_EVERY = 20
WARM_STEPS = SAVE_EVERY + 10  # past a commit, and on the way to the next
PACE = "0.05"
ENDLESS = "train.duration=100000 steps"
ELASTIC = "fleet={local: {machines: 1..2}, workers: 1, failures: 1000}"
FIXED = "fleet={local: {machines: 2}, workers: 1, failures: 1000}"
PROMISES = {
    "worker": "2 s, 15 s",
    "node": "15 s, -",
    "notice": "-, 15 s, none lost",
    "host": "30 s, 60 s",
}
Recovery = tuple[float | None, float, int]


class Trial:
    """A run in progress, and the steps and events that it recorded."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._points, self._events = run.points(), run.events()
        self._steps: dict[int, dict[int, float]] = {}  # by generation: steps and their times
        self._events_seen: list[tuple[str, float]] = []

    def look(self) -> None:
        for point in self._points.read():
            if point.kind == "train":
                self._steps.setdefault(point.generation, {})[point.step] = point.time
        self._events_seen += [(event.kind, event.time) for event in self._events.read()]

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what} within {PATIENCE_SECONDS:.0f} s")
            time.sleep(0.1)
            self.look()

    def warm_up(self) -> int:
        """Wait until the latest generation has made some steps; return its number."""

        def is_warm() -> bool:
            return bool(self._steps) and len(self._steps[max(self._steps)]) >= WARM_STEPS

        self.wait("steps", is_warm)
        return max(self._steps)

    def after(self, fault: Callable[[], None], sign: str | None) -> Recovery:
        """Cause a fault; return the seconds until it was detected and until the next step, and the steps lost."""
        generation = self.warm_up()
        time.sleep(random.uniform(0, SAVE_EVERY * float(PACE)))  # noqa: S311 - any time between two saves
        at = time.time()
        fault()

        def seen() -> list[float]:
            return [when for kind, when in self._events_seen if kind == sign and when >= at]

        self.wait("steps after it", lambda: max(self._steps) > generation and (sign is None or bool(seen())))
        self.look()
        number, when = min(self._steps[max(self._steps)].items())
        before = max(self._steps[generation])  # recorded steps
        return (min(seen()) - at if sign else None), when - at, before - number + 1


@contextmanager
def here(fleet: str) -> Iterator[tuple[Sandbox, Trial]]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        sandbox = make_sandbox(Path(directory), PACE=PACE)
        try:
            sandbox.detach("--set", ENDLESS, "--set", fleet)
            yield sandbox, Trial(sandbox.run())
        finally:
            sandbox.close()


def members(run: Run) -> list[str]:
    latest = run.latest_generation()
    return [member.node for member in latest.members] if latest else []


def of_worker(rounds: int) -> list[Recovery]:
    with here(FIXED) as (sandbox, trial):
        return [trial.after(lambda: kill(sandbox.workers_of(members(trial.run)[1])), "failure") for _ in range(rounds)]


def of_node(rounds: int) -> list[Recovery]:
    def fault(sandbox: Sandbox, trial: Trial) -> None:
        kill(sandbox.machine(members(trial.run)[1])[:1])

    found = []
    for _ in range(rounds):  # each in a new sandbox: a replacement exists only once
        with here(ELASTIC) as (sandbox, trial):
            found.append(trial.after(lambda sandbox=sandbox, trial=trial: fault(sandbox, trial), "lost"))  # type: ignore[misc]
    return found


def of_notice(rounds: int) -> list[Recovery]:
    found = []
    for _ in range(rounds):
        with here(ELASTIC) as (sandbox, trial):

            def fault(sandbox: Sandbox = sandbox, trial: Trial = trial) -> None:
                node: psutil.Process = sandbox.machine(members(trial.run)[1])[0]
                node.terminate()

            found.append(trial.after(fault, None))
    return found


def of_host(rounds: int) -> list[Recovery]:
    found = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch, hosts(Path(scratch), 2) as network:
            host_run = make_host_run(network, str(network.shared / "store"), [ENDLESS, ELASTIC], {"PACE": PACE})
            for host in network:
                host_run.start(host)
            found.append(Trial(host_run.run).after(network[0].kill, "lost"))
    return found


KINDS: dict[str, tuple[str, Callable[[int], list[Recovery]]]] = {
    "worker": ("worker killed (SIGKILL)", of_worker),
    "node": ("node killed (SIGKILL)", of_node),
    "notice": ("preemption notice", of_notice),
    "host": ("first machine loses power", of_host),
}


def parser() -> argparse.ArgumentParser:
    arguments = bench.parser(__doc__, rounds=3)
    arguments.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    return arguments


def measure(options: argparse.Namespace) -> dict[str, list[Recovery] | str]:
    """Return the recoveries from each kind of fault, or why it cannot be caused here."""
    recoveries: dict[str, list[Recovery] | str] = {}
    for kind in options.only:
        _, recover = KINDS[kind]
        reason = missing() if kind == "host" else None
        recoveries[kind] = recover(options.rounds) if reason is None else reason
    return recoveries


def report(options: argparse.Namespace, recoveries: dict[str, list[Recovery] | str]) -> bench.Report:
    rows: list[dict[str, object]] = []
    notes = [
        f"median and maximum of {options.rounds}; a save every {SAVE_EVERY} steps of at least {PACE} s",
        "only recorded steps count as lost; a machine without power loses the records of its last second, too",
        f"{os.cpu_count()} cores; load at the end: {os.getloadavg()[0]:.1f}",
    ]
    for kind, measured in recoveries.items():
        title, _ = KINDS[kind]
        if isinstance(measured, str):
            notes.append(f"{title}: not measured: {measured}")
            continue
        detected = [seconds for seconds, _, _ in measured if seconds is not None]
        again = [seconds for _, seconds, _ in measured]
        rows.append(
            {
                "fault": title,
                "detected s": bench.median(detected) if detected else "-",
                "max": max(detected) if detected else "-",
                "training again s": bench.median(again),
                "max ": max(again),
                "max steps lost": max(lost for _, _, lost in measured),
                "promised": PROMISES[kind],
            }
        )
    return bench.Report("Recovery from faults", rows, notes)


if __name__ == "__main__":
    bench.main(parser(), measure, report)
