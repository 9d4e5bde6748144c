"""A process of Packtrain at its start and its end: the log that it writes to, its exit code, and how it ends."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from packtrain.errors import PacktrainError

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
