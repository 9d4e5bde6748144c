"""The command schema, and the schema that init puts beside a job file for editors."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packtrain.cli.output import json_text

if TYPE_CHECKING:
    from packtrain.job.schema import Schema

# Beside the job file: it works offline, from any checkout, and the name of the folder keeps it out of the run's code.
SCHEMA = Path(".packtrain/job.schema.json")
EDITOR_LINE = f"# yaml-language-server: $schema={SCHEMA}\n"


def schema(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="File to write. Default: print it.")
    ] = None,
) -> None:
    """Print the JSON Schema of the job file, for editors."""
    text = json_text(current_schema())
    if output is None:
        print(text)
    else:
        _write(output, text)


def write_beside(job: Path) -> None:
    """Write the schema where the first line of a job file of `init` names it."""
    folder = job.parent / SCHEMA.parent
    folder.mkdir(exist_ok=True)
    _write(job.parent / SCHEMA, json_text(current_schema()))


@cache
def current_schema() -> Schema:
    from packtrain.job.schema import job_schema
    from packtrain.recipes import RECIPES, recipe_class

    return job_schema({name: recipe_class(name) for name in RECIPES})


def _write(path: Path, text: str) -> None:
    from packtrain.errors import Mistake

    try:
        path.write_text(f"{text}\n", "utf-8")
    except OSError as error:
        raise Mistake(f"{path}: cannot write it: {error.strerror}") from None
