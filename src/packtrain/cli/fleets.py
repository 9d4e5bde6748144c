"""Verbs for the machines of a fleet: doctor, attach."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packtrain.cli.common import JsonOption, RunArgument, StoreOption, console, find_run, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from packtrain.fleet.doctor import Check
    from packtrain.places import FleetKind


def register(app: typer.Typer) -> None:
    app.command()(doctor)
    app.command()(attach)


def doctor(
    fleet: Annotated[
        str, typer.Option("--fleet", metavar="JOB|local|ssh:HOST,HOST", help="The machines to try.")
    ] = "local",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Try each step that a run takes on its machines, and say what to do about what fails."""
    from packtrain.errors import EXIT_DONE, EXIT_MISTAKE, EXIT_UNFINISHED
    from packtrain.fleet.doctor import examine

    kind, place, names, public = _target(fleet, store)
    checks = list(examine(kind, place, names, public))
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        _print(checks)
    failed = any(check.tried and not check.ok for check in checks)
    sys.exit(EXIT_MISTAKE if failed else EXIT_DONE if all(check.tried for check in checks) else EXIT_UNFINISHED)


def attach(
    name: RunArgument = None,
    node: Annotated[str | None, typer.Argument(metavar="[NODE]", help="A node or a host. Default: the first.")] = None,
    store: StoreOption = None,
) -> None:
    """Open a shell on a machine of a run; where it has tmux, in the session that shows the agent's words."""
    from packtrain.fleet import fleet_of

    run = find_run(store, name)
    command = fleet_of(run.job.fleet.kind).shell(run, node)
    os.execvp(command[0], command)  # noqa: S606 - the terminal is the shell's from now on


def _target(fleet: str, store: str | None) -> tuple[FleetKind, str, Sequence[str], bool]:
    """The machines, the store, the variables, and whether addresses may be public: of a job, or of a short form."""
    from packtrain.errors import Mistake
    from packtrain.places import Local, Ssh
    from packtrain.start import load

    place = store or os.environ.get("PACKTRAIN_STORE") or "./store"
    if fleet == "local":
        return Local(), place, (), False
    if fleet.startswith("ssh:"):
        from pydantic import ValidationError

        from packtrain.parts import faults

        try:
            return Ssh.model_validate({"hosts": fleet.removeprefix("ssh:").split(",")}), place, (), False
        except ValidationError as error:
            raise Mistake(f"--fleet {fleet}: {faults(error)[0][1]}") from None
    if not Path(fleet).exists():
        raise Mistake(f"--fleet {fleet}: there is no such job file; or write local, or ssh:host,host")
    job = load(fleet).job
    return job.fleet.kind, store or job.store, job.environment, job.fleet.public_address


def _print(checks: Sequence[Check]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("machine", "step", "", "what", "what to do"):
        table.add_column(column)
    for check in checks:
        mark = "[green]ok[/green]" if check.ok else "[red]fails[/red]" if check.tried else "[yellow]not tried[/yellow]"
        table.add_row(escape(check.machine), check.step, mark, escape(check.what), escape(check.advice))
    console().print(table)
