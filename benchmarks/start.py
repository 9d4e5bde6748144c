"""Startup time: the help text, and the first training step of the demo once its data is packed.

python benchmarks/start.py [--json] [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import bench
from packtrain.observe.history import read_points
from packtrain.run.run import open_run
from packtrain.store import open_store

JOB = [str(bench.EXAMPLES / "translate.yaml"), "--set", "data.test=[]", "--set", "data.valid=[]"]
HELP, FIRST_STEP = "packtrain --help", "packtrain run to the first step"
LIMITS = {HELP: 0.3, FIRST_STEP: 15.0}  # seconds


def seconds_for(*arguments: str, cwd: Path | None = None, environment: dict[str, str] | None = None) -> float:
    started = time.perf_counter()
    command = [sys.executable, "-m", "packtrain", *arguments]
    subprocess.run(command, check=True, capture_output=True, cwd=cwd, env=environment)
    return time.perf_counter() - started


def seconds_to_first_step(directory: Path, environment: dict[str, str]) -> float:
    """Return the time from the start of the command to the end of the first step."""
    started = time.time()
    seconds_for("run", *JOB, "--set", "train.duration=3 steps", cwd=directory, environment=environment)
    run = open_run(open_store(str(directory / "store")), None)
    return next(point.time for point in read_points(run) if point.kind == "train") - started


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    helps = [seconds_for("--help") for _ in range(options.rounds)]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        environment = {**os.environ, "PACKTRAIN_CACHE": str(directory / "cache")}
        seconds_for("pack", *JOB, cwd=directory, environment=environment)
        starts = [seconds_to_first_step(directory, environment) for _ in range(options.rounds)]
    return {HELP: helps, FIRST_STEP: starts}


def report(options: argparse.Namespace, seconds: dict[str, list[float]]) -> bench.Report:
    rows = [{"what": what, "seconds": bench.median(taken), "limit": LIMITS[what]} for what, taken in seconds.items()]
    return bench.Report("Start", rows, [f"medians of {options.rounds}"])


def parser() -> argparse.ArgumentParser:
    return bench.parser(__doc__)


if __name__ == "__main__":
    bench.main(parser(), measure, report)
