"""Verbs of the model that came home: predict."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from packtrain.cli.common import JsonOption, StoreOption, find_run, print_json


def register(app: typer.Typer) -> None:
    app.command()(predict)


def predict(
    name: Annotated[str, typer.Argument(metavar="RUN", help="A run, or a job's name for its newest run.")],
    inputs: Annotated[
        list[str] | None, typer.Argument(metavar="[INPUT]...", help="Default: lines of standard input.")
    ] = None,
    store: StoreOption = None,
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint instead of the last.")] = False,
    beam: Annotated[int, typer.Option("--beam", min=1, max=100, help="Hypotheses kept in a search.")] = 4,
    as_json: JsonOption = False,
) -> None:
    """Use the model of a run: a sentence to its translation."""
    from packtrain.export.predict import load_predictor

    predictor = load_predictor(find_run(store, name), best)
    given = inputs if inputs else [line.rstrip("\n") for line in sys.stdin]
    outputs = predictor.predict(given, beam)
    if as_json:
        print_json([{"input": one, "output": other} for one, other in zip(given, outputs, strict=True)])
        return
    for output in outputs:
        print(output)
