"""Verbs that read a run or end it: ls, show, logs, stop, report."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from packtrain.cli.common import JsonOption, RunArgument, StoreOption, console, find_run, find_store, print_json

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from packtrain.errors import PacktrainError
    from packtrain.report.summary import Standing
    from packtrain.run.liveness import State
    from packtrain.run.run import Run

_STOP_POLL_SECONDS = 1.0
_READERS = 16  # the answer to a request takes long, not the request
_STATE_STYLES = {
    "finished": "green", "running": "cyan", "waiting": "cyan", "stopped": "yellow", "interrupted": "yellow",
    "failed": "red",
}  # fmt: skip


def register(app: typer.Typer) -> None:
    app.command("ls")(list_runs)
    app.command()(show)
    app.command()(logs)
    app.command()(stop)
    app.command()(report)


def list_runs(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List the runs in a store, the newest first."""
    from packtrain.errors import EXIT_DONE, EXIT_FAILED, PacktrainError
    from packtrain.run.liveness import states_now
    from packtrain.run.run import Run, run_names

    found = find_store(store)
    runs = [Run(found, name) for name in reversed(run_names(found))]
    known = states_now(runs)
    with ThreadPoolExecutor(_READERS) as readers:
        asked = [readers.submit(_listed, run, state) for run, state in zip(runs, known, strict=True)]
        answers = [one.result() for one in asked]
    listed = [one for one in answers if not isinstance(one, PacktrainError)]
    unreadable = [one for one in answers if isinstance(one, PacktrainError)]
    if as_json:
        print_json([{**asdict(one), "queue": queue} for one, queue in listed])
    elif listed:
        _print_list(listed)
    elif not unreadable:
        console().print(f"no runs in {found.url}; [bold]packtrain run JOB[/bold] starts one")
    for error in unreadable:  # which is no reason to hide the others
        print(f"packtrain: {error}", file=sys.stderr)
    sys.exit(EXIT_FAILED if unreadable else EXIT_DONE)


def _print_list(listed: Sequence[tuple[Standing, str | None]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from packtrain.units import show_seconds

    table = Table(box=None, pad_edge=False, header_style="dim")
    queued = ["queue"] if any(queue for _, queue in listed) else []
    for column in ("run", "state", *queued, "step", "loss", "score", "time", "what"):
        table.add_column(column, justify="right" if column in ("step", "loss", "time") else "left")
    for one, queue in listed:
        style = _STATE_STYLES[one.state]
        table.add_row(
            f"[bold]{one.run}[/bold]",
            f"[{style}]{one.state}[/{style}]",
            *([queue or ""] if queued else []),
            f"{one.step:,}",
            "" if one.loss is None else f"{one.loss:.3f}",
            one.headline,
            show_seconds(one.seconds) if one.seconds else "",
            escape(one.what),
        )
    console().print(table)


def _listed(run: Run, state: State) -> tuple[Standing, str | None] | PacktrainError:
    """How a run stands, and where in its fleet's queue if it has not ended; or that it cannot be read."""
    from packtrain.errors import PacktrainError
    from packtrain.fleet import fleet_of
    from packtrain.report.summary import standing
    from packtrain.store import StoreError

    try:
        ended = state in ("finished", "failed", "stopped")
        return standing(run, state), None if ended else fleet_of(run.job.fleet.kind).queue(run)
    except StoreError:
        raise
    except PacktrainError as error:
        return error


def show(name: RunArgument = None, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show how a run stands: its state, scores, machines and last events."""
    from packtrain.cli.follow import print_summary
    from packtrain.report.summary import summarise
    from packtrain.run.liveness import EXIT_CODES, state_of

    run = find_run(store, name)
    summary = summarise(run, state_of(run))
    if as_json:
        events = sorted(run.events().read(), key=lambda event: event.time)
        print_json({**asdict(summary), "events": [asdict(event) for event in events]})
    else:
        print_summary(console(), run, summary)
    sys.exit(0 if summary.state == "running" else EXIT_CODES[summary.state])


def logs(
    name: RunArgument = None,
    store: StoreOption = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the run ends.")] = False,
    rank: Annotated[int | None, typer.Option("--rank", help="Only this worker's lines.")] = None,
) -> None:
    """Print what the workers wrote, that of all machines together or of one worker."""
    from packtrain.run.liveness import LEASE_LOST_SECONDS

    run = find_run(store, name)
    reader, ranks = run.log_lines(), set[int | None]()
    ended_at: float | None = None
    while True:
        if ended_at is None and run.result() is not None:
            ended_at = time.monotonic()
        # The last lines come after the result: when the machines have left, or should have, they are all there.
        over = not follow or (
            ended_at is not None
            and (time.monotonic() - ended_at > LEASE_LOST_SECONDS or all(node.left for node in run.leases()))
        )
        for line in sorted(reader.read(), key=lambda line: (line.generation, line.time)):
            ranks.add(line.rank)
            if rank is None or line.rank == rank:
                who = "launcher" if line.rank is None else f"rank {line.rank}"
                print(f"[{who}] {line.text}", flush=True)
        if over:
            break
        time.sleep(1.0)
    if not ranks or (rank is not None and rank not in ranks):
        print(f"packtrain: {run.name}: {_why_no_lines(ranks, rank, ended_at is None)}", file=sys.stderr)


def _why_no_lines(ranks: Collection[int | None], rank: int | None, going: bool) -> str:
    workers = sorted(one for one in ranks if one is not None)
    if rank is not None and workers:
        return f"no lines of rank {rank}; there are those of {', '.join(map(str, workers))}"
    who = "its workers have" if rank is None else f"rank {rank} has"
    return f"{who} written nothing" + (" so far; with -f this command waits for it" if going else "")


def stop(name: RunArgument = None, store: StoreOption = None) -> None:
    """Stop a run: its workers commit a checkpoint and end. `resume` goes on from there."""
    from packtrain.errors import PacktrainError
    from packtrain.fleet import fleet_of
    from packtrain.run.liveness import states_now

    run = find_run(store, name)
    result = run.result()
    if result is not None:
        console().print(f"{run.name} has ended already: {result.status}")
        return
    run.request_stop("stopped by hand")
    screen = console()
    try:
        fleet_of(run.job.fleet.kind).withdraw(run)
    except PacktrainError as error:  # what begins later finds that the run has ended, and leaves
        screen.print(f"what waits in the queue stays there: {error}", markup=False)
    with screen.status(f"{run.name} commits a checkpoint and ends (Ctrl-C: it does so without this command)"):
        while (result := run.result()) is None:
            if states_now([run])[0] in ("interrupted", "waiting"):
                _finish_alone(run)
            else:
                time.sleep(_STOP_POLL_SECONDS)
    screen.print(f"{run.name}: {result.status} at step {result.step:,}; `packtrain resume {run.name}` goes on")


def _finish_alone(run: Run) -> None:
    """Ends a run that no machine works on where it is."""
    from packtrain.run.checkpoint import committed
    from packtrain.run.records import Result

    step = max((checkpoint.step for checkpoint in committed(run)), default=0)
    seconds = max((node.used_seconds for node in run.leases()), default=0.0)
    run.finish(Result("stopped", "stopped by hand, when no machine was working on it", step, seconds))


def report(name: RunArgument = None, store: StoreOption = None) -> None:
    """Write the report of a run, as far as it has come, and say where it is."""
    from packtrain.report import write_report

    print(write_report(find_run(store, name)))
