"""Verbs that read a run or end it: ls, show, logs, stop, report."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from packtrain.cli.common import (
    JsonOption,
    RunArgument,
    StoreOption,
    console,
    find_run,
    find_store,
    print_json,
)

if TYPE_CHECKING:
    from packtrain.runs import Run

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
    from rich.table import Table

    from packtrain.node.signs import states_now
    from packtrain.report.summary import summarise
    from packtrain.runs import Run, run_names
    from packtrain.units import show_seconds

    found = find_store(store)
    runs = [Run(found, name) for name in reversed(run_names(found))]
    known = states_now(runs)
    with ThreadPoolExecutor(_READERS) as readers:
        queued_as = [readers.submit(_queue_of, run, state) for run, state in zip(runs, known, strict=True)]
        summaries = list(readers.map(summarise, runs, known))
        queues = [queue.result() for queue in queued_as]
    if as_json:
        print_json([{**asdict(one), "queue": queue} for one, queue in zip(summaries, queues, strict=True)])
        return
    if not summaries:
        console().print(f"no runs in {found.url}; [bold]packtrain run JOB[/bold] starts one")
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    queued = ["queue"] if any(queues) else []
    for column in ("run", "state", *queued, "step", "loss", "score", "time", "what"):
        table.add_column(column, justify="right" if column in ("step", "loss", "time") else "left")
    for summary, queue in zip(summaries, queues, strict=True):
        style = _STATE_STYLES[summary.state]
        table.add_row(
            f"[bold]{summary.run}[/bold]",
            f"[{style}]{summary.state}[/{style}]",
            *([queue or ""] if queued else []),
            f"{summary.step:,}",
            "" if summary.loss is None else f"{summary.loss:.3f}",
            summary.headline,
            show_seconds(summary.seconds),
            summary.what,
        )
    console().print(table)


def _queue_of(run: Run, state: str) -> str | None:
    """Where a run that has not ended stands in its fleet's queue, if it has one."""
    from packtrain.fleet import fleet_of

    return None if state in ("finished", "failed", "stopped") else fleet_of(run.job.fleet.kind).queue(run)


def show(name: RunArgument = None, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show how a run stands: its state, scores, machines and last events."""
    from packtrain.cli.follow import print_summary
    from packtrain.report.summary import summarise
    from packtrain.runs import EXIT_CODES

    run = find_run(store, name)
    summary = summarise(run, run.state())
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
    from packtrain.runs import LEASE_LOST_SECONDS

    run = find_run(store, name)
    reader = run.log_lines()
    ended_at: float | None = None
    while True:
        if ended_at is None and run.result() is not None:
            ended_at = time.monotonic()
        # The last lines come after the result: when the machines have left, or should have, they are all there.
        over = not follow or (
            ended_at is not None
            and (time.monotonic() - ended_at > LEASE_LOST_SECONDS or all(node.left for node in run.nodes()))
        )
        for line in sorted(reader.read(), key=lambda line: (line.generation, line.time)):
            if rank is None or line.rank == rank:
                who = "launcher" if line.rank is None else f"rank {line.rank}"
                print(f"[{who}] {line.text}", flush=True)
        if over:
            return
        time.sleep(1.0)


def stop(name: RunArgument = None, store: StoreOption = None) -> None:
    """Stop a run: its workers commit a checkpoint and end. `resume` goes on from there."""
    from packtrain.errors import PacktrainError
    from packtrain.fleet import fleet_of
    from packtrain.node.signs import states_now

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
    from packtrain.checkpoint import committed
    from packtrain.runs import Result

    step = max((checkpoint.step for checkpoint in committed(run)), default=0)
    seconds = max((node.used_seconds for node in run.nodes()), default=0.0)
    run.finish(Result("stopped", "stopped by hand, when no machine was working on it", step, seconds))


def report(name: RunArgument = None, store: StoreOption = None) -> None:
    """Write the report of a run, as far as it has come, and say where it is."""
    from packtrain.report import write_report

    print(write_report(find_run(store, name)))
