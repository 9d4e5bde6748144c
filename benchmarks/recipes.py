"""Score of each recipe after the time of its example, against a bare PyTorch script and against its defaults.

    python benchmarks/recipes.py [--json] [translate classify chat caption] [--share 1] [--clock wall]
        [--against defaults]

Ours is the Trainer on one thread plus the loader's thread, for `share` of the example's steps. The bare script has the
same model, loss, optimizer, schedule and EMA. It shuffles, takes the next samples until the batch is full and makes the
batch when it is needed. It stops after the same wall time, or CPU time (`--clock cpu`, for a shared machine). Both are
evaluated on the validation split in the same way. The job with the recipe's defaults has the example's data, model,
duration and batch, and nothing else: it is a fault if it reaches less than 90 % of the example's score.
"""

from __future__ import annotations

import argparse
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
import example
from packtrain.data.order import Ids, spread
from packtrain.recipes import EvaluationRequest, Recipe, recipe_class
from packtrain.store import Store
from packtrain.train.engine import Ema
from packtrain.train.progress import Progress

RECIPES = ("translate", "classify", "chat", "caption")
BEAM = 1
OURS, BARE, DEFAULTS = "packtrain", "bare PyTorch", "defaults"
ENOUGH = 0.9  # of the example's score, for a job with the recipe's defaults


@dataclass(frozen=True)
class Learned:
    steps: int
    wall_seconds: float
    processor_seconds: float
    score: float


def prepared(name: str, share: float, directory: Path) -> tuple[Recipe, Store]:
    duration = example.load(name).train.duration
    amount = max(1, round(duration.value * share))
    job = example.load(
        name, f"train.duration={amount} {duration.unit}", "evaluate.every=null", f"evaluate.beam={BEAM}",
        "evaluate.samples=0", "data.test=[]", "checkpoint.every=1 h",
    )  # fmt: skip
    return example.packed(job, directory)


def ours(recipe: Recipe, store: Store, decoded_samples: int) -> Learned:
    timer = example.Timer()
    timer.tick()
    trainer, _ = example.train(recipe, store, timer.tick)
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
    timer = example.Timer()
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


def parser() -> argparse.ArgumentParser:
    arguments = bench.parser(__doc__, rounds=1)
    arguments.add_argument("recipes", nargs="*", default=list(RECIPES))
    arguments.add_argument("--share", type=float, default=1.0)
    arguments.add_argument("--decoded", type=int, default=200, help="validation samples")
    arguments.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    arguments.add_argument("--against", nargs="*", choices=(BARE, DEFAULTS), default=[BARE, DEFAULTS])
    return arguments


def measure(options: argparse.Namespace) -> dict[str, dict[str, Learned]]:
    """Return what the two contenders learned, by recipe."""
    torch.set_num_threads(1)
    learned = {}
    for name in options.recipes:
        with tempfile.TemporaryDirectory() as directory:
            recipe, store = prepared(name, options.share, Path(directory))
            learned[name] = {OURS: ours(recipe, store, options.decoded)}
            if BARE in options.against:
                learned[name][BARE] = bare(recipe, learned[name][OURS], options.clock, options.decoded)
            if DEFAULTS in options.against:
                job = example.by_default(recipe.job, Path(directory))
                learned[name][DEFAULTS] = ours(*example.packed(job, Path(directory)), options.decoded)
    return learned


def relative_score(name: str, result: Learned, of: Learned) -> float:
    recipe = recipe_class(name)
    better, worse = (of, result) if recipe.best_metric in recipe.lower_is_better else (result, of)
    return better.score / worse.score if worse.score else 1.0


def report(options: argparse.Namespace, learned: dict[str, dict[str, Learned]]) -> bench.Report:
    rows = [
        {
            "recipe": name,
            "who": who,
            "steps": result.steps,
            "seconds": result.wall_seconds,
            "CPU seconds": result.processor_seconds,
            "score": result.score,
            "by": recipe_class(name).best_metric,
            "of the example": relative_score(name, result, contenders[OURS]),
        }
        for name, contenders in learned.items()
        for who, result in contenders.items()
    ]
    notes = [f"{options.share:.0%} of the example's steps; greedy search on {options.decoded} validation samples"]
    faults = [
        f"{name}: the defaults reach {share:.0%} of the example's score, less than {ENOUGH:.0%}"
        for name, contenders in learned.items()
        if DEFAULTS in contenders and options.share >= 1
        if (share := relative_score(name, contenders[DEFAULTS], contenders[OURS])) < ENOUGH
    ]
    return bench.Report("Recipes", rows, notes, faults)


if __name__ == "__main__":
    bench.main(parser(), measure, report)
