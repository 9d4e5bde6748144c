"""Options, stores, hints and output that commands share."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from packtrain.run.run import Run
    from packtrain.store import Store

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="STORE",
        help="A directory, or s3://bucket/prefix. Default: $PACKTRAIN_STORE, else ./store.",
    ),
]
RunArgument = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help="Name of a run, or of a job for its newest run. Default: the newest run."),
]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Job file.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="FIELD=VALUE", help='Override a field of the job, e.g. train.duration="100 steps"; repeatable.'
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_HINTS = {"follow": "logs -f", "status": "show", "stop": "stop", "resume": "resume"}


def default_store() -> str:
    return os.environ.get("PACKTRAIN_STORE") or "./store"


def find_store(location: str | None) -> Store:
    from packtrain.store import open_store

    return open_store(location or default_store())


def find_run(location: str | None, name: str | None) -> Run:
    from packtrain.run.run import open_run

    return open_run(find_store(location), name)


def hints(run: Run, *words: str) -> str:
    """Return one line for each of follow, status, stop and resume, with the command to type."""
    # A hint has --store only if the command would otherwise look elsewhere.
    known = (default_store().rstrip("/"), str(Path(default_store()).expanduser().absolute()))
    where = "" if run.store.url in known else f" --store {run.store.url}"
    return "\n".join(f"  {word + ':':<8} packtrain {_HINTS[word]} {run.name}{where}" for word in words)


def console() -> Console:
    from rich.console import Console

    # Lines for a pipe are not wrapped.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 10_000)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))
