"""A small job of two nodes on this machine, with real processes, for tests and benchmarks that break things."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from typer.testing import CliRunner, Result

from packtrain.cli import app
from packtrain.node.telemetry import rank_of
from packtrain.observe.history import read_points
from packtrain.run.checkpoint import committed
from packtrain.run.records import Point
from packtrain.run.run import Run, open_run
from packtrain.store import open_store
from packtrain.train.control import CONTROL_VARIABLE

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 120
JOB = f"""
name: faults
recipe: paced:Paced
code: code
store: STORE
data:
  train: [{{bitext: [{EXAMPLES}/data/en-de/valid.en.gz, {EXAMPLES}/data/en-de/valid.de.gz]}}]
  vocabulary: 500
model: {{size: tiny, width: 32, heads: 2, feedforward: 64, encoder_layers: 1, decoder_layers: 1, dropout: 0.1}}
train:
  duration: {STEPS} steps
  batch: 200 tokens
  schedule: {{noam: {{warmup: 10 steps, peak: 0.003}}}}
checkpoint: {{every: 20 steps, keep_last: 2, keep_best: 0}}
fleet: {{local: {{machines: 2}}, workers: 1}}
"""

# The example's recipe, slowed down as the test needs so that there is time to interfere: PACE is a number of seconds
# per step, or a file with one, which may change during the run. HANG makes a worker hang once.
RECIPE = """
import os, time
from pathlib import Path
from packtrain.recipes.translate import Translate

def pace():
    given = os.environ.get("PACE", "0")
    return float(Path(given).read_text() if "/" in given else given)

class Paced(Translate):
    steps = 0

    def loss(self, model, batch):
        time.sleep(pace())
        self.steps += 1
        at = [os.environ[name] for name in ("PACKTRAIN_GENERATION", "RANK")]
        if at == ["1", "1"] and str(self.steps) == os.environ.get("HANG"):
            self.hang()
        return super().loss(model, batch)

    def hang(self):
        time.sleep(3600)
"""
PACE = "pace.txt"


def set_pace(path: Path, seconds: float) -> None:
    path.with_suffix(".part").write_text(str(seconds))
    path.with_suffix(".part").rename(path)


def wait_until(condition: Callable[[], object], what: str, seconds: float = 300, pause: float = 0.05) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(pause)


@dataclass
class Sandbox:
    """A directory with a store and a cache of its own, and the nodes that were added by hand."""

    directory: Path
    store: str
    extra: dict[str, str] = field(default_factory=dict)
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        own = {"PACKTRAIN_CACHE": str(self.directory / "cache"), "PACKTRAIN_STORE": self.store, "OMP_NUM_THREADS": "1"}
        return {**os.environ, **own, **self.extra}

    def pace(self, seconds: float) -> None:
        """Slow every step down by so many seconds from now on."""
        set_pace(self.directory / PACE, seconds)

    def packtrain(
        self, *arguments: str, text: str | None = None, timeout: float = 150
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; `text` is what a person types."""
        command = [sys.executable, "-m", "packtrain", *arguments]
        where: dict[str, Any] = {"cwd": self.directory, "env": self.environment}
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=timeout, **where)

    def here(self, *arguments: str) -> Result:
        """Run a command that starts nothing in this process."""
        return CliRunner().invoke(app, arguments, env=self.environment)

    def detach(self, *options: str) -> None:
        done = self.packtrain("run", "job.yaml", "--detach", *options)
        assert done.returncode == 0, done.stderr + done.stdout

    def add_node(self, run: str | None = None) -> subprocess.Popen[bytes]:
        """Start another node, as a person or a fleet would."""
        with (self.directory / f"node-{len(self.nodes)}.txt").open("wb") as log:
            self.nodes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "packtrain", "node", run or self.run().name, "--address", "127.0.0.1"],
                    cwd=self.directory,
                    env=self.environment,
                    stdout=log,
                    stderr=log,
                )
            )
        return self.nodes[-1]

    def run(self) -> Run:
        return open_run(open_store(self.store), None)

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter(["environ", "status"]):
            mark = (process.info["environ"] or {}).get("PACKTRAIN_CACHE")
            if mark == str(self.directory / "cache") and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    def node_processes(self) -> list[psutil.Process]:
        return [one for one in self.processes() if "node" in one.cmdline()[:5] and _mark(one) is None]

    def workers_of(self, node: str) -> list[psutil.Process]:
        """The workers of a node, without their launcher."""
        mine = [one for one in self.processes() if f"-{node}/" in (_mark(one) or "")]
        return [one for one in mine if rank_of(one) is not None]

    def machine(self, node: str) -> list[psutil.Process]:
        """All processes of a node: its own first, so that killing them in order restarts nothing."""
        family = [one for one in self.processes() if f"-{node}/" in (_mark(one) or "")]
        launchers = {one.ppid() for one in family}
        return [*(one for one in self.node_processes() if one.pid in launchers), *family]

    def committed_step(self) -> int:
        return max((one.step for one in committed(self.run())), default=0)

    def wait_for_commit(self, step: int = 20) -> None:
        wait_until(lambda: self.committed_step() >= step, f"a checkpoint of step {step}", 240, pause=0.1)

    def wait_for_result(self, seconds: float = 150) -> str:
        wait_until(lambda: self.run().result() is not None, "the end of the run", seconds, pause=0.25)
        result = self.run().result()
        assert result is not None
        return result.status

    def close(self) -> None:
        for process in self.processes():
            process.kill()
        for node in self.nodes:
            node.wait()


def _mark(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(CONTROL_VARIABLE)
    except psutil.Error:
        return None


def make_sandbox(directory: Path, store: str | None = None, **extra: str) -> Sandbox:
    """Create a sandbox; `extra` are environment variables of its commands and nodes."""
    sandbox = Sandbox(directory, store or str(directory / "store"), {"PACE": str(directory / PACE), **extra})
    sandbox.pace(0)
    (directory / "code").mkdir()
    (directory / "code" / "paced.py").write_text(RECIPE)
    (directory / "job.yaml").write_text(JOB.replace("STORE", sandbox.store))
    return sandbox


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def kill(processes: Iterable[psutil.Process]) -> None:
    send(processes, signal.SIGKILL)


def history(run: Run) -> list[tuple[int, dict[str, float]]]:
    """Losses and batches of every step, which must be the same whatever happened."""

    def exact(point: Point) -> dict[str, float]:
        return {name: value for name, value in point.values.items() if name in ("loss", "tokens", "rate", "epoch")}

    return [(point.step, exact(point)) for point in read_points(run) if point.kind == "train"]


def weights(run: Run) -> dict[str, str]:
    last = committed(run)[-1]
    return {file.name: file.sha256 for file in last.files if file.name.endswith(".safetensors")}


def assert_same_as(oracle: Sandbox, sandbox: Sandbox) -> None:
    """Every step once, with the same samples and the same loss; the same weights at the end."""
    assert [step for step, _ in history(sandbox.run())] == list(range(1, STEPS + 1))
    assert history(sandbox.run()) == history(oracle.run())
    assert weights(sandbox.run()) == weights(oracle.run())


def assert_same_samples(oracle: Sandbox, run: Run) -> None:
    """Every step once, with the same samples; holds even if the number of workers changed during the run."""

    def samples(of: Run) -> list[tuple[int, float, float]]:
        return [(step, values["tokens"], values["epoch"]) for step, values in history(of)]

    assert samples(run) == samples(oracle.run())


def assert_nothing_left(sandbox: Sandbox) -> None:
    wait_until(lambda: not sandbox.processes(), "all processes to end", 30)
    assert list((sandbox.directory / "cache" / "nodes").iterdir()) == []
