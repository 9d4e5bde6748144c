"""The command line. Each group of commands is one file; a command parses its options, calls and prints.

Commands import heavy modules inside their functions, so that `packtrain --help` is fast.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from copy import copy
from typing import Annotated

import typer
from typer.main import get_command_name

from packtrain.backoff import SLOW_ANSWERS
from packtrain.cli import (
    compare,
    completion,
    copies,
    evaluate,
    export,
    jobs,
    machines,
    models,
    packages,
    plan,
    runs,
    schema,
    serve,
    stored,
    sweep,
    tensorboard,
    ui,
)
from packtrain.cli.common import OutputLost, ReaderGone, console, prepare_streams, safe_output
from packtrain.errors import EXIT_DONE, EXIT_MISTAKE, PacktrainError

app = typer.Typer(
    name="packtrain",
    help="Pack your data once, train it anywhere, bring the model home.",
    epilog="Start with `packtrain init`; `packtrain COMMAND --help` has the options.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(given: bool) -> None:
    if given:
        from importlib.metadata import version

        print(f"packtrain {version('packtrain')}")
        raise typer.Exit


def _complain(text: str) -> None:
    if sys.stderr.isatty():  # a terminal would break the line inside words
        console(sys.stderr).say_row("packtrain:", "", text, gap=1)
    else:
        print(f"packtrain: {text}", file=sys.stderr, flush=True)


@app.callback()
def options(
    context: typer.Context,
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Pack your data once, train it anywhere, bring the model home."""
    if context.invoked_subcommand != "node":  # a node reports to the store, and there may be hundreds of them
        SLOW_ANSWERS.tell = _complain


for group in (
    jobs, plan, sweep, runs, stored, compare, ui, tensorboard, models, evaluate, export, serve, copies, machines,
    packages, schema, completion,
):  # fmt: skip
    group.register(app)


def asked_for(words: Sequence[str]) -> typer.Typer:
    """Return the command line with the asked command alone, if the first word is one.

    Typer reads the options of all commands before it runs one, which takes longer than most commands do. A command
    that takes the context may look at the others there.
    """
    for one in app.registered_commands:
        assert one.callback is not None
        name = one.name or get_command_name(one.callback.__name__)
        if [name] == list(words[:1]) and "typer.Context" not in one.callback.__annotations__.values():
            alone = copy(app)
            alone.registered_commands, alone.registered_groups = [one], []
            return alone
    return app


def main() -> None:
    """Run a command. An error that a person can act on is one line on standard error and an exit code."""
    prepare_streams()
    with safe_output():
        sys.exit(_run(sys.argv[1:]))


def _run(words: Sequence[str]) -> int:
    try:
        try:
            asked_for(words)()
        finally:
            sys.stdout.flush()  # what is buffered must meet a full disk or a reader that has gone here
    except ReaderGone:
        return EXIT_DONE
    except OutputLost as error:
        _complain(str(error))
        return EXIT_MISTAKE
    except PacktrainError as error:
        _complain(str(error))
        return error.exit_code
    return EXIT_DONE
