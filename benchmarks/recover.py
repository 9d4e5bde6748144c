"""Time until a run trains again after a worker is killed, and goodput with a kill every half a minute.

    python benchmarks/recover.py [--json] [--rounds 3] [--seconds 120] [--every 30] [--only torchrun]

The example job on two workers with a save every 20 steps, against a hand-written script that uses torchrun's restarts
and torch.save. Same model, batches and kills (SIGKILL of the second worker). A restart loses the time from when a step
was first made until it is made again; goodput is the share of the time that is not lost.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

import bench
from packtrain.api import RunHandle
from packtrain.api import run as start_run
from packtrain.node.telemetry import rank_of
from packtrain.process import end_with_parent
from packtrain.run.run import Run
from packtrain.train.control import RUN_VARIABLE

EXAMPLE = bench.EXAMPLES / "translate.yaml"
PATIENCE_SECONDS = 100.0
GRACE_SECONDS = 40.0  # torchrun gives its workers half a minute
ERRORS = "errors.txt"


@dataclass(frozen=True)
class Step:
    """A completed step, its time, and the generation (torchrun: the restart) it belongs to."""

    number: int
    generation: int
    time: float


class Contender(ABC):
    @abstractmethod
    def steps(self) -> list[Step]: ...

    @abstractmethod
    def workers(self) -> list[psutil.Process]: ...

    @abstractmethod
    def end(self) -> None: ...

    def kill_one(self) -> float:
        """Kill the worker with the highest rank; return the time."""
        victim = max(self.workers(), key=lambda worker: rank_of(worker) or 0)
        at = time.time()
        victim.kill()
        return at

    def wait_for(self, steps: int, generation: int) -> list[Step]:
        """Wait until a generation after `generation` has made this many steps; return them."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            made = [step for step in self.steps() if step.generation > generation]
            if len(made) >= steps:
                return made
            time.sleep(0.1)
        raise TimeoutError(f"no {steps} steps within {PATIENCE_SECONDS:.0f} s after generation {generation}")


class Ours(Contender):
    def __init__(self, directory: Path, store: Path, save_every: int) -> None:
        os.environ["PACKTRAIN_CACHE"] = str(directory / "cache")
        settings = [
            "train.duration=100000 steps", f"checkpoint.every={save_every} steps", "evaluate.every=100000 steps",
            "fleet.workers=2", "fleet.failures=1000", f"store={store}",
        ]  # fmt: skip
        self._handle: RunHandle = start_run(EXAMPLE, settings)
        self._run: Run = self._handle._run
        self._points = self._run.points()
        self._steps: list[Step] = []

    def steps(self) -> list[Step]:
        for point in self._points.read():
            if point.kind == "train":
                self._steps.append(Step(point.step, point.generation, point.time))
        self._steps.sort(key=lambda step: (step.generation, step.number))
        return self._steps

    def workers(self) -> list[psutil.Process]:
        return _processes(RUN_VARIABLE, self._run.name, str(self._run.store.url))

    def end(self) -> None:
        self._handle.stop()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._run.result() is None and time.monotonic() < deadline:
            time.sleep(0.2)


class ByHand(Contender):
    """A script that saves with torch.save, restarted by torchrun."""

    def __init__(self, directory: Path, store: Path, save_every: int) -> None:
        self._log = directory / "steps.jsonl"
        self._log.touch()
        self._mark = str(directory)
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
                "--nproc-per-node", "2", "--max-restarts", "1000",
                str(Path(__file__).parent / "peers" / "by_hand.py"), str(directory), str(store), str(save_every),
            ],
            env={
                **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "BY_HAND": self._mark,
                # Torch 2.13 gives restarted workers the store of those before them: half of the restarts then fail,
                # because a worker reads the address of one that is dead.
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            },
            stdout=subprocess.DEVNULL,
            stderr=(directory / ERRORS).open("w"),
            preexec_fn=lambda: end_with_parent(signal.SIGTERM),  # noqa: PLW1509 - prctl alone
        )  # fmt: skip

    def steps(self) -> list[Step]:
        lines = self._log.read_text().splitlines()
        return [Step(*json.loads(line)) for line in lines if line.endswith("]")]

    def workers(self) -> list[psutil.Process]:
        return _processes("BY_HAND", self._mark)

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:  # it may miss the signal while it restarts its workers
            processes: list[psutil.Process | subprocess.Popen[bytes]] = [*self.workers(), self._process]
            for process in processes:
                process.kill()
            self._process.wait()


CONTENDERS: dict[str, type[Ours | ByHand]] = {"packtrain": Ours, "torchrun": ByHand}


def _processes(variable: str, value: str, store: str | None = None) -> list[psutil.Process]:
    """Return the workers whose environment has the variable."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environment = process.environ()
            ours = environment.get(variable) == value and store in (None, environment.get("PACKTRAIN_STORE"))
            if ours and rank_of(process) is not None:
                found.append(process)
    return found


def lost_seconds(steps: list[Step]) -> float:
    """Return how much later the steps were that restarts made again, or the next ones where they repeated none."""
    lost, made = 0.0, dict[int, float]()
    for early, late in itertools.pairwise(steps):
        made[early.number] = early.time
        if late.generation != early.generation:
            lost += late.time - made.get(late.number, early.time)
    return lost


def kills(contender: Contender, rounds: int, warm_steps: int) -> list[tuple[float, int]]:
    """Return for each kill the seconds until the next step, and how many steps were repeated."""
    found = []
    generation = 0
    for _ in range(rounds):
        made = contender.wait_for(warm_steps, generation)
        generation = made[-1].generation
        at = contender.kill_one()
        first = contender.wait_for(1, generation)[0]
        before = max(step.number for step in contender.steps() if step.generation == generation)
        found.append((first.time - at, before - first.number + 1))
    return found


def goodput_with_kills(contender: Contender, seconds: float, every: float) -> float:
    """Return the goodput with a kill at regular intervals."""
    start = contender.steps()[-1]
    began = time.time()
    for number in itertools.count(1):
        time.sleep(max(0.0, began + min(number * every, seconds) - time.time()))
        if number * every >= seconds:  # a kill at the end would not change the result
            break
        with suppress(ValueError, psutil.Error):  # between two generations there are no workers
            contender.kill_one()
    steps = contender.steps()
    return 1 - lost_seconds(steps[steps.index(start) :]) / (steps[-1].time - start.time)


@dataclass(frozen=True)
class Recovery:
    """Seconds to the next step and steps repeated, of each kill; and the goodput with kills at regular intervals."""

    kills: list[tuple[float, int]]
    goodput: float


def parser() -> argparse.ArgumentParser:
    arguments = bench.parser(__doc__, rounds=3)
    arguments.add_argument("--seconds", type=float, default=120.0)
    arguments.add_argument("--every", type=float, default=30.0)
    arguments.add_argument("--save-every", type=int, default=20, help="steps")
    arguments.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    return arguments


def measure(options: argparse.Namespace) -> dict[str, Recovery | str]:
    """Return what each contender took, or why it did not come back."""
    recoveries: dict[str, Recovery | str] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        for name in options.only:
            kind = CONTENDERS[name]
            directory = Path(place, kind.__name__)
            directory.mkdir()
            contender = kind(directory, Path(place, "store"), options.save_every)
            try:
                single = kills(contender, options.rounds, 2 * options.save_every + 5)
                goodput = goodput_with_kills(contender, options.seconds, options.every)
                recoveries[name] = Recovery(single, goodput)
            except TimeoutError as error:
                recoveries[name] = str(error)
                if (directory / ERRORS).exists():  # why, which torchrun alone knows
                    sys.stderr.write((directory / ERRORS).read_text())
            finally:
                contender.end()
    return recoveries


def report(options: argparse.Namespace, recoveries: dict[str, Recovery | str]) -> bench.Report:
    rows: list[dict[str, object]] = []
    for name, recovery in recoveries.items():
        if isinstance(recovery, str):
            rows.append({"run": name, "seconds to the next step": recovery})
            continue
        rows.append(
            {
                "run": name,
                "seconds to the next step": bench.median([seconds for seconds, _ in recovery.kills]),
                "steps repeated": bench.median([float(steps) for _, steps in recovery.kills]),
                "goodput with kills": f"{recovery.goodput:.0%}",
            }
        )
    notes = [
        f"medians of {options.rounds} kills; saves every {options.save_every} steps, 2 workers on this machine;"
        f" with kills: one every {options.every:.0f} s for {options.seconds:.0f} s"
    ]
    return bench.Report("Recovery from a killed worker", rows, notes)


if __name__ == "__main__":
    bench.main(parser(), measure, report)
