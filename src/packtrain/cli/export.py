"""The command that takes a model home: export."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packtrain.cli.common import (
    JsonOption,
    StoreOption,
    TrustOption,
    console,
    find_run,
    print_json,
    trusting,
)

if TYPE_CHECKING:
    from packtrain.export.model import ExportedModel


def register(app: typer.Typer) -> None:
    app.command()(export)


def export(
    name: Annotated[str, typer.Argument(metavar="RUN", help="Name of a run, or of a job for its newest run.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="The folder to write. Default: model.")
    ] = None,
    store: StoreOption = None,
    checkpoint: Annotated[
        str,
        typer.Option("--checkpoint", metavar="best|last|STEP", help="Checkpoint, by score, age or step."),
    ] = "best",
    average: Annotated[
        int,
        typer.Option("--average", metavar="N", min=1, max=100, help="Average the weights of that many checkpoints."),
    ] = 1,
    form: Annotated[
        str | None,
        typer.Option("--format", metavar="ctranslate2|onnx", help="Default: the fastest that the recipe has."),
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="Quantize the weights: smaller, and faster on CPUs.")] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            metavar="NUMBER",
            min=0.0,
            help="Largest allowed drop in score against torch. Default: the recipe's.",
        ),
    ] = None,
    samples: Annotated[
        int,
        typer.Option("--samples", metavar="N", min=1, help="Maximum validation samples for the comparison."),
    ] = 1000,
    license_name: Annotated[
        str | None, typer.Option("--license", metavar="NAME", help="For the model card, such as apache-2.0.")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="PLACE", help="Deliver it: user@board:dir, s3://bucket/prefix or a folder."),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the model of another run in the folder.")] = False,
    trust_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write the model of a run for machines without torch."""
    from packtrain.cli.copies import CopyBars
    from packtrain.export.deliver import deliver, destination_of, untracked
    from packtrain.export.export import ExportOptions, export_run
    from packtrain.run.checkpoint import choice_of

    options = ExportOptions(
        choice_of(checkpoint), average, form, "int8" if int8 else "fp32", tolerance, samples, license_name, replace
    )
    if to is not None:
        destination_of(to)  # refuses a wrong place before the work
    run, screen = find_run(store, name), console()
    say = (lambda _: None) if as_json else screen.say
    with tempfile.TemporaryDirectory(prefix="packtrain-export-") as scratch:
        # Only a copy is wanted where it is delivered, unless a folder is asked for as well.
        folder = output or (Path("model") if to is None else Path(scratch, "model"))
        model = export_run(run, folder, options, say, trusting(trust_code))
        if to is not None:
            deliver(folder, to, say, untracked if as_json else CopyBars(screen).track)
            say(f"Delivered to {to}")
        if as_json:
            from dataclasses import asdict

            print_json({"folder": None if to and not output else str(folder), "to": to, **asdict(model.manifest)})
            return
        if to is None or output is not None:
            _say_written(folder, model, run.job.has_own_code)


def _say_written(folder: Path, model: ExportedModel, has_own_code: bool) -> None:
    from shlex import quote

    from packtrain.units import show_bytes

    screen, size = console(), sum(file.bytes for file in model.manifest.files)
    screen.say("Wrote ", (str(folder), "bold"), f" ({show_bytes(size)})")
    if has_own_code:
        screen.say(f"  inputs and outputs of model.onnx: {folder / 'README.md'}")
        return
    screen.say(f"  try it: packtrain predict {quote(str(folder))}")
    screen.say(f"  serve it: packtrain serve {quote(str(folder))}")
