"""Keeps a run's state: brings the newest checkpoint back, and saves new ones beside training."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from packtrain.job.job import Checkpoint as Settings
from packtrain.recipes import Recipe
from packtrain.run.checkpoint import Checkpoint, Superseded, commit, committed, fetch, fetch_newest, prune
from packtrain.run.records import TellEvent
from packtrain.run.run import Run
from packtrain.store import StoreError
from packtrain.train.engine import Engine
from packtrain.train.progress import save_interval
from packtrain.train.recorder import Books
from packtrain.train.state import Copier, Description, Progress, Snapshot, check, restore, take, versions
from packtrain.train.world import World

_PLANNED = ("start", "resumed", "joined", "preempted", "ended")  # causes of generations before which nothing was lost


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


# Saving beside training: no step waits for the upload.


Scored = tuple[Snapshot, float | None]

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 30.0


class Saver:
    """Commits one snapshot at a time; while it is at it, a newer one waits and replaces what waited before.

    Only the best is not replaced, where the best are kept: then there may be two that wait.

    `directory` is where files wait to be put; whoever made it takes away what a killed process leaves there. `before`
    is called ahead of each commit: what belongs to the steps up to it must be in the store first.
    `stall_seconds` is how long training waited for the last copy, and `commit_seconds` how long a commit last took.
    """

    def __init__(
        self,
        run: Run,
        generation: int,
        settings: Settings,
        copier: Copier,
        directory: Path,
        before: Callable[[], None],
        tell: TellEvent,
    ) -> None:
        self._run, self._generation, self._settings = run, generation, settings
        self._copier, self._directory, self._before, self._tell = copier, directory, before, tell
        self.stall_seconds = self.commit_seconds = 0.0
        self._luck = random.Random()  # noqa: S311 - not the one that a model draws from
        self._changed = threading.Condition()
        self._waiting: list[Scored] = []
        self._closed = self._abandoned = False
        self.superseded: Superseded | None = None
        self._thread = threading.Thread(target=self._work, name="saver", daemon=True)
        self._thread.start()

    def save(self, snapshot: Snapshot, score: float | None) -> None:
        with self._changed:
            best = self._best_of([*self._waiting, (snapshot, score)])
            for one in self._waiting:
                if one is not best:
                    self._copier.give_back(one[0].copies)
            self._waiting = [*(one for one in self._waiting if one is best), (snapshot, score)]
            self._changed.notify_all()

    def _best_of(self, snapshots: list[Scored]) -> Scored | None:
        """The one with the best score, of equals the newest."""
        scored = [one for one in reversed(snapshots) if one[1] is not None] if self._settings.keep_best else []
        return max(scored, key=lambda one: one[1] or 0.0, default=None)

    def close(self) -> None:
        """Waits until all is committed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def abandon(self) -> None:
        """Waits for nothing: what is being committed may still be, and nothing after it."""
        with self._changed:
            self._waiting.clear()
            self._closed = self._abandoned = True
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                one = self._waiting.pop(0)
            self._commit_or_complain(one)
            self._copier.give_back(one[0].copies)

    def _commit_or_complain(self, one: Scored) -> None:
        """A save that fails is told and training goes on: the last good checkpoint is still there.

        While the store is away it is tried again, until a newer snapshot waits: the last one waits for the store.
        """
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                self._commit(*one)
                return
            except Superseded as error:
                self.superseded = error
                return
            except Exception as error:
                self._tell("warning", f"step {one[0].step} is not saved yet: {error}")
                if not (isinstance(error, StoreError) and error.temporary):
                    return
            with self._changed:
                seconds = pause * self._luck.uniform(0.5, 1.0)
                if self._changed.wait_for(lambda: self._abandoned or self._is_replaced(one), seconds):
                    return
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _is_replaced(self, one: Scored) -> bool:
        """Whether those that wait make it needless to try this one again."""
        return bool(self._waiting) and self._best_of([one, *self._waiting]) is not one

    def _commit(self, snapshot: Snapshot, score: float | None) -> None:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="save-", dir=self._directory) as directory:
            files = snapshot.write(Path(directory))
            self._before()
            checkpoint = commit(self._run, snapshot.step, self._generation, score, files)
        self.commit_seconds = time.monotonic() - started
        self._tell("checkpoint", f"committed {checkpoint.name} in {self.commit_seconds:.1f} s")
        try:
            prune(self._run, self._settings.keep_last, self._settings.keep_best)
        except StoreError as error:
            self._tell("warning", f"old checkpoints could not be deleted: {error}")
