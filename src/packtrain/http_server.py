"""The parts that all HTTP servers of Packtrain share: address, certificate, token, headers, log and limits.

They meet browsers, so every answer forbids what a page does not need, and requests that a page of another site makes a
browser send are refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import os
import resource
import socket
import ssl
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from packtrain.errors import Mistake, printable, quoted

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self';"
        " font-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
FILE_KINDS = {
    ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml", ".png": "image/png", ".txt": "text/plain; charset=utf-8", ".woff2": "font/woff2",
}  # fmt: skip
_SHARED_PAGE = Path(__file__).parent / "page"
CLIENT_LEFT = 499
"""The status in the log if the client left, as nginx has it."""
_LENGTHS = {b"content-length", b"transfer-encoding"}
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
_MAX_CONNECTIONS = 2000
_FILES_PER_PROCESS = 4096
_IDLE_SECONDS = 15
_SHUTDOWN_SECONDS = 5


def page_files(folder: Path) -> dict[str, Path]:
    """Return the files of a page by name, with those that all pages share."""
    return {path.name: path for page in (_SHARED_PAGE, folder) for path in page.iterdir() if path.suffix in FILE_KINDS}


def is_loopback(host: str) -> bool:
    """True if only this machine can reach the address."""
    with suppress(OSError):
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return bool(addresses) and all(ipaddress.ip_address(address[4][0]).is_loopback for address in addresses)
    return False


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens there; port 0 is any that is free."""
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=kind, backlog=2048)
    except OSError as error:
        # Python adds the address to the error of bind; that of a name that cannot be resolved has a negative number.
        fault = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror
        raise Mistake(f"cannot listen on {quoted(host)}, port {port}: {fault}") from None
    # Headers and body are two packets, and a client may wait 40 ms before it acknowledges the first. asyncio sets this
    # only for sockets whose protocol is stated.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
    return listener


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    name, number = listener.getsockname()[:2]
    return f"{scheme}://{f'[{name}]' if ':' in name else name}:{number}"


def check_certificate(certificate: Path, key: Path | None) -> None:
    """Raise a Mistake unless a server can use the certificate with that key; without one, both are in one file."""
    for option, file in (("--certificate", certificate), ("--key", key)):
        if file is not None and not file.is_file():
            raise Mistake(f"{option} {printable(str(file))}: no such file")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        fault = getattr(error, "reason", None) or getattr(error, "strerror", None) or "cannot be read"
        advice = "a PEM file with the certificate, and --key with its private key without a password, are needed"
        raise Mistake(f"--certificate {printable(str(certificate))}: {fault}; {advice}") from None


class Token:
    """The secret that clients know. Only its digest is kept; comparing takes the same time wherever it differs."""

    def __init__(self, text: str) -> None:
        self._digest = hashlib.sha256(text.encode()).digest()

    def is_sent_in(self, request: Request) -> bool:
        """True if the request has it as `Authorization: Bearer TOKEN`."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        return self.is_equal(token.strip()) and scheme.lower() == "bearer"

    def is_equal(self, token: str) -> bool:
        # Headers are Latin-1, which has every byte.
        digest = hashlib.sha256(token.encode("latin-1", errors="replace")).digest()
        return hmac.compare_digest(digest, self._digest)


def names_this_machine(host: str) -> bool:
    """True if the name in a Host header means this machine by itself, and not because some server of names says so."""
    with suppress(ValueError):
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or name.endswith(".localhost") or ipaddress.ip_address(name).is_loopback
    return False


def is_from_elsewhere(request: Request) -> bool:
    """True if a page of another site makes a browser send this."""
    origin = request.headers.get("origin")
    with suppress(ValueError):
        return origin is not None and urlsplit(origin).netloc != request.headers.get("host", "")
    return True


class SendAnswer:
    """The `send` of one request, which adds the headers of every answer and remembers the status."""

    def __init__(self, send: Send) -> None:
        self._send, self.status = send, CLIENT_LEFT

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            extra = [(name.lower().encode(), text.encode()) for name, text in _HEADERS.items()]
            message["headers"] = [*message.get("headers", ()), *extra]
        await self._send(message)


def log_line(scope: Scope, route: str, status: int, seconds: float, details: str = "") -> str:
    """Return the line for the log; `route` must be nothing that a client can choose freely."""
    method = scope["method"] if scope["method"] in _METHODS else "-"
    client = scope["client"][0] if scope.get("client") else "-"
    timestamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"{timestamp} {client} {method} {route} {status} {1000 * seconds:.1f} ms{details}"


def server_config(app: ASGIApp, **options: Any) -> uvicorn.Config:
    """Return uvicorn's settings: limits of connections and times, and nothing printed."""
    # As many open files, each connection being one, as this process may have.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _FILES_PER_PROCESS if hard == resource.RLIM_INFINITY else min(hard, _FILES_PER_PROCESS)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return uvicorn.Config(
        app,
        http=PatientProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        **options,
    )


class _StrictConnection(h11.Connection):
    """Refuses a request that states the length of its body in two ways: a proxy may have believed the other one."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request) and {name for name, _ in event.headers} >= _LENGTHS:
            raise h11.RemoteProtocolError("Content-Length and Transfer-Encoding")
        return event


class PatientProtocol(H11Protocol):
    """A connection that is closed if the head of a request does not arrive in time.

    Uvicorn's own timer runs only between requests: connections that say nothing, or a byte now and then, would
    otherwise stay until they are too many.
    """

    _impatience: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = _StrictConnection(h11.SERVER)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_watching()

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_watching()  # the endpoint limits the time of a request
        elif self._impatience is None:  # later bytes of the head do not extend its time
            self._impatience = self.loop.call_later(self.timeout_keep_alive, self._give_up)

    def _stop_watching(self) -> None:
        if self._impatience is not None:
            self._impatience.cancel()
            self._impatience = None

    def _give_up(self) -> None:
        self._impatience = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
