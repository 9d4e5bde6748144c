"""What the verbs share: options, the store, and printing."""

from __future__ import annotations

import json
import os
import sys
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
        metavar="PLACE",
        help="Directory or s3://bucket/prefix. Default: $PACKTRAIN_STORE or ./store.",
    ),
]
RunArgument = Annotated[
    str | None,
    typer.Argument(metavar="[RUN]", help="A run, or a job's name for its newest run. Default: the newest."),
]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="The job file.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help='Changes a field, as in --set train.duration="100 steps".'),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document for scripts.")]


def find_store(place: str | None) -> Store:
    from packtrain.store import open_store

    return open_store(place or os.environ.get("PACKTRAIN_STORE") or "./store")


def find_run(place: str | None, name: str | None) -> Run:
    from packtrain.run.run import open_run

    return open_run(find_store(place), name)


def console() -> Console:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))
