"""The workers of one generation on this machine, from the node's side: start, output, stop, report.

The node never waits for them: what takes long (restoring, committing, uploading) is a `Task` in a thread, and the node
looks at it again at its next tick.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from packtrain.node.causes import OomWatch, why_they_ended
from packtrain.node.launcher import Directories, Launcher, last_output
from packtrain.node.output import LogShipper
from packtrain.node.preemption import STOP_GRACE_SECONDS
from packtrain.node.program import ProgramCheckpoints
from packtrain.process import Task, say
from packtrain.run.checkpoint import Superseded
from packtrain.run.chunks import ChunkWriter
from packtrain.run.records import Cause, Generation, LogLine, NodeReport, TellEvent
from packtrain.run.run import Run
from packtrain.train.control import Control
from packtrain.units import show_seconds

LAUNCHER_SECONDS = 5.0  # for the launcher to exit after its workers: it would wait minutes for those of other machines
_COMMIT_SECONDS, _LOOK_SECONDS = 10.0, 0.05
_PROGRAM_SECONDS = 60.0  # after which a program, which does not report its steps, counts as training
_NOT_COMMITTED = "the program's files could not be committed"


@dataclass(frozen=True)
class WorkerStop:
    """A request that the workers commit and exit: why, since when, and how long they may take."""

    cause: Cause
    reason: str
    at: float
    grace_seconds: float = STOP_GRACE_SECONDS


@dataclass
class WorkerGroup:
    """The workers of a generation on this machine.

    `launcher` is None while `restoring` (a program's checkpoint) is under way. `committing` runs beside the workers,
    `closing` after they have exited.
    """

    generation: Generation
    rank: int
    directories: Directories
    shipper: LogShipper
    is_program: bool
    began: float
    restoring: Task | None = None
    launcher: Launcher | None = None
    committing: Task | None = None
    closing: Task | None = None
    stop: WorkerStop | None = None
    _alone_since: float | None = None
    oom_watch: OomWatch = field(default_factory=OomWatch)
    _stopping: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def create(
        cls,
        run: Run,
        node: str,
        generation: Generation,
        rank: int,
        home: Path,
        logs: ChunkWriter[LogLine],
        began: float,
        echo: Callable[[LogLine], None],
    ) -> WorkerGroup:
        """Make the directories; nothing is started yet."""
        folder = home / f"{generation.number:06d}"
        directories = Directories(folder / "logs", folder / "control", home / "checkpoints")
        directories.logs.mkdir(parents=True, exist_ok=True)
        first_rank = sum(member.workers for member in generation.members[:rank])
        shipper = LogShipper(directories.logs, logs, node, generation.number, first_rank, echo=echo)
        return cls(generation, rank, directories, shipper, run.job.program is not None, began)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def control(self) -> Control:
        return Control(self.directories.control)

    @property
    def needs_attention(self) -> bool:
        """True if something on this machine waits for the node's next look."""
        if self.launcher is None:  # waiting for the checkpoint
            return self.restoring is None or self.restoring.is_done
        return self.launcher.poll() is not None and (self.closing is None or self.closing.is_done)

    def is_under_way(self, time_now: float) -> bool:
        """True once the first step is made. A program does not say when: it gets a fixed time."""
        return time_now - self.began > _PROGRAM_SECONDS if self.is_program else self.control.has_stepped()

    @property
    def has_settled(self) -> bool:
        """True if no commit of these workers can still arrive: they exited by themselves, and nothing is committing."""
        tasks = (self.committing, self.closing)
        return (
            self.launcher is not None
            and self.launcher.poll() == 0
            and all(task is None or task.is_done for task in tasks)
        )

    # Stop.

    def request_stop(self, stop: WorkerStop) -> bool:
        """Ask the workers to commit and exit. True for the first request; a later one can only shorten the time.

        Needs no store, and may be called from any thread: the deadline calls it from its own.
        """
        with self._stopping:
            if self.stop is not None:
                if stop.at + stop.grace_seconds < self.stop.at + self.stop.grace_seconds:
                    self.stop = replace(self.stop, at=stop.at, grace_seconds=stop.grace_seconds)
                return False
            self.stop = stop
        self._signal_stop()
        if self.is_program and self.launcher is not None:  # a program does not know the file, only the signal
            self.launcher.terminate()
        return True

    def _signal_stop(self) -> None:
        try:
            self.control.request_stop()
        except OSError as error:  # the disk is full, and has no room even for an empty file
            say(f"warning: cannot tell the workers to stop: {error}")

    def enforce_stop(self, time_now: float) -> str | None:
        """Kill workers that take too long; return a warning if work was lost by that."""
        assert self.stop is not None
        assert self.launcher is not None
        self._signal_stop()  # again: the first time the disk may have been full
        if self.launcher.has_workers():
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = time_now
        elif time_now - self._alone_since > LAUNCHER_SECONDS:
            self.launcher.kill()
            return None
        if time_now - self.stop.at <= self.stop.grace_seconds:
            return None
        self.launcher.kill()
        return f"the workers did not stop within {show_seconds(self.stop.grace_seconds)} and were killed"

    def wait_for_commit(self) -> None:
        """Wait until no worker is committing a checkpoint, but not for long: the others wait for this machine."""
        deadline = time.monotonic() + _COMMIT_SECONDS
        while self.control.is_saving() and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)

    def kill(self) -> None:
        if self.launcher is not None:
            self.launcher.kill()
        self.shipper.ship(is_complete=True)  # after the kill: nothing writes to the files anymore

    # After the end.

    def report(self, code: int) -> NodeReport:
        # After a stop request any exit is expected, except for an error that would only happen again.
        errors, output = self.control.errors(), last_output(self.directories.logs)
        ended = why_they_ended(self.generation.number, code, errors, output, self.oom_watch.recent())
        if self.stop is not None and not ended.fatal:
            return NodeReport(self.generation.number, self.stop.cause, self.stop.reason)
        return ended

    def stacks(self) -> list[Path]:
        """Return the files with stack traces of workers that hung; those of killed workers are empty and left out."""
        return sorted(path for path in self.directories.control.glob("stacks-*.txt") if path.stat().st_size)

    def upload_stacks(self, run: Run, tell: TellEvent) -> None:
        for path in self.stacks():
            rank = path.stem.removeprefix("stacks-")
            name = f"stacks/{self.generation.number:06d}-{rank}.txt"
            run.store.put_file(run.key(name), path)
            tell("stacks", f"stack traces of rank {rank}: {name}")
            path.unlink()

    def commit_if_due(self, program: ProgramCheckpoints, tell: TellEvent) -> None:
        """Commit a program's checkpoint directory in the background while it runs."""
        if self.committing is not None and self.committing.is_done:
            committing, self.committing = self.committing, None
            try:
                committing.result()
            except Superseded:  # the node's next look sees the newer generation and ends this one
                pass
            except OSError as error:
                tell("warning", f"{_NOT_COMMITTED}: {error}")
        if self.committing is None and program.is_due():
            self.committing = Task(lambda: program.commit(self.generation.number), "commit")

    def close(self, run: Run, program: ProgramCheckpoints | None, tell: TellEvent) -> None:
        """Put what the workers left on this machine into the store."""
        self.upload_stacks(run, tell)
        if self.committing is not None:
            with suppress(Exception):  # what it failed to commit is committed below
                self.committing.result()
        if program is not None:
            program.finish(self.generation.number)

    def not_committed(self, error: OSError) -> NodeReport:
        return NodeReport(self.generation.number, "disk", f"{_NOT_COMMITTED}: {error}")
