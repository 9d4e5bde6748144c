"""Commands that watch a run or stop it: ls, show, follow, logs, stop."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from heapq import merge
from typing import Annotated

import typer
from rich.cells import cell_len
from rich.text import Text

from packtrain.cli.common import (
    STATE_STYLES,
    JsonOption,
    QuietOption,
    RunArgument,
    StoreOption,
    YesOption,
    confirm,
    existing_store,
    find_run,
    hints,
    parsed,
)
from packtrain.cli.follow import StepLines, print_summary
from packtrain.cli.follow import follow as follow_run
from packtrain.cli.output import print_json
from packtrain.cli.screen import console
from packtrain.errors import EXIT_DONE, EXIT_FAILED, Mistake, NotFound, PacktrainError, harmless, nearest
from packtrain.fleet import fleet_to_ask, release, request_stop
from packtrain.fleet.fleet import HasQueue
from packtrain.observe.status import About, Status, about, is_started_here, read_end, read_status, status_json
from packtrain.run.liveness import (
    EXIT_CODES,
    LEASE_LOST_SECONDS,
    State,
    attempt,
    finish_unattended,
    state_of,
    states_now,
)
from packtrain.run.outputs import output_sizes
from packtrain.run.run import Run, run_names
from packtrain.units import counted, parse_moment, show_dollars, show_seconds, show_time

Listed = tuple[Status, About, str | None]  # and the place in the fleet's queue
Filter = Callable[[State, About | None], bool]

_STOP_POLL_SECONDS = 1.0
_COLUMNS = ("run", "state", "started", "queue", "step", "loss", "score", "time", "cost", "tags", "set", "job")
# Of a narrow list, in this order.
_LEFT_OUT = ("loss", "job", "tags", "set", "time", "cost", "step", "queue", "score", "started")
_LEAST_JOB = 12
_MAX_SET = 40  # characters of what `--set` changed
_READERS = 16  # threads: a store is slow to answer one request, but answers many at the same time


def ls(
    location: StoreOption = None,
    states: Annotated[
        list[str] | None, typer.Option("--state", metavar="STATE", help="Only runs in this state; repeatable.")
    ] = None,
    job: Annotated[str | None, typer.Option("--job", metavar="NAME", help="Only runs of this job.")] = None,
    tags: Annotated[
        list[str] | None, typer.Option("--tag", metavar="WORD", help="Only runs with this tag; repeatable.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="TIME|DATE", help="Only runs started since then, e.g. 2d or 2026-11-17."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the runs in a store, newest first."""
    matches = _filter(states or (), job, tags or (), since)
    store = existing_store(location)
    runs = [Run(store, name) for name in reversed(run_names(store))]
    current_states = states_now(runs)
    with ThreadPoolExecutor(_READERS) as readers:
        answers = list(
            readers.map(lambda run, state: attempt(lambda: _listed(run, state, matches)), runs, current_states)
        )
    rows = [(run, answer) for run, answer in zip(runs, answers, strict=True) if answer is not None]
    if as_json:
        print_json([_as_json(run, answer) for run, answer in rows])
    elif rows:
        _print_list(rows)
    elif runs:
        console().say(f"None of {counted(len(runs), 'run')} in {store.url} matches.")
    else:
        console().say(f"No runs in {store.url}. Start one: ", ("packtrain run JOB", "bold"))
    sys.exit(EXIT_FAILED if any(isinstance(answer, PacktrainError) for answer in answers) else EXIT_DONE)


def _filter(states: Sequence[str], job: str | None, tags: Sequence[str], since: str | None) -> Filter:
    """Return what decides, from its state and then from what is about it, if a run is listed."""
    unknown = next((state for state in states if state not in STATE_STYLES), None)
    if unknown is not None:
        raise Mistake(f"--state {unknown}: no such state; {nearest(unknown, STATE_STYLES)}")
    start = None if since is None else parsed("--since", partial(parse_moment, present=time.time()), since)

    def matches(state: State, about: About | None) -> bool:
        if about is None:
            return not states or state in states
        is_recent = start is None or about.created >= start
        return is_recent and job in (None, about.job) and set(tags) <= set(about.tags)

    return matches


def _as_json(run: Run, answer: Listed | PacktrainError) -> dict[str, object]:
    if isinstance(answer, PacktrainError):
        return {"run": run.name, "state": "?", "reason": str(answer)}
    status, about, queue = answer
    return {**status_json(status, in_full=False), **asdict(about), "queue": queue}


def _print_list(rows: Sequence[tuple[Run, Listed | PacktrainError]]) -> None:
    """Print one line for each run. A terminal that is too narrow for all columns gets those that matter most."""
    screen, differing = console(), _differing_overrides([answer[1] for _, answer in rows if isinstance(answer, tuple)])
    cells = [dict.fromkeys(_COLUMNS, "") | _cells(run, answer, differing) for run, answer in rows]
    widths = {name: max(cell_len(texts[name]) for texts in cells) for name in _COLUMNS}
    widths = {name: max(width, len(name)) for name, width in widths.items() if width}
    shown = fitting(widths, screen.width)
    for texts in ({name: name for name in shown}, *cells):
        styles = {"run": "bold", "state": STATE_STYLES.get(texts["state"], "red"), "started": "dim"}
        line = Text()
        for name in shown:
            cell = Text(texts[name], "dim" if texts[name] == name else styles.get(name, ""))
            cell.align("right" if name in ("step", "loss", "time", "cost") else "left", widths[name])
            line.append_text(cell).append("  ")
        line.rstrip()
        if "job" in shown:  # it may be cut; a name never is, because it is there to be copied
            line.truncate(screen.width, overflow="ellipsis")
        screen.print(line, soft_wrap=True)
    if "job" not in shown:
        screen.say_lines(f"{run.name}: {answer}" for run, answer in rows if isinstance(answer, PacktrainError))


def _differing_overrides(listed: Sequence[About]) -> dict[str, str]:
    """Return the names of fields that `--set` changed in some runs of a job but not in all of them, each with the name
    to show: the last part if that is clear."""
    by_job: dict[str, list[frozenset[str]]] = {}
    for run_about in listed:
        by_job.setdefault(run_about.job, []).append(frozenset(run_about.overrides))
    fields = {
        override.partition("=")[0]
        for runs in by_job.values()
        for override in frozenset.union(*runs) - frozenset.intersection(*runs)
    }
    last = {field: field.rpartition(".")[2] for field in fields}
    names = list(last.values())
    return {field: name if names.count(name) == 1 else field for field, name in last.items()}


def _cells(run: Run, answer: Listed | PacktrainError, differing: Mapping[str, str]) -> dict[str, str]:
    if isinstance(answer, PacktrainError):
        return {"run": run.name, "state": "?", "job": str(answer)}
    status, about, queue = answer
    fields = [override.partition("=") for override in about.overrides]
    changed = ", ".join(f"{differing[field]}={value}" for field, _, value in fields if field in differing)
    cost = "" if status.cost is None else show_dollars(status.cost.so_far)
    if status.cost is not None and status.cost.expected is not None:
        cost += f" of {show_dollars(status.cost.expected)}"
    return {
        "run": status.run,
        "state": status.state,
        "started": show_time(about.created),
        "queue": harmless(queue or ""),
        "step": status.step_text,
        "loss": "" if status.loss is None else f"{status.loss:.3f}",
        "score": harmless(status.headline),
        "time": show_seconds(status.seconds) if status.seconds else "",
        "cost": cost,
        "tags": harmless(" ".join(about.tags)),
        "set": harmless(changed if len(changed) <= _MAX_SET else f"{changed[: _MAX_SET - 3]}..."),
        "job": harmless(status.description),  # on one line, also if an argument of a program has several
    }


def fitting(widths: Mapping[str, int], width: int) -> list[str]:
    """Return the columns to show, in order; those that matter least are left out until the others fit.

    The job is the last column, and may be cut.
    """
    shown = list(widths)
    for name in ("", *_LEFT_OUT):
        shown = [column for column in shown if column != name]
        needed = {**widths, "job": min(widths.get("job", 0), _LEAST_JOB)}
        if sum(needed[column] for column in shown) + 2 * (len(shown) - 1) <= width:
            break
    return shown


def _listed(run: Run, state: State | PacktrainError, matches: Filter) -> Listed | None:
    """Return what the list shows of a run; None if it is not wanted. Raise the error that keeps it from being read."""
    if isinstance(state, PacktrainError):
        raise state
    # The state alone first: it costs no request.
    if not matches(state, None) or not matches(state, run_about := about(run)):
        return None
    fleet = None if state in ("finished", "failed", "stopped") else fleet_to_ask(run)
    queue = fleet.queue(run) if fleet is not None and isinstance(fleet, HasQueue) else None
    return read_end(run, state), run_about, queue


def show(
    name: RunArgument = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the state, scores, time and machines of a run."""
    run = find_run(store, name)
    status = read_status(run, state_of(run))
    events = sorted(run.events().read(), key=lambda event: event.time)
    if as_json:
        outputs = {name: sum(sizes) for name, sizes in output_sizes(run).items()}
        history = [asdict(event) for event in events]
        facts = asdict(about(run))
        print_json({**status_json(status), **facts, "outputs": outputs, "events": history})
    else:
        print_summary(console(), run, status, events)
    # Looking at a healthy run is a success, although the run is not finished.
    sys.exit(0 if status.state == "running" else EXIT_CODES[status.state])


def follow(name: RunArgument = None, store: StoreOption = None, quiet: QuietOption = False) -> None:
    """Follow a run until it ends, as `packtrain run` does. Ctrl-C detaches; the run keeps running."""
    sys.exit(follow_run(find_run(store, name), [], foreground=False, quiet=quiet))


def logs(
    name: RunArgument = None,
    store: StoreOption = None,
    keep: Annotated[bool, typer.Option("-f", "--follow", help="Keep printing until the run ends.")] = False,
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="N", min=0, help="Only the output of this worker. Default: all.")
    ] = None,
) -> None:
    """Print the output of all workers, or of one. With -f, also a recipe's steps and scores."""
    run = find_run(store, name)
    counts = (sum(member.workers for member in generation.members) for generation in run.generations())
    _check_rank(run, rank, max(counts, default=0))
    ranks = _print_logs(run, keep, rank)
    _check_rank(run, rank, max((writer + 1 for writer in ranks if writer is not None), default=0))
    if not ranks or (rank is not None and rank not in ranks):
        who = "the workers" if rank is None else f"rank {rank}"
        advice = " yet; use -f to wait for it" if run.result() is None else ""
        print(f"packtrain: {run.name}: no output from {who}{advice}", file=sys.stderr)


def _check_rank(run: Run, rank: int | None, count: int) -> None:
    """Refuse a rank that is not below the number of ranks; zero if that is not known."""
    if rank is not None and count and rank >= count:
        existing = "only rank 0" if count == 1 else f"ranks 0 to {count - 1}"
        raise NotFound(f"{run.name} has no rank {rank}; it has {existing}")


def _print_logs(run: Run, keep: bool, rank: int | None) -> set[int | None]:
    """Print what the workers wrote, until the run ends if `keep`; return the ranks that wrote something."""
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
                lines.append((line.time, line.labeled))
        for _, text in merge(lines, steps.lines(points.read()) if keep else (), key=lambda entry: entry[0]):
            print(text.replace("\n", "\\n"), flush=True)  # a line cannot pretend to be several
        if over:
            return ranks
        time.sleep(1.0)


def stop(name: RunArgument = None, store: StoreOption = None, yes: YesOption = False) -> None:
    """Stop a run after its workers commit a checkpoint. `packtrain resume` continues from it."""
    run = find_run(store, name)
    result, screen = run.result(), console()
    if result is not None:
        screen.say(f"{run.name} has already {result.status}")
        release(run, screen.say)  # nobody may have seen its end
        return
    if name is None and not is_started_here(run):
        # Whoever leaves out the name means their own run; the newest one may be anybody's.
        who = next((launch.client for launch in reversed(run.launches())), "nobody yet")
        reason = f"the newest run is {run.name}, which was started by {who}"
        confirm([f"{reason[0].upper()}{reason[1:]}."], f"Stop {run.name}?", reason, yes, "nothing was stopped")
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
