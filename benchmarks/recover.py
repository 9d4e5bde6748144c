"""How soon a run steps again after a worker was killed, and what is left of its time under a kill every half a minute.

    python benchmarks/recover.py [--json] [--rounds 3] [--seconds 120] [--every 30]

The example job on two workers, with a save every 20 steps, against what people write by hand: torchrun with restarts
and a script that saves with torch.save. The same model, batches and kills (SIGKILL of the second worker). Goodput is
the steps that were kept, at the pace of undisturbed ones, by the time that passed.
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
from typing import Any

import psutil

import bench
from packtrain.api import RunHandle
from packtrain.api import run as start_run
from packtrain.run.run import Run
from packtrain.system import end_with_parent
from packtrain.train.control import RUN_VARIABLE

EXAMPLE = Path(__file__).parent.parent / "examples" / "translate.yaml"
PATIENCE_SECONDS = 100.0
GRACE_SECONDS = 40.0  # torchrun itself gives its workers half a minute


@dataclass(frozen=True)
class Step:
    """A step that was made: when, and in which attempt."""

    number: int
    attempt: int
    time: float


class Contender(ABC):
    @abstractmethod
    def steps(self) -> list[Step]: ...

    @abstractmethod
    def workers(self) -> list[psutil.Process]: ...

    @abstractmethod
    def end(self) -> None: ...

    def kill_one(self) -> float:
        """SIGKILL of the worker with the highest rank; when that was."""
        victim = max(self.workers(), key=lambda worker: int(worker.environ()["RANK"]))
        at = time.time()
        victim.kill()
        return at

    def wait_for(self, steps: int, attempt: int) -> list[Step]:
        """Until an attempt after `attempt` has made so many steps."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            made = [step for step in self.steps() if step.attempt > attempt]
            if len(made) >= steps:
                return made
            time.sleep(0.1)
        raise TimeoutError(f"no {steps} steps within {PATIENCE_SECONDS:.0f} s, attempt {attempt} was the last")


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
        self._steps.sort(key=lambda step: (step.attempt, step.number))
        return self._steps

    def workers(self) -> list[psutil.Process]:
        return _processes(RUN_VARIABLE, self._run.name, str(self._run.store.url))

    def end(self) -> None:
        self._handle.stop()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._run.result() is None and time.monotonic() < deadline:
            time.sleep(0.2)


class ByHand(Contender):
    """torchrun restarts a script that saves with torch.save."""

    def __init__(self, directory: Path, store: Path, save_every: int) -> None:
        self._log = directory / "steps.jsonl"
        self._log.touch()
        self._mark = str(directory)
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
                "--nproc-per-node", "2", "--max-restarts", "1000",
                str(Path(__file__).parent / "by_hand.py"), str(directory), str(store), str(save_every),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "BY_HAND": self._mark},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
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
        except subprocess.TimeoutExpired:  # asked while it starts its workers again, it may not hear it
            for process in (*self.workers(), self._process):
                process.kill()
            self._process.wait()


def _processes(variable: str, value: str, store: str | None = None) -> list[psutil.Process]:
    """The workers whose environment has the variable."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environment = process.environ()
            ours = environment.get(variable) == value and store in (None, environment.get("PACKTRAIN_STORE"))
            if ours and "RANK" in environment:
                found.append(process)
    return found


def pace(steps: list[Step]) -> float:
    """Seconds of an undisturbed step: the median between two of the same attempt."""
    return bench.median(
        [late.time - early.time for early, late in itertools.pairwise(steps) if late.attempt == early.attempt]
    )


def kept(steps: list[Step]) -> int:
    """How far the last attempt has come."""
    return max(step.number for step in steps if step.attempt == steps[-1].attempt)


def kills(contender: Contender, rounds: int, warm_steps: int) -> list[tuple[float, int]]:
    """After each kill: seconds to the next step that was made, and how many had to be made again."""
    found = []
    attempt = 0
    for _ in range(rounds):
        made = contender.wait_for(warm_steps, attempt)
        attempt = made[-1].attempt
        at = contender.kill_one()
        first = contender.wait_for(1, attempt)[0]
        before = max(step.number for step in contender.steps() if step.attempt == attempt)
        found.append((first.time - at, before - first.number + 1))
    return found


def under_fire(contender: Contender, seconds: float, every: float) -> float:
    """The goodput under a kill every so often."""
    start = contender.steps()[-1]
    began = time.time()
    for number in itertools.count(1):
        time.sleep(max(0.0, began + min(number * every, seconds) - time.time()))
        if number * every >= seconds:  # a kill at the end would change nothing that is counted
            break
        with suppress(ValueError, psutil.Error):  # between two attempts there is nobody to kill
            contender.kill_one()
    steps = contender.steps()
    return (kept(steps) - start.number) * pace(steps) / (time.time() - start.time)


def measure(contender: Contender, options: argparse.Namespace) -> dict[str, Any]:
    found = kills(contender, options.rounds, 2 * options.save_every + 5)
    return {
        "seconds to the next step": bench.median([seconds for seconds, _ in found]),
        "steps made again": bench.median([float(steps) for _, steps in found]),
        "goodput under fire": f"{under_fire(contender, options.seconds, options.every):.0%}",
    }


def main() -> None:
    arguments = bench.parser(__doc__)
    arguments.set_defaults(rounds=3)
    arguments.add_argument("--seconds", type=float, default=120.0)
    arguments.add_argument("--every", type=float, default=30.0)
    arguments.add_argument("--save-every", type=int, default=20, help="steps")
    options = arguments.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        for name, kind in (("packtrain", Ours), ("torchrun and torch.save", ByHand)):
            directory = Path(place, kind.__name__)
            directory.mkdir()
            contender = kind(directory, Path(place, "store"), options.save_every)
            try:
                rows.append({"run": name, **measure(contender, options)})
            except TimeoutError as error:
                rows.append({"run": name, "seconds to the next step": str(error)})
            finally:
                contender.end()
    notes = [
        f"medians of {options.rounds} kills; saves every {options.save_every} steps, 2 workers on this machine;"
        f" under fire: a kill every {options.every:.0f} s for {options.seconds:.0f} s"
    ]
    bench.show("After a worker's death", rows, notes, options.json)


if __name__ == "__main__":
    main()
