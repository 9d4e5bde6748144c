"""Pack your data once, train it anywhere, bring the model home.

import packtrain as pt
run = pt.run("job.yaml")
run.wait()
run.metrics()
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packtrain.api import RunHandle

__version__ = "0.1.0"
__all__ = ["RunHandle", "open", "run"]

# Python binds a subpackage to its name here when it is first imported. This first import is before the function of
# that name, so that `pt.run` stays the function.
importlib.import_module("packtrain.run")


# The interface is imported when it is used, so that the command line starts at once.


def run(job: str | Path, overrides: Sequence[str] = ()) -> RunHandle:
    """Pack if needed, start the run and return; it keeps running by itself."""
    from packtrain import api

    return api.run(job, overrides)


def open(name: str | None = None, store: str = "./store") -> RunHandle:  # noqa: A001 - pt.open reads as what it is
    """Open a run of a store: by its name, the newest of a job, or the newest of all."""
    from packtrain import api

    return api.open_(name, store)


def __getattr__(name: str) -> object:
    if name != "RunHandle":
        raise AttributeError(f"module 'packtrain' has no attribute {name!r}")
    from packtrain.api import RunHandle

    return RunHandle
