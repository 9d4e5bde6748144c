"""The command that sets runs side by side: compare."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packtrain.cli.common import (
    JsonOption,
    StoreOption,
    TrustOption,
    console,
    find_store,
    print_json,
    run_in,
    trusting,
    write_output,
)
from packtrain.errors import Mistake

if TYPE_CHECKING:
    from collections.abc import Sequence

    from packtrain.report.compare import ComparedRun, PairedTest, Tests
    from packtrain.run.run import Run

_LETTERS = "ABCDEFGHIJ"


def register(app: typer.Typer) -> None:
    app.command()(compare)


def compare(
    names: Annotated[list[str], typer.Argument(metavar="RUN", help="Names of runs, or of jobs for their newest runs.")],
    store: StoreOption = None,
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
    from packtrain.report.compare import MAX_RUNS, compare_runs, gather
    from packtrain.report.compare import as_json as plain
    from packtrain.report.compare_render import compare_page, text_lines
    from packtrain.run.liveness import state_of

    if not 2 <= len(names) <= MAX_RUNS:
        raise Mistake(f"compare takes 2 to {MAX_RUNS} runs, not {len(names)}; `packtrain ls` lists them")
    found_store = find_store(store)
    runs = [run_in(found_store, name) for name in names]
    twice = next((run.name for at, run in enumerate(runs) if run.name in [one.name for one in runs[:at]]), None)
    if twice is not None:
        raise Mistake(f"{twice} is named twice; compare different runs")
    found = [gather(run, letter, state_of(run)) for run, letter in zip(runs, _LETTERS, strict=False)]
    tests = _paired_tests(runs, found, trust_code) if resample else {}
    comparison = compare_runs(found, tests)
    if output is not None:
        write_output(output, compare_page(comparison))
    if as_json:
        print_json(plain(comparison))
        return
    screen = console()
    screen.say_lines(text_lines(comparison, screen.width))
    if output is not None:
        screen.say(f"Wrote {output}")


def _paired_tests(runs: Sequence[Run], found: Sequence[ComparedRun], trust_code: bool) -> Tests:
    """Evaluate every model on the same samples, and compare each with the first."""
    from packtrain.cli.packs import ProgressBars
    from packtrain.export.evaluate import EvaluateOptions, evaluate, run_subject
    from packtrain.export.evaluate import compare as compare_scores
    from packtrain.pack.workers import Processes
    from packtrain.report.compare import PairedTest

    subjects = [run_subject(run, "last", trusting(trust_code)) for run in runs]
    scored = evaluate(subjects, EvaluateOptions(), ProgressBars(console(sys.stderr)), Processes())
    tests: dict[tuple[str, str], dict[str, PairedTest]] = {}
    for run, other in zip(found[1:], scored[1:], strict=True):
        differences = compare_scores(scored[0], other).differences
        tests[found[0].letter, run.letter] = {
            f"{other.split}.{name}": PairedTest(
                one.value, one.interval.low, one.interval.high, one.p_value, one.is_significant
            )
            for name, one in differences.items()
        }
    return tests
