"""Cost of a checkpoint: the stall of an asynchronous save, and the throughput of a run that saves often.

    python benchmarks/checkpoint.py [--json] [--rounds 5] [--megabytes 300] [--steps 100]

The stall is the time that a step waits: for the start of the copy, and for its end before the weights change, with a
forward and a backward pass between. It is compared with torch.save of the same state (weights and Adam's moments) to
the same disk, in turns. The throughput is that of the example's Trainer with a save every 20 steps, against one that
saves only at the end, in wall time and in CPU time of all threads.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

import bench
from packtrain.data.pack import Pack
from packtrain.job import Job
from packtrain.job.load import load_job
from packtrain.pack.build import PlainProgress
from packtrain.pack.packing import pack
from packtrain.pack.workers import InProcess
from packtrain.recipes import Recipe, recipe_class, recipe_defaults
from packtrain.run.checkpoint import commit
from packtrain.run.code import archive
from packtrain.run.run import create_run
from packtrain.store import Store, open_store
from packtrain.train.control import Control
from packtrain.train.optimizer import optimizer_tensors
from packtrain.train.progress import Progress
from packtrain.train.state import Description, Snapshot, SnapshotCopier
from packtrain.train.trainer import Trainer
from packtrain.train.world import World
from step import EXAMPLE, Timer, TimingClock

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
    run = create_run(open_store(str(directory / "store"), create=True), job, archive({}), None)
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
        copies.wait()
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


def throughput(job: Job, recipe: Recipe, store: Store) -> tuple[float, float]:
    """Return wall and CPU seconds per step."""
    run = create_run(store, job, archive({}), recipe.pack.name)
    timer = Timer()
    with tempfile.TemporaryDirectory() as control:
        Trainer(run, recipe, World(), 1, Control(Path(control)), clock=TimingClock(timer.tick)).train()
    return timer.seconds_per_step()


def saving(rounds: int, steps: int, directory: Path) -> dict[str, list[tuple[float, float]]]:
    rare, often = (
        load_job(
            EXAMPLE,
            [f"train.duration={steps} steps", f"checkpoint.every={every}", "data.test=[]", "data.valid=[]"],
            recipe_defaults,
        ).job
        for every in ("1 h", f"{SAVE_EVERY} steps")
    )
    store = open_store(str(directory / "runs"), create=True)
    manifest = pack(rare.name, rare.data, store, InProcess(), PlainProgress(lambda _: None))
    assert rare.recipe is not None
    seconds: dict[str, list[tuple[float, float]]] = {"rare": [], "often": []}
    for _ in range(rounds):
        for name, job in (("rare", rare), ("often", often)):
            recipe = recipe_class(rare.recipe)(job, Pack(store, manifest.name, directory / "cache"))
            seconds[name].append(throughput(job, recipe, store))
    return seconds


def main() -> None:
    arguments = bench.parser(__doc__)
    arguments.add_argument("--megabytes", type=float, default=300.0)
    arguments.add_argument("--steps", type=int, default=100)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        found = stalls(options.megabytes, options.rounds, Path(name))
        speeds = saving(options.rounds, options.steps, Path(name))
    copy = [begin + wait for begin, wait in zip(found[BEGIN], found[WAIT], strict=True)]
    whole = bench.median(copy) + bench.median(found[BESIDE]) - bench.median(found[PLAIN])
    rows = [{"what": name, "seconds": bench.median(values)} for name, values in found.items()]
    ratios = [one / other for one, other in zip(copy, found[SYNC], strict=True)]
    costs = [
        [often[clock] / rare[clock] - 1 for often, rare in zip(speeds["often"], speeds["rare"], strict=True)]
        for clock in (0, 1)
    ]
    notes = [
        f"the step waits {bench.median(ratios):.1%} of the time of torch.save for the same {options.megabytes:.0f} MB"
        f" ({min(ratios):.1%} to {max(ratios):.1%}, {options.rounds} rounds)",
        f"including the slowdown of the batch during the copy: {whole / bench.median(found[SYNC]):.1%}",
        *(
            f"a save every {SAVE_EVERY} steps costs {bench.median(cost):+.1%} of {clock}"
            f" ({min(cost):+.1%} to {max(cost):+.1%})"
            for clock, cost in zip(("wall time", "CPU time"), costs, strict=True)
        ),
    ]
    bench.show("Checkpoint", rows, notes, options.json)


if __name__ == "__main__":
    main()
