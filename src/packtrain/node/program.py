"""The checkpoint directory of a person's own program: committed to the store, and brought back.

The program writes its files there as it likes. What is committed is a state in which nothing changed while
it was copied; the program's own rank 0 is taken to be the one that writes.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from pathlib import Path

from packtrain.job.job import Checkpoint as Settings
from packtrain.run.checkpoint import commit, committed, fetch_newest, prune
from packtrain.run.records import TellEvent
from packtrain.run.run import Run
from packtrain.store import is_key
from packtrain.units import counted

Fingerprint = dict[str, tuple[int, int]]
_ATTEMPTS = 5


class ProgramCheckpoints:
    def __init__(self, run: Run, directory: Path, settings: Settings, tell: TellEvent) -> None:
        self._run, self._directory, self._settings, self._tell = run, directory, settings, tell
        self._committed: Fingerprint = {}
        self._last = time.monotonic()
        self._restoring = threading.Lock()

    def restore(self) -> None:
        """The directory as it was last committed; empty for a new run."""
        with self._restoring:  # one that nobody waits for any more may still be at it
            self._restore()

    def _restore(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True)
        found = fetch_newest(self._run, self._directory, lambda text: self._tell("warning", text))
        self._committed = fingerprint(self._directory)
        if found is not None:
            self._tell("restored", f"the program's checkpoint directory is back as of {found.name}")

    def is_due(self) -> bool:
        every = self._settings.every
        assert every != "auto", "a program's job has a time here"
        return time.monotonic() - self._last >= every.value

    def commit_if_due(self, generation: int) -> None:
        if self.is_due():
            self.commit(generation)

    def commit(self, generation: int) -> None:
        """Commits the directory, if it has changed and holds still."""
        self._last = time.monotonic()
        for _ in range(_ATTEMPTS):
            before = fingerprint(self._directory)
            if before == self._committed:
                return
            with tempfile.TemporaryDirectory(prefix="copy-", dir=self._directory.parent) as name:
                if self._copied(Path(name), before):
                    self._put(Path(name), before, generation)
                    return
            time.sleep(0.2)
        self._tell("warning", "the checkpoint directory changes all the time: it is not committed this time")

    def _copied(self, copy: Path, expected: Fingerprint) -> bool:
        """Whether the copy is of one moment: nothing changed while it was made."""
        try:
            for file in expected:
                (copy / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self._directory / file, copy / file)
        except FileNotFoundError:
            return False
        return fingerprint(self._directory) == expected

    def _put(self, copy: Path, state: Fingerprint, generation: int) -> None:
        number = 1 + max((one.step for one in committed(self._run)), default=0)
        checkpoint = commit(self._run, number, generation, None, {file: copy / file for file in state})
        self._committed = state
        self._tell("checkpoint", f"committed {checkpoint.name} ({counted(len(state), 'file')} of the program)")
        prune(self._run, self._settings.keep_last, 0)


def fingerprint(directory: Path) -> Fingerprint:
    """The size and time of every plain file below the directory that a store can hold by its name."""
    found: Fingerprint = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        try:
            if path.is_file() and not path.is_symlink() and is_key(name):
                status = path.stat()
                found[name] = (status.st_size, status.st_mtime_ns)
        except FileNotFoundError:
            continue
    return found
