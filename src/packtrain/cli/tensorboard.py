"""The command tensorboard: TensorBoard on the event files of runs, wherever their store is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from packtrain.cli.common import StoreOption, find_store, run_in, termination_as_interrupt

if TYPE_CHECKING:
    from packtrain.run.run import Run

_FILE = re.compile(r"events\.out\.tfevents\.[^/]+")
_URL = re.compile(r"TensorBoard \S+ at (http://\S+)")
_MAX_FILE_BYTES = 1 << 30
_LOOK_SECONDS = 5.0  # as often as TensorBoard itself looks for new files
_END_SECONDS = 5.0


def register(app: typer.Typer) -> None:
    app.command()(tensorboard)


def tensorboard(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="RUN", help="Runs to show together. Default: the newest run.")
    ] = None,
    store: StoreOption = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=0, max=65535, metavar="N", help="Port to listen on. Default: the first free one from 6006."
        ),
    ] = None,
) -> None:
    """Open TensorBoard on the event files of runs. Ctrl-C stops it."""
    from importlib.util import find_spec

    from packtrain.errors import Mistake

    if find_spec("tensorboard") is None:
        raise Mistake("TensorBoard is not installed; it comes with the extra `train`, or run `pip install tensorboard`")
    found = find_store(store)
    runs = [run_in(found, name) for name in dict.fromkeys(names)] if names else [run_in(found, None)]
    with termination_as_interrupt(), tempfile.TemporaryDirectory(prefix="packtrain-tensorboard-") as scratch:
        folder = EventFolder(runs, Path(scratch) / "runs")
        if not folder.update():
            raise Mistake(_why_no_files(runs))
        try:
            _serve(folder, Path(scratch), port)
        except KeyboardInterrupt:
            print()
            raise


def _why_no_files(runs: Sequence[Run]) -> str:
    names = ", ".join(run.name for run in runs)
    if all(run.job.recipe is None for run in runs):
        return f"{names}: no TensorBoard files; a program writes its own, where it likes"
    return f"{names}: no TensorBoard files yet; the first is written 30 s after the first step, or at the end"


class EventFolder:
    """A folder with the event files of each run: links into a store that is a directory, copies from a bucket."""

    def __init__(self, runs: Sequence[Run], path: Path) -> None:
        self._runs, self.path = runs, path
        self._copied: set[str] = set()
        path.mkdir()

    def update(self) -> bool:
        """Take in what is new; True if there is anything to show."""
        for run in self._runs:
            if run.store.is_directory:
                self._link(run)
            else:
                self._copy(run)
        return any(self.path.iterdir())

    def _link(self, run: Run) -> None:
        target, link = Path(run.store.url) / run.key("tensorboard"), self.path / run.name
        if target.is_dir() and not link.is_symlink():
            link.symlink_to(target)

    def _copy(self, run: Run) -> None:
        prefix = run.key("tensorboard/")
        for entry in run.store.list(prefix):
            name = entry.key.removeprefix(prefix)
            # A file is complete when it is there, and never changes: each is fetched once.
            if entry.key not in self._copied and _FILE.fullmatch(name):
                (self.path / run.name).mkdir(exist_ok=True)
                run.store.get_file(entry.key, self.path / run.name / name, _MAX_FILE_BYTES)
                self._copied.add(entry.key)


def _serve(folder: EventFolder, scratch: Path, port: int | None) -> None:
    """Run TensorBoard until it ends, and keep its folder up to date."""
    from packtrain.errors import Mistake
    from packtrain.store import StoreError

    with _started(folder.path, scratch, port) as (process, output):
        away = ""
        while process.poll() is None:
            output.wait(_LOOK_SECONDS)
            try:
                folder.update()
                away = ""
            except StoreError as error:
                if not error.temporary:
                    raise
                if not away:
                    print(f"packtrain: {error}; showing what was there", file=sys.stderr, flush=True)
                away = str(error)
    raise Mistake(f"TensorBoard: {output.last or f'exited with code {process.returncode}'}")


@contextmanager
def _started(
    logdir: Path, scratch: Path, port: int | None
) -> Iterator[tuple[subprocess.Popen[str], TensorBoardOutput]]:
    """Start TensorBoard on the loopback address, and end it on the way out."""
    from packtrain.fleet.remote import end_with_client

    command = [sys.executable, "-P", "-m", "tensorboard.main", "--logdir", str(logdir), "--host", "127.0.0.1"]
    command += [] if port is None else ["--port", str(port)]
    # It notes its address in the directory for temporary files, for others to find it: that goes with the rest.
    environment: Mapping[str, str] = {**os.environ, "TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        env=environment,
        start_new_session=True,  # Ctrl-C must reach this process alone, which ends it
        preexec_fn=end_with_client,  # noqa: PLW1509 - prctl alone
    )
    assert process.stdout is not None
    try:
        yield process, TensorBoardOutput(process.stdout)
    finally:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class TensorBoardOutput:
    """Reads what TensorBoard prints: its address is for the person, and its last line says why it ended."""

    def __init__(self, stream: IO[str]) -> None:
        self.last = ""
        self._over = threading.Event()
        threading.Thread(target=self._read, args=(stream,), name="tensorboard", daemon=True).start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            if found := _URL.search(line):
                print(f"TensorBoard: {found[1]}  Ctrl-C ends it.", flush=True)
            elif line.strip():
                self.last = line.strip().removeprefix("ERROR: ").removeprefix("TensorBoard ")
        self._over.set()

    def wait(self, seconds: float) -> None:
        """Wait that long, or until it has ended."""
        self._over.wait(seconds)
