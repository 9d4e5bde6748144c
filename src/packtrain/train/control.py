"""Communication between a node and its workers on one machine: files in a directory, variables, and signals.

A request to stop is a file, not a signal, because a worker can look at it when it suits: once per step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
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


# The side of a user's own program. Without Packtrain, or under another launcher, nothing happens.


_signal = StopSignal()
_refused: set[str] = set()  # what a warning has named already
_MAX_WARNINGS = 20


def _control() -> Control | None:
    directory = os.environ.get(CONTROL_VARIABLE)
    return Control(Path(directory)) if directory else None


def request_commit() -> None:
    """Have the checkpoint directory committed now; the program continues meanwhile. Only rank 0's word counts."""
    control = _control()
    if control is not None and os.environ.get("RANK", "0") == "0":
        control.request_commit()


def is_stopping() -> bool:
    """True once the run is to stop. From the first call on, the signal that asks for it no longer ends the process."""
    control = _control()
    if control is None:
        return False
    # A handler of the program's own stays, and only the main thread can set one.
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        _signal.listen()
    return _signal.received or control.stop_requested()


def log_numbers(values: object, named: Mapping[str, object], step: object = None) -> None:
    """Append numbers to the file that the node reads. Only rank 0's count; nothing is raised into the program."""
    directory = os.environ.get(CONTROL_VARIABLE)
    if not directory or os.environ.get("RANK", "0") != "0":
        return
    if values is not None and not isinstance(values, Mapping):
        _warn_once("values", f"{type(values).__name__} is not a mapping of names to numbers")
        values = None
    values_by_name = {**(values or {}), **named}
    numbers = {
        str(name): number for name, value in values_by_name.items() if (number := _number(name, value)) is not None
    }
    at = None if step is None else _number("step", step)
    if not numbers or (step is not None and at is None):
        return
    line = json.dumps({"step": at, "time": time.time(), "values": numbers})
    try:
        # One write for each line: it is complete whatever kills the process, also with threads and forks that log.
        os.write(_opened(directory), f"{line}\n".encode())
    except OSError as error:  # a full disk
        _warn_once("file", f"cannot record numbers: {error}")


@cache
def _opened(directory: str) -> int:
    return os.open(Control(Path(directory)).numbers, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _number(name: object, value: object) -> float | None:
    """Return a number of any library, or of a tensor with one element, as Python's own; None for anything else."""
    try:
        if isinstance(value, (str, bytes, bytearray)):  # `float` would read it
            raise TypeError("is text")
        item = getattr(value, "item", None)  # NumPy, torch, JAX: raises unless there is exactly one element
        return float(value if item is None else item())  # type: ignore[arg-type]
    except Exception:  # whatever a class of the program raises: a log must not end a run
        _warn_once(repr(name), f"{name!r} is not a number ({type(value).__name__})")
        return None


def _warn_once(about: str, text: str) -> None:
    if about not in _refused and len(_refused) < _MAX_WARNINGS:
        _refused.add(about)
        print(f"packtrain.log: {text}; left out", file=sys.stderr, flush=True)
