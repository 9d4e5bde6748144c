"""The checkpoint directory of a user's own program: committed to the store and restored from it.

The program may write its files there at any time; only those of the first machine, which has rank 0, are committed. A
commit is a copy during which no file changed. A program that resumes only if it is told to gets the job's
`program.resume` after a restore.
"""

from __future__ import annotations

import math
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from packtrain.errors import Mistake
from packtrain.job.job import CheckpointSettings
from packtrain.node.metrics import ProgramMetrics
from packtrain.node.workspace import Fingerprint, Workspace, fingerprint
from packtrain.run.checkpoint import Checkpoint, Superseded, commit, committed, fetch_newest, prune
from packtrain.run.records import TellEvent
from packtrain.run.run import Run
from packtrain.train.control import CHECKPOINTS_VARIABLE
from packtrain.units import counted

_TRIES = 5  # to copy the directory between two writes of the program
_IN_CHECKPOINTS = re.compile(rf"\$(?:\{{{CHECKPOINTS_VARIABLE}\}}|{CHECKPOINTS_VARIABLE})/+(.+)")


class ProgramCheckpoints:
    def __init__(
        self,
        run: Run,
        directory: Path,
        settings: CheckpointSettings,
        tell: TellEvent,
        workspace: Workspace,
        metrics: ProgramMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._directory, self._settings, self._tell, self._clock = run, directory, settings, tell, clock
        self._workspace, self._metrics = workspace, metrics
        self._committed: Fingerprint = {}
        self._last = clock()
        self._restoring = threading.Lock()
        self._generation = 0  # the latest that was to be restored for
        self.restored: Checkpoint | None = None
        self.resume: tuple[str, ...] = ()  # arguments that follow the program's own at the next start

    def restore(self, generation: int, is_first: bool) -> None:
        """Restore the directory as it was last committed; empty for a new run."""
        self._generation = max(generation, self._generation)
        with self._restoring:  # an earlier restore that is no longer needed may still be running
            if generation < self._generation:  # or waiting: the workers of a newer generation may use the directory
                raise Superseded(f"generation {self._generation} has started; not restoring for {generation}")
            # First: from here on, outputs of older generations come too late.
            self._workspace.restore_outputs(generation, is_first)
            self._restore()
            self._workspace.stage_inputs()

    def _restore(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True)
        self.restored = fetch_newest(self._run, self._directory, lambda text: self._tell("warning", text))
        self._committed = fingerprint(self._directory)
        self.resume = ()
        if self.restored is None:
            if (parent := self._run.job.parent) is not None:  # its client was killed before it had copied this
                raise Mistake(f"{self._run.name} starts from {parent.in_words}, but has no copy of it; create it again")
            return
        program = self._run.job.program
        words = program.resume if program is not None else ()
        self.resume, absent = resume_arguments(words, self._directory)
        added = f"; starting the program with {' '.join(words)}" if self.resume else ""
        self._tell("restored", f"restored checkpoint {self.restored.step}{added}")
        if absent is not None:
            self._tell("warning", f"checkpoint {self.restored.step} has no {absent}; ignoring program.resume")

    def hurry(self) -> None:
        """Make the next commit due now."""
        self._last = -math.inf

    def is_due(self) -> bool:
        every = self._settings.every
        assert every != "auto", "a program's job has a time here"
        return self._clock() - self._last >= every.value

    def commit(self, generation: int) -> None:
        """Commit the directory if it has changed, and keep the outputs that have."""
        self._last = self._clock()
        self._metrics.flush(is_complete=True)  # first: numbers up to the checkpoint are in the store before it
        not_kept: OSError | None = None
        try:
            self._workspace.keep_outputs(generation)
        except OSError as error:  # the disk has no room for an output, but may have it for the checkpoint
            not_kept = error
        self._commit_directory(generation)
        if not_kept is not None:
            raise not_kept

    def _commit_directory(self, generation: int) -> None:
        for _ in range(_TRIES):
            before = fingerprint(self._directory)
            if before == self._committed:  # nothing new; another checkpoint would only push out an older one
                return
            with tempfile.TemporaryDirectory(prefix="copy-", dir=self._directory.parent) as name:
                if self._copied(Path(name), before):
                    self._put(Path(name), before, generation)
                    return
            time.sleep(0.2)
        self._tell("warning", "the checkpoint directory keeps changing; skipped this commit")

    def finish(self, generation: int) -> None:
        """Commit what the program left, and name what nothing keeps."""
        self.commit(generation)
        self._workspace.warn_of_the_rest()

    def _copied(self, copy: Path, expected: Fingerprint) -> bool:
        """Copy the files; True if nothing changed meanwhile."""
        try:
            for file in expected:
                (copy / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self._directory / file, copy / file)
        except FileNotFoundError:
            return False
        return fingerprint(self._directory) == expected

    def _put(self, copy: Path, state: Fingerprint, generation: int) -> None:
        # A program does not report its steps: its checkpoints are numbered.
        number = 1 + max((checkpoint.step for checkpoint in committed(self._run)), default=0)
        reached = self._metrics.reached
        checkpoint = commit(self._run, number, generation, None, {file: copy / file for file in state}, reached)
        self._committed = state
        self._tell("checkpoint", f"committed checkpoint {checkpoint.step} ({counted(len(state), 'file')})")
        restored = self.restored
        # If the program does not log its steps, nobody knows whether this commit is as far as what it resumed from.
        is_unclear = restored is not None and (reached is None or restored.reached is None)
        prune(self._run, generation, self._settings.keep_last, 0, restored.name if restored and is_unclear else None)


def resume_arguments(words: Iterable[str], directory: Path) -> tuple[tuple[str, ...], str | None]:
    """Return the arguments with paths in the checkpoint directory; none, and a path that is not there, if one is not.

    Of the files that a path with wildcards matches, the last counts: checkpoint-1000 comes after checkpoint-900.
    """
    arguments = []
    for word in words:
        path = _IN_CHECKPOINTS.search(word)
        if path is None:
            arguments.append(word)
            continue
        matches: list[Path] = []
        with suppress(ValueError):  # no pattern at all, such as `**x`
            matches = sorted(directory.glob(path[1]), key=_by_numbers)
        if not matches:
            return (), path[1]
        arguments.append(f"{word[: path.start()]}{matches[-1]}")
    return tuple(arguments), None


def _by_numbers(path: Path) -> tuple[list[int], str]:
    return [int(digits) for digits in re.findall("[0-9]+", str(path))], str(path)
