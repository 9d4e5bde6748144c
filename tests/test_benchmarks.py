"""Benchmarks run and print one JSON object; what they measure is not judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


RUNS = [
    ["recover.py", "--seconds", "2", "--every", "2", "--save-every", "3"],
    ["soak.py", "--minutes", "0.15", "--every", "2", "3", "--machines", "1"],
    ["step.py", "--steps", "8"],
    ["start.py"],
    ["pack.py", "--images", "40"],
    ["pack.py", "--pairs", "500"],
    ["input.py", "--images", "16"],
    ["input_text.py", "--pairs", "2000"],
    ["scale.py", "--nodes", "2", "4"],
    ["translate.py", "--seconds", "2", "--sentences", "20"],
    ["checkpoint.py", "--megabytes", "20", "--steps", "25"],
    ["exchange.py", "--steps", "2", "--quality-steps", "4", "--only", "ddp", "--links", "1 Gbit/s"],
    ["faults.py", "--only", "worker"],
    ["recipes.py", "translate", "--share", "0.005", "--decoded", "20"],
]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Future[str]]]:
    """Two run at a time: many of them wait for most of it, and nobody looks at their figures."""

    def run(arguments: list[str]) -> str:
        directory = tmp_path_factory.mktemp("benchmark")
        command = [sys.executable, str(BENCHMARKS / arguments[0]), "--json", "--rounds", "1", *arguments[1:]]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PACKTRAIN_CACHE": str(directory)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=directory, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with ThreadPoolExecutor(2) as pool:
        yield [pool.submit(run, arguments) for arguments in RUNS]


@pytest.mark.parametrize("number", range(len(RUNS)), ids=[arguments[0] for arguments in RUNS])
def test_a_benchmark_prints_one_json_object(number: int, printed: list[Future[str]]) -> None:
    measured = json.loads(printed[number].result().splitlines()[-1])
    assert measured["rows"]


def test_every_benchmark_is_tried() -> None:
    scripts = {path.name for path in BENCHMARKS.glob("*.py")} - {"bench.py", "by_hand.py"}  # shared; a peer
    assert scripts == {arguments[0] for arguments in RUNS}
