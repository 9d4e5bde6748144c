"""Verbs that begin with a job: init, pack, run, resume."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packtrain.cli.common import JobArgument, RunArgument, SetOption, StoreOption, console, find_run, load

if TYPE_CHECKING:
    from packtrain.job import Job
    from packtrain.jobfile import LoadedJob
    from packtrain.run import Run
    from packtrain.store import Store

ForegroundOption = Annotated[bool, typer.Option("--foreground", help="Tie the run to this command: Ctrl-C stops it.")]
DetachOption = Annotated[bool, typer.Option("--detach", help="Start the run and return at once.")]


def register(app: typer.Typer) -> None:
    app.command()(init)
    app.command()(pack)
    app.command()(run)
    app.command()(resume)


def init(
    path: Annotated[str, typer.Argument(metavar="[JOB]", help="The file to write.")] = "job.yaml",
    kind: Annotated[str, typer.Option("--kind", help="translate or program.")] = "translate",
    name: Annotated[str | None, typer.Option("--name", help="The job's name. Default: the file's.")] = None,
) -> None:
    """Write a commented job file to start from."""
    from packtrain.cli.template import write_template

    write_template(Path(path), kind, name)
    console().print(f"wrote {path}; next: edit its data, then [bold]packtrain run {path}[/bold]")


def pack(job: JobArgument, overrides: SetOption = None) -> None:
    """Turn the job's raw data into a pack in its store; nothing is done twice."""
    from packtrain.store import open_store

    loaded = load(job, overrides)
    name = _pack(loaded, open_store(loaded.job.store))
    console().print(f"packed: [bold]{name}[/bold]" if name else "a program packs no data")


def run(
    job: JobArgument,
    overrides: SetOption = None,
    foreground: ForegroundOption = False,
    detach: DetachOption = False,
) -> None:
    """Pack if needed, start the run, and follow it. Ctrl-C leaves it going."""
    from packtrain.code import archive, snapshot
    from packtrain.run import create_run
    from packtrain.store import open_store

    loaded = load(job, overrides)
    _require_torch()
    store = open_store(loaded.job.store)
    if loaded.job.program is not None:
        script = loaded.code / loaded.job.program[0]
        if script.suffix == ".py" and not script.is_file():
            raise loaded.mistake("program.0", f"there is no file {script}")
        code = snapshot(loaded.code)
    else:
        code = archive({"job.yaml": loaded.text.encode()})
    _require_put_if_absent(loaded.job, store)
    pack_name = _pack(loaded, store)
    _start_and_follow(create_run(store, loaded.job, code, pack_name), foreground, detach)


def resume(
    name: RunArgument = None,
    store: StoreOption = None,
    foreground: ForegroundOption = False,
    detach: DetachOption = False,
) -> None:
    """Go on with a run that was stopped, failed or interrupted, from its last checkpoint."""
    from packtrain.cli.follow import conclude, follow

    found = find_run(store, name)
    state = found.state()
    if state == "finished":
        console().print(f"{found.name} has reached its goal already")
        sys.exit(conclude(found))
    if state == "running":
        console().print(f"{found.name} is running; following it")
        sys.exit(follow(found, [], foreground=False))
    _require_torch()
    found.reopen()
    _start_and_follow(found, foreground, detach)


def _start_and_follow(found: Run, foreground: bool, detach: bool) -> None:
    from packtrain.cli.follow import follow, how_to_go_on
    from packtrain.fleet import fleet_of

    fleet = fleet_of(found.job.fleet.kind)
    nodes = fleet.start(fleet.plan(found), tied=foreground)
    if detach:
        console().print(f"started [bold]{found.name}[/bold]\n{how_to_go_on(found)}")
        return
    sys.exit(follow(found, nodes, foreground))


def _pack(loaded: LoadedJob, store: Store) -> str | None:
    from packtrain.errors import FieldMistake

    if loaded.job.recipe is None:
        return None
    from packtrain.pack.packing import pack as make_pack

    screen = console()
    try:
        with screen.status("packing"):
            return make_pack(loaded.job, store, lambda text: screen.print(f"[dim]pack[/dim]  {text}")).name
    except FieldMistake as mistake:
        raise loaded.mistake(mistake.field, mistake.fault) from None


def _require_torch() -> None:
    """The local fleet trains on this machine; the base install has nothing to do it with."""
    from importlib.util import find_spec

    from packtrain.errors import Mistake

    if find_spec("torch") is None:
        raise Mistake("training on this machine needs torch: pip install 'packtrain[train]'")


def _require_put_if_absent(job: Job, store: Store) -> None:
    """More than one machine must be able to agree; a store that ignores put-if-absent would let two win."""
    from packtrain.errors import FieldMistake

    machines: int = getattr(job.fleet.kind, "machines", 1)
    if machines > 1 and not store.holds_put_if_absent():
        raise FieldMistake(
            "store",
            f"{store.url} ignores put-if-absent, so {machines} machines could not agree; use another store",
        )
