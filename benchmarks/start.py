"""Startup time: the help text, and the first training step of the demo once its data is packed.

python benchmarks/start.py [--json] [--rounds 3]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import bench
from packtrain.run.run import open_run
from packtrain.store import open_store

EXAMPLE = Path(__file__).parent.parent / "examples" / "translate.yaml"
JOB = [str(EXAMPLE), "--set", "data.test=[]", "--set", "data.valid=[]"]


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
    return next(point.time for point in run.metrics() if point.kind == "train") - started


def main() -> None:
    options = bench.parser(__doc__).parse_args()
    helps = [seconds_for("--help") for _ in range(options.rounds)]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        environment = {**os.environ, "PACKTRAIN_CACHE": str(directory / "cache")}
        seconds_for("pack", *JOB, cwd=directory, environment=environment)
        starts = [seconds_to_first_step(directory, environment) for _ in range(options.rounds)]
    rows = [
        {"what": "packtrain --help", "seconds": bench.median(helps), "limit": 0.3},
        {"what": "packtrain run to the first step", "seconds": bench.median(starts), "limit": 15.0},
    ]
    bench.show("Start", rows, [f"medians of {options.rounds}"], options.json)


if __name__ == "__main__":
    main()
