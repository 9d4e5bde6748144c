"""Commands that read a run or stop it: ls, show, follow, logs, stop, report, mirror."""

from __future__ import annotations

import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from heapq import merge
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packtrain.cli.common import (
    STATE_STYLES,
    JsonOption,
    QuietOption,
    RunArgument,
    StoreOption,
    TrustOption,
    console,
    find_run,
    find_store,
    hints,
    print_json,
    trusting,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from packtrain.errors import PacktrainError
    from packtrain.report.summary import Overview
    from packtrain.run.liveness import State
    from packtrain.run.run import Run

    Listed = tuple[Overview, str | None]  # and the place in the fleet's queue

_STOP_POLL_SECONDS = 1.0
_READERS = 16  # threads: a store is slow to answer one request, but answers many at the same time


def register(app: typer.Typer) -> None:
    app.command("ls")(list_runs)
    app.command()(show)
    app.command()(follow)
    app.command()(logs)
    app.command()(stop)
    app.command()(report)
    app.command()(mirror)


def list_runs(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List the runs in a store, newest first."""
    from packtrain.errors import EXIT_DONE, EXIT_FAILED, PacktrainError
    from packtrain.run.liveness import attempt, states_now
    from packtrain.run.run import Run, run_names

    found = find_store(store)
    runs = [Run(found, name) for name in reversed(run_names(found))]
    known = states_now(runs)
    with ThreadPoolExecutor(_READERS) as readers:
        answers = list(readers.map(lambda run, state: attempt(lambda: _listed(run, state)), runs, known))
    rows = list(zip(runs, answers, strict=True))
    if as_json:
        print_json([_as_json(run, answer) for run, answer in rows])
    elif rows:
        _print_list(rows)
    else:
        console().say(f"No runs in {found.url}. Start one: ", ("packtrain run JOB", "bold"))
    sys.exit(EXIT_FAILED if any(isinstance(answer, PacktrainError) for answer in answers) else EXIT_DONE)


def _as_json(run: Run, answer: Listed | PacktrainError) -> dict[str, object]:
    from packtrain.errors import PacktrainError

    if isinstance(answer, PacktrainError):
        return {"run": run.name, "state": "?", "reason": str(answer)}
    overview, queue = answer
    return {**asdict(overview), "queue": queue}


def _print_list(rows: Sequence[tuple[Run, Listed | PacktrainError]]) -> None:
    from rich.table import Table
    from rich.text import Text

    from packtrain.errors import PacktrainError, harmless
    from packtrain.units import show_seconds

    table = Table(box=None, pad_edge=False, header_style="dim")
    queued = any(not isinstance(answer, PacktrainError) and answer[1] for _, answer in rows)
    priced = any(not isinstance(answer, PacktrainError) and answer[0].cost for _, answer in rows)
    optional = (["queue"] if queued else [], ["cost"] if priced else [])
    columns = ("run", "state", *optional[0], "step", "loss", "score", "time", *optional[1], "job")
    for column in columns:
        table.add_column(column, justify="right" if column in ("step", "loss", "time", "cost") else "left")
    for run, answer in rows:
        if isinstance(answer, PacktrainError):
            blank = [""] * (len(columns) - 3)
            table.add_row(Text(run.name, "bold"), Text("?", "red"), *blank, Text(str(answer), "red"))
            continue
        one, queue = answer
        table.add_row(
            Text(one.run, "bold"),
            Text(one.state, STATE_STYLES[one.state]),
            *([harmless(queue or "")] if queued else []),
            one.progress,
            "" if one.loss is None else f"{one.loss:.3f}",
            harmless(one.headline),
            show_seconds(one.seconds) if one.seconds else "",
            *([_cost(one)] if priced else []),
            harmless(one.description),  # on one line, also if an argument of a program has several
        )
    console().print(table)


def _cost(one: Overview) -> str:
    """Return the dollars so far and expected: `$3.42 of $12.40`."""
    from packtrain.units import show_dollars

    if one.cost is None:
        return ""
    expected = "" if one.cost.expected is None else f" of {show_dollars(one.cost.expected)}"
    return show_dollars(one.cost.so_far) + expected


def _listed(run: Run, state: State | PacktrainError) -> Listed:
    """Return a run's overview and its place in the fleet's queue; raise the error that keeps it from being read."""
    from packtrain.errors import PacktrainError
    from packtrain.fleet import fleet_of
    from packtrain.report.summary import overview

    if isinstance(state, PacktrainError):
        raise state
    ended = state in ("finished", "failed", "stopped")
    return overview(run, state), None if ended else fleet_of(run.job.fleet.kind).queue(run)


def show(
    name: RunArgument = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
    live: Annotated[
        bool, typer.Option("-w", "--watch", help="Draw curves, machines, events and output until the run ends.")
    ] = False,
) -> None:
    """Show the state, scores, time and machines of a run."""
    from packtrain.cli.follow import print_summary
    from packtrain.errors import Mistake
    from packtrain.report.summary import summarize
    from packtrain.run.liveness import EXIT_CODES, state_of

    if live and as_json:
        raise Mistake("--watch and --json exclude each other; use one of them")
    run = find_run(store, name)
    if live:
        from packtrain.cli.watch import watch

        sys.exit(watch(run))
    summary = summarize(run, state_of(run))
    if as_json:
        events = sorted(run.events().read(), key=lambda event: event.time)
        print_json({**asdict(summary), "events": [asdict(event) for event in events]})
    else:
        print_summary(console(), run, summary)
    # Looking at a healthy run is a success, although the run is not finished.
    sys.exit(0 if summary.state == "running" else EXIT_CODES[summary.state])


def follow(name: RunArgument = None, store: StoreOption = None, quiet: QuietOption = False) -> None:
    """Follow a run until it ends, as `packtrain run` does. Ctrl-C detaches; the run keeps running."""
    from packtrain.cli.follow import follow as follow_run

    sys.exit(follow_run(find_run(store, name), [], foreground=False, quiet=quiet))


def logs(
    name: RunArgument = None,
    store: StoreOption = None,
    keep: Annotated[bool, typer.Option("-f", "--follow", help="Keep printing until the run ends.")] = False,
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="N", min=0, help="Only lines of this worker. Default: all.")
    ] = None,
) -> None:
    """Print the output of all workers, or of one. With -f, also the steps and scores of a recipe."""
    run = find_run(store, name)
    counts = (sum(member.workers for member in generation.members) for generation in run.generations())
    _check_rank(run, rank, max(counts, default=0))
    ranks = _print_logs(run, keep, rank)
    _check_rank(run, rank, max((one + 1 for one in ranks if one is not None), default=0))
    if not ranks or (rank is not None and rank not in ranks):
        who = "the workers" if rank is None else f"rank {rank}"
        advice = " yet; use -f to wait for it" if run.result() is None else ""
        print(f"packtrain: {run.name}: no output from {who}{advice}", file=sys.stderr)


def _check_rank(run: Run, rank: int | None, count: int) -> None:
    """Refuse a rank that is not below the number of ranks; zero if that is not known."""
    from packtrain.errors import NotFound

    if rank is not None and count and rank >= count:
        known = "only rank 0" if count == 1 else f"ranks 0 to {count - 1}"
        raise NotFound(f"{run.name} has no rank {rank}; it has {known}")


def _print_logs(run: Run, keep: bool, rank: int | None) -> set[int | None]:
    """Print what the workers wrote, until the run ends if `keep`; return the ranks that wrote something."""
    from packtrain.cli.follow import StepLines
    from packtrain.run.liveness import LEASE_LOST_SECONDS

    reader, ranks = run.log_lines(), set[int | None]()
    points, steps = run.points().skip(), StepLines(run.job)
    ended_at: float | None = None
    while True:
        if ended_at is None and run.result() is not None:
            ended_at = time.monotonic()
        # Machines upload their last lines after the result, before they leave. Judge that before reading, so that
        # nothing can arrive between the last read and the end.
        over = not keep or (
            ended_at is not None
            and (time.monotonic() - ended_at > LEASE_LOST_SECONDS or all(lease.left for lease in run.leases()))
        )
        lines = []
        for line in sorted(reader.read(), key=lambda line: (line.generation, line.time)):
            ranks.add(line.rank)
            if rank is None or line.rank == rank:
                who = "launcher" if line.rank is None else f"rank {line.rank}"
                lines.append((line.time, f"[{who}] {line.text}"))
        for _, text in merge(lines, steps.lines(points.read()) if keep else (), key=lambda one: one[0]):
            print(text.replace("\n", "\\n"), flush=True)  # a line cannot pretend to be several
        if over:
            return ranks
        time.sleep(1.0)


def stop(name: RunArgument = None, store: StoreOption = None) -> None:
    """Stop a run after its workers commit a checkpoint. `packtrain resume` continues from it."""
    from rich.text import Text

    from packtrain.fleet import release, request_stop
    from packtrain.run.liveness import finish_unattended
    from packtrain.units import counted

    run = find_run(store, name)
    result, screen = run.result(), console()
    if result is not None:
        screen.say(f"{run.name} has already {result.status}")
        release(run, screen.say)  # nobody may have seen its end
        return
    try:
        with screen.status(Text(f"Stopping {run.name}: waiting for its last checkpoint (Ctrl-C stops waiting)")):
            request_stop(run, "stopped by user", screen.say)
            while (result := run.result()) is None:
                if not finish_unattended(run):
                    time.sleep(_STOP_POLL_SECONDS)
    except KeyboardInterrupt:
        screen.say(f"{run.name} stops after its last checkpoint.")
        screen.say_lines(hints(run, "follow", "status"))
        raise
    reached = f"at step {result.step:,}" if run.job.program is None else f"with {counted(result.step, 'commit')}"
    screen.say(f"{run.name} {result.status} {reached}")
    release(run, screen.say)
    if result.status != "finished":
        screen.say_lines(hints(run, "resume"))


def report(
    name: RunArgument = None,
    store: StoreOption = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    as_json: JsonOption = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write to this file, not to the store.")
    ] = None,
) -> None:
    """Answer questions about a run, with evidence, on one page.

    The page is in the run's folder. It is written when a run ends, and by this command at any time.
    """
    from packtrain.cli.common import json_text
    from packtrain.errors import Mistake
    from packtrain.report import report_json, report_page, write_report
    from packtrain.report.findings import findings_of, gather
    from packtrain.report.markdown import markdown

    if as_markdown and as_json:
        raise Mistake("--markdown and --json: pass one of them")
    run = find_run(store, name)
    if as_markdown:
        evidence = gather(run)
        text = markdown(evidence, findings_of(evidence))
    elif as_json:
        text = json_text(report_json(gather(run))) + "\n"
    elif output is not None:
        text = report_page(run)
    else:
        print(write_report(run))
        return
    if output is None:
        print(text, end="")
        return
    try:
        output.write_text(text)
    except OSError as error:
        raise Mistake(f"{output}: {error.strerror}") from error
    print(output)


def mirror(
    name: RunArgument = None,
    store: StoreOption = None,
    uri: Annotated[
        str | None, typer.Option("--mlflow", metavar="URI", help="Tracking server or directory. Default: from the job.")
    ] = None,
    trust_code: TrustOption = False,
    node: Annotated[str | None, typer.Option(hidden=True)] = None,
    store_id: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Mirror a run to MLflow until it ends. The first machine does this if the job asks for it."""
    from packtrain.errors import EXIT_DONE, EXIT_FAILED, Mistake
    from packtrain.report.mirror import follow, follow_as_node
    from packtrain.run.run import open_run
    from packtrain.run.trust import require_trust
    from packtrain.system import end_with_parent

    run = open_run(find_store(store, store_id), name)
    if uri is None:
        uri = run.job.report.mlflow
        if uri is None:
            raise Mistake(f"{run.name} does not say where MLflow is; pass --mlflow URI")
        # Whoever writes the store could send this person's keys for MLflow elsewhere.
        require_trust(run, trusting(trust_code))
    if node is not None:
        end_with_parent(signal.SIGKILL)
        follow_as_node(run, uri, node)
        return
    screen = console()
    done = follow(run, uri, lambda text: screen.say(f"warning: {text}"))
    if done:
        screen.say(f"{run.name} is in MLflow")
    sys.exit(EXIT_DONE if done else EXIT_FAILED)
