"""Shared by the benchmarks that train: an example's recipe and pack, and its Trainer in this process with a timer."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import bench
from packtrain.data.pack import Pack
from packtrain.job import Job
from packtrain.job.load import load_job
from packtrain.pack.build import PlainProgress, pack
from packtrain.pack.workers import InProcess
from packtrain.recipes import Recipe, recipe_class, recipe_defaults
from packtrain.run.code import archive
from packtrain.run.run import Run, add_run
from packtrain.store import Store, open_store
from packtrain.train.control import Control
from packtrain.train.recorder import Clock
from packtrain.train.trainer import Trainer
from packtrain.train.world import World

WARM_UP_STEPS = 5

Tick = Callable[[], None]
"""Called by a contender after every step."""


@dataclass
class Timer:
    """Wall time and CPU time after every step."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    def tick(self) -> None:
        self.wall.append(time.perf_counter())
        self.processor.append(time.process_time())

    def seconds_per_step(self) -> tuple[float, float]:
        steps = len(self.wall) - WARM_UP_STEPS
        return tuple((times[-1] - times[WARM_UP_STEPS - 1]) / steps for times in (self.wall, self.processor))  # type: ignore[return-value]


class TimingClock(Clock):
    def __init__(self, tick: Tick) -> None:
        super().__init__()
        self._tick = tick

    def mark(self, span: str) -> None:
        super().mark(span)
        if span == "optimizer":
            self._tick()


def load(name: str, *settings: str) -> Job:
    """Return the job of examples/NAME.yaml, with settings as in `packtrain run --set`."""
    return load_job(bench.EXAMPLES / f"{name}.yaml", list(settings), recipe_defaults).job


def by_default(job: Job, directory: Path) -> Job:
    """Return the job as a newcomer writes it: data, model, duration and batch, and the recipe's defaults."""
    fields = job.model_dump(mode="json", include={"name", "recipe", "store", "data", "model", "evaluate", "checkpoint"})
    train = {"duration": str(job.train.duration), "batch": str(job.train.batch)}
    path = directory / "job.yaml"
    path.write_text(json.dumps({**fields, "train": train}))
    return load_job(path, [], recipe_defaults).job


def packed(job: Job, directory: Path) -> tuple[Recipe, Store]:
    """Return the recipe of a job and the store below the directory; its data is packed there once."""
    store = open_store(str(directory / "store"), create=True)
    manifest = pack(job.name, job.data, store, InProcess(), PlainProgress(lambda _: None))
    return recipe_class(str(job.recipe))(job, Pack(store, manifest.name, directory / "cache")), store


def train(recipe: Recipe, store: Store, tick: Tick) -> tuple[Trainer, Run]:
    """Make all steps of the recipe's job with the whole Trainer: loader, step sync, watchdog, metrics in a store."""
    run = add_run(store, recipe.job, archive({}), recipe.pack.name)
    with tempfile.TemporaryDirectory() as control:
        trainer = Trainer(run, recipe, World(), 1, Control(Path(control)), clock=TimingClock(tick))
        trainer.train()
    return trainer, run
