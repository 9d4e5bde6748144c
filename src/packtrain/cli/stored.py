"""Commands for what a store holds: rm, mv, tag, du, gc, cp, get."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from packtrain.cli.common import (
    JsonOption,
    RunArgument,
    StoreOption,
    YesOption,
    confirm,
    existing_store,
    find_run,
    find_store,
    hints,
    parsed,
    run_in,
)
from packtrain.cli.output import print_json
from packtrain.cli.screen import CopyBars, console
from packtrain.errors import Mistake, NotFound, harmless
from packtrain.fleet.down import check_has_no_machines
from packtrain.housekeeping import garbage
from packtrain.housekeeping.copies import copy_pack, copy_run
from packtrain.housekeeping.garbage import Unused
from packtrain.housekeeping.removal import clear_sweep, is_half_removed, remove_run, remove_sweep, rename_run
from packtrain.housekeeping.usage import OTHER, store_usage, usage_of
from packtrain.job.part import is_name
from packtrain.pack.manifest import pack_key
from packtrain.process import to_type
from packtrain.report import write_report
from packtrain.run.outputs import chosen, fetch_file, kept_files
from packtrain.run.run import Run
from packtrain.run.sweeps import Sweep
from packtrain.store import Store, is_key, open_store, store_option
from packtrain.sweep.drive import DriverSeat
from packtrain.units import counted, parse_seconds, show_bytes, show_seconds

ForceOption = Annotated[bool, typer.Option("--force", help="Skip the check for machines that the run may still rent.")]

_SHOWN = ("where", "kind", "name", "bytes", "age_seconds")
_MAX_LISTED = 20
_DIGEST = 12  # characters of a digest that are shown
_OLDER = "7d"
_MAX_TAG, _MAX_TAGS, _MAX_NOTE = 60, 50, 2000
_SEAT_POLL_SECONDS = 0.5
_SEAT_SECONDS = 15.0  # longer than a driver that was killed on another machine is taken for alive


def rm(
    names: Annotated[list[str], typer.Argument(metavar="RUN", help="Full names of runs, or of sweeps.")],
    location: StoreOption = None,
    yes: YesOption = False,
    force: ForceOption = False,
) -> None:
    """Remove runs with their checkpoints, logs and metrics. Packs stay; see `packtrain gc`."""
    store, check = existing_store(location), partial(check_has_no_machines, force=force)
    runs_and_sweeps = [_named(store, name) for name in dict.fromkeys(names)]
    runs = [run for run in runs_and_sweeps if isinstance(run, Run)]
    sweeps = [sweep for sweep in runs_and_sweeps if not isinstance(sweep, Run)]
    every_run = [*runs, *(sweep.run(trial) for sweep in sweeps for trial in sweep.plan.trials)]
    for run in every_run:  # before anything is removed
        if store.exists(run.key("job.json")):
            check(run)
    sizes = {run.name: usage_of(run.name, store.list(run.folder)).bytes for run in every_run}
    amount = f"{counted(len(every_run), 'run')} ({show_bytes(sum(sizes.values()))})"
    lines = [f"  {name}  {show_bytes(size)}" for name, size in sizes.items()]
    confirm(lines, f"Remove {amount}?", f"{amount} would be removed", yes, "nothing was removed")
    screen = console()
    for run in runs:
        remove_run(run, check)
        screen.say("Removed ", (run.name, "bold"), f" ({show_bytes(sizes[run.name])})")
    for sweep in sweeps:
        names_of_runs = _remove_sweep(sweep, check)
        size = show_bytes(sum(sizes[name] for name in names_of_runs))
        screen.say("Removed ", (sweep.name, "bold"), f" with {counted(len(names_of_runs), 'run')} ({size})")


def _named(store: Store, name: str) -> Run | Sweep:
    """Return the run or sweep of exactly that name: what is deleted is not looked for by half a name."""
    if not is_name(name) or store.exists(Run(store, name).key("job.json")) or is_half_removed(store, name):
        return Run(store, name)
    if store.exists(Sweep(store, name).key("plan.json")):
        return Sweep(store, name)
    newest = run_in(store, name)  # or an error that says what became of the name
    raise NotFound(f"no run {name!r} in {store.url}; its newest run is {newest.name}, and rm needs the full name")


def _remove_sweep(sweep: Sweep, check: Callable[[Run], None]) -> list[str]:
    """Remove a sweep as its driver, so that nobody starts runs of it meanwhile; return the names of its runs."""
    seat, deadline = DriverSeat(sweep), time.monotonic() + _SEAT_SECONDS
    while not seat.take():
        if time.monotonic() > deadline:
            who = "another process" if seat.other is None else seat.other.client
            raise Mistake(f"{sweep.name} is being driven by {who}; end that first (Ctrl-C)")
        time.sleep(_SEAT_POLL_SECONDS)
    try:
        names = remove_sweep(sweep, check)
    finally:
        seat.close()
    clear_sweep(sweep)  # after the last sign of life of its driver
    return names


def mv(
    name: Annotated[str, typer.Argument(metavar="RUN", help="Full name of a run.")],
    new_name: Annotated[str, typer.Argument(metavar="NEWNAME", help="A name that does not end in a number.")],
    store: StoreOption = None,
    force: ForceOption = False,
) -> None:
    """Rename a run that is not running. An interrupted rename continues."""
    renamed = rename_run(existing_store(store), name, new_name, partial(check_has_no_machines, force=force))
    if renamed.store.exists(renamed.key("report.html")):
        write_report(renamed)  # it has the name of the run in many places
    console().say(f"{name} is called ", (renamed.name, "bold"), " now")


def tag(
    name: RunArgument,
    words: Annotated[list[str] | None, typer.Argument(metavar="WORD", help="Tags to add.")] = None,
    remove: Annotated[
        list[str] | None, typer.Option("--remove", metavar="WORD", help="Tag to remove; repeatable.")
    ] = None,
    note: Annotated[str | None, typer.Option("--note", metavar="TEXT", help='Note on the run; "" removes it.')] = None,
    store: StoreOption = None,
) -> None:
    """Tag a run with words to find it by, or add a note to it."""
    run = find_run(store, name)
    notes = run.notes()
    if words or remove or note is not None:
        for word in words or ():
            if not 0 < len(word) <= _MAX_TAG or not word.isprintable() or any(map(str.isspace, word)):
                raise Mistake(f"{word!r}: a tag is one word of at most {_MAX_TAG} characters")
        tags = tuple(word for word in dict.fromkeys([*notes.tags, *(words or ())]) if word not in (remove or ()))
        if len(tags) > _MAX_TAGS:
            raise Mistake(f"{run.name} would have {len(tags)} tags; at most {_MAX_TAGS} are allowed")
        if note is not None and len(note) > _MAX_NOTE:
            raise Mistake(f"--note: longer than {_MAX_NOTE:,} characters")
        notes = replace(notes, tags=tags, text=notes.text if note is None else " ".join(note.split()))
        run.put_notes(notes)
    line = " ".join(notes.tags) or "no tags"
    console().say(f"{run.name}: {line}" + (f" ({notes.text})" if notes.text else ""))


def du(
    name: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Run name, or a job name for its newest run. Default: all.")
    ] = None,
    location: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how much space runs and packs take in a store."""
    store = existing_store(location)
    if name is None:
        _show_store_usage(store, as_json)
        return
    run = run_in(store, name)
    usage = usage_of(run.name, store.list(run.folder))
    pack = run.pack_name() if store.exists(run.key("pack.txt")) else None
    packed = 0 if pack is None else sum(entry.size for entry in store.list(f"packs/{pack}"))
    if as_json:
        print_json({**asdict(usage), "bytes": usage.bytes, "pack": pack and {"name": pack, "bytes": packed}})
        return
    rows = [*((folder, size) for folder, size in usage.parts.items() if size), (f"total of {run.name}", usage.bytes)]
    _print_sizes([*rows, (f"pack {pack}, which other runs may share", packed)] if pack else rows)


def _show_store_usage(store: Store, as_json: bool) -> None:
    usage = store_usage(store)
    if as_json:
        runs = [{**asdict(run), "bytes": run.bytes} for run in usage.runs]
        print_json({**asdict(usage), "runs": runs, "bytes": usage.bytes})
        return
    folders = ("checkpoints", "logs", "metrics")
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("run", overflow="fold")  # a name is there to be copied
    for column in ("total", *folders, OTHER):
        table.add_column(column, justify="right", no_wrap=True)
    for run in sorted(usage.runs, key=lambda run: -run.bytes):
        shown = [run.parts[folder] for folder in folders]
        sizes = [run.bytes, *shown, run.bytes - sum(shown)]
        table.add_row(Text(run.run, "bold"), *(show_bytes(size) if size else "" for size in sizes))
    if usage.runs:
        console().print(table)
    rows = [(f"pack {harmless(name)}", size) for name, size in sorted(usage.packs.items(), key=lambda pack: -pack[1])]
    rows += [("files that jobs name", usage.files)] if usage.files else []
    _print_sizes([*rows, ("sweeps and other records", usage.other), (f"total in {store.url}", usage.bytes)])


def _print_sizes(rows: Sequence[tuple[str, int]]) -> None:
    console().say_lines(f"{show_bytes(size):>9}  {label}" for label, size in rows)


def gc(
    location: StoreOption = None,
    older: Annotated[
        str, typer.Option("--older", metavar="TIME", help="Only what has been unused for at least TIME.")
    ] = _OLDER,
    delete: Annotated[bool, typer.Option("--delete", help="Delete it. Default: only list it.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List or delete what no run uses, in the store and the cache.

    These are packs and files that no run uses, what interrupted commands left behind, and downloads that this machine
    can repeat.
    """
    seconds = parsed("--older", parse_seconds, older)
    garbage.check_age(seconds)
    store, screen = existing_store(location), console()
    in_store, in_cache = garbage.unused_in_store(store, seconds), garbage.unused_here(seconds)
    if delete:
        in_store = garbage.delete_from_store(store, in_store, (lambda _: None) if as_json else screen.say)
        in_cache = garbage.delete_here(in_cache, seconds)
    if as_json:
        unused = [
            {key: value for key, value in asdict(entry).items() if key in _SHOWN} for entry in (*in_store, *in_cache)
        ]
        print_json(
            {"deleted" if delete else "unused": unused, "bytes": sum(entry.bytes for entry in (*in_store, *in_cache))}
        )
        return
    words = "Deleted" if delete else f"Unused for {older.strip()}"
    _print_unused(words, store.url, in_store)
    _print_unused(words, "the cache of this machine", in_cache)
    if not delete and (in_store or in_cache):
        again = to_type("gc", *store_option(store), *(["--older", older] if older != _OLDER else []), "--delete")
        screen.say(f"Nothing was deleted. To delete it: {again}")


def _print_unused(words: str, where: str, entries: Sequence[Unused]) -> None:
    screen = console()
    size = show_bytes(sum(entry.bytes for entry in entries)) if entries else "nothing"
    screen.say((f"{words}: {size}", "bold"), f" in {where}")
    for entry in sorted(entries, key=lambda entry: -entry.bytes)[:_MAX_LISTED]:
        name = entry.name if entry.path or "/" in entry.name else entry.name[:_DIGEST]
        screen.say(f"{show_bytes(entry.bytes):>9}  {entry.kind} {name}, {show_seconds(entry.age_seconds)} old")
    if len(entries) > _MAX_LISTED:
        screen.say(f"{'':>9}  and {len(entries) - _MAX_LISTED:,} more; --json lists all")


def cp(
    source: Annotated[
        str, typer.Argument(metavar="RUN|PACK", help="Name of a run, of a job for its newest run, or of a pack.")
    ],
    destination: Annotated[
        str, typer.Argument(metavar="STORE", help="A directory, or s3://, gs:// or az://bucket/prefix.")
    ],
    location: StoreOption = None,
) -> None:
    """Copy a run with its pack, or a pack, to another store. An interrupted copy continues."""
    screen, store = console(), find_store(location)
    run_or_pack = _run_or_pack(store, source)
    target, bars = open_store(destination, create=True), CopyBars(screen)
    name = run_or_pack if isinstance(run_or_pack, str) else run_or_pack.name
    try:
        if isinstance(run_or_pack, str):
            copied = copy_pack(store, run_or_pack, target, bars)
        else:
            copied = copy_run(run_or_pack, target, bars)
    except KeyboardInterrupt:
        print(f"The copy of {name} is not complete; the same command continues it.", file=sys.stderr)
        raise
    if copied.objects == 0:
        screen.say((name, "bold"), f" is complete in {target.url}: nothing was left to copy")
    else:
        already = f"; {counted(copied.present, 'object')} were there" if copied.present else ""
        amount = f"{counted(copied.objects, 'object')}, {show_bytes(copied.bytes)}{already}"
        screen.say("Copied ", (name, "bold"), f" to {target.url}: {amount}")
    if not isinstance(run_or_pack, str):
        screen.say_lines(hints(Run(target, name), "status", "resume"))


def get(
    name: Annotated[str, typer.Argument(metavar="RUN", help="Name of a run, or of a job for its newest run.")],
    paths: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATH", help="Files or folders, such as out/. Default: list them."),
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="Folder to write to. Default: one named after the run."),
    ] = None,
    store: StoreOption = None,
) -> None:
    """Download the outputs or the checkpoint of a run."""
    run, screen = find_run(store, name), console()
    files = kept_files(run)
    if not paths:
        width = max(map(len, files), default=0)
        screen.say_lines(f"{path:<{width}}  {show_bytes(file.size)}" for path, file in files.items())
        if not files:
            screen.say(f"{run.name} has neither outputs nor checkpoints yet")
        return
    chosen_files, target = chosen(run, files, paths), directory or Path(run.name)
    try:
        for path, file in chosen_files.items():
            fetch_file(run, path, file, target)
    except OSError as error:
        raise Mistake(f"{target}: cannot write there: {error.strerror}; choose another directory with -o") from error
    size = show_bytes(sum(file.size for file in chosen_files.values()))
    screen.say("Wrote ", (f"{target}/", "bold"), f" ({counted(len(chosen_files), 'file')}, {size})")


def _run_or_pack(store: Store, name: str) -> Run | str:
    pack = name.removeprefix("packs/")
    if is_key(pack) and "/" not in pack and store.exists(pack_key(pack, "manifest.json")):
        return pack
    if name != pack:
        raise NotFound(f"no pack {pack!r} in {store.url}")
    try:
        return run_in(store, name)
    except NotFound as error:
        raise NotFound(str(error).replace("no run", "no run or pack", 1)) from None
