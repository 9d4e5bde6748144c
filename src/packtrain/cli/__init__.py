"""The command line. Each group of commands is one file; a command parses its options, calls and prints.

Commands import heavy modules inside their functions, so that `packtrain --help` is fast.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from copy import copy
from typing import Annotated, Any, cast

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
from packtrain.cli.common import OutputLost, ReaderGone, console, prepare_streams, safe_output
from packtrain.errors import EXIT_DONE, EXIT_UNWRITTEN, PacktrainError

FIRST = ("init", "run", "show", "ui", "report", "predict")  # what a newcomer needs
PANELS = {
    "Start": ("init", "plan", "pack", "run", "sweep", "resume", "stop"),
    "Watch": ("ls", "show", "follow", "logs", "ui", "tensorboard"),
    "Compare": ("report", "compare", "evaluate", "tag"),
    "Use the model": ("predict", "export", "serve", "unit", "get"),
    "Machines": ("doctor", "attach", "down", "volume"),
    "Store": ("du", "gc", "cp", "mv", "rm"),
    "Set up": ("image", "bundle", "schema", "completion"),
}


class Commands(TyperGroup):
    """All commands. Their panels are plain text: those of Typer import Rich, which takes longer than the help does."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - as Click calls it
        for title, names in PANELS.items():
            self.write_panel(formatter, title, [name for name in names if name in self.commands])

    def write_panel(self, formatter: Any, title: str, names: Sequence[str]) -> None:
        width = max(map(len, self.commands))
        room = formatter.width - width - 4
        with formatter.section(title):
            formatter.write_dl(
                [(name.ljust(width), self.commands[name].get_short_help_str(room)) for name in names],
            )


app = typer.Typer(
    name="packtrain",
    cls=Commands,
    help="Pack your data once, train it anywhere, bring the model home.",
    epilog="`packtrain COMMAND --help` shows the options of a command.",
    invoke_without_command=True,
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
    if context.invoked_subcommand is None:
        _print_first_page(context)
    if context.invoked_subcommand != "node":  # a node reports to the store, and there may be hundreds of them
        SLOW_ANSWERS.tell = _complain
    from packtrain.system import keep_compiled_code

    keep_compiled_code()


def _print_first_page(context: typer.Context) -> None:
    formatter = context.make_formatter()
    formatter.write_text(app.info.help or "")
    formatter.write_paragraph()
    formatter.write_usage("packtrain", "COMMAND [ARGS]...")
    cast("Commands", context.command).write_panel(formatter, "First steps", FIRST)
    formatter.write_paragraph()
    formatter.write_text("`packtrain --help` lists all commands.")
    print(formatter.getvalue(), end="")


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
        return EXIT_UNWRITTEN
    except PacktrainError as error:
        _complain(str(error))
        return error.exit_code
    return EXIT_DONE
