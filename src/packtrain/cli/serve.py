"""The command that serves a trained model over HTTP."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packtrain.cli.common import HostOption, PortOption, check_host, log_request
from packtrain.errors import Mistake, printable

if TYPE_CHECKING:
    from collections.abc import Callable

TOKEN_VARIABLE = "PACKTRAIN_SERVE_TOKEN"  # noqa: S105 - the name of a variable
_MIN_TOKEN, _MAX_TOKEN_BYTES = 16, 4096


def register(app: typer.Typer) -> None:
    app.command()(serve)


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
    from packtrain.export.model import read_model
    from packtrain.export.serve import serve as serve_model
    from packtrain.export.service import ServedModel, ServiceSettings
    from packtrain.http_server import listening, url_of
    from packtrain.units import parse_bytes, parse_seconds

    token = _token(token_file)
    check_host(host, token is not None, f"set ${TOKEN_VARIABLE} or --token-file")
    size, seconds = _parsed("--max-bytes", parse_bytes, max_bytes), _parsed("--timeout", parse_seconds, timeout)
    settings = ServiceSettings(batch, queue, int(size), float(seconds))
    model = ServedModel.of(read_model(folder), threads)
    listener = listening(host, port)
    print(f"{model.name} ({model.form} {model.precision}): {url_of(listener)}  Ctrl-C stops it.", flush=True)
    if serve_model(model, settings, listener, token, log_request):
        raise KeyboardInterrupt  # it ends as every command does


def _parsed(option: str, parse: Callable[[str], float], text: str) -> float:
    try:
        return parse(text)
    except ValueError as error:
        raise Mistake(f"{option}: {error}") from None


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
