"""The command that scores trained models: evaluate."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from packtrain.cli.common import (
    CheckpointOption,
    JsonOption,
    StoreOption,
    TrustOption,
    console,
    find_run,
    find_store,
    json_line,
    print_json,
    trusting,
)
from packtrain.errors import Mistake

if TYPE_CHECKING:
    from packtrain.cli.screen import Screen
    from packtrain.export.bootstrap import Interval
    from packtrain.export.evaluate import Comparison, ModelScores, Subject

_SPLITS = ("test", "valid")
_SHOWN = 300  # characters of a text of a sample


def register(app: typer.Typer) -> None:
    app.command()(evaluate)


def evaluate(
    name: Annotated[
        str, typer.Argument(metavar="MODEL", help="Name of a run or job, or the folder of an exported model.")
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="DATA",
            help="Raw data: paths, a source such as '{bitext: [new.en, new.de]}', or a YAML file of sources;"
            " repeatable. Default: the run's own data.",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="MODEL", help="Compare with this run or folder on the same samples."),
    ] = None,
    split: Annotated[
        str | None, typer.Option("--split", metavar="test|valid", help="Split of the run. Default: test, else valid.")
    ] = None,
    store: StoreOption = None,
    checkpoint: CheckpointOption = None,
    samples: Annotated[
        int | None,
        typer.Option("--samples", metavar="N", min=1, help="Evaluate this many samples, evenly spaced. Default: all."),
    ] = None,
    beam: Annotated[
        int | None, typer.Option("--beam", metavar="N", min=1, max=100, help="Beam size. Default: the job's.")
    ] = None,
    allow_drops: Annotated[
        bool, typer.Option("--allow-drops", help="Drop unusable samples of --data instead of stopping.")
    ] = False,
    predictions: Annotated[
        Path | None,
        typer.Option(
            "--predictions",
            metavar="FILE",
            help="Write one JSON object per line: each sample with its prediction and scores.",
        ),
    ] = None,
    trust_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Score a model on its test data or on new data.

    Scores have confidence intervals, and two models are compared on the same samples.
    """
    from packtrain.cli.packs import ProgressBars
    from packtrain.export.evaluate import EvaluateOptions, compare, report
    from packtrain.export.evaluate import evaluate as evaluate_all
    from packtrain.export.predict import is_folder
    from packtrain.pack.workers import Processes

    if split not in (None, *_SPLITS):
        raise Mistake(f"--split: must be test or valid, not {split!r}")
    names = [name] if against is None else [name, against]
    if checkpoint is not None and all(map(is_folder, names)):
        raise Mistake("--checkpoint: chooses one of a run; an exported model has only one")
    if predictions is not None and (predictions.is_dir() or not predictions.parent.is_dir()):
        fault = "is a directory" if predictions.is_dir() else f"there is no directory {predictions.parent}"
        raise Mistake(f"--predictions {predictions}: {fault}")
    subjects = [_subject(one, store, checkpoint, trust_code) for one in names]
    options = EvaluateOptions(tuple(data or ()), split, samples, beam, allow_drops, predictions is not None)
    # Standard output has the result alone.
    found = evaluate_all(subjects, options, ProgressBars(console(sys.stderr)), Processes())
    if predictions is not None:
        _write_predictions(predictions, [row for one in found for row in one.predictions])
    if as_json:
        print_json(report(found, options.data))
        return
    screen = console()
    for one in found:
        _print(screen, one, ", ".join(options.data))
    if len(found) == 2:
        _print_comparison(screen, compare(*found))
    if predictions is not None:
        screen.say(f"Predictions: {predictions}")


def _write_predictions(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    try:
        path.write_text("".join(f"{json_line(row)}\n" for row in rows), encoding="utf-8")
    except OSError as error:
        raise Mistake(f"--predictions {path}: cannot write it: {error.strerror}") from None


def _subject(name: str, store: str | None, checkpoint: str | None, trust_code: bool) -> Subject:
    from packtrain.export.evaluate import folder_subject, run_subject
    from packtrain.export.predict import is_folder
    from packtrain.run.checkpoint import choice_of

    if is_folder(name):
        return folder_subject(Path(name), lambda: find_store(store))
    return run_subject(find_run(store, name), choice_of(checkpoint), trusting(trust_code))


def _print(screen: Screen, found: ModelScores, data: str) -> None:
    from packtrain.export.evaluate import show
    from packtrain.units import show_seconds

    some = f"{found.samples:,} of {found.available:,}" if found.samples < found.available else f"{found.samples:,}"
    where = data or found.split
    screen.say(
        (found.subject.name, "bold"),
        f" (step {found.step:,}): {some} samples of {where} in {show_seconds(found.seconds)}",
    )
    for note in found.notes:
        screen.say_row("  note", "yellow", note)
    rows = [
        (name, show(score.value), _span(score.interval) if score.interval else "none", score.signature)
        for name, score in found.scores.items()
    ]
    _print_table(screen, [("score", "value", "95 % interval", ""), *rows])
    for sample in found.shown:
        screen.say()
        for label, text in (
            ("input", sample.input),
            ("reference", sample.reference),
            ("prediction", sample.prediction),
        ):
            short = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
            screen.say_row(f"  {label:<10}", "dim", " ".join(short.split()))
    screen.say()


def _print_comparison(screen: Screen, comparison: Comparison) -> None:
    from packtrain.export.evaluate import show

    names = comparison.second.subject.name, comparison.first.subject.name
    screen.say(f"{names[0]} minus {names[1]}, by paired bootstrap resampling")
    rows = [
        (name, show(one.value), _span(one.interval), f"p = {one.p_value:.3f}")
        for name, one in comparison.differences.items()
    ]
    _print_table(screen, [("score", "difference", "95 % interval", ""), *rows])
    screen.say((comparison.verdict, "bold"))


def _print_table(screen: Screen, rows: Sequence[tuple[str, str, str, str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for number, (name, value, span, rest) in enumerate(rows):
        style = "" if number else "dim"
        line = f"{value:>{widths[1]}}  {span:<{widths[2]}}  {rest}".rstrip()
        screen.say_row(f"  {name:<{widths[0]}}", style, (line, style))


def _span(interval: Interval) -> str:
    from packtrain.export.evaluate import show

    return f"{show(interval.low)} to {show(interval.high)}"
