"""Predicted against seen: time of a step and of a run, by `packtrain plan` before and by the run itself after.

    sudo python benchmarks/plan.py [--json] [--rounds 1] [--steps 300] [--only "1 worker" "2 hosts, 100 Mbit/s"]

One and two workers on this machine, and two hosts (network namespaces, tests/parts/hosts.py) with one worker each and a
link of 1 Gbit/s and of 100 Mbit/s between them, probed over ssh. The job is the example translation; on hosts, where
the link makes steps slow, it has a quarter of the steps. The goal is a difference within 20 %. Hosts need root.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import bench
import packtrain as pt
from packtrain.launch.check import pack_data
from packtrain.launch.load import load
from packtrain.observe.evidence import gather
from packtrain.pack.build import PlainProgress
from packtrain.pack.workers import InProcess
from packtrain.plan.plan import PlanRequest, make_plan
from packtrain.report.account import compared
from packtrain.run.run import open_run
from packtrain.store import open_store

DATA = bench.EXAMPLES / "data" / "en-de"
HOSTS = {"2 hosts, 1 Gbit/s": 1e9, "2 hosts, 100 Mbit/s": 1e8}
CASES = ["1 worker", "2 workers", *HOSTS]
PATIENCE_SECONDS = 900


def write_job(folder: Path, store: Path, steps: int, fleet: Mapping[str, Any]) -> Path:
    """Write a job of so many steps, with an evaluation in the middle and at the end, and its data."""

    def bitext(name: str, split: str, lines: int) -> list[dict[str, list[str]]]:
        files = [folder / f"{name}.{language}" for language in ("en", "de")]
        for file in files:
            with gzip.open(DATA / f"{split}{file.suffix}.gz", "rt", encoding="utf-8") as whole:
                file.write_text("".join(islice(whole, lines)), encoding="utf-8")
        return [{"bitext": [str(file) for file in files]}]

    pairs = min(20_000, 100 * steps)
    job = {
        "name": "planned",
        "recipe": "translate",
        "store": str(store),
        "data": {"train": bitext("train", "train", pairs), "valid": bitext("valid", "test", 60), "vocabulary": 4000},
        "model": "tiny",
        "train": {
            "duration": f"{steps} steps",
            "batch": "640 tokens",
            "schedule": {"noam": {"warmup": "400 steps", "peak": 0.003}},
        },
        "evaluate": {"every": f"{max(1, steps // 2)} steps", "samples": 20, "beam": 1},
        "checkpoint": {"every": "1 min"},
        "fleet": dict(fleet),
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))  # JSON is YAML
    return path


def measured(path: Path, probe: bool, seconds: float, environment: Mapping[str, str]) -> dict[str, float]:
    """Plan, run, compare; return how far each figure was off."""
    os.environ.update(environment)  # for the processes that this one starts, too
    loaded = load(path)
    pack_data(loaded, open_store(loaded.job.store, create=True), PlainProgress(lambda _: None), InProcess())
    made = make_plan(loaded, PlanRequest(probe=probe, seconds=seconds), lambda _: None)
    started = pt.run(path)
    try:
        result = started.wait(PATIENCE_SECONDS)
        if result is None or result.status != "finished":
            raise RuntimeError(f"the run did not finish: {result}")
    finally:
        started.down()  # or its machines would wait for a store that is deleted
    run = open_run(open_store(loaded.job.store), None)
    forecast = run.forecast()
    assert forecast is not None and forecast.source in made.source, "the run remembers another plan"
    found = {one.what: one for one in compared(gather(run))}
    step, whole = found["time of a step"], found["whole run"]
    return {
        "step, predicted (ms)": 1000 * step.expected,
        "step, seen (ms)": 1000 * step.seen,
        "step, off (%)": 100 * step.off,
        "run, predicted (s)": whole.expected,
        "run, seen (s)": whole.seen,
        "run, off (%)": 100 * whole.off,
    }


def on_this_machine(workers: int, folder: Path, steps: int, seconds: float) -> dict[str, float]:
    path = write_job(folder, folder / "store", steps, {"local": {}, "workers": workers})
    return measured(path, False, seconds, {"PACKTRAIN_CACHE": str(folder / "cache")})


def on_hosts(bits_per_second: float, folder: Path, steps: int, seconds: float) -> dict[str, float]:
    from parts.hosts import hosts

    with hosts(folder / "scratch", 2, shared=[bench.REPOSITORY]) as network:
        for host in network:
            host.rate(bits_per_second)
        # The hosts' own Python with this source, wherever it is.
        python = network.shared / "python"
        source = bench.REPOSITORY / "src"
        python.write_text(f'#!/bin/sh\nPYTHONPATH={source} OMP_NUM_THREADS=1 exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        names = [host.name for host in network]
        fleet = {"ssh": {"hosts": names, "python": str(python), "interface": "eth0"}, "workers": 1}
        path = write_job(folder, network.shared / "store", steps, fleet)
        environment = {
            "PACKTRAIN_CACHE": str(folder / "cache"),
            "PATH": f"{network.search_path()}:{os.environ['PATH']}",
        }
        return measured(path, True, seconds, environment)


def parser() -> argparse.ArgumentParser:
    arguments = bench.parser(__doc__, rounds=1)
    arguments.add_argument("--steps", type=int, default=300)
    arguments.add_argument("--seconds", type=float, default=4.0, help="of steps that a plan measures")
    arguments.add_argument("--only", nargs="*", choices=CASES, default=CASES)
    return arguments


def measure(options: argparse.Namespace) -> dict[str, list[dict[str, float]] | str]:
    """Return the figures of each case and round, or why it cannot be measured here."""
    sys.path.insert(0, str(bench.REPOSITORY / "tests"))
    from parts.hosts import missing

    figures: dict[str, list[dict[str, float]] | str] = {}
    for case in options.only:
        if case in HOSTS and (reason := missing()):
            figures[case] = reason
            continue
        figures[case] = rounds = []
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory(prefix="plan-") as name:
                folder = Path(name)
                if case in HOSTS:
                    rounds.append(on_hosts(HOSTS[case], folder, max(6, options.steps // 4), options.seconds))
                else:
                    rounds.append(on_this_machine(int(case[0]), folder, options.steps, options.seconds))
        print(case, rounds, file=sys.stderr, flush=True)
    return figures


def report(options: argparse.Namespace, figures: dict[str, list[dict[str, float]] | str]) -> bench.Report:
    notes = [f"{options.steps} steps; a positive difference means that it took longer than predicted"]
    rows: list[dict[str, object]] = []
    for case, rounds in figures.items():
        if isinstance(rounds, str):
            notes.append(f"{case}: not measured: {rounds}")
        else:
            rows.append({"case": case, **{name: bench.median([turn[name] for turn in rounds]) for name in rounds[0]}})
    return bench.Report("Plans", rows, notes)


if __name__ == "__main__":
    bench.main(parser(), measure, report)
