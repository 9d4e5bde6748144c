"""The command that trains many runs of one job: sweep."""

from __future__ import annotations

import shlex
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text

from packtrain.cli.common import (
    DropsOption,
    JsonOption,
    SetOption,
    StoreOption,
    TrustOption,
    existing_store,
    find_store,
    trusting,
    write_output,
)
from packtrain.cli.output import print_json, unread_output
from packtrain.cli.screen import Part, ProgressBars, Screen, console
from packtrain.errors import EXIT_FAILED, EXIT_INTERRUPTED, Mistake, harmless
from packtrain.job.part import is_name
from packtrain.process import to_type
from packtrain.report.sweep import SweepTable, rungs_in_words, sweep_page, sweep_table, write_sweep_report
from packtrain.report.sweep import as_json as plain
from packtrain.run.sweeps import Sweep, SweepPlan, sweep_names
from packtrain.run.trust import Accept
from packtrain.store import Store, StoreError, store_option
from packtrain.sweep.create import SweepRequest, create_sweep, prepare_sweep
from packtrain.sweep.drive import SweepDrive

_POLL_SECONDS = 1.0
_TABLE_SECONDS = 5.0  # between two tables of a sweep that runs
_MAX_ROWS = 30  # of a table that is drawn again and again


def sweep(
    target: Annotated[
        str | None,
        typer.Argument(metavar="JOB|NAME", help="Job file, or the name of a sweep to continue. Default: list sweeps."),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", metavar="FIELD=VALUE,...", help="Values of a field, or LOW..HIGH; repeatable."),
    ] = None,
    overrides: SetOption = None,
    draws: Annotated[
        int | None, typer.Option("--random", metavar="N", min=1, help="Sample N combinations instead of training all.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Random seed for --random.")] = 1,
    halving: Annotated[
        bool, typer.Option("--halving", help="Stop the worse half of the runs early, repeatedly.")
    ] = False,
    parallel: Annotated[
        int | None,
        typer.Option("--parallel", metavar="N", min=1, help="Maximum runs at a time. Default: as many as fit."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name of the sweep. Default: from job and values.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and list the runs; start nothing.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the sweep's current table.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write table and plot as an HTML page.")
    ] = None,
    store: StoreOption = None,
    allow_drops: DropsOption = False,
    trust_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train many runs of one job that differ in a few fields.

    Ctrl-C detaches; the runs keep running. The same command, or the name of the sweep, continues it.
    """
    if target is None:
        _list(existing_store(store), as_json)
        return
    if not (target.endswith((".yaml", ".yml")) or Path(target).is_file()):
        if grid or draws or halving or overrides or dry_run:
            raise Mistake(f"{target} is not a job file: --grid and the like need one; a name alone continues a sweep")
        continued = Sweep(find_store(store), target)
        if show:
            _report(continued, output, as_json)
            return
        with unread_output():
            code = _drive(continued, parallel, trusting(trust_code), output, as_json)
        sys.exit(code)
    if store is not None:
        raise Mistake("--store: a job file names its store; change it with --set store=...")
    if name is not None and (not is_name(name) or len(name) > 56):
        raise Mistake(f"--name {name[:60]}: names have at most 56 of a-z, 0-9 and -, and do not start with -")
    prepared = prepare_sweep(
        SweepRequest(Path(target), grid or (), overrides or (), draws, seed, halving, parallel, name, allow_drops)
    )
    if dry_run:
        if as_json:
            print_json(asdict(prepared.plan))
            return
        screen = console()
        screen.say(*_heading(prepared.plan))
        for trial in prepared.plan.trials:
            screen.say(f"  {trial.run}  {'  '.join(f'{field}={value}' for field, value in trial.values.items())}")
        return
    with unread_output():
        screen = _news(as_json)
        screen.say(*_heading(prepared.plan))
        code = _drive(create_sweep(prepared, ProgressBars(screen)), parallel, trusting(trust_code), output, as_json)
    sys.exit(code)


def _heading(plan: SweepPlan) -> tuple[Part, ...]:
    return (plan.name, "bold"), f": {rungs_in_words(plan)}, {plan.parallel} at a time"


def _news(as_json: bool) -> Screen:
    """Return where to say what happens: not where JSON goes."""
    return console(sys.stderr if as_json else None)


def _drive(sweep: Sweep, parallel: int | None, accept: Accept, output: Path | None, as_json: bool) -> int:
    """Drive or watch a sweep until it is over, and return the exit code."""
    screen = _news(as_json)
    drive = SweepDrive(sweep, accept, lambda text: screen.say(f"  {text}"), parallel)
    shown = float("-inf")
    try:
        with Live(Text(), console=screen, refresh_per_second=4, transient=True) as live:
            while not drive.look():
                if screen.is_terminal and time.monotonic() - shown > _TABLE_SECONDS:
                    live.update(_drawn(sweep_table(sweep.store, sweep.name), _MAX_ROWS))
                    shown = time.monotonic()
                time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        screen.say()
        running = "No run is training."
        if names := drive.running:
            keeps = "keeps" if len(names) == 1 else "keep"
            running = f"{', '.join(names)} {keeps} running; no other run starts until you continue."
        screen.say(f"Detached. {running}")
        screen.say(f"  continue: {to_type('sweep', sweep.name, *store_option(sweep.store))}")
        for name in names[:1]:
            screen.say(f"  follow:   {to_type('follow', name, *store_option(sweep.store))}")
        return EXIT_INTERRUPTED
    finally:
        drive.close()
    table = _report(sweep, output, as_json)
    return EXIT_FAILED if all(row.state == "failed" for row in table.rows) else 0


def _report(sweep: Sweep, output: Path | None, as_json: bool) -> SweepTable:
    """Print the table, and write its page to the store and wherever the user wants it."""
    table = sweep_table(sweep.store, sweep.name)
    if output is not None:
        write_output(output, sweep_page(table))
    if as_json:
        print_json(plain(table))
        return table
    screen = console()
    screen.say((table.name, "bold"), f"  {table.finished} of {len(table.rows)} runs done; {table.rungs}")
    screen.print(_drawn(table))
    if (best := table.best) is not None:
        values = " ".join(f"--set {shlex.quote(f'{name}={value}')}" for name, value in best.values.items())
        screen.say("best: ", (best.run, "bold"), f"  {values}")
    with suppress(StoreError):  # a person who may only read the store still sees the table
        written = write_sweep_report(sweep.store, table)
        screen.say(f"report: {output or written}")
    return table


def _drawn(table: SweepTable, max_rows: int | None = None) -> Table:
    drawn = Table(box=None, pad_edge=False, header_style="dim")
    # Of each field's name its last part, with as many more as make them different and a word.
    paths = [name.split(".") for name in table.parameters]
    length = 2 if any(path[-1].isdecimal() for path in paths) else 1  # `program.2`, not `2`
    while len({".".join(path[-length:]) for path in paths}) < len(paths) and length < max(map(len, paths)):
        length += 1
    short = [".".join(path[-length:]) for path in paths]
    numbers = ("step", table.score_head)
    for column in ("run", "state", *short, "step", *([table.score_head] if table.measure else [])):
        drawn.add_column(harmless(column), justify="right" if column in numbers else "left", overflow="fold")
    for row in table.rows[:max_rows]:
        values = [row.values.get(name, "-") for name in table.parameters]
        score = [table.score_of(row)] if table.measure else []
        drawn.add_row(*map(harmless, (row.run, row.standing, *values, f"{row.step:,}", *score)))
    if max_rows is not None and len(table.rows) > max_rows:
        drawn.add_row(f"and {len(table.rows) - max_rows} more")
    return drawn


def _list(store: Store, as_json: bool) -> None:
    tables = [sweep_table(store, name) for name in sweep_names(store)]
    if as_json:
        rows = [
            {
                "name": table.name, "job": table.job, "runs": len(table.rows), "finished": table.finished,
                "best": table.best and table.best.run,
            }
            for table in tables
        ]  # fmt: skip
        print_json(rows)
        return
    screen = console()
    if not tables:
        screen.say(f"No sweeps in {store.url}. Start one: ", ("packtrain sweep JOB --grid FIELD=VALUE,VALUE", "bold"))
    for table in tables:
        best = "" if table.best is None else f"  best: {table.best.run}"
        screen.say((table.name, "bold"), f"  {table.finished} of {len(table.rows)} runs done{best}")
