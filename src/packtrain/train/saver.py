"""Saving beside training: the step waits for the copy of the state, not for the upload."""

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
from packtrain.train.state import Snapshot

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 30.0


class Saver:
    """Commits one snapshot at a time; while it is at it, a newer one waits and replaces what waited before.

    `before` is called ahead of each commit: what belongs to the steps up to it must be in the store first.
    """

    def __init__(
        self,
        run: Run,
        generation: int,
        settings: Settings,
        before: Callable[[], None],
        tell: Callable[[str, str], None],
    ) -> None:
        self._run, self._generation, self._settings = run, generation, settings
        self._before, self._tell = before, tell
        self._changed = threading.Condition()
        self._waiting: tuple[Snapshot, float | None] | None = None
        self._closed = False
        self.superseded: Superseded | None = None
        self._thread = threading.Thread(target=self._work, name="saver", daemon=True)
        self._thread.start()

    def save(self, snapshot: Snapshot, score: float | None) -> None:
        with self._changed:
            self._waiting = (snapshot, score)
            self._changed.notify_all()

    def close(self) -> None:
        """Waits until all is committed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closed)
                if self._waiting is None:
                    return
                snapshot, score = self._waiting
                self._waiting = None
            self._commit_or_complain(snapshot, score)

    def _commit_or_complain(self, snapshot: Snapshot, score: float | None) -> None:
        """A save that fails is told and training goes on: the last good checkpoint is still there.

        While the store is away it is tried again, until a newer snapshot waits: the last one waits for the store.
        """
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                self._commit(snapshot, score)
                return
            except Superseded as error:
                self.superseded = error
                return
            except Exception as error:
                self._tell("warning", f"step {snapshot.step} is not saved yet: {error}")
                if not (isinstance(error, StoreError) and error.temporary):
                    return
            with self._changed:
                if self._changed.wait_for(lambda: self._waiting is not None, pause * random.uniform(0.5, 1.0)):  # noqa: S311
                    return
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _commit(self, snapshot: Snapshot, score: float | None) -> None:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="packtrain-save-") as directory:
            files = snapshot.write(Path(directory))
            self._before()
            checkpoint = commit(self._run, snapshot.step, self._generation, score, files)
        self._tell("checkpoint", f"committed {checkpoint.name} in {time.monotonic() - started:.1f} s")
        try:
            prune(self._run, self._settings.keep_last, self._settings.keep_best)
        except StoreError as error:
            self._tell("warning", f"old checkpoints could not be deleted: {error}")
