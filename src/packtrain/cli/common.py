"""Options, stores, hints and questions that commands share."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from packtrain.errors import EXIT_NOT_FOUND, Mistake, NotFound, PacktrainError, printable
from packtrain.run.code import unpacked
from packtrain.run.run import Run, open_run
from packtrain.run.trust import Accept, CodeReview
from packtrain.store import Store, default_store, open_store, stores_nearby
from packtrain.units import show_bytes

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="STORE",
        help="A directory, or s3://, gs:// or az://bucket/prefix. Default: $PACKTRAIN_STORE, else ./store, here or in"
        " the nearest directory above.",
    ),
]
RunArgument = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help="Run name, or a job name for its newest run. Default: the newest run."),
]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Job file.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="FIELD=VALUE", help='Override a field of the job, e.g. train.duration="100 steps"; repeatable.'
    ),
]
DropsOption = Annotated[bool, typer.Option("--allow-drops", help="Drop unusable samples instead of stopping.")]
TrustOption = Annotated[
    bool, typer.Option("--trust-code", help="Run the run's own code even if you have not run it from here before.")
]
CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="best|last|STEP",
        help="Checkpoint of a run, by score, age or step. Default: last.",
    ),
]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
QuietOption = Annotated[bool, typer.Option("-q", "--quiet", help="Hide the program's output.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

STATE_STYLES = {
    "finished": "green", "running": "cyan", "waiting": "cyan", "stopped": "yellow", "interrupted": "yellow",
    "failed": "red",
}  # fmt: skip

_SHOWN_FILES, _SHOWN_CHARACTERS = 20, 500
_HINTS = {"follow": "follow", "status": "show", "stop": "stop", "resume": "resume"}


def find_store(location: str | None, identity: str | None = None) -> Store:
    return open_store(location or default_store(), identity=identity)


def existing_store(location: str | None) -> Store:
    """Return a store that is there: a list of nothing would hide that its name is wrong."""
    store = find_store(location)
    with naming_stores_nearby(store, None):
        check_exists(store)
    return store


def check_exists(store: Store) -> None:
    # A directory that is no store is an error by itself; a prefix of a bucket is there if it has objects.
    if not store.folders("") and not store.is_directory:
        raise NotFound(f"{store.url}: no store here; check the name, or start a run there with `packtrain run`")


def find_run(location: str | None, name: str | None) -> Run:
    return run_in(find_store(location), name)


def run_in(store: Store, name: str | None) -> Run:
    """Return a run as `open_run` does; the error names a store around here that has it."""
    with naming_stores_nearby(store, name):
        return open_run(store, name)


@contextmanager
def naming_stores_nearby(store: Store, name: str | None) -> Iterator[None]:
    """Add to the error that a run, or the whole store, was not found which store around here has one."""
    try:
        yield
    except PacktrainError as error:
        for nearby in stores_nearby() if error.exit_code == EXIT_NOT_FOUND else ():
            run = None
            if nearby.url != store.url:
                with suppress(PacktrainError):
                    run = open_run(nearby, name)
            if run is not None:
                option = f"--store {shlex.quote(nearby.url)}"
                raise NotFound(f"{error}; {run.name} is in another store; add {option}") from None
        raise


def parsed(option: str, parse: Callable[[str], float], text: str) -> float:
    """Return the value of an option that is a number with a unit."""
    try:
        return parse(text)
    except ValueError as error:
        raise Mistake(f"{option}: {error}") from None


def write_output(path: Path, text: str, option: str = "-o") -> None:
    """Write a file; the option that named it, if one did, is for the error."""
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise Mistake(f"{f'{option} {path}'.lstrip()}: cannot write it: {error.strerror}") from None


def hints(run: Run, *words: str) -> list[str]:
    """Return one line for each of follow, status, stop and resume, with the command to type."""
    return [f"  {word + ':':<8} {run.command(_HINTS[word])}" for word in words]


def trusting(is_trusted: bool) -> Accept:
    """Return what decides about a run's code that this person has not run before: the option, or the person."""

    def accept(review: CodeReview) -> None:
        advice = "run this in a terminal to look at it, or pass --trust-code"
        confirm(_about(review), "Run it?", review.reason, is_trusted, f"{review.run.name}: not run", advice)

    return accept


def _about(review: CodeReview) -> Iterator[str]:
    """Yield what a person needs to know before code runs here."""
    job = review.job
    yield f"{review.reason}:"
    for change in review.changes[:_SHOWN_FILES]:
        kind = f"{change.kind:<8} " if review.is_known else ""
        yield f"  {kind}{change.name} ({show_bytes(change.size)})"
    if len(review.changes) > _SHOWN_FILES:
        yield f"  and {len(review.changes) - _SHOWN_FILES} more"
    yield f"It runs: {job.recipe if job.program is None else job.program.in_words}"
    yield f"Fleet: {job.fleet.model_dump_json(exclude_defaults=True)}"
    if job.report.mlflow is not None:
        yield f"MLflow server, which gets your credentials for it: {job.report.mlflow}"
    if job.environment:
        yield f"Environment variables that it gets: {', '.join(job.environment)}"
    if job.has_own_code:
        yield f"Read its code first, in {unpacked(review.run.code)}: it can do everything that you can do here."


def confirm(
    lines: Iterable[str],
    question: str,
    reason: str,
    yes: bool,
    refusal: str,
    advice: str = "run this in a terminal to be asked, or pass --yes",
) -> None:
    """Return if the person agrees; the reason explains a refusal where nobody can be asked.

    Everything is shown on standard error, where it disturbs no output.
    """
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise Mistake(f"{reason}; {advice}")
    for line in lines:
        print(printable(line, _SHOWN_CHARACTERS), file=sys.stderr)
    print(f"{printable(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Mistake(refusal)


def ask(question: str, answers: Sequence[str]) -> str | None:
    """Ask on standard error, and return the answer; None if there is nobody to ask. Enter takes the first one."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    while True:
        print(f"{question} [{'/'.join(answers)}] ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        typed = line.strip().lower()
        fitting = [answer for answer in answers if answer.lower().startswith(typed)]
        exact = [answer for answer in fitting if answer.lower() == typed]
        if not line or not typed:
            return answers[0]
        if exact or len(fitting) == 1:
            return (exact or fitting)[0]
