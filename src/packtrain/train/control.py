"""Communication between a node and its workers on one machine: files in a directory, variables, and signals.

A request to stop is a file, not a signal, because a worker can look at it when it suits: once per step.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

import psutil

from packtrain.process import end_process

RUN_VARIABLE = "PACKTRAIN_RUN"
STORE_VARIABLE, STORE_ID_VARIABLE = "PACKTRAIN_STORE", "PACKTRAIN_STORE_ID"
JOB_VARIABLE = "PACKTRAIN_JOB_DIGEST"
GENERATION_VARIABLE = "PACKTRAIN_GENERATION"
CONTROL_VARIABLE = "PACKTRAIN_CONTROL"
CHECKPOINTS_VARIABLE = "PACKTRAIN_CHECKPOINTS"
DATA_VARIABLE = "PACKTRAIN_DATA"
SUBMIT_VARIABLE = "PACKTRAIN_SUBMIT_DIR"
# Directories that a program may name in its command.
PLACE_VARIABLES = (CHECKPOINTS_VARIABLE, DATA_VARIABLE, SUBMIT_VARIABLE)
VISIBLE_GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"

WORKER_NAME = "packtrain-"  # with the rank, the name of a worker's process
EXIT_STUCK = 76  # a worker that could not heed a signal
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

SAVING = "save-{}-"  # with the process id of a worker: where it has a checkpoint while it is committing it

WorkerCause = Literal["program", "memory", "disk", "store", "hang", "number", "mistake"]


@dataclass(frozen=True)
class WorkerError:
    """Why a worker failed, and at which step. `fatal`: another try would fail the same way."""

    rank: int
    text: str
    fatal: bool
    time: float
    cause: WorkerCause = "program"
    step: int | None = None


class Control:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._stop, self._first_step, self._commit = (directory / name for name in ("stop", "first-step", "commit"))
        self._reported_step = False

    @property
    def numbers(self) -> Path:
        """The file to which a program's `packtrain.log` appends lines of JSON."""
        return self.directory / "numbers.jsonl"

    def request_stop(self) -> None:
        self._stop.touch()

    def stop_requested(self) -> bool:
        return self._stop.exists()  # microseconds on a local disk, so once per step costs nothing

    def request_commit(self) -> None:
        """Ask for a checkpoint soon; training continues."""
        self._commit.touch()

    def take_commit_request(self) -> bool:
        """True on one of the workers of this machine for each request."""
        try:
            self._commit.unlink()
        except OSError:
            return False
        return True

    def is_saving(self) -> bool:
        """True while a worker is committing a checkpoint; what a killed one has left does not count."""
        pids = [int(path.name.split("-")[1]) for path in self.directory.glob(SAVING.format("*") + "*")]
        return any(psutil.pid_exists(pid) for pid in pids)

    def report_step(self) -> None:
        """Tell the node that a step was made; only the first call writes."""
        if not self._reported_step:
            self._reported_step = True
            with suppress(OSError):  # a full disk: the node then does not know, and training continues
                self._first_step.touch()

    def has_stepped(self) -> bool:
        return self._first_step.exists()

    def report_error(self, error: WorkerError) -> None:
        path = self.directory / f"error-{error.rank}.json"
        # Renamed when it is complete: the node may read at any moment.
        path.with_suffix(".part").write_text(json.dumps(asdict(error)), "utf-8")
        path.with_suffix(".part").rename(path)

    def errors(self) -> list[WorkerError]:
        """Return the workers' errors, root causes first: the first worker to fail makes the others fail."""
        errors = [WorkerError(**json.loads(path.read_text("utf-8"))) for path in self.directory.glob("error-*.json")]
        return sorted(errors, key=lambda error: (not error.fatal, error.time))


class StopSignal:
    """Signals that ask a worker to commit and exit. The handler only sets a flag; the loop looks at it every step."""

    def __init__(self) -> None:
        self.received = False
        self._is_heard = False

    def listen(self) -> StopSignal:
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.received = True
        self._is_heard = True

    def end_if_stuck(self, patience: Callable[[], float], keep: Callable[[], None]) -> None:
        """After a signal, end the process if it hears none for so many seconds and `keep` has returned.

        Python runs no handler while a worker waits for a GPU, which may wait for a peer that has died; the launcher
        would kill it half a minute later. The kernel tells a thread of the signal through a pipe. It may have been
        heard just before the wait began: so the thread sends another one later, and listens to that.
        """
        main_thread = threading.get_ident()
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)

        def watch() -> None:
            while data := os.read(read, 1):
                if data[0] not in STOP_SIGNALS:
                    continue
                time.sleep(patience())
                self._is_heard = False
                signal.pthread_kill(main_thread, data[0])
                time.sleep(patience())
                if not self._is_heard:
                    with suppress(Exception):  # whatever is wrong with what it kept, this process has to end
                        keep()
                    end_process(EXIT_STUCK, flush=False)

        threading.Thread(target=watch, name="stop signals", daemon=True).start()

    @contextmanager
    def fatal(self) -> Iterator[None]:
        """Let a signal end the process inside this block, even one received before: there is nothing to commit yet.

        Python runs no handler while a worker waits inside torch for a peer that has died.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        if self.received:  # before the block: deliver it again, now with the default effect
            os.kill(os.getpid(), STOP_SIGNALS[0])
        yield
        self.listen()
