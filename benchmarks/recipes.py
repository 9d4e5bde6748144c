"""Score of each recipe after the time of its example, against a bare PyTorch script with the same model.

    python benchmarks/recipes.py [--json] [--share 1] [--clock wall] [translate classify chat caption]

Ours is the Trainer on one thread plus the loader's thread, for `share` of the example's steps. The bare script has the
same model, loss, optimizer, schedule and EMA. It shuffles, takes the next samples until the batch is full and makes the
batch when it is needed. It stops after the same wall time, or CPU time (`--clock cpu`, for a shared machine). Both are
evaluated on the validation split in the same way.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import nn

import bench
from packtrain.data.order import Ids, spread
from packtrain.data.pack import Pack
from packtrain.job.load import load_job
from packtrain.pack.build import PlainProgress
from packtrain.pack.packing import pack
from packtrain.pack.workers import InProcess
from packtrain.recipes import EvaluationRequest, Recipe, recipe_class, recipe_defaults
from packtrain.run.code import archive
from packtrain.run.run import create_run
from packtrain.store import Store, open_store
from packtrain.train.control import Control
from packtrain.train.engine import Ema
from packtrain.train.progress import Progress
from packtrain.train.trainer import Trainer
from packtrain.train.world import World
from step import Timer, TimingClock

EXAMPLES = Path(__file__).parent.parent / "examples"
RECIPES = ("translate", "classify", "chat", "caption")
BEAM = 1


@dataclass(frozen=True)
class Learned:
    steps: int
    wall_seconds: float
    processor_seconds: float
    score: float


def prepared(name: str, share: float, directory: Path) -> tuple[Recipe, Store]:
    path = EXAMPLES / f"{name}.yaml"
    duration = load_job(path, [], recipe_defaults).job.train.duration
    amount = max(1, round(duration.value * share))
    settings = [
        f"train.duration={amount} {duration.unit}", "evaluate.every=null", f"evaluate.beam={BEAM}",
        "evaluate.samples=0", "data.test=[]", "checkpoint.every=1 h",
    ]  # fmt: skip
    job = load_job(path, settings, recipe_defaults).job
    store = open_store(str(directory / "store"), create=True)
    manifest = pack(job.name, job.data, store, InProcess(), PlainProgress(lambda _: None))
    return recipe_class(name)(job, Pack(store, manifest.name, directory / "cache")), store


def ours(recipe: Recipe, store: Store, decoded_samples: int) -> Learned:
    run = create_run(store, recipe.job, archive({}), recipe.pack.name)
    timer = Timer()
    timer.tick()
    with tempfile.TemporaryDirectory() as control:
        trainer = Trainer(run, recipe, World(), 1, Control(Path(control)), clock=TimingClock(timer.tick))
        trainer.train()
    wall, processor = (clock[-1] - clock[0] for clock in (timer.wall, timer.processor))
    return Learned(trainer.step, wall, processor, score(recipe, trainer._engine.evaluation_model(), decoded_samples))


def shuffled(recipe: Recipe, batch: int) -> Iterator[tuple[int, float, Ids]]:
    """Yield the epoch, the progress in epochs, and the samples of the next batch."""
    numbers = np.random.default_rng(1)
    epoch = 0
    while True:
        ids = numbers.permutation(len(recipe.costs))
        ends = np.cumsum(recipe.costs[ids]) // batch
        edges = [0, *(np.flatnonzero(np.diff(ends)) + 1).tolist(), len(ids)]
        for start, end in pairwise(edges):
            yield epoch, epoch + start / len(ids), ids[start:end]
        epoch += 1


def bare(recipe: Recipe, most: Learned, clock: str, decoded_samples: int) -> Learned:
    settings = recipe.job.train
    torch.manual_seed(settings.seed)
    model = recipe.build_model()
    ema = None if settings.ema is None else Ema(model, settings.ema)
    optimizer, rate = settings.optimizer.build(model), settings.schedule.build(recipe.width, settings.duration)
    timer = Timer()
    timer.tick()
    step = 0
    for epoch, epochs, ids in shuffled(recipe, settings.batch.value):
        wall, processor = time.perf_counter() - timer.wall[0], time.process_time() - timer.processor[0]
        if wall >= most.wall_seconds if clock == "wall" else processor >= most.processor_seconds:
            break
        recipe.prepare(epoch, model)
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = rate(Progress(step, epochs))
        batch = {name: torch.from_numpy(array) for name, array in recipe.batch(ids, epoch).items()}
        (recipe.loss(model, batch) / int(recipe.costs[ids].sum())).backward()
        if settings.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        if ema is not None:
            ema.update(step)
        step += 1
    return Learned(step, wall, processor, score(recipe, (model if ema is None else ema.model).eval(), decoded_samples))


def score(recipe: Recipe, model: nn.Module, decoded_samples: int) -> float:
    count = recipe.count("valid")
    decoded = spread(count, decoded_samples)
    epoch = max(0, int(recipe.job.train.duration.value) - 1) if recipe.job.train.duration.unit == "epochs" else 0
    part = recipe.measure(model.eval(), EvaluationRequest("valid", np.arange(count), decoded, BEAM, epoch))
    return recipe.score("valid", decoded, [part]).values[recipe.best_metric]


def main() -> None:
    arguments = bench.parser(__doc__)
    arguments.set_defaults(rounds=1)
    arguments.add_argument("recipes", nargs="*", default=list(RECIPES))
    arguments.add_argument("--share", type=float, default=1.0)
    arguments.add_argument("--decoded", type=int, default=200, help="validation samples")
    arguments.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in options.recipes:
        with tempfile.TemporaryDirectory() as directory:
            recipe, store = prepared(name, options.share, Path(directory))
            mine = ours(recipe, store, options.decoded)
            theirs = bare(recipe, mine, options.clock, options.decoded)
        for who, learned in (("packtrain", mine), ("bare PyTorch", theirs)):
            rows.append(
                {
                    "recipe": name,
                    "who": who,
                    "steps": learned.steps,
                    "seconds": learned.wall_seconds,
                    "CPU seconds": learned.processor_seconds,
                    "score": learned.score,
                    "by": recipe_class(name).best_metric,
                }
            )
    notes = [f"{options.share:.0%} of the example's steps; greedy search on {options.decoded} validation samples"]
    bench.show("Recipes", rows, notes, options.json)


if __name__ == "__main__":
    main()
