"""Small jobs for the hosts of tests, and clients that start them from this computer or from one of the hosts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from packtrain.observe.history import read_points
from packtrain.run.run import Run, open_run
from packtrain.store import open_store
from parts.hosts import Host, Network
from parts.sandbox import EXAMPLES, wait_until

ENVIRONMENT = {"OMP_NUM_THREADS": "1"}

TRAINING = f"""
name: small
recipe: translate
store: STORE
environment: [OMP_NUM_THREADS]
data:
  train: [{{bitext: [{EXAMPLES}/data/en-de/valid.en.gz, {EXAMPLES}/data/en-de/valid.de.gz]}}]
  vocabulary: 500
model: {{size: tiny, width: 32, heads: 2, feedforward: 64, encoder_layers: 1, decoder_layers: 1}}
train: {{duration: 12 steps, batch: 600 tokens, schedule: {{noam: {{warmup: 10 steps, peak: 0.003}}}}}}
evaluate: {{every: null}}
checkpoint: {{every: 5 steps}}
fleet: FLEET
"""

# Counts, keeps its count where programs keep checkpoints, and ends after it has resumed from one.
COUNTING = """
import os, time
from pathlib import Path

kept = Path(os.environ["PACKTRAIN_CHECKPOINTS"]) / "count"
count = int(kept.read_text()) if kept.exists() else 0
rank, ranks = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
print("rank", rank, "of", ranks, "from", count, os.environ.get("SECRET", ""), flush=True)
while not count or not kept.exists():
    count += 1
    if rank == "0":
        kept.with_suffix(".part").write_text(str(count))
        kept.with_suffix(".part").rename(kept)
    if count > LAST:
        break
    time.sleep(0.05)
"""


def write_job(directory: Path, store: Path | str, fleet: str) -> Path:
    job = directory / "job.yaml"
    job.write_text(TRAINING.replace("STORE", str(store)).replace("FLEET", fleet))
    return job


def write_program(directory: Path, store: Path | str, fleet: str, script: str, more: str = "") -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "train.py").write_text(script)
    job = directory / "job.yaml"
    job.write_text(f"name: counts\nprogram: [train.py]\nstore: {store}\nfleet: {fleet}\n{more}\n")
    return job


def packtrain(
    *arguments: str | Path, directory: Path, environment: dict[str, str], seconds: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run a command of a client on this computer."""
    command = [sys.executable, "-m", "packtrain", *map(str, arguments)]
    whole = {**os.environ, **ENVIRONMENT, **environment}
    return subprocess.run(command, cwd=directory, env=whole, capture_output=True, text=True, timeout=seconds)


def packtrain_on(host: Host, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command of a client on a host."""
    command = [sys.executable, "-m", "packtrain", *map(str, arguments)]
    return host.run(command, {**ENVIRONMENT, **environment}, timeout=600)


def newest(store: Path | str) -> Run:
    return open_run(open_store(str(store)), None)


def wait_until_all_left(run: Run) -> None:
    """The last lines of the logs come after the result."""
    wait_until(lambda: run.result() and all(lease.left for lease in run.leases()), "the last machine to leave")


def losses(run: Run) -> list[tuple[int, float]]:
    return [(point.step, point.values["loss"]) for point in read_points(run) if point.kind == "train"]


def left_on(network: Network | Sequence[Host]) -> list[str]:
    """Return the command lines that still run on hosts some time after the end of a run.

    A run may wait 20 s for another machine, and its nodes have 60 s for a last checkpoint.
    """
    deadline = time.monotonic() + 150
    while (found := commands_on(network)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def commands_on(network: Network | Sequence[Host]) -> list[str]:
    """Return the command lines of all processes on hosts, except for Slurm's own."""
    found = []
    for process in [process for host in network for process in host.processes()]:
        with suppress(psutil.NoSuchProcess):  # a zombie is one of these
            command = " ".join(process.cmdline())
            if not any(name in command for name in ("slurmd", "slurmctld", "slurmscriptd", "munged")):
                found.append(command)
    return found
