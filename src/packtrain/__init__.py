"""Pack your data once, train it anywhere, bring the model home.

From Python:

    import packtrain as pt

    run = pt.run("job.yaml")
    run.watch()
    run.metrics()
    pt.runs()
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packtrain.api import RunHandle, Runs

__version__ = "0.1.0"
__all__ = ["RunHandle", "checkpoint", "log", "open", "run", "runs", "stop_requested"]

# Importing a subpackage binds its name here. Import it before the function of that name is defined, so that `pt.run`
# stays the function.
importlib.import_module("packtrain.run")


# The functions import the interface when they are called, so that the command line starts fast.
def run(job: str | Path, overrides: Sequence[str] = ()) -> RunHandle:
    """Pack if needed, start a run and return; it keeps running without this process."""
    from packtrain import api

    return api.run(job, overrides)


def open(name: str | None = None, store: str | None = None) -> RunHandle:  # noqa: A001 - pt.open reads as what it is
    """Open a run by its name, the newest of a job, or the newest in the store: by default that of the commands."""
    from packtrain import api

    return api.open_(name, store)


def runs(store: str | None = None) -> Runs:
    """Return all runs of a store, newest first."""
    from packtrain import api

    return api.runs(store)


def checkpoint() -> None:
    """In a program: say that its checkpoint directory is complete, so that it is committed now."""
    from packtrain.train.control import request_commit

    request_commit()


def log(values: Mapping[str, object] | None = None, /, *, step: object = None, **named: object) -> None:
    """In a program: record numbers of rank 0 at a step: `log(loss=0.3, step=7)` or `log({"val/loss": 0.4}, step=7)`.

    Without a step, each call is one step after the last. Whatever is not a number is left out; nothing is raised.
    """
    from packtrain.train.control import log_numbers

    log_numbers(values, named, step)


def stop_requested() -> bool:
    """In a program: true once the run is to stop; the program then saves its checkpoint and exits."""
    from packtrain.train.control import is_stopping

    return is_stopping()


def __dir__() -> list[str]:
    return sorted(__all__)  # not the modules that happen to be imported


def __getattr__(name: str) -> object:
    if name != "RunHandle":
        raise AttributeError(f"module 'packtrain' has no attribute {name!r}")
    from packtrain.api import RunHandle

    return RunHandle
