"""Saves, keeps and restores the state of a run. A save copies the state and returns; the upload runs in a thread.

Where every rank saves a part, each has such a thread. They tell each other when their parts are in the store; then the
first rank commits, and tells the others.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from packtrain.backoff import Backoff
from packtrain.errors import Mistake, PacktrainError
from packtrain.job.job import CheckpointSettings
from packtrain.recipes import Recipe
from packtrain.run.checkpoint import (
    FORMAT,
    Checkpoint,
    StoredFile,
    Superseded,
    checkpoint_name,
    commit,
    committed,
    fetch_named,
    fetch_newest,
    prune,
    put_files,
    put_manifest,
)
from packtrain.run.parent import fetch_weights
from packtrain.run.run import Run
from packtrain.store import StoreError
from packtrain.train.control import SAVING
from packtrain.train.engine import Engine
from packtrain.train.progress import Progress, save_interval
from packtrain.train.recorder import Recorder
from packtrain.train.state import Description, Snapshot, SnapshotCopier, SnapshotPart, check, restore, take, versions
from packtrain.train.weights import fit_of, parent_weights
from packtrain.train.world import World
from packtrain.units import show_seconds


class Scored(NamedTuple):
    """A snapshot with its score, if it was evaluated; higher is better."""

    snapshot: Snapshot
    score: float | None


_PLANNED = ("start", "resumed", "joined", "preempted", "ended")  # causes of generations before which nothing was lost
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 1.0, 30.0
_LISTEN_SECONDS = 0.1  # between two looks at what the other ranks have told


class Checkpointer:
    """`directory` is this machine's place for files on their way to and from the store."""

    def __init__(
        self,
        run: Run,
        generation: int,
        recipe: Recipe,
        engine: Engine,
        world: World,
        recorder: Recorder,
        directory: Path,
    ) -> None:
        self._run, self._recipe, self._engine, self._world, self._recorder = run, recipe, engine, world, recorder
        self._settings, self._copier = run.job.checkpoint, SnapshotCopier()
        self._directory, self._generation = directory, generation
        self._committer = BackgroundCommitter(run, generation, self._settings, self._copier, directory, recorder, world)
        self._copying: Snapshot | None = None
        self._stall_seconds = 0.0  # how long training waited for the last save
        engine.before_update = self._wait_for_copy
        self._saved_at = time.monotonic()
        # Only the first rank votes on saves, so only it needs to read the generations.
        causes = [record.cause for record in run.generations()] if world.is_first else []
        self._failures = sum(cause not in _PLANNED for cause in causes)

    def restore(self) -> Progress:
        """Load the newest valid checkpoint into the engine and return its progress. Collective.

        The first rank finds it, and one rank of every machine fetches it for all of them.
        """
        directory = self._directory / "restored"
        directory.mkdir(exist_ok=True)
        newest: Checkpoint | None = None
        if self._world.is_first:
            newest = fetch_newest(
                self._run,
                directory,
                lambda text: self._recorder.event("warning", text),
                lambda path: check(self._engine, path, self._description(Progress())),
            )
        # All ranks load what the first one found: if each listed by itself, a commit in between would divide them.
        name = self._world.share(newest.name.encode() if newest else b"").decode()
        if not name:
            self._begin(directory)
            return Progress()

        def fetch() -> None:
            if not self._world.is_first:  # which has it
                fetch_named(self._run, name, directory)

        with self._fetched(fetch, directory):
            progress = restore(self._engine, directory, self._description(Progress()), self._world.rank)
        if self._world.is_first:
            self._recorder.event("restored", f"restored checkpoint {progress.step} ({name})")
        return progress

    @contextmanager
    def _fetched(self, fetch: Callable[[], object], directory: Path) -> Iterator[None]:
        """Have one rank of every machine fetch files, and remove them when no rank there needs them. Collective."""
        if self._world.rank_of_node == 0:
            fetch()
        self._world.barrier()  # now every machine has the files
        yield
        self._world.barrier()  # now no rank of this machine needs them
        if self._world.rank_of_node == 0:
            shutil.rmtree(directory)

    def _begin(self, directory: Path) -> None:
        """Load the weights of the first step: those of another run, if the job says so. Collective."""
        parent = self._run.job.parent
        if parent is None:
            weights = self._engine.load_initial_weights()
            if weights and self._world.is_first:
                words = fit_of(self._engine.model.state_dict(), weights).in_words
                self._recorder.event("restored", f"started from given weights: {words}")
            return
        if parent.takes == "everything":
            raise Mistake(f"{self._run.name} starts from {parent.in_words}, but has no copy of it; create it again")
        with self._fetched(lambda: fetch_weights(self._run, directory), directory):
            fitting = parent_weights(self._recipe, self._engine, directory)
            self._engine.begin_with(fitting.tensors)
        if self._world.is_first:
            self._recorder.event("restored", f"started from {parent.in_words}: {fitting.fit.in_words}")

    def is_due(self, elapsed_seconds: float) -> bool:
        """True if the first rank wants a save, where the job leaves the interval to it."""
        if self._settings.every != "auto" or not self._world.is_first:
            return False
        interval = save_interval(self._stall_seconds, self._committer.commit_seconds, self._failures, elapsed_seconds)
        return time.monotonic() - self._saved_at >= interval

    def save(self, progress: Progress, score: float | None) -> None:
        """Start to save the state as it is now. Collective."""
        started = time.monotonic()
        self._wait_for_copy()
        name = ""
        if self._engine.gradient_sync.saves_parts:  # under a name that all ranks know
            name = self._world.share(checkpoint_name(progress.step, self._generation).encode()).decode()
        self._copying = take(self._engine, self._description(progress), self._world, self._copier, name)
        if self._copying is not None:
            self._committer.add(self._copying, score)
        self._saved_at = time.monotonic()
        self._stall_seconds = self._saved_at - started

    def _wait_for_copy(self) -> None:
        """Wait until the last snapshot is complete: after this the weights may change."""
        if self._copying is not None:
            started = time.monotonic()
            self._copying.tensors.result()
            self._copying = None
            self._engine.clock.mark("save")
            self._stall_seconds += time.monotonic() - started

    def close(self, patience: float = math.inf, most_seconds: float | None = None) -> None:
        """Wait until everything is committed, or for so many seconds; raise if a newer generation has begun.

        Parts of other ranks are waited for with `patience`: a rank that has died will not save its part.
        """
        self._committer.close(patience, most_seconds)
        if self._committer.superseded is not None:
            raise self._committer.superseded

    def abandon(self) -> None:
        self._committer.abandon()
        self._copier.close()

    def has_committed(self, step: int) -> bool:
        """True if the newest checkpoint in the store is of that step."""
        checkpoints = committed(self._run)
        return bool(checkpoints) and checkpoints[-1].step == step

    def _description(self, progress: Progress) -> Description:
        model, scale = self._run.job.model, self._engine.precision.scale
        options = {"size": model.size, **model.options}
        recipe, pack = str(self._run.job.recipe), self._recipe.pack.name
        return Description(recipe, pack, options, versions(), progress, scale.state())


class PartNotSaved(PacktrainError):
    """Another rank did not save its part of a checkpoint, or did not commit it."""


@dataclass(frozen=True)
class PartReport:
    """A rank's files of a checkpoint, or why there are none. The first rank reports when it has committed."""

    files: tuple[StoredFile, ...] = ()
    failure: str = ""


_PART_REPORT = TypeAdapter(PartReport)


class BackgroundCommitter:
    """Commits one snapshot at a time in a thread; a newer snapshot replaces one that is still waiting.

    If the job keeps its best checkpoints, the best snapshot that waits is not replaced, so two may wait. `directory`
    holds the files until they are put; the node removes what a killed process leaves there.
    """

    def __init__(
        self,
        run: Run,
        generation: int,
        settings: CheckpointSettings,
        copier: SnapshotCopier,
        directory: Path,
        recorder: Recorder,
        world: World | None = None,
    ) -> None:
        self._run, self._generation, self._settings = run, generation, settings
        self._copier, self._directory, self._recorder, self._world = copier, directory, recorder, world or World()
        self.commit_seconds = 0.0
        self.superseded: Superseded | None = None
        self._changed = threading.Condition()
        self._waiting: list[Scored] = []
        self._closed = self._abandoned = False
        self._listens_until = math.inf
        self._thread = threading.Thread(target=self._work, name="committer", daemon=True)
        self._thread.start()

    def add(self, snapshot: Snapshot, score: float | None) -> None:
        with self._changed:
            # Everything that waits is replaced, except for the best.
            newest = Scored(snapshot, score)
            best = self._best_of([*self._waiting, newest])
            for scored in self._waiting:
                if scored is not best:
                    self._report(scored.snapshot, PartReport(failure="a newer state replaced it"))
                    self._copier.give_back(scored.snapshot.tensors)
            self._waiting = [*(scored for scored in self._waiting if scored is best), newest]
            self._changed.notify_all()

    def _best_of(self, snapshots: list[Scored]) -> Scored | None:
        """Return the snapshot with the best score, of equals the newest."""
        candidates = [scored for scored in reversed(snapshots) if scored.score is not None and self._settings.keep_best]
        return max(candidates, key=lambda scored: scored.score or 0.0, default=None)

    def close(self, patience: float = math.inf, most_seconds: float | None = None) -> None:
        """Wait until everything is committed, or for so many seconds; for parts of other ranks with `patience`."""
        with self._changed:
            self._closed = True
            self._listens_until = time.monotonic() + patience
            self._changed.notify_all()
        self._thread.join(most_seconds)

    def abandon(self) -> None:
        """Return without waiting: the commit in progress may still finish, and no other one starts."""
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
                scored = self._waiting.pop(0)
            self._commit_or_warn(scored)
            self._copier.give_back(scored.snapshot.tensors)  # the next copy reuses the memory

    def _commit_or_warn(self, scored: Scored) -> None:
        """Commit, or warn and let training continue: the last good checkpoint is still there.

        While the store is unreachable the commit is retried, until a newer snapshot makes it pointless.
        """
        backoff = Backoff(_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS)
        while True:
            try:
                self._commit(*scored)
                return
            except Superseded as error:
                self.superseded, failure = error, str(error)
                break
            except Exception as error:
                failure = str(error)
                if self._world.is_first or not isinstance(error, PartNotSaved):  # one rank warns of what another lacks
                    self._recorder.event("warning", f"step {scored.snapshot.step} is not saved yet: {error}")
                if not (isinstance(error, StoreError) and error.temporary):  # the next save will try again
                    break
            with self._changed:
                if self._changed.wait_for(lambda: self._abandoned or self._is_replaced(scored), backoff.next_pause()):
                    break
        self._report(scored.snapshot, PartReport(failure=failure))

    def _is_replaced(self, scored: Scored) -> bool:
        return bool(self._waiting) and self._best_of([scored, *self._waiting]) is not scored

    def _commit(self, snapshot: Snapshot, score: float | None) -> None:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix=SAVING.format(os.getpid()), dir=self._directory) as directory:
            files = snapshot.write(Path(directory))
            # The metrics up to this step go first, so that the history of a resumed run has no gap.
            self._recorder.flush_points()
            if snapshot.rank_part is None:
                checkpoint = commit(self._run, snapshot.step, self._generation, score, files)
            else:
                name = snapshot.rank_part.checkpoint
                stored = put_files(self._run, name, files)
                if snapshot.rank_part.rank > 0:
                    self._report(snapshot, PartReport(stored))
                    self._listen(snapshot.rank_part, 0)  # until the first rank has committed
                    return
                for rank in range(1, self._world.num_ranks):
                    stored += self._listen(snapshot.rank_part, rank)
                checkpoint = Checkpoint(FORMAT, name, snapshot.step, self._generation, score, stored)
                put_manifest(self._run, checkpoint)
                self._report(snapshot, PartReport())
        self.commit_seconds = time.monotonic() - started
        self._recorder.event("checkpoint", f"committed {checkpoint.name} in {show_seconds(self.commit_seconds)}")
        try:
            prune(self._run, self._generation, self._settings.keep_last, self._settings.keep_best)
        except StoreError as error:
            self._recorder.event("warning", f"cannot delete old checkpoints: {error}")

    def _report(self, snapshot: Snapshot, report: PartReport) -> None:
        if snapshot.rank_part is not None:
            with suppress(RuntimeError):  # the rank that hosts the ranks' store is gone, and with it all of them
                self._world.tell(_subject(snapshot.rank_part, snapshot.rank_part.rank), json.dumps(asdict(report)))

    def _listen(self, snapshot_part: SnapshotPart, rank: int) -> tuple[StoredFile, ...]:
        """Wait for a rank's files; raise PartNotSaved if there will be none."""
        while not self._abandoned and time.monotonic() < self._listens_until:
            if (answer := self._world.heard(_subject(snapshot_part, rank))) is not None:
                report = _PART_REPORT.validate_json(answer)
                if report.failure:
                    raise PartNotSaved(f"rank {rank} did not save its part: {report.failure}")
                return report.files
            time.sleep(_LISTEN_SECONDS)
        raise PartNotSaved(f"rank {rank} has not saved its part")


def _subject(snapshot_part: SnapshotPart, rank: int) -> str:
    return f"checkpoint {snapshot_part.checkpoint} part {rank}"
