"""Saving beside training: no step waits for the upload."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from packtrain.checkpoint import Superseded, commit, prune
from packtrain.job import Checkpoint as Settings
from packtrain.runs import Run
from packtrain.store import StoreError
from packtrain.train.copier import Copier
from packtrain.train.state import Snapshot

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
        tell: Callable[[str, str], None],
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
