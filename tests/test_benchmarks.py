"""Benchmarks run and print one JSON object; what they measure is not judged here."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
BENCHMARKS = REPOSITORY / "benchmarks"
LINES = 2000  # of the 75,000 that the example learns from


@pytest.fixture(scope="session")
def benchmarks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The benchmarks beside an example with less to pack: nine of them pack it, for ten seconds each."""
    root = tmp_path_factory.mktemp("repository")
    for name in ("benchmarks", "examples", "tests/parts"):
        leave_out = shutil.ignore_patterns("__pycache__", "emoji", "chitchat")
        shutil.copytree(REPOSITORY / name, root / name, ignore=leave_out)
    for file in (root / "examples" / "data" / "en-de").glob("train.*.gz"):
        with gzip.open(file, "rb") as whole:
            lines = list(islice(whole, LINES))
        file.write_bytes(gzip.compress(b"".join(lines)))
    return root / "benchmarks"


@pytest.mark.parametrize(
    "arguments",
    [
        ["step.py", "--bursts", "1", "--steps", "2"],
        ["start.py"],
        ["pack.py", "--images", "40"],
        ["pack.py", "--pairs", "500"],
        ["input.py", "--images", "16"],
        ["input_text.py", "--pairs", "2000"],
        ["scale.py", "--nodes", "2", "4"],
        ["translate.py", "--seconds", "2", "--sentences", "20"],
        ["checkpoint.py", "--megabytes", "20", "--steps", "25"],
        ["recover.py", "--seconds", "2", "--every", "2", "--save-every", "3"],
        [
            "exchange.py",
            "--steps",
            "2",
            "--quality-steps",
            "4",
            "--links",
            "1 Gbit/s",
            "--only",
            "local, 4 fragments, int8",
        ],
        ["plan.py", "--steps", "6", "--seconds", "0.2", "--only", "1 worker"],
        ["faults.py", "--only", "worker"],
        ["soak.py", "--minutes", "0.15", "--every", "2", "3", "--machines", "1"],
        ["recipes.py", "translate", "--share", "0.005", "--decoded", "20"],
        [
            "home.py",
            "serve",
            "--inputs",
            "20",
            "--set",
            "train.duration=5 steps",
            "--set",
            "evaluate.samples=5",
            "--set",
            "data.test=[]",
            "--set",
            "fleet.workers=1",
        ],
        ["ui.py", "--runs", "3", "--points", "400", "--overlay", "2", "--watch", "1", "--only", "packtrain"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_benchmark_prints_one_json_object(arguments: list[str], benchmarks: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(benchmarks / arguments[0]), "--json", "--rounds", "1", *arguments[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PACKTRAIN_CACHE": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["rows"]


def test_every_benchmark_is_tried() -> None:
    scripts = {path.name for path in BENCHMARKS.glob("*.py")} - {
        "bench.py",
        "by_hand.py",
        "serve_load.py",
    }  # shared; a peer; a part of home.py
    assert scripts == {
        "step.py", "start.py", "pack.py", "input.py", "input_text.py", "scale.py", "translate.py", "checkpoint.py",
        "recover.py", "exchange.py", "faults.py", "soak.py", "recipes.py", "home.py", "plan.py", "ui.py",
    }  # fmt: skip
