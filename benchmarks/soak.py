"""Random faults for minutes: does the run end with what an undisturbed one gives, and is nothing left behind?

    sudo python benchmarks/soak.py [--json] [--minutes 10] [--seed 1] [--every 5 20] [--machines 1 2]

The tests' small job on two workers: on this machine, or one on each of two machines (network namespaces, reached by
ssh; needs root). Every 5 to 20 s, also while the run recovers, one of: SIGKILL of a worker, of a node, of both at the
same time, or `packtrain stop` and `packtrain resume`. A killed node is replaced at once, as systemd would. After the
last fault the run finishes. Every step must be there once, with the samples and the loss of an undisturbed run, and the
weights must be equal. Exits with 1 if they are not, or if processes or files are left.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import psutil

import bench
from packtrain.fleet.host import is_node
from packtrain.node.telemetry import rank_of
from packtrain.observe.history import read_points, read_recent
from packtrain.run.checkpoint import committed
from packtrain.run.records import Point
from packtrain.run.run import Run
from parts.hosts import Host, Network, hosts, missing
from parts.sandbox import PACE, Sandbox, history, kill, make_sandbox, set_pace, weights

PACE_SECONDS = 0.2  # per step, while there are faults
WORKERS = 2
PATIENCE_SECONDS = 300.0


def wait(condition: Callable[[], object], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {seconds:.0f} s")
        time.sleep(0.2)


@dataclass
class Field:
    """A run on one machine or several, its client, and what happened to it."""

    sandbox: Sandbox
    pace_file: Path
    network: Network | None = None
    replacements: list[subprocess.Popen[bytes]] = field(default_factory=list)
    faults: list[tuple[str, float, int]] = field(default_factory=list)  # kind, time, generation
    killed_nodes: int = 0

    @property
    def run(self) -> Run:
        return self.sandbox.run()

    def client(self, *words: str) -> None:
        done = self.sandbox.packtrain(*words, timeout=PATIENCE_SECONDS)
        if done.returncode != 0:
            raise RuntimeError(f"packtrain {' '.join(words)}: {done.stderr or done.stdout}")

    def machines(self) -> Sequence[Host | None]:
        """Return the hosts; None is this machine."""
        return [None] if self.network is None else list(self.network)

    def processes(self, machine: Host | None) -> list[psutil.Process]:
        return self.sandbox.processes() if machine is None else machine.processes()

    def nodes(self, machine: Host | None) -> list[psutil.Process]:
        run = self.run
        return [one for one in self.processes(machine) if is_node(_words(one), run.name, run.store.url)]

    def workers(self, machine: Host | None) -> list[psutil.Process]:
        return [one for one in self.processes(machine) if _is_worker(one)]

    def start_node(self, machine: Host | None) -> None:
        """Start a node in the place of a killed one."""
        if machine is None:
            self.sandbox.add_node()
            return
        run = self.run
        command = [sys.executable, "-m", "packtrain", "node", run.name, "--store", run.store.url]
        command += ["--code", run.code_digest, "--interface", "eth0"]
        own = {"OMP_NUM_THREADS": "1", "PACE": str(self.pace_file)}
        null = subprocess.DEVNULL
        self.replacements.append(machine.popen(command, own, stdin=null, stdout=null, stderr=null))

    # Faults.

    def kill_worker(self, chance: random.Random) -> None:
        found = [worker for machine in self.machines() for worker in self.workers(machine)]
        if found:  # between two generations there are none
            kill([chance.choice(found)])

    def kill_node(self, chance: random.Random) -> None:
        machine = chance.choice(self.machines())
        found = self.nodes(machine)
        kill(found)
        self.killed_nodes += len(found)
        self.start_node(machine)

    def kill_both(self, chance: random.Random) -> None:
        self.kill_worker(chance)
        self.kill_node(chance)

    def stop_and_resume(self, chance: random.Random) -> None:  # noqa: ARG002
        self.client("stop")
        self.faults[-1] = ("stop", time.time(), self.faults[-1][2])  # the stop itself is not time to recover
        self.client("resume", "--detach")

    def disturb(self, seconds: float, every: tuple[float, float], chance: random.Random) -> float:
        """Cause faults for so long; return the seconds that passed."""
        kinds = {
            "worker": self.kill_worker,
            "node": self.kill_node,
            "both": self.kill_both,
            "stop": self.stop_and_resume,
        }
        began = time.monotonic()
        while True:
            pause = chance.uniform(*every)
            if time.monotonic() - began + pause > seconds:
                break
            time.sleep(pause)
            kind = chance.choice(list(kinds))
            latest = self.run.latest_generation()
            self.faults.append((kind, time.time(), latest.number if latest is not None else 0))
            kinds[kind](chance)
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        return time.monotonic() - began

    # What is left.

    def left_processes(self) -> list[str]:
        def found() -> list[str]:
            for process in [*self.replacements, *self.sandbox.nodes]:
                process.poll()  # or it would stay a zombie
            return [" ".join(_words(one)) for machine in self.machines() for one in self.processes(machine)]

        with suppress(TimeoutError):
            wait(lambda: not found(), "end of all processes", 60.0)
        return found()

    def left_files(self) -> list[str]:
        """Return the files that should not be there any more: of machines, then of the store."""
        caches = [self.sandbox.directory / "cache"]
        if self.network is not None:
            caches = [host.home / ".cache" / "packtrain" for host in self.network]
        of_nodes = [str(path) for cache in caches for path in (cache / "nodes").glob("*")]
        # The logs of nodes that were killed stay for a week.
        logs = [str(path) for cache in caches for path in (cache / "logs").glob("*.log")]
        root = Path(self.run.store.url)
        temporary = [str(path) for path in root.rglob(".tmp-*")]
        whole = {checkpoint.name for checkpoint in committed(self.run)}
        checkpoints = [path for path in (root / self.run.folder / "checkpoints").iterdir() if path.name not in whole]
        return [*of_nodes, *logs[self.killed_nodes :], *temporary, *map(str, checkpoints)]


def _words(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def _is_worker(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return rank_of(process) is not None
    return False


@contextmanager
def one_machine(scratch: Path) -> Iterator[tuple[Field, str]]:
    sandbox = make_sandbox(scratch)
    try:
        yield Field(sandbox, scratch / PACE), f"{{local: {{machines: 1}}, workers: {WORKERS}, failures: 1000}}"
    finally:
        sandbox.close()


@contextmanager
def several_machines(scratch: Path, count: int) -> Iterator[tuple[Field, str]]:
    with hosts(scratch, count) as network:
        directory = scratch / "client"
        directory.mkdir()
        pace = network.shared / PACE
        sandbox = make_sandbox(
            directory, str(network.shared / "store"), PATH=network.search_path(), PACE=str(pace), OMP_NUM_THREADS="1"
        )
        names = ", ".join(host.name for host in network)
        ssh = f"{{hosts: [{names}], python: {sys.executable}, interface: eth0}}"
        yield Field(sandbox, pace, network), f"{{ssh: {ssh}, workers: {WORKERS // count}, failures: 1000}}"


def begin(made: Field, fleet: str, steps: int) -> None:
    made.sandbox.detach(
        "--set", f"train.duration={steps} steps", "--set", f"fleet={fleet}",
        "--set", "environment=[OMP_NUM_THREADS, PACE]",
    )  # fmt: skip


def undisturbed(scratch: Path, steps: int) -> Run:
    with one_machine(scratch) as (made, fleet):
        begin(made, fleet, steps)
        wait(made.run.result, "result of the undisturbed run", 10 * PATIENCE_SECONDS)
        return made.run


def recoveries(faults: Sequence[tuple[str, float, int]], points: Sequence[Point]) -> list[float]:
    """Return for each fault the seconds until the first step of a later generation. Later faults may be in between."""
    ordered = sorted(points, key=lambda point: point.time)
    found = []
    for _, at, generation in faults:
        again = next((point.time for point in ordered if point.generation > generation and point.time > at), None)
        if again is not None:
            found.append(again - at)
    return found


def goodput(run: Run, until: float, seconds: float) -> float:
    """Return the time that the steps that counted take by themselves, as a part of the time that passed."""
    made = [point for point in read_points(run) if point.kind == "train" and point.time <= until]
    took = [late.time - early.time for early, late in itertools.pairwise(made) if early.generation == late.generation]
    return len(made) * bench.median(took) / seconds if took else 0.0


def soak(
    made: Field, fleet: str, options: argparse.Namespace, steps: int, oracle: Run
) -> tuple[dict[str, object], list[str]]:
    """Return the row of the table, and what is wrong."""
    set_pace(made.pace_file, PACE_SECONDS)
    begin(made, fleet, steps)
    wait(lambda: read_recent(made.run, 1, evaluated=False), "first step")
    seconds = made.disturb(60 * options.minutes, tuple(options.every), random.Random(options.seed))  # noqa: S311
    until = time.time()
    set_pace(made.pace_file, 0)
    wait(made.run.result, "result after the last fault")
    run, wrong = made.run, []
    result = run.result()
    assert result is not None
    if result.status != "finished":
        wrong.append(f"the run {result.status}: {result.reason}")
    elif [step for step, _ in history(run)] != list(range(1, steps + 1)):
        wrong.append("steps are missing or there twice")
    elif history(run) != history(oracle):
        wrong.append("samples or losses differ from those of the undisturbed run")
    elif weights(run) != weights(oracle):
        wrong.append("weights differ from those of the undisturbed run")
    equal = "no" if wrong else "yes"
    processes, files = made.left_processes(), made.left_files()
    wrong += [f"left: {one}" for one in (*processes, *files)]
    kinds = Counter(kind for kind, _, _ in made.faults)
    times = recoveries(made.faults, [point for point in run.points().read() if point.kind == "train"])
    commits = sum(event.kind == "checkpoint" and "committed" in event.text for event in run.events().read())
    return {
        "machines": len(made.machines()),
        "faults": ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())),
        "generations": len(run.generations()),
        "commits": commits,
        "recovery s": f"{bench.median(times):.1f}" if times else "-",
        "worst s": f"{max(times):.1f}" if times else "-",
        "goodput": f"{goodput(run, until, seconds):.0%}",
        "equal": equal,
        "left": f"{len(processes)} processes, {len(files)} files",
    }, wrong


@dataclass(frozen=True)
class Soaked:
    """A row for each number of machines, what is wrong, and why there is no second machine."""

    rows: list[dict[str, object]]
    faults: list[str]
    absent: str | None


def steps_of(options: argparse.Namespace) -> int:
    """Return more steps than the faults leave time for: the run must not end before them."""
    return int(60 * options.minutes / PACE_SECONDS) + 60


def parser() -> argparse.ArgumentParser:
    arguments = bench.parser(__doc__)
    arguments.add_argument("--minutes", type=float, default=10.0, help="of faults, on each number of machines")
    arguments.add_argument("--seed", type=int, default=1, help="of the faults")
    arguments.add_argument("--every", type=float, nargs=2, default=[5.0, 20.0], help="min and max seconds between")
    arguments.add_argument("--machines", type=int, nargs="+", choices=[1, 2], default=[1, 2])
    return arguments


def measure(options: argparse.Namespace) -> Soaked:
    soaked = Soaked([], [], missing() if 2 in options.machines else None)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        os.environ["XDG_STATE_HOME"] = place  # what the person has run is none of its business
        for name in ("oracle", "1", "2"):
            Path(place, name).mkdir()
        oracle = undisturbed(Path(place, "oracle"), steps_of(options))
        for count in options.machines:
            if count > 1 and soaked.absent is not None:
                continue
            scratch = Path(place, str(count))
            with one_machine(scratch) if count == 1 else several_machines(scratch, count) as (made, fleet):
                row, faults = soak(made, fleet, options, steps_of(options), oracle)
                soaked.rows.append(row)
                soaked.faults.extend(f"{count} machines: {fault}" for fault in faults)
    return soaked


def report(options: argparse.Namespace, soaked: Soaked) -> bench.Report:
    least, most = options.every
    notes = [
        f"{options.minutes:g} min with a fault every {least:g} to {most:g} s, seed {options.seed};"
        f" {steps_of(options)} steps of at least {PACE_SECONDS} s, {WORKERS} workers, a save every 20 steps",
        "recovery: from a fault (or `packtrain resume`) to the next step, also if other faults came first",
        f"{os.cpu_count()} cores; load at the end: {os.getloadavg()[0]:.1f}",
        *([f"no second machine: {soaked.absent}"] if soaked.absent else []),
    ]
    return bench.Report("Soak", soaked.rows, notes, soaked.faults)


if __name__ == "__main__":
    bench.main(parser(), measure, report)
