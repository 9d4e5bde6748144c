"""Keeps a run's state: brings the newest checkpoint back, and saves new ones beside training."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from packtrain.checkpoint import Checkpoint, committed, fetch, fetch_newest
from packtrain.recipes import Recipe
from packtrain.runs import Run
from packtrain.train.books import Books
from packtrain.train.copier import Copier
from packtrain.train.engine import Engine
from packtrain.train.pace import save_interval
from packtrain.train.saver import Saver
from packtrain.train.state import Description, Progress, Snapshot, check, restore, take, versions
from packtrain.train.world import World

_PLANNED = ("start", "resumed", "joined", "notice", "ended")  # causes of generations before which nothing was lost


class Keeper:
    """`directory` is this machine's place for files on their way from and to the store."""

    def __init__(
        self,
        run: Run,
        generation: int,
        recipe: Recipe,
        engine: Engine,
        world: World,
        books: Books,
        directory: Path,
    ) -> None:
        self._run, self._recipe, self._engine, self._world, self._books = run, recipe, engine, world, books
        self._settings, self._copier = run.job.checkpoint, Copier()
        self._directory = directory
        self._saver = Saver(run, generation, self._settings, self._copier, directory, books.flush_points, books.tell)
        self._copied: Snapshot | None = None
        engine.before_update = self._wait_for_copy
        self._saved_at = time.monotonic()
        self._failures = sum(one.cause not in _PLANNED for one in run.generations()) if world.is_first else 0

    def restore(self) -> Progress:
        """How far the newest checkpoint that holds had come; it is in the engine now.

        The first rank finds it, and one rank of every machine fetches it for all there.
        """
        directory = self._directory / "restored"
        directory.mkdir(exist_ok=True)
        found: Checkpoint | None = None
        if self._world.is_first:
            found = fetch_newest(self._run, directory, self._warn, self._check)
        chosen = self._world.gather(found.name.encode() if found else b"")[0].decode()
        if not chosen:
            self._engine.begin()
            return Progress()
        if not self._world.is_first and self._world.rank_of_node == 0:
            fetch(self._run, next(one for one in committed(self._run) if one.name == chosen), directory)
        self._world.gather(b"fetched")
        progress = restore(self._engine, directory, self._description(Progress()), self._world.rank)
        self._world.gather(b"restored")
        if self._world.rank_of_node == 0:
            _remove(directory)
        if self._world.is_first:
            self._books.tell("restored", f"goes on from step {progress.step} ({chosen})")
        return progress

    def _warn(self, text: str) -> None:
        self._books.tell("warning", text)

    def _check(self, directory: Path) -> None:
        check(self._engine, directory, self._description(Progress()))

    def is_due(self, elapsed_seconds: float) -> bool:
        """Whether the first rank wishes for a save, where the interval is left to it."""
        if self._settings.every != "auto" or not self._world.is_first:
            return False
        saver = self._saver
        interval = save_interval(saver.stall_seconds, saver.commit_seconds, self._failures, elapsed_seconds)
        return time.monotonic() - self._saved_at >= interval

    def save(self, progress: Progress, score: float | None) -> None:
        """Begins to save the state as it is. All ranks take part."""
        started = time.monotonic()
        self._wait_for_copy()
        scale = self._engine.precision.scale
        if scale.enabled:
            progress = replace(progress, loss_scale=scale.value, clean_steps=scale.clean_steps)
        self._copied = take(self._engine, self._description(progress), self._world, self._copier)
        if self._copied is not None:
            self._saver.save(self._copied, score)
        self._saved_at = time.monotonic()
        self._saver.stall_seconds = self._saved_at - started

    def _wait_for_copy(self) -> None:
        """Until the last snapshot is whole: after this the weights may change."""
        if self._copied is not None:
            started = time.monotonic()
            self._copied.copies.wait()
            self._copied = None
            self._engine.clock.mark("save")
            self._saver.stall_seconds += time.monotonic() - started

    def close(self) -> None:
        """Waits until all is committed; raises if a newer generation has begun."""
        self._saver.close()
        if self._saver.superseded is not None:
            raise self._saver.superseded

    def abandon(self) -> None:
        self._saver.abandon()
        self._copier.close()

    def has_committed(self, step: int) -> bool:
        """Whether the newest checkpoint in the store is of that step."""
        found = committed(self._run)
        return bool(found) and found[-1].step == step

    def _description(self, progress: Progress) -> Description:
        model = self._run.job.model
        options = {"size": model.size, **model.options}
        return Description(str(self._run.job.recipe), self._recipe.pack.name, options, versions(), progress)


def _remove(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
