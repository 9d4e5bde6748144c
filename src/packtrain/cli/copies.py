"""Commands that bring things elsewhere: cp a run or a pack to another store, get files of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packtrain.cli.common import StoreOption, console, find_run, find_store, hints, run_in

if TYPE_CHECKING:
    from packtrain.cli.screen import Screen
    from packtrain.run.run import Run
    from packtrain.store import Store


def register(app: typer.Typer) -> None:
    app.command()(cp)
    app.command()(get)


def cp(
    source: Annotated[
        str, typer.Argument(metavar="RUN|PACK", help="Name of a run, of a job for its newest run, or of a pack.")
    ],
    destination: Annotated[
        str, typer.Argument(metavar="STORE", help="A directory, or s3://, gs:// or az://bucket/prefix.")
    ],
    store: StoreOption = None,
) -> None:
    """Copy a run with its pack, or a pack, to another store. An interrupted copy continues."""
    from packtrain.housekeeping.copies import copy_pack, copy_run
    from packtrain.run.run import Run
    from packtrain.store import open_store
    from packtrain.units import counted, show_bytes

    screen, here = console(), find_store(store)
    found = _find(here, source)
    there = open_store(destination, create=True)
    bars = CopyBars(screen)
    name = found if isinstance(found, str) else found.name
    try:
        done = copy_pack(here, found, there, bars) if isinstance(found, str) else copy_run(found, there, bars)
    except KeyboardInterrupt:
        print(f"The copy of {name} is not complete; the same command continues it.", file=sys.stderr)
        raise
    if done.objects == 0:
        screen.say((name, "bold"), f" is complete in {there.url}: nothing was left to copy")
    else:
        already = f"; {counted(done.present, 'object')} were there" if done.present else ""
        copied = f"{counted(done.objects, 'object')}, {show_bytes(done.bytes)}{already}"
        screen.say("Copied ", (name, "bold"), f" to {there.url}: {copied}")
    if not isinstance(found, str):
        screen.say_lines(hints(Run(there, name), "status", "resume"))


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
    from packtrain.errors import Mistake
    from packtrain.run.outputs import chosen, fetch_file, kept_files
    from packtrain.units import counted, show_bytes

    run, screen = find_run(store, name), console()
    files = kept_files(run)
    if not paths:
        width = max(map(len, files), default=0)
        screen.say_lines(f"{one:<{width}}  {show_bytes(file.size)}" for one, file in files.items())
        if not files:
            screen.say(f"{run.name} has neither outputs nor checkpoints yet")
        return
    wanted, target = chosen(run, files, paths), directory or Path(run.name)
    try:
        for one, file in wanted.items():
            fetch_file(run, one, file, target)
    except OSError as error:
        raise Mistake(f"{target}: cannot write there: {error.strerror}; choose another directory with -o") from error
    size = show_bytes(sum(file.size for file in wanted.values()))
    screen.say("Wrote ", (f"{target}/", "bold"), f" ({counted(len(wanted), 'file')}, {size})")


def _find(store: Store, name: str) -> Run | str:
    """Return the run of that name, or else the name of the pack."""
    from packtrain.errors import NotFound
    from packtrain.pack.manifest import pack_key
    from packtrain.store import is_key

    pack = name.removeprefix("packs/")
    if is_key(pack) and "/" not in pack and store.exists(pack_key(pack, "manifest.json")):
        return pack
    if name != pack:
        raise NotFound(f"no pack {pack!r} in {store.url}")
    try:
        return run_in(store, name)
    except NotFound as error:
        raise NotFound(str(error).replace("no run", "no run or pack", 1)) from None


class CopyBars:
    """A bar of bytes; where there is no terminal, only the lines are printed."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    def say(self, text: str) -> None:
        self._screen.say(f"  {text}")

    @contextmanager
    def track(self, what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (
            TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
            TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=self._screen, transient=True, disable=not self._screen.is_terminal) as bars:
            task = bars.add_task(what, total=total_bytes)
            yield lambda count: bars.advance(task, count)
