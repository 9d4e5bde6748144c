"""Commands for people who look at runs: the dashboard, and tags to find runs by."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from packtrain.cli.common import (
    HostOption,
    PortOption,
    RunArgument,
    StoreOption,
    check_host,
    console,
    default_store,
    find_run,
    log_request,
    needing,
)
from packtrain.errors import Mistake

_TOKEN_BYTES = 24
_OUTAGE_SECONDS = 4.0
_MAX_TAG, _MAX_TAGS, _MAX_NOTE = 60, 50, 2000


def register(app: typer.Typer) -> None:
    app.command()(ui)
    app.command()(tag)


def ui(
    store: StoreOption = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8265,
    certificate: Annotated[
        Path | None,
        typer.Option("--certificate", metavar="FILE", help="TLS certificate, as PEM; needed for other machines."),
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--key", metavar="FILE", help="Private key of the certificate, if not in its file.")
    ] = None,
    browse: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
) -> None:
    """Show all runs of a store in the browser, live."""
    with needing("ui", "ui"):
        from packtrain.http_server import check_certificate, listening, url_of
        from packtrain.web.server import DashboardServer
    import secrets

    from packtrain.store import open_store

    if key is not None and certificate is None:
        raise Mistake("--key: needs --certificate")
    advice = "set --certificate and --key, or listen on 127.0.0.1 and use `ssh -L`"
    check_host(host, certificate is not None, advice)
    if certificate is not None:
        check_certificate(certificate, key)
    # Pages want an answer now: they show that a store is away, and ask again.
    found = open_store(store or default_store(), outage_seconds=_OUTAGE_SECONDS, answer_seconds=_OUTAGE_SECONDS)
    found.folders("runs/")  # a store that is not there is a mistake now, and an outage later
    listener = listening(host, port)
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    options = {} if certificate is None else {"ssl_certfile": str(certificate), "ssl_keyfile": key and str(key)}
    server = DashboardServer(found, listener, token, log_request, **options)
    url = f"{url_of(listener, 'https' if certificate else 'http')}/?token={token}"
    print(f"Dashboard of {found.url}: {url}  Ctrl-C stops it.", flush=True)
    if browse:
        _open(url)
    server.run(sockets=[listener])


def _open(url: str) -> None:
    """Open the page if there is a screen to see it on."""
    import webbrowser

    if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or sys.platform == "darwin":
        webbrowser.open(url)


def tag(
    name: RunArgument,
    words: Annotated[list[str] | None, typer.Argument(metavar="WORD...", help="Tags to add.")] = None,
    remove: Annotated[
        list[str] | None, typer.Option("--remove", metavar="WORD", help="Tag to remove; repeatable.")
    ] = None,
    note: Annotated[str | None, typer.Option("--note", metavar="TEXT", help="A sentence about the run.")] = None,
    store: StoreOption = None,
) -> None:
    """Tag a run with words to find it by, or add a note to it."""
    from dataclasses import replace

    run = find_run(store, name)
    notes = run.notes()
    if words or remove or note is not None:
        wrong = next((word for word in words or () if not _is_tag(word)), None)
        if wrong is not None:
            raise Mistake(f"{wrong!r}: a tag is one word of at most {_MAX_TAG} characters")
        kept = [one for one in dict.fromkeys([*notes.tags, *(words or ())]) if one not in (remove or ())]
        if len(kept) > _MAX_TAGS:
            raise Mistake(f"{run.name} would have {len(kept)} tags; at most {_MAX_TAGS} are allowed")
        if note is not None and len(note) > _MAX_NOTE:
            raise Mistake(f"--note: longer than {_MAX_NOTE:,} characters")
        notes = replace(notes, tags=tuple(kept), text=notes.text if note is None else " ".join(note.split()))
        run.put_notes(notes)
    line = " ".join(notes.tags) or "no tags"
    console().say(f"{run.name}: {line}" + (f" ({notes.text})" if notes.text else ""))


def _is_tag(word: str) -> bool:
    return 0 < len(word) <= _MAX_TAG and word.isprintable() and not any(one.isspace() for one in word)
