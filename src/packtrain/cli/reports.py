"""Commands that judge and compare: report, compare, evaluate."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from packtrain.cli.common import (
    CheckpointOption,
    JsonOption,
    StoreOption,
    TrustOption,
    find_run,
    find_store,
    run_in,
    trusting,
    write_output,
)
from packtrain.cli.output import json_line, json_text, print_json
from packtrain.cli.screen import ProgressBars, Screen, console
from packtrain.errors import Mistake
from packtrain.export.bootstrap import Interval
from packtrain.export.evaluate import (
    EvaluateOptions,
    ModelScores,
    Subject,
    folder_subject,
    run_subject,
    show,
)
from packtrain.export.evaluate import compare as compare_scores
from packtrain.export.evaluate import evaluate as score_models
from packtrain.export.evaluate import report as scores_as_json
from packtrain.export.predict import is_folder
from packtrain.observe.evidence import gather
from packtrain.pack.workers import Processes
from packtrain.report import findings_of, report_json, report_page, write_report
from packtrain.report.compare import MAX_RUNS, ComparedRun, PairedTest, Tests, compare_runs
from packtrain.report.compare import as_json as comparison_as_json
from packtrain.report.compare import gather as gather_compared
from packtrain.report.compare_render import compare_page, text_lines
from packtrain.report.markdown import markdown
from packtrain.report.sweep import as_json as sweep_as_json
from packtrain.report.sweep import (
    find_sweep,
    sweep_markdown,
    sweep_page,
    sweep_table,
    write_sweep_report,
)
from packtrain.run.checkpoint import choice_of
from packtrain.run.liveness import state_of
from packtrain.run.run import Run
from packtrain.units import show_seconds

_REPORTED = "Run, job or sweep; a job stands for its newest run. Default: the newest run."
_LETTERS = "ABCDEFGHIJ"
_SHOWN = 300  # characters of a text of a sample


def report(
    name: Annotated[str | None, typer.Argument(metavar="RUN|SWEEP", help=_REPORTED)] = None,
    location: StoreOption = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    as_json: JsonOption = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write to this file instead of the store.")
    ] = None,
) -> None:
    """Report the results, speed and problems of a run or sweep.

    The page is stored with the run or sweep. It is also written when that ends.
    """
    if as_markdown and as_json:
        raise Mistake("--markdown and --json: pass one of them")
    store = find_store(location)
    sweep = find_sweep(store, name)
    table = None if sweep is None else sweep_table(store, sweep)
    if as_json:
        text = json_text(report_json(gather(run_in(store, name))) if table is None else sweep_as_json(table)) + "\n"
    elif as_markdown and table is not None:
        text = sweep_markdown(table)
    elif as_markdown:
        evidence = gather(run_in(store, name))
        text = markdown(evidence, findings_of(evidence))
    elif output is None:
        print(write_report(run_in(store, name)) if table is None else write_sweep_report(store, table))
        return
    else:
        text = report_page(run_in(store, name)) if table is None else sweep_page(table)
    if output is None:
        print(text, end="")
    else:
        write_output(output, text)
        print(output)


def compare(
    names: Annotated[list[str], typer.Argument(metavar="RUN", help="Names of runs, or of jobs for their newest runs.")],
    location: StoreOption = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the comparison as an HTML page.")
    ] = None,
    resample: Annotated[
        bool,
        typer.Option("--resample", help="Score the models on the same samples and test the differences; needs torch."),
    ] = False,
    trust_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare runs: jobs, speed term by term, scores and curves.

    Every run is compared with the first.
    """
    if not 2 <= len(names) <= MAX_RUNS:
        raise Mistake(f"compare takes 2 to {MAX_RUNS} runs, not {len(names)}; `packtrain ls` lists them")
    store = find_store(location)
    runs = [run_in(store, name) for name in names]
    twice = next((run.name for at, run in enumerate(runs) if run.name in [earlier.name for earlier in runs[:at]]), None)
    if twice is not None:
        raise Mistake(f"{twice} is named twice; compare different runs")
    compared = [gather_compared(run, letter, state_of(run)) for run, letter in zip(runs, _LETTERS, strict=False)]
    tests = _paired_tests(runs, compared, trust_code) if resample else {}
    comparison = compare_runs(compared, tests)
    if output is not None:
        write_output(output, compare_page(comparison))
    if as_json:
        print_json(comparison_as_json(comparison))
        return
    screen = console()
    screen.say_lines(text_lines(comparison, screen.width))
    if output is not None:
        screen.say(f"Wrote {output}")


def _paired_tests(runs: Sequence[Run], compared: Sequence[ComparedRun], trust_code: bool) -> Tests:
    """Evaluate every model on the same samples, and compare each with the first."""
    subjects = [run_subject(run, "last", trusting(trust_code)) for run in runs]
    scored = score_models(subjects, EvaluateOptions(), ProgressBars(console(sys.stderr)), Processes())
    tests: dict[tuple[str, str], dict[str, PairedTest]] = {}
    for run, model in zip(compared[1:], scored[1:], strict=True):
        differences = compare_scores(scored[0], model).differences
        tests[compared[0].letter, run.letter] = {
            f"{model.split}.{name}": PairedTest(
                difference.value,
                difference.interval.low,
                difference.interval.high,
                difference.p_value,
                difference.is_significant,
            )
            for name, difference in differences.items()
        }
    return tests


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
    if split not in (None, "test", "valid"):
        raise Mistake(f"--split: must be test or valid, not {split!r}")
    names = [name] if against is None else [name, against]
    if checkpoint is not None and all(map(is_folder, names)):
        raise Mistake("--checkpoint: chooses one of a run; an exported model has only one")
    if predictions is not None and (predictions.is_dir() or not predictions.parent.is_dir()):
        fault = "is a directory" if predictions.is_dir() else f"there is no directory {predictions.parent}"
        raise Mistake(f"--predictions {predictions}: {fault}")
    subjects = [_subject(model, store, checkpoint, trust_code) for model in names]
    options = EvaluateOptions(tuple(data or ()), split, samples, beam, allow_drops, predictions is not None)
    # Standard output has the result alone.
    evaluated = score_models(subjects, options, ProgressBars(console(sys.stderr)), Processes())
    if predictions is not None:
        rows = [row for model in evaluated for row in model.predictions]
        write_output(predictions, "".join(f"{json_line(row)}\n" for row in rows), "--predictions")
    if as_json:
        print_json(scores_as_json(evaluated, options.data))
        return
    screen = console()
    for model in evaluated:
        _print_scores(screen, model, ", ".join(options.data))
    if len(evaluated) == 2:
        comparison = compare_scores(*evaluated)
        first, second = comparison.first.subject.name, comparison.second.subject.name
        screen.say(f"{second} minus {first}, by paired bootstrap resampling")
        differences = [
            (name, show(difference.value), _span(difference.interval), f"p = {difference.p_value:.3f}")
            for name, difference in comparison.differences.items()
        ]
        _print_table(screen, [("score", "difference", "95 % interval", ""), *differences])
        screen.say((comparison.verdict, "bold"))
    if predictions is not None:
        screen.say(f"Predictions: {predictions}")


def _subject(name: str, store: str | None, checkpoint: str | None, trust_code: bool) -> Subject:
    if is_folder(name):
        return folder_subject(Path(name), lambda: find_store(store))
    return run_subject(find_run(store, name), choice_of(checkpoint), trusting(trust_code))


def _print_scores(screen: Screen, model: ModelScores, data: str) -> None:
    count = f"{model.samples:,} of {model.available:,}" if model.samples < model.available else f"{model.samples:,}"
    where = data or model.split
    screen.say(
        (model.subject.name, "bold"),
        f" (step {model.step:,}): {count} samples of {where} in {show_seconds(model.seconds)}",
    )
    for note in model.notes:
        screen.say_row("  note", "yellow", note)
    rows = [
        (name, show(score.value), _span(score.interval) if score.interval else "none", score.signature)
        for name, score in model.scores.items()
    ]
    _print_table(screen, [("score", "value", "95 % interval", ""), *rows])
    for sample in model.shown:
        screen.say()
        for label, text in (
            ("input", sample.input),
            ("reference", sample.reference),
            ("prediction", sample.prediction),
        ):
            short = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
            screen.say_row(f"  {label:<10}", "dim", " ".join(short.split()))
    screen.say()


def _print_table(screen: Screen, rows: Sequence[tuple[str, str, str, str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for number, (name, value, span, remark) in enumerate(rows):
        style = "" if number else "dim"
        line = f"{value:>{widths[1]}}  {span:<{widths[2]}}  {remark}".rstrip()
        screen.say_row(f"  {name:<{widths[0]}}", style, (line, style))


def _span(interval: Interval) -> str:
    return f"{show(interval.low)} to {show(interval.high)}"
