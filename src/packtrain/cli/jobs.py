"""Commands that start from a job: init, schema, pack, run, resume."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from packtrain.cli.common import (
    DropsOption,
    JobArgument,
    QuietOption,
    RunArgument,
    SetOption,
    StoreOption,
    TrustOption,
    ask,
    find_run,
    hints,
    trusting,
    write_output,
)
from packtrain.cli.follow import follow
from packtrain.cli.output import json_text, unread_output
from packtrain.cli.screen import ProgressBars, console, say_detail
from packtrain.cli.template import TEMPLATES, InitRequest, current_schema, write_job
from packtrain.data.pack import Pack
from packtrain.errors import Mistake
from packtrain.fleet import StartedNode, fleet_of, release
from packtrain.job.changes import changed_job
from packtrain.job.kinds import FleetKind
from packtrain.job.load import LoadedJob
from packtrain.launch.check import check, pack_data
from packtrain.launch.create import create
from packtrain.launch.load import load
from packtrain.launch.parent import read_name
from packtrain.launch.resume import AlreadyComplete, edited_since, reopen
from packtrain.launch.start import dry_run, manifests, start, wait_until_joined
from packtrain.observe.follower import RunNews
from packtrain.pack.manifest import pack_key
from packtrain.pack.shard import Columns
from packtrain.pack.workers import Dask, Processes
from packtrain.plan.estimate import lines_of
from packtrain.process import to_type
from packtrain.report.pack_page import print_stats, sample_page
from packtrain.report.pack_stats import stats_of
from packtrain.run.liveness import state_of
from packtrain.run.run import Run
from packtrain.store import open_store
from packtrain.system import cache_directory
from packtrain.units import show_bytes

ForegroundOption = Annotated[bool, typer.Option("--foreground", help="Tie the run to this command; Ctrl-C stops it.")]
DetachOption = Annotated[bool, typer.Option("--detach", help="Start the run and return.")]


def init(
    kind: Annotated[
        str | None, typer.Argument(metavar="KIND", help="A recipe, own, or program. Default: list the kinds.")
    ] = None,
    path: Annotated[str | None, typer.Argument(metavar="JOB", help="File to write. Default: KIND.yaml.")] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name of the job. Default: the file's name.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="PATH",
            help="Training data, or a folder with train, valid and test; repeatable. Default: generate toy data.",
        ),
    ] = None,
    valid: Annotated[
        list[str] | None, typer.Option("--valid", metavar="PATH", help="Validation data; repeatable.")
    ] = None,
) -> None:
    """Write a commented job file, with toy data to try it on."""
    screen = console()
    if kind is None:
        for word, template in TEMPLATES.items():
            screen.say((f"packtrain init {word:<10}", "bold"), f" {template.about}")
        return
    job = Path(path or f"{kind}.yaml")
    written = write_job(InitRequest(kind, job, name, data or (), valid or ()), ask)
    *first, last = written.files
    screen.say(f"Wrote {', '.join(first)}{' and ' if first else ''}{last}")
    screen.say_lines(f"  data:    {line}" for line in written.data)
    screen.say_lines(f"  note:    {line}" for line in written.notes)
    screen.say("  train:   ", (to_type("run", str(job)), "bold"))
    if written.example:
        screen.say("  predict: ", (f"{to_type('predict')} {written.example}", "bold"))


def schema(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="File to write. Default: print it.")
    ] = None,
) -> None:
    """Print the JSON Schema of the job file, for editors."""
    text = json_text(current_schema())
    if output is None:
        print(text)
    else:
        write_output(output, f"{text}\n", option="")


def pack(
    job: JobArgument,
    overrides: SetOption = None,
    processes: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Worker processes. Default: one per core.")
    ] = None,
    dask: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Pack on a Dask cluster, e.g. tcp://host:8786.")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print statistics and write a page of samples.")] = False,
    allow_drops: DropsOption = False,
) -> None:
    """Pack a job's raw data into its store, unless the pack exists."""
    loaded = load(job, overrides or (), allow_drops)
    store, screen = open_store(loaded.job.store, create=True), console()
    workers = Dask(dask) if dask else Processes(processes)
    manifest = pack_data(loaded, store, ProgressBars(screen), workers)
    if manifest is None:
        screen.say("Nothing to pack: the job runs a program.")
        return
    screen.say("Packed ", (manifest.name, "bold"))
    if stats:
        data = Pack(store, manifest.name, cache_directory() / "packs")

        def columns(split: str) -> Iterator[Columns]:
            return data.split(split).shards()

        vocabularies = [data.vocabulary] if manifest.vocabulary else []
        vocabularies += [data.target_vocabulary] if manifest.target_vocabulary else []
        statistics = stats_of(manifest, columns, [len(vocabulary) for vocabulary in vocabularies])
        print_stats(screen, statistics)
        key = pack_key(manifest.name, "samples.html")
        store.put(key, sample_page(statistics, columns, vocabularies).encode())
        screen.say(f"samples: {store.url}/{key}")


def run(
    job: JobArgument,
    overrides: SetOption = None,
    foreground: ForegroundOption = False,
    detach: DetachOption = False,
    quiet: QuietOption = False,
    allow_drops: DropsOption = False,
    parent: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN[:STEP]",
            help="Start from a checkpoint of a run: a fork if the job is the same, else from its weights.",
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="With --from: use only the weights, even if the job is the same.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the code that the run would store and the commands to start it.")
    ] = False,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="job|jobset|trainjob",
            help="Create the run, but print its Kubernetes manifests instead of starting it.",
        ),
    ] = None,
) -> None:
    """Pack if needed, start a run, and follow it. Ctrl-C detaches; the run keeps running."""
    _check_modes(foreground, detach)
    if fresh and parent is None:
        raise Mistake("--fresh: needs --from RUN")
    name = None if parent is None else read_name(parent, "--from ", fresh)
    loaded = load(job, overrides or (), allow_drops)
    # Again with the fleet, and before packing, which may take hours.
    _check_modes(foreground, detach, loaded.job.fleet.kind)
    if form is not None:
        # Nothing else on standard output: `kubectl apply -f -` reads it.
        print(manifests(loaded, form, None if dry_run else ProgressBars(console(sys.stderr)), name), end="")
        return
    if dry_run:
        if name is not None:
            console().say(f"start from {parent}")
        _print_dry_run(loaded)
        return
    with unread_output():
        new_run = check(loaded, ProgressBars(console()), name)
        created = create(new_run, lambda label, line: console().say((label, "dim"), f"  {line}"))
        forecast = created.forecast()  # from what is known without measuring: nothing waits for it
        for line in lines_of(forecast, created.job) if forecast is not None else ():
            console().say_row("plan", "dim", line)
        started = _start(created, foreground, detach)
    _follow(created, started, foreground, detach, quiet)


def resume(
    name: RunArgument = None,
    store: StoreOption = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            help="Change fleet, budget, train.duration, train.exact, train.patience, train.profile, checkpoint,"
            " evaluate, data.stage or report; repeatable.",
        ),
    ] = None,
    foreground: ForegroundOption = False,
    detach: DetachOption = False,
    quiet: QuietOption = False,
    trust_code: TrustOption = False,
) -> None:
    """Resume a run from its last checkpoint. With --set: on another fleet, or for longer."""
    _check_modes(foreground, detach)
    run = find_run(store, name)
    # Watches the leases for a few seconds if need be: starting nodes beside running ones must not happen by mistake.
    state = state_of(run)
    if state == "finished" and not overrides and run.is_complete():
        _say_complete(run)
        return
    if state == "running" and overrides:
        raise Mistake(f"{run.name} is running; stop it first (`{run.command('stop')}`), then resume it")
    if state == "running":
        # A second set of nodes would compete with the first, and --foreground cannot tie nodes that already run.
        if detach:
            console().say_lines([f"{run.name} is already running", *hints(run, "follow", "status", "stop")])
            return
        console().say(f"{run.name} is already running; following it")
        sys.exit(follow(run, [], foreground=False, quiet=quiet))
    job = changed_job(run.job_data, overrides)[0] if overrides else run.job
    _check_modes(foreground, detach, job.fleet.kind)
    edited = edited_since(run, overrides or ())
    try:
        with unread_output():
            if edited is not None:
                console().say(("note", "dim"), f"  {edited}")
            reopened = reopen(run, trusting(trust_code), say_detail, overrides or ())
            started = _start(reopened, foreground, detach)
    except AlreadyComplete:  # its machines had left, and its result came a moment later
        _say_complete(run)
        return
    _follow(reopened, started, foreground, detach, quiet)


def _say_complete(run: Run) -> None:
    console().say(f"{run.name} is already complete")
    release(run, console().say)  # nobody may have seen its end


def _print_dry_run(loaded: LoadedJob) -> None:
    preview, screen = dry_run(loaded), console()
    width = max(map(len, [*preview.code.sizes, *preview.code.left_out]), default=0)
    screen.say(f"code that the run stores ({show_bytes(sum(preview.code.sizes.values()))})")
    screen.say_lines(f"  {name:<{width}}  {show_bytes(size)}" for name, size in preview.code.sizes.items())
    if preview.code.left_out:
        screen.say("left out")
        screen.say_lines(f"  {name:<{width}}  {why}" for name, why in preview.code.left_out.items())
    if preview.note is not None:
        screen.say(("note", "dim"), f"  {preview.note}")
    if loaded.job.program is not None:
        screen.say("program")
        screen.say(f"  {loaded.job.program.in_words}")
    for plan in preview.plans:
        variables = f" with the variables {', '.join(plan.variables)}" if plan.variables else ""
        screen.say(f"start on {plan.machine}{variables}")
        screen.say_lines(plan.in_shell().splitlines())  # as it is, to be copied


def _check_modes(foreground: bool, detach: bool, fleet: FleetKind | None = None) -> None:
    """Refuse options that exclude each other, and --foreground on a fleet that cannot do it, before any work."""
    if foreground and detach:
        raise Mistake("--foreground and --detach exclude each other; use one of them")
    fault = fleet_of(fleet).no_foreground if foreground and fleet is not None else None
    if fault is not None:
        raise Mistake(fault)


def _start(run: Run, foreground: bool, detach: bool) -> tuple[RunNews, list[StartedNode]]:
    news = RunNews(run)  # before anything is started: nothing new must be taken for history
    nodes = start(run, foreground, say_detail)
    if detach:
        wait_until_joined(run, nodes)
    return news, nodes


def _follow(run: Run, started: tuple[RunNews, list[StartedNode]], foreground: bool, detach: bool, quiet: bool) -> None:
    if detach:
        console().say("Started ", (run.name, "bold"), f" in {run.store.url}")
        console().say_lines(hints(run, "follow", "status", "stop"))
        return
    news, nodes = started
    sys.exit(follow(run, nodes, foreground, news, quiet))
