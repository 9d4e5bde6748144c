"""The loop: batches in, steps, evaluations and checkpoints when they are due, until the goal or a stop.

    for each global batch from the checkpoint's position on:
        step; start to add up the loss, votes to stop and the first rank's clock over all ranks
        read the sums of the step before and record them
        evaluate and save, when due
        stop, when any rank voted for it; end, at the goal

Every decision is a function of numbers that are the same on all ranks, so no rank waits for one that left.
"""

from __future__ import annotations

import signal
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor

from packtrain.checkpoint import Checkpoint, committed, fetch, fetch_newest
from packtrain.control import Control
from packtrain.data.loader import Loaded, Loader, Order, parts
from packtrain.errors import PacktrainError
from packtrain.recipes import Recipe, Scores
from packtrain.runs import Point, Result, Run
from packtrain.train.books import Books
from packtrain.train.engine import Engine, Stepped
from packtrain.train.evaluation import evaluate
from packtrain.train.pace import Progressed, due, reached
from packtrain.train.saver import Saver
from packtrain.train.state import Description, Progress, restore, take, versions
from packtrain.train.world import World


@dataclass(frozen=True)
class Pending:
    """A step whose sums over all ranks are still on their way."""

    number: int
    stepped: Stepped
    loaded: Loaded
    data_seconds: float
    wall_seconds: float
    sums: Tensor
    work: dist.Work | None


class Trainer:
    def __init__(self, run: Run, recipe: Recipe, world: World, generation: int, control: Control) -> None:
        self._run, self._job, self._recipe, self._world = run, run.job, recipe, world
        self._generation, self._control = generation, control
        self._signalled = False
        self._books = Books(run, generation, world.rank)
        self._engine = Engine(recipe, run.job.train, world)
        self._progress = Progress()
        self._restored_seconds = 0.0
        self._evaluated: tuple[int, Scores] | None = None
        self._clock_start = time.monotonic()
        self._saver = Saver(run, generation, run.job.checkpoint, self._books.flush_points, self._books.tell)

    def train(self) -> None:
        """Returns at the goal, with the result written, or once a stop is committed, without a result.

        The result comes last: agents that see it end what is still running.
        """
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._on_signal)
        result: Result | None = None
        try:
            self._restore()
            self._record("start", self._progress.step, {})
            reached_goal = self._loop()
            self._saver.close()
            if self._saver.superseded is not None:
                raise self._saver.superseded
            if reached_goal:
                result = self._finish()
        finally:
            self._books.close()
        if result is not None:
            self._run.finish(result)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._signalled = True

    # The loop.

    def _loop(self) -> bool:
        """Whether the goal was reached; if not, a stop was asked for."""
        order = self._order()
        rank, num_ranks = self._world.rank, self._world.num_ranks
        start = self._progress.position
        batches_in_epoch = len(order.batches(start.epoch))
        now = Progressed(self._progress.step, start.epoch + start.batch / batches_in_epoch, self._progress.seconds)
        if reached(self._job.train.duration, now):
            return True
        loader = Loader(parts(order, self._recipe.batch, start, rank, num_ranks))
        pending: Pending | None = None
        try:
            while True:
                current = self._step(loader)
                stop, seconds = self._settle(pending) if pending else (False, now.seconds)
                pending = current
                before, now = now, _advanced(current, seconds)
                at_goal = reached(self._job.train.duration, now)
                evaluating = at_goal or (
                    self._job.evaluate.every is not None and due(self._job.evaluate.every, before, now)
                )
                saving = at_goal or stop or due(self._job.checkpoint.every, before, now)
                if evaluating or saving:
                    self._settle(pending)
                    pending = None
                if evaluating:
                    saving |= self._evaluate()
                if saving:
                    self._save()
                if at_goal or stop:
                    return at_goal
        finally:
            loader.close()

    def _order(self) -> Order:
        return Order(
            self._recipe.costs,
            self._recipe.likeness,
            self._job.train.batch.value,
            self._job.train.seed,
            self._recipe.lengths,
            self._recipe.pack.manifest.splits["train"].sources,
            tuple(source.weight for source in self._job.data.train),
        )

    def _step(self, loader: Loader) -> Pending:
        started = time.perf_counter()
        loaded = loader.next()
        batch = {name: torch.from_numpy(array).to(self._world.device) for name, array in loaded.arrays.items()}
        ready = time.perf_counter()
        number = self._progress.step
        stepped = self._engine.step(number, batch, loaded.cost)
        self._progress = replace(self._progress, step=number + 1, position=loaded.after, seconds=self._seconds_so_far())
        sums = torch.zeros(3, dtype=torch.float64, device=self._world.device)
        sums[0] = stepped.loss
        sums[1] = float(self._signalled or self._control.asked_to_stop())
        sums[2] = self._progress.seconds if self._world.is_first else 0.0
        work = self._world.begin_sum(sums)
        return Pending(number, stepped, loaded, ready - started, time.perf_counter() - started, sums, work)

    def _seconds_so_far(self) -> float:
        """Time spent on the run by this generation and the ones whose work it goes on from."""
        return self._restored_seconds + time.monotonic() - self._clock_start

    def _settle(self, pending: Pending) -> tuple[bool, float]:
        """Reads a step's sums and records them: whether to stop, and the first rank's clock."""
        if pending.work is not None:
            pending.work.wait()
        loss, stop_votes, seconds = pending.sums.tolist()
        values = {
            "loss": loss / pending.loaded.cost,
            "rate": pending.stepped.rate,
            "gradient_norm": pending.stepped.gradient_norm,
            self._recipe.unit: float(pending.loaded.cost),
            "epoch": _epochs(pending.loaded),
            "elapsed_seconds": seconds,
            "step_seconds": pending.wall_seconds,
            "data_seconds": pending.data_seconds,
            **{f"{name}_seconds": spent for name, spent in pending.stepped.seconds.items()},
        }
        self._record("train", pending.number + 1, values)
        return stop_votes > 0, seconds

    # What interrupts it.

    def _evaluate(self) -> bool:
        """Measures the validation split; whether the score is the best so far, and so worth keeping."""
        if not self._recipe.count("valid"):
            return False
        started = time.perf_counter()
        settings = self._job.evaluate
        scores = evaluate(self._engine, self._recipe, self._world, "valid", settings.samples, settings.beam)
        self._evaluated = (self._progress.step, scores)
        values = {**scores.values, "evaluation_seconds": time.perf_counter() - started}
        self._record("valid", self._progress.step, values, scores)
        score, best = self._score(), self._progress.best_score
        if score is None or (best is not None and score <= best):
            return False
        self._progress = replace(self._progress, best_score=score)
        return self._job.checkpoint.keep_best > 0

    def _score(self) -> float | None:
        """The score of the weights as they are now, if they have been measured."""
        if self._evaluated is None or self._evaluated[0] != self._progress.step:
            return None
        return self._evaluated[1].values.get(self._recipe.measure_of_best)

    def _save(self) -> None:
        if self._world.is_first:
            scale, clean_steps = self._engine.precision.loss_scale()
            self._progress = replace(self._progress, loss_scale=scale, clean_steps=clean_steps)
            self._saver.save(take(self._engine, self._description()), self._score())

    def _finish(self) -> Result | None:
        """The last measure, on the test split or else on all of the validation split; the result, on the first rank."""
        split = "test" if self._recipe.count("test") else "valid"
        scores = Scores({})
        if self._recipe.count(split):
            if self._world.is_first:
                self._books.tell("evaluation", f"measures all of the {split} split")
            started = time.perf_counter()
            scores = evaluate(self._engine, self._recipe, self._world, split, None, self._job.evaluate.beam)
            values = {**scores.values, "evaluation_seconds": time.perf_counter() - started}
            self._record("test", self._progress.step, values, scores)
        if not self._world.is_first:
            return None
        newest = committed(self._run)
        if not newest or newest[-1].step != self._progress.step:
            raise PacktrainError("the last checkpoint did not reach the store; the run is not finished")
        self._books.flush_points()
        return Result(
            "finished",
            f"reached {self._job.train.duration}",
            self._progress.step,
            self._seconds_so_far(),
            {f"{split}.{name}": value for name, value in scores.values.items()},
            {f"{split}.{name}": text for name, text in scores.signatures.items()},
            scores.samples,
        )

    # The state.

    def _restore(self) -> None:
        """The first rank finds the newest checkpoint that holds; the others take the same."""
        with tempfile.TemporaryDirectory(prefix="packtrain-load-") as name:
            directory = Path(name)
            found: Checkpoint | None = None
            if self._world.is_first:
                found = fetch_newest(self._run, directory, lambda text: self._books.tell("warning", text))
            chosen = self._world.gather(found.name.encode() if found else b"")[0].decode()
            if not chosen:
                return
            if not self._world.is_first:
                found = next(one for one in committed(self._run) if one.name == chosen)
                fetch(self._run, found, directory)
            self._progress = restore(self._engine, directory, self._description())
        self._restored_seconds = self._progress.seconds
        if self._world.is_first:
            self._books.tell("restored", f"goes on from step {self._progress.step} ({chosen})")

    def _description(self) -> Description:
        model = self._job.model
        return Description(
            str(self._job.recipe),
            self._recipe.pack.name,
            {"size": model.size, **model.options},
            versions(),
            self._progress,
        )

    def _record(self, kind: str, step: int, values: dict[str, float], scores: Scores | None = None) -> None:
        samples = scores.samples if scores else ()
        self._books.record(Point(kind, self._generation, step, time.time(), values, samples))  # type: ignore[arg-type]


def _epochs(loaded: Loaded) -> float:
    return loaded.after.epoch + loaded.after.batch / loaded.batches_in_epoch


def _advanced(pending: Pending, seconds: float) -> Progressed:
    return Progressed(pending.number + 1, _epochs(pending.loaded), seconds)
