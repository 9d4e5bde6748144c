"""A process of Packtrain: its name, its log, its threads, its exit code, and how it ends."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from packtrain.errors import PacktrainError

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
LOG_VARIABLE = "PACKTRAIN_LOG"  # tells a process which file its output goes to


class OwnLog:
    """The log that was created for this process, if there is one; processes that it starts are not told of it."""

    def __init__(self) -> None:
        path = os.environ.pop(LOG_VARIABLE, None)
        self._path = None if path is None else Path(path)

    def remove(self) -> None:
        """Remove it after a good end: nobody will ask why."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def run_main(main: Callable[[Sequence[str]], int | None]) -> NoReturn:
    """Call a module's `main` with the words of the command line, and exit with the code that it returns.

    An error that a person can act on is one line on standard error.
    """
    try:
        sys.exit(main(sys.argv[1:]))
    except PacktrainError as error:
        print(f"packtrain: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def exit_code_of(call: Callable[[], object]) -> int:
    """Return the exit code with which Python would end after this call."""
    try:
        call()
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def end_process(code: int, flush: bool = True) -> NoReturn:
    """End this process at once, without the cleanup of Python and of libraries, which may hang or take a while.

    A thread that ends the process because another one hangs must not `flush`: that one may hold the lock of a stream.
    """
    if flush:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def say(text: str) -> None:
    """Print a line to the log of this process. A log that cannot be written, as on a full disk, does not end it."""
    with suppress(OSError):
        print(f"{text}\n", end="", flush=True)  # in one piece: threads print, too


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel signal this process when its parent ends, even by SIGKILL. Does nothing outside of Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def name_process(name: str) -> None:
    """Give this process a name for `top` and `ps`, of up to 15 letters. Does nothing outside of Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


class Task:
    """Work in a thread of its own."""

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

    def wait(self, seconds: float | None = None) -> bool:
        """True if the work ends within that time, with or without an error."""
        self._thread.join(seconds)
        return self.is_done

    def result(self) -> None:
        """Wait until the work has ended, and raise its error, if any."""
        self._thread.join()
        if self._error is not None:
            raise self._error


def to_type(*words: str) -> str:
    """Return a command of Packtrain as a person has to type it: by its path where the shell would not find it."""
    script, on_path = sys.argv[0], shutil.which("packtrain")
    is_found = on_path is not None and Path(on_path).resolve() == Path(script).resolve()
    return shlex.join(["packtrain" if is_found or Path(script).name != "packtrain" else script, *words])
