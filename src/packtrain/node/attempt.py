"""The workers of one generation on this machine: made ready, working, brought to an end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from packtrain.node.causes import oom_kills, why_they_ended
from packtrain.node.launch import Directories, Launch, last_words
from packtrain.node.logs import LogShipper
from packtrain.node.program import ProgramCheckpoints
from packtrain.run.checkpoint import Superseded
from packtrain.run.chunks import ChunkWriter
from packtrain.run.records import Cause, Generation, LogLine, NodeReport, TellEvent
from packtrain.run.run import Run
from packtrain.system import say
from packtrain.train.control import Control
from packtrain.units import show_seconds

STOP_GRACE_SECONDS = 600.0  # a large checkpoint over a slow network takes minutes
LAUNCHER_SECONDS = 5.0  # for the launcher to end after its workers; it would wait for those of others for minutes
_PROGRAM_SECONDS = 60.0
_UNCOMMITTED = "the program's checkpoint directory could not be committed"


@dataclass(frozen=True)
class Asked:
    """That workers are to commit and end: why, since when, and how long they may take."""

    cause: Cause
    reason: str
    at: float
    grace_seconds: float = STOP_GRACE_SECONDS


@dataclass
class Attempt:
    """`preparing` and `closing` are what happens before the launch and after its end; both take their time."""

    generation: Generation
    rank: int
    directories: Directories
    shipper: LogShipper
    is_program: bool
    began: float
    preparing: Task | None = None
    launch: Launch | None = None
    committing: Task | None = None
    closing: Task | None = None
    asked: Asked | None = None
    _alone_since: float | None = None
    _oom_kills: int = field(default_factory=oom_kills)
    _asking: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def control(self) -> Control:
        return Control(self.directories.control)

    @property
    def wants_a_look(self) -> bool:
        """Whether something on this machine waits for the agent's next look at the world."""
        if self.launch is None:
            return self.preparing is None or self.preparing.is_done
        return self.launch.poll() is not None and (self.closing is None or self.closing.is_done)

    def is_under_way(self, now: float) -> bool:
        """Whether the first step was made. A program does not say: it has had its time."""
        return now - self.began > _PROGRAM_SECONDS if self.is_program else self.control.has_stepped()

    def ask_to_stop(self, asked: Asked) -> bool:
        """Whether this is the first time; a later one may leave less time. Needs no store; from any thread."""
        with self._asking:
            if self.asked is not None:
                if asked.at + asked.grace_seconds < self.asked.at + self.asked.grace_seconds:
                    self.asked = replace(self.asked, at=asked.at, grace_seconds=asked.grace_seconds)
                return False
            self.asked = asked
        self._ask_workers()
        if self.is_program and self.launch is not None:
            self.launch.terminate()
        return True

    def _ask_workers(self) -> None:
        try:
            self.control.request_stop()
        except OSError as error:  # a full disk has no room for the file by which they know
            say(f"warning: the workers do not hear that they are to stop: {error}")

    def hold_to_grace(self, now: float) -> str | None:
        """Ends what was asked to and does not; what there is to say about it where work was lost by that."""
        assert self.asked is not None
        assert self.launch is not None
        self._ask_workers()
        if self.launch.has_workers():
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        elif now - self._alone_since > LAUNCHER_SECONDS:
            self.launch.kill()
            return None
        if now - self.asked.at <= self.asked.grace_seconds:
            return None
        self.launch.kill()
        return f"the workers did not stop within {show_seconds(self.asked.grace_seconds)}: killed"

    def kill(self) -> None:
        if self.launch is not None:
            self.launch.kill()
        self.shipper.ship(all_of_it=True)

    def report(self, code: int) -> NodeReport:
        errors, said = self.control.errors(), last_words(self.directories.logs)
        ended = why_they_ended(self.generation.number, code, errors, said, oom_kills() - self._oom_kills)
        if self.asked is not None and not ended.fatal:
            return NodeReport(self.generation.number, self.asked.cause, self.asked.reason)
        return ended

    def stacks(self) -> list[Path]:
        """What workers that hung left behind: where each of their threads was. One that was killed leaves it empty."""
        return sorted(path for path in self.directories.control.glob("stacks-*.txt") if path.stat().st_size)

    def keep_stacks(self, run: Run, tell: TellEvent) -> None:
        for path in self.stacks():
            rank = path.stem.removeprefix("stacks-")
            name = f"stacks/{self.generation.number:06d}-{rank}.txt"
            run.store.put_file(run.key(name), path)
            tell("stacks", f"where the threads of rank {rank} were is in {name}")
            path.unlink()

    def commit_if_due(self, program: ProgramCheckpoints, tell: TellEvent) -> None:
        """What a program wrote, while it works: in the background."""
        if self.committing is not None and self.committing.is_done:
            committing, self.committing = self.committing, None
            try:
                committing.result()
            except Superseded:  # the next look at the world ends the attempt
                pass
            except OSError as error:
                tell("warning", f"{_UNCOMMITTED}: {error}")
        if self.committing is None and program.is_due():
            self.committing = Task(lambda: program.commit(self.generation.number), "commit")

    def close(self, run: Run, program: ProgramCheckpoints | None, tell: TellEvent) -> None:
        """Brings into the store what the workers left."""
        self.keep_stacks(run, tell)
        if self.committing is not None:
            with suppress(Exception):  # what it could not commit is committed now
                self.committing.result()
        if program is not None:
            program.commit(self.generation.number)

    def uncommitted(self, error: OSError) -> NodeReport:
        return NodeReport(self.generation.number, "disk", f"{_UNCOMMITTED}: {error}")


def begin(
    run: Run, node: str, generation: Generation, rank: int, home: Path, logs: ChunkWriter[LogLine], now: float
) -> Attempt:
    """An attempt with its directories; nothing is started yet."""
    folder = home / f"{generation.number:06d}"
    directories = Directories(folder / "logs", folder / "control", home / "checkpoints")
    directories.logs.mkdir(parents=True, exist_ok=True)
    first_rank = sum(member.workers for member in generation.members[:rank])
    shipper = LogShipper(directories.logs, logs, node, generation.number, first_rank)
    return Attempt(generation, rank, directories, shipper, run.job.program is not None, now)


# Work that takes its time: in a thread, so that the agent goes on looking at the world.


class Task:
    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._work = work
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self._error = error

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> bool:
        """Whether it ended in that time, one way or another."""
        self._thread.join(seconds)
        return self.is_done

    def result(self) -> None:
        """Waits for the end, and raises what the work raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
