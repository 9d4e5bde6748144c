"""The command line. Each group of commands is one file; a command parses its options, calls and prints.

Commands import heavy modules inside their functions, so that `packtrain --help` is fast.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from copy import copy
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
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
from packtrain.cli.common import discard_rest, open_closed_streams, safe_output
from packtrain.errors import PacktrainError


class ReaderGone(Exception):
    """The reader of standard output, such as `head`, has exited."""


class Commands(TyperGroup):
    """All commands. Typer itself would end with 1 where nobody reads the output anymore."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:  # prints what --help and --version ask for
        try:
            return super().make_context(*arguments, **options)
        except BrokenPipeError as error:
            raise ReaderGone from error

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise ReaderGone from error


app = typer.Typer(
    name="packtrain",
    cls=Commands,
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
    open_closed_streams()
    try:
        try:
            with safe_output():
                try:
                    asked_for(sys.argv[1:])()
                except PacktrainError as error:
                    _complain(str(error))
                    sys.exit(error.exit_code)
        finally:
            sys.stdout.flush()  # what is still buffered must meet a reader that has gone here, not in Python's own exit
    except (ReaderGone, BrokenPipeError):
        discard_rest(sys.stdout)
        sys.exit(0)
