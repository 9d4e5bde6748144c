"""Cost of a checkpoint: the stall of an asynchronous save, and the throughput of a run that saves often.

    python benchmarks/checkpoint.py [--json] [--rounds 5] [--megabytes 300] [--steps 100]

The stall is the time that a step waits: for the start of the copy, and for its end before the weights change, with a
forward and a backward pass between. It is compared with torch.save of the same state (weights and Adam's moments) to
the same disk, in turns. The throughput is that of the example's Trainer with a save every 20 steps, against one that
saves only at the end, in wall time and in CPU time of all threads.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

import bench
import example
from packtrain.job import Job
from packtrain.run.checkpoint import commit
from packtrain.run.code import archive
from packtrain.run.run import add_run
from packtrain.store import open_store
from packtrain.train.optimizer import optimizer_tensors
from packtrain.train.progress import Progress
from packtrain.train.state import Description, Snapshot, SnapshotCopier

SAVE_EVERY = 20
SYNC, PLAIN, BEGIN, BESIDE, WAIT, COMMIT = SPENT = (
    "torch.save",
    "gradients of a batch",
    "start a copy",
    "gradients of a batch during the copy",
    "wait for the copy",
    "write and commit, during later steps",
)
WIDTH, WORDS = 1024, 256


def model_of(megabytes: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return square layers whose weights and moments take about this much memory."""
    layers = max(1, round(megabytes * 1e6 / (3 * 4 * WIDTH * WIDTH)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    compute(model)
    optimizer.step()
    return model, optimizer


def compute(model: nn.Module) -> None:
    """Compute the gradients of a batch."""
    model.zero_grad()
    model(torch.ones(WORDS, WIDTH)).sum().backward()


def stalls(megabytes: float, rounds: int, directory: Path) -> dict[str, list[float]]:
    model, optimizer = model_of(megabytes)
    copier = SnapshotCopier()
    seconds: dict[str, list[float]] = {name: [] for name in SPENT}
    job = Job.model_validate({"name": "bench", "program": ["x.py"]})
    run = add_run(open_store(str(directory / "stalls"), create=True), job, archive({}), None)
    for number in range(rounds + 1):
        times = [time.perf_counter()]

        def tick(times: list[float] = times) -> None:
            times.append(time.perf_counter())

        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, directory / "peer.pt")
        tick()
        compute(model)
        tick()
        files = {
            "model.safetensors": model.state_dict(),
            "optimizer.safetensors": optimizer_tensors(optimizer, model),
        }
        copies = copier.begin(files)
        tick()
        compute(model)
        tick()
        copies.result()
        tick()
        place = directory / f"save-{number}"
        place.mkdir()
        commit(run, number, 1, None, Snapshot(Description("", "", {}, {}, Progress(number)), copies).write(place))
        copier.give_back(copies)
        tick()
        if number:  # the first save of a run allocates memory that the others reuse
            for name, (before, after) in zip(SPENT, itertools.pairwise(times), strict=True):
                seconds[name].append(after - before)
    return seconds


def saving(rounds: int, steps: int, directory: Path) -> dict[str, list[tuple[float, float]]]:
    """Return wall and CPU seconds per step of each round, with rare and with frequent saves."""
    jobs = {
        name: example.load(
            "translate", f"train.duration={steps} steps", f"checkpoint.every={every}", "data.test=[]", "data.valid=[]"
        )
        for name, every in (("rare", "1 h"), ("often", f"{SAVE_EVERY} steps"))
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            timer = example.Timer()
            example.train(*example.packed(job, directory), timer.tick)
            seconds[name].append(timer.seconds_per_step())
    return seconds


@dataclass(frozen=True)
class Costs:
    stalls: dict[str, list[float]]
    saving: dict[str, list[tuple[float, float]]]


def parser() -> argparse.ArgumentParser:
    arguments = bench.parser(__doc__)
    arguments.add_argument("--megabytes", type=float, default=300.0)
    arguments.add_argument("--steps", type=int, default=100)
    return arguments


def measure(options: argparse.Namespace) -> Costs:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        return Costs(
            stalls(options.megabytes, options.rounds, directory), saving(options.rounds, options.steps, directory)
        )


def report(options: argparse.Namespace, costs: Costs) -> bench.Report:
    seconds, speeds = costs.stalls, costs.saving
    copy = [begin + wait for begin, wait in zip(seconds[BEGIN], seconds[WAIT], strict=True)]
    whole = bench.median(copy) + bench.median(seconds[BESIDE]) - bench.median(seconds[PLAIN])
    rows = [{"what": name, "seconds": bench.median(values)} for name, values in seconds.items()]
    ratios = [stall / peer for stall, peer in zip(copy, seconds[SYNC], strict=True)]
    slower = [
        [often[clock] / rare[clock] - 1 for often, rare in zip(speeds["often"], speeds["rare"], strict=True)]
        for clock in (0, 1)
    ]
    notes = [
        f"the step waits {bench.median(ratios):.1%} of the time of torch.save for the same {options.megabytes:.0f} MB"
        f" ({min(ratios):.1%} to {max(ratios):.1%}, {options.rounds} rounds)",
        f"including the slowdown of the batch during the copy: {whole / bench.median(seconds[SYNC]):.1%}",
        *(
            f"a save every {SAVE_EVERY} steps costs {bench.median(cost):+.1%} of {clock}"
            f" ({min(cost):+.1%} to {max(cost):+.1%})"
            for clock, cost in zip(("wall time", "CPU time"), slower, strict=True)
        ),
    ]
    return bench.Report("Checkpoint", rows, notes)


if __name__ == "__main__":
    bench.main(parser(), measure, report)
