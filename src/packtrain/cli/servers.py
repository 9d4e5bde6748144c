"""Commands that open pages in a browser and serve models: ui, tensorboard, serve, unit."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import IO, Annotated

import typer

from packtrain.cli.common import StoreOption, check_exists, find_store, parsed, run_in
from packtrain.errors import Mistake, printable
from packtrain.export.model import read_model
from packtrain.export.serve import serve as serve_model
from packtrain.export.service import ServedModel, ServiceSettings
from packtrain.export.unit import UnitRequest
from packtrain.export.unit import unit as unit_of
from packtrain.fleet.remote import end_with_client
from packtrain.http_server import check_certificate, is_loopback, listening, url_of
from packtrain.run.run import Run
from packtrain.store import StoreError, default_store, open_store
from packtrain.units import parse_bytes, parse_seconds
from packtrain.web.server import DashboardServer

HostOption = Annotated[
    str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on; the default accepts this machine only.")
]
PortOption = Annotated[
    int, typer.Option("--port", metavar="PORT", min=0, max=65535, help="Port to listen on; 0 picks a free one.")
]
_TOKEN_BYTES = 24
_OUTAGE_SECONDS = 4.0

_FILE = re.compile(r"events\.out\.tfevents\.[^/]+")
_URL = re.compile(r"TensorBoard \S+ at (http://\S+)")
_MAX_FILE_BYTES = 1 << 30
_LOOK_SECONDS = 5.0  # as often as TensorBoard itself looks for new files
_END_SECONDS = 5.0

TOKEN_VARIABLE = "PACKTRAIN_SERVE_TOKEN"  # noqa: S105 - the name of a variable
_MIN_TOKEN, _MAX_TOKEN_BYTES = 16, 4096


def check_host(host: str, is_protected: bool, advice: str) -> None:
    """Refuse an address that other machines can reach, unless the server is protected."""
    if not is_protected and not is_loopback(host):
        raise Mistake(f"--host {printable(host)}: other machines may reach this address; {advice}")


def log_request(line: str) -> None:
    """Print a line of a server's log."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, for commands that have to clean up: the terminal, or files."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def ui(
    location: StoreOption = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8265,
    certificate: Annotated[
        Path | None,
        typer.Option("--certificate", metavar="FILE", help="TLS certificate (PEM); required to accept other machines."),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option("--key", metavar="FILE", help="The certificate's private key, unless in the same file."),
    ] = None,
    browse: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
) -> None:
    """Show all runs of a store in the browser, live."""
    if key is not None and certificate is None:
        raise Mistake("--key: needs --certificate")
    advice = "set --certificate and --key, or listen on 127.0.0.1 and use `ssh -L`"
    check_host(host, certificate is not None, advice)
    if certificate is not None:
        check_certificate(certificate, key)
    # Pages want an answer now: they show that a store is away, and ask again.
    store = open_store(location or default_store(), outage_seconds=_OUTAGE_SECONDS, answer_seconds=_OUTAGE_SECONDS)
    check_exists(store)  # a store that is not there is a mistake now, and an outage later
    listener = listening(host, port)
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    options = {} if certificate is None else {"ssl_certfile": str(certificate), "ssl_keyfile": key and str(key)}
    url = f"{url_of(listener, 'https' if certificate else 'http')}/{token}/"
    print(f"Dashboard of {store.url}: {url}  Ctrl-C stops it.", flush=True)
    with ExitStack() as pages:
        # Not before it has started: a signal would leave the file behind.
        started = partial(pages.enter_context, _opened(url) if browse else nullcontext())
        server = DashboardServer(store, listener, token, log_request, started, **options)
        server.run(sockets=[listener])
    if server.is_interrupted:
        raise KeyboardInterrupt


@contextmanager
def _opened(url: str) -> Iterator[None]:
    """Open the page if there is a screen to see it on.

    Every user of the machine sees the arguments of a browser, so it gets a private file that leads to the address.
    """
    if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or sys.platform == "darwin"):
        yield
        return
    with TemporaryDirectory(prefix="packtrain-ui-") as folder:  # of this user only, as is the file
        page = Path(folder) / "dashboard.html"
        page.touch(0o600)
        page.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={url}">', encoding="utf-8")
        Thread(target=webbrowser.open, args=(page.as_uri(),), daemon=True).start()  # some return when they are closed
        yield


def tensorboard(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="RUN", help="Runs to show together. Default: the newest run.")
    ] = None,
    location: StoreOption = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=0, max=65535, metavar="N", help="Port to listen on. Default: the first free one from 6006."
        ),
    ] = None,
) -> None:
    """Open TensorBoard on the event files of runs. Ctrl-C stops it."""
    if find_spec("tensorboard") is None:
        raise Mistake("TensorBoard is not installed; it comes with the extra `train`, or run `pip install tensorboard`")
    store = find_store(location)
    runs = [run_in(store, name) for name in dict.fromkeys(names)] if names else [run_in(store, None)]
    with termination_as_interrupt(), tempfile.TemporaryDirectory(prefix="packtrain-tensorboard-") as scratch:
        folder = EventFolder(runs, Path(scratch) / "runs")
        if not folder.update():
            together = ", ".join(run.name for run in runs)
            if all(run.job.recipe is None for run in runs):
                raise Mistake(f"{together}: no TensorBoard files; a program writes its own, where it likes")
            raise Mistake(
                f"{together}: no TensorBoard files yet; the first is written 30 s after the first step, or at the end"
            )
        try:
            _serve(folder, Path(scratch), port)
        except KeyboardInterrupt:
            print()
            raise


class EventFolder:
    """A folder with the event files of each run: links into a store that is a directory, copies from a bucket."""

    def __init__(self, runs: Sequence[Run], path: Path) -> None:
        self._runs, self.path = runs, path
        self._copied: set[str] = set()
        path.mkdir()

    def update(self) -> bool:
        """Take in what is new; True if there is anything to show."""
        for run in self._runs:
            if not run.store.is_directory:
                self._copy(run)
                continue
            target, link = Path(run.store.url) / run.key("tensorboard"), self.path / run.name
            if target.is_dir() and not link.is_symlink():
                link.symlink_to(target)
        return any(self.path.iterdir())

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
    """Run TensorBoard on the loopback address until it ends, and keep its folder up to date."""
    command = [sys.executable, "-P", "-m", "tensorboard.main", "--logdir", str(folder.path), "--host", "127.0.0.1"]
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
    away = ""
    try:
        output = TensorBoardOutput(process.stdout)
        while process.poll() is None:
            output.over.wait(_LOOK_SECONDS)
            try:
                folder.update()
                away = ""
            except StoreError as error:
                if not error.temporary:
                    raise
                if not away:
                    print(f"packtrain: {error}; showing what was there", file=sys.stderr, flush=True)
                away = str(error)
    finally:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    raise Mistake(f"TensorBoard: {output.last or f'exited with code {process.returncode}'}")


class TensorBoardOutput:
    """Reads what TensorBoard prints: its address is for the person, and its last line says why it ended."""

    def __init__(self, stream: IO[str]) -> None:
        self.last = ""
        self.over = threading.Event()
        threading.Thread(target=self._read, args=(stream,), name="tensorboard", daemon=True).start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            if address := _URL.search(line):
                print(f"TensorBoard: {address[1]}  Ctrl-C ends it.", flush=True)
            elif line.strip():
                self.last = line.strip().removeprefix("ERROR: ").removeprefix("TensorBoard ")
        self.over.set()


def serve(
    folder: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of an exported model.")],
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help=f"File with the token; needed for other machines. Default: ${TOKEN_VARIABLE}.",
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", min=1, max=1024, help="Cores to use. Default: all.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", metavar="N", min=1, max=1024, help="Maximum inputs per batch.")] = 64,
    queue: Annotated[
        int,
        typer.Option(
            "--queue",
            metavar="N",
            min=1,
            max=100_000,
            help="Maximum waiting inputs; more are rejected with status 429.",
        ),
    ] = 1024,
    max_bytes: Annotated[str, typer.Option("--max-bytes", metavar="SIZE", help="Maximum size of a request.")] = "20 MB",
    timeout: Annotated[str, typer.Option("--timeout", metavar="TIME", help="Maximum time of a request.")] = "30 s",
) -> None:
    """Serve an exported model over HTTP, with a page to try it."""
    token = _token(token_file)
    check_host(host, token is not None, f"set ${TOKEN_VARIABLE} or --token-file")
    size, seconds = parsed("--max-bytes", parse_bytes, max_bytes), parsed("--timeout", parse_seconds, timeout)
    settings = ServiceSettings(batch, queue, int(size), float(seconds))
    model = ServedModel.of(read_model(folder), threads)
    listener = listening(host, port)
    print(f"{model.name} ({model.form} {model.precision}): {url_of(listener)}  Ctrl-C stops it.", flush=True)
    if serve_model(model, settings, listener, token, log_request):
        raise KeyboardInterrupt  # it ends as every command does


def _token(file: Path | None) -> str | None:
    """Return the token that clients must send; None if there is none. It is never an argument: others can see those."""
    token, source = os.environ.get(TOKEN_VARIABLE), f"${TOKEN_VARIABLE}"
    if file is not None:
        source = f"--token-file {printable(str(file))}"
        try:
            with file.open("rb") as opened:
                token = opened.read(_MAX_TOKEN_BYTES).decode().strip()
            is_shared = bool(file.stat().st_mode & 0o004)
        except OSError as error:
            raise Mistake(f"{source}: cannot read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise Mistake(f"{source}: not valid UTF-8") from None
        if is_shared:
            print(f"{source}: every user of this machine can read it; run chmod 600", file=sys.stderr)
    if token is not None and (
        len(token) < _MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token
    ):
        raise Mistake(f"{source}: a token must have {_MIN_TOKEN} or more ASCII characters without spaces")
    return token


def unit(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of an exported model on this machine.")],
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Name of the unit, packtrain-NAME. Default: the folder's name."),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on; other than loopback needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="PORT", min=1, max=65535, help="Port to listen on.")] = 8000,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", metavar="FILE", help="File with the clients' token.")
    ] = None,
) -> None:
    """Print a systemd unit that serves a model on this machine."""
    print(unit_of(UnitRequest(model, name, host, port, token_file)), end="")
