"""The command line: which commands there are, and how one is run and ends. A command parses its options, calls, prints.

A module of commands is imported when one of its commands is asked for: what they import takes longer than the help.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from packtrain.backoff import SLOW_ANSWERS
from packtrain.cli.output import OutputLost, ReaderGone, prepare_streams, safe_output
from packtrain.errors import EXIT_DONE, EXIT_UNWRITTEN, PacktrainError
from packtrain.system import keep_compiled_code

# The panels of the help, and in each the commands: the module of a command, and the first sentence of its help.
PANELS = {
    "Start": {
        "init": ("jobs", "Write a commented job file, with toy data to try it on."),
        "plan": ("plan", "Estimate what a run will take: time, money, memory and network."),
        "pack": ("jobs", "Pack a job's raw data into its store, unless the pack exists."),
        "run": ("jobs", "Pack if needed, start a run, and follow it."),
        "sweep": ("sweep", "Train many runs of one job that differ in a few fields."),
        "resume": ("jobs", "Resume a run from its last checkpoint."),
        "stop": ("runs", "Stop a run after its workers commit a checkpoint."),
    },
    "Watch": {
        "ls": ("runs", "List the runs in a store, newest first."),
        "show": ("runs", "Show the state, scores, time and machines of a run."),
        "follow": ("runs", "Follow a run until it ends, as `packtrain run` does."),
        "logs": ("runs", "Print the output of all workers, or of one."),
        "ui": ("servers", "Show all runs of a store in the browser, live."),
        "tensorboard": ("servers", "Open TensorBoard on the event files of runs."),
    },
    "Compare": {
        "report": ("reports", "Report the results, speed and problems of a run or sweep."),
        "compare": ("reports", "Compare runs: jobs, speed term by term, scores and curves."),
        "evaluate": ("reports", "Score a model on its test data or on new data."),
        "tag": ("stored", "Tag a run with words to find it by, or add a note to it."),
    },
    "Use the model": {
        "predict": ("models", "Predict with the model of a run, or with an exported one."),
        "export": ("models", "Write the model of a run for machines without torch."),
        "serve": ("servers", "Serve an exported model over HTTP, with a page to try it."),
        "unit": ("servers", "Print a systemd unit that serves a model on this machine."),
        "get": ("stored", "Download the outputs or the checkpoint of a run."),
    },
    "Machines": {
        "doctor": ("machines", "Check this machine or the machines of a fleet."),
        "attach": ("machines", "Open a shell on a machine of a run."),
        "down": ("machines", "Terminate a run's machines now, and wait until they are gone."),
        "volume": ("machines", "Keep a run's data on volumes that outlive it."),
    },
    "Store": {
        "du": ("stored", "Show how much space runs and packs take in a store."),
        "gc": ("stored", "List or delete what no run uses, in the store and the cache."),
        "cp": ("stored", "Copy a run with its pack, or a pack, to another store."),
        "mv": ("stored", "Rename a run that is not running."),
        "rm": ("stored", "Remove runs with their checkpoints, logs and metrics."),
    },
    "Set up": {
        "image": ("packages", "Build a container image, for Kubernetes or to serve models."),
        "bundle": ("packages", "Bundle a job with its wheels, code and pack, for offline use."),
        "schema": ("jobs", "Print the JSON Schema of the job file, for editors."),
        "completion": ("completion", "Print a shell script that completes commands, runs and fields."),
    },
}
FIRST = ("init", "run", "show", "ui", "report", "predict")  # what a newcomer needs
HIDDEN = {  # fleets and nodes start them
    "node": ("node", "Take part in a run on this machine until it ends."),
    "mirror": ("node", "Mirror a run to MLflow until it ends."),
}


class CommandStub(TyperCommand):
    """A command whose module is not imported: its name, and the first sentence of its help."""

    def __init__(self, name: str, module: str, summary: str, hidden: bool) -> None:
        super().__init__(name, short_help=summary, hidden=hidden)
        self.module = f"packtrain.cli.{module}"

    def load(self) -> Any:
        """Import the module, and build the command from the function of its name, or from the group."""
        assert self.name is not None
        command = getattr(import_module(self.module), self.name)
        if isinstance(command, typer.Typer):
            return get_group(command)
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(self.name, hidden=self.hidden)(command)
        return get_command(alone)


class Commands(TyperGroup):
    """All commands. Their panels are plain text: those of Typer import Rich, which takes longer than the help does."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for names in (*PANELS.values(), HIDDEN):
            for name, (module, summary) in names.items():
                self.add_command(CommandStub(name, module, summary, hidden=names is HIDDEN))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if isinstance(command, CommandStub):
            command = self.commands[cmd_name] = command.load()
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - as Click calls it
        for title, names in PANELS.items():
            self.write_panel(formatter, title, tuple(names))

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


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version  # takes a fifth of the time of the help

        print(f"packtrain {version('packtrain')}")
        raise typer.Exit


def _complain(text: str) -> None:
    if sys.stderr.isatty():  # a terminal would break the line inside words
        from packtrain.cli.screen import console  # Rich would take longer than the help

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
        formatter = context.make_formatter()
        formatter.write_text(app.info.help or "")
        formatter.write_paragraph()
        formatter.write_usage("packtrain", "COMMAND [ARGS]...")
        cast("Commands", context.command).write_panel(formatter, "First steps", FIRST)
        formatter.write_paragraph()
        formatter.write_text("`packtrain --help` lists all commands.")
        print(formatter.getvalue(), end="")
    if context.invoked_subcommand != "node":  # a node reports to the store, and there may be hundreds of them
        SLOW_ANSWERS.tell = _complain
    keep_compiled_code()


def main() -> None:
    """Run a command. An error that a person can act on is one line on standard error and an exit code."""
    prepare_streams()
    with safe_output():
        code = EXIT_DONE
        try:
            try:
                app()
            finally:
                sys.stdout.flush()  # what is buffered must meet a full disk or a reader that has gone here
        except ReaderGone:
            pass
        except OutputLost as error:
            _complain(str(error))
            code = EXIT_UNWRITTEN
        except PacktrainError as error:
            _complain(str(error))
            code = error.exit_code
        sys.exit(code)
