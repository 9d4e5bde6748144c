"""What Packtrain adds to a training step, against a bare PyTorch loop with the same model and batches.

    python benchmarks/step.py [--json] [--rounds 5] [--steps 60]

Both run in this process on one thread, in turns. The bare loop does what any script would: make the batch,
forward, backward, clip, Adam, EMA. Ours is the whole Trainer: loader, sums over ranks, metrics into a store.
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
from packtrain.code import archive
from packtrain.control import Control
from packtrain.data.order import epoch_batches
from packtrain.data.pack import Pack
from packtrain.job import Job
from packtrain.jobfile import load_job
from packtrain.pack.packing import pack
from packtrain.pack.progress import Plain
from packtrain.pack.workers import HereAlone
from packtrain.recipes import Recipe, recipe_class, recipe_defaults
from packtrain.runs import create_run
from packtrain.store import Store, open_store
from packtrain.train.schedule import rate_of
from packtrain.train.trainer import Trainer
from packtrain.train.world import World

EXAMPLE = Path(__file__).parent.parent / "examples" / "translate.yaml"
WARM_UP_STEPS = 5


def bare(job: Job, recipe: Recipe, steps: int) -> float:
    """Seconds a step of a plain loop, after a few to warm up."""
    torch.manual_seed(1)
    model = recipe.build_model()
    average = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0, fused=True)
    rate = rate_of(job.train.schedule, recipe.width)
    batches = epoch_batches(recipe.costs, recipe.likeness, job.train.batch.value, job.train.seed, 0)
    started = 0.0
    for step, ids in enumerate(itertools.islice(batches, steps)):
        if step == WARM_UP_STEPS:
            started = time.perf_counter()
        batch = {name: torch.from_numpy(array) for name, array in recipe.batch(ids).items()}
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        loss = recipe.loss(model, batch) / int(recipe.costs[ids].sum())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(average, list(model.parameters()), 0.01)
        loss.item()
    return (time.perf_counter() - started) / (steps - WARM_UP_STEPS)


def ours(job: Job, recipe: Recipe, store: Store) -> float:
    """Seconds a step of the Trainer: its own clock between the same two steps, whatever happened there."""
    run = create_run(store, job, archive({}), recipe.pack.name)
    with tempfile.TemporaryDirectory() as control:
        trainer = Trainer(run, recipe, World(), 1, Control(Path(control)))
        trainer.train()
    clock = [point.values["elapsed_seconds"] for point in run.metrics() if point.kind == "train"]
    return (clock[-1] - clock[WARM_UP_STEPS - 1]) / (len(clock) - WARM_UP_STEPS)


def main() -> None:
    arguments = bench.parser(__doc__)
    arguments.add_argument("--steps", type=int, default=60)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    settings = [f"train.duration={options.steps} steps", "checkpoint.every=1 h", "data.test=[]", "data.valid=[]"]
    with tempfile.TemporaryDirectory() as directory:
        job = load_job(EXAMPLE, settings, recipe_defaults).job
        store = open_store(f"{directory}/store")
        manifest = pack(job.name, job.data, store, HereAlone(), Plain(lambda _: None))
        assert job.recipe is not None
        recipe = recipe_class(job.recipe)(job, Pack(store, manifest.name, Path(directory) / "cache"))
        seconds: dict[str, list[float]] = {"bare PyTorch loop": [], "packtrain": []}
        for _ in range(options.rounds):
            seconds["bare PyTorch loop"].append(bare(job, recipe, options.steps))
            seconds["packtrain"].append(ours(job, recipe, store))
    ratios = [mine / theirs for theirs, mine in zip(*seconds.values(), strict=True)]
    rows = [
        {
            "loop": name,
            "ms a step": 1000 * bench.median(values),
            "tokens/s": job.train.batch.value / bench.median(values),
        }
        for name, values in seconds.items()
    ]
    overhead = bench.median(ratios) - 1
    notes = [
        f"overhead: {overhead:+.1%} (median of {options.rounds} rounds;"
        f" {min(ratios) - 1:+.1%} to {max(ratios) - 1:+.1%})"
    ]
    bench.show("A training step", rows, notes, options.json)


if __name__ == "__main__":
    main()
