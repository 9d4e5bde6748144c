"""Verbs that begin with a job: init, pack, run, resume."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packtrain.cli.common import JobArgument, RunArgument, SetOption, StoreOption, console, find_run

if TYPE_CHECKING:
    from packtrain.job.kinds import FleetKind
    from packtrain.run.run import Run

ForegroundOption = Annotated[bool, typer.Option("--foreground", help="Tie the run to this command: Ctrl-C stops it.")]
DetachOption = Annotated[bool, typer.Option("--detach", help="Start the run and return at once.")]


def register(app: typer.Typer) -> None:
    app.command()(init)
    app.command()(pack)
    app.command()(run)
    app.command()(resume)


def init(
    kind: Annotated[
        str | None, typer.Argument(metavar="[KIND]", help="What to learn: a recipe, or program. Default: lists them.")
    ] = None,
    path: Annotated[str | None, typer.Argument(metavar="[JOB]", help="The file to write. Default: KIND.yaml.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="The job's name. Default: the file's.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="PATH", help="Your data, once for each file. Default: a little, made up."),
    ] = None,
    valid: Annotated[list[str] | None, typer.Option("--valid", metavar="PATH", help="The same for validation.")] = None,
) -> None:
    """Write a commented job file to start from, with data to try it."""
    from rich.markup import escape

    from packtrain.cli.template import STARTS, Wanted, write_start

    screen = console()
    if kind is None:
        for word, start in STARTS.items():
            screen.print(f"[bold]packtrain init {word:<10}[/bold] {start.about}")
        return
    job = Path(path or f"{kind}.yaml")
    written = write_start(Wanted(kind, job, name, data or (), valid or ()))
    screen.print(escape(f"wrote {' and '.join(written.files)}"))
    screen.print(f"next: [bold]packtrain run {escape(str(job))}[/bold]")
    if written.example:
        screen.print(f"then: [bold]packtrain predict {escape(written.example)}[/bold]")


def pack(
    job: JobArgument,
    overrides: SetOption = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Worker processes. Default: one for each core.")] = None,
    dask: Annotated[str | None, typer.Option(metavar="ADDRESS", help="A Dask scheduler, as tcp://host:8786.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print what is in the pack and write a sample page.")] = False,
    allow_drops: Annotated[bool, typer.Option("--allow-drops", help="Go on without unusable samples.")] = False,
) -> None:
    """Turn the job's raw data into a pack in its store; nothing is done twice."""
    from packtrain.cli.packs import ProgressBars
    from packtrain.pack.workers import Dask, Processes
    from packtrain.start import load, pack_data
    from packtrain.store import open_store

    loaded = load(job, overrides or ())
    store, screen = open_store(loaded.job.store), console()
    workers = Dask(dask) if dask else Processes(processes)
    manifest = pack_data(loaded, store, ProgressBars(screen), workers, allow_drops)
    if manifest is None:
        screen.print("a program packs no data")
        return
    screen.print(f"packed: [bold]{manifest.name}[/bold]")
    if stats:
        from packtrain.cli.packs import show_stats

        show_stats(screen, store, manifest)


def run(
    job: JobArgument,
    overrides: SetOption = None,
    foreground: ForegroundOption = False,
    detach: DetachOption = False,
) -> None:
    """Pack if needed, start the run, and follow it. Ctrl-C leaves it going."""
    from packtrain.cli.packs import ProgressBars
    from packtrain.start import create, load

    _refuse_both(foreground, detach)
    loaded = load(job, overrides or ())
    _refuse_tied(loaded.job.fleet.kind, foreground)
    _start_and_follow(create(loaded, ProgressBars(console())), foreground, detach)


def resume(
    name: RunArgument = None,
    store: StoreOption = None,
    foreground: ForegroundOption = False,
    detach: DetachOption = False,
) -> None:
    """Go on with a run that was stopped, failed or interrupted, from its last checkpoint."""
    from packtrain.cli.follow import conclude, follow
    from packtrain.run.liveness import state_of
    from packtrain.start import reopen

    _refuse_both(foreground, detach)
    found = find_run(store, name)
    state = state_of(found)
    if state == "finished":
        console().print(f"{found.name} has reached its goal already")
        sys.exit(conclude(found))
    if state == "running":
        console().print(f"{found.name} is running; following it")
        sys.exit(follow(found, [], foreground=False))
    _refuse_tied(found.job.fleet.kind, foreground)
    reopen(found, _tell)
    _start_and_follow(found, foreground, detach)


def _refuse_both(foreground: bool, detach: bool) -> None:
    from packtrain.errors import Mistake

    if foreground and detach:
        raise Mistake("--foreground ties the run to this command and --detach leaves it alone: give one of them")


def _refuse_tied(kind: FleetKind, foreground: bool) -> None:
    """Before anything that takes long."""
    from packtrain.errors import Mistake
    from packtrain.fleet import fleet_of

    fault = fleet_of(kind).not_tied
    if foreground and fault is not None:
        raise Mistake(fault)


def _tell(text: str) -> None:
    from rich.markup import escape

    console().print(f"  {escape(text)}")


def _start_and_follow(found: Run, foreground: bool, detach: bool) -> None:
    from packtrain.cli.follow import follow, how_to_go_on
    from packtrain.start import start

    nodes = start(found, foreground, _tell)
    if detach:
        console().print(f"started [bold]{found.name}[/bold]\n{how_to_go_on(found)}")
        return
    sys.exit(follow(found, nodes, foreground))
