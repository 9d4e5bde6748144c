"""The command that shows runs in a browser: ui."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Annotated

import typer

from packtrain.cli.common import (
    HostOption,
    PortOption,
    StoreOption,
    check_exists,
    check_host,
    log_request,
)
from packtrain.errors import Mistake

_TOKEN_BYTES = 24
_OUTAGE_SECONDS = 4.0


def register(app: typer.Typer) -> None:
    app.command()(ui)


def ui(
    store: StoreOption = None,
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
    import secrets

    from packtrain.http_server import check_certificate, listening, url_of
    from packtrain.store import default_store, open_store
    from packtrain.web.server import DashboardServer

    if key is not None and certificate is None:
        raise Mistake("--key: needs --certificate")
    advice = "set --certificate and --key, or listen on 127.0.0.1 and use `ssh -L`"
    check_host(host, certificate is not None, advice)
    if certificate is not None:
        check_certificate(certificate, key)
    # Pages want an answer now: they show that a store is away, and ask again.
    found = open_store(store or default_store(), outage_seconds=_OUTAGE_SECONDS, answer_seconds=_OUTAGE_SECONDS)
    check_exists(found)  # a store that is not there is a mistake now, and an outage later
    listener = listening(host, port)
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    options = {} if certificate is None else {"ssl_certfile": str(certificate), "ssl_keyfile": key and str(key)}
    url = f"{url_of(listener, 'https' if certificate else 'http')}/{token}/"
    print(f"Dashboard of {found.url}: {url}  Ctrl-C stops it.", flush=True)
    with ExitStack() as pages:
        # Not before it has started: a signal would leave the file behind.
        started = partial(pages.enter_context, _opened(url) if browse else nullcontext())
        server = DashboardServer(found, listener, token, log_request, started, **options)
        server.run(sockets=[listener])
    if server.is_interrupted:
        raise KeyboardInterrupt


@contextmanager
def _opened(url: str) -> Iterator[None]:
    """Open the page if there is a screen to see it on.

    Every user of the machine sees the arguments of a browser, so it gets a private file that leads to the address.
    """
    import webbrowser

    if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or sys.platform == "darwin"):
        yield
        return
    with TemporaryDirectory(prefix="packtrain-ui-") as folder:  # of this user only, as is the file
        page = Path(folder) / "dashboard.html"
        page.touch(0o600)
        page.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={url}">', encoding="utf-8")
        Thread(target=webbrowser.open, args=(page.as_uri(),), daemon=True).start()  # some return when they are closed
        yield
