"""The dashboard's HTTP server. It answers GET only and changes nothing.

The way of a request:

    door       host, origin, method and token
    query      checked: names, numbers and choices (query.py)
    answer     in a thread, from readers that know what was read before (endpoints.py, reader.py, board.py)
    news       meanwhile, one thread looks at the store and tells open pages what has changed (news.py)
"""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import Message, Receive, Scope, Send

from packtrain.errors import quoted
from packtrain.http_server import (
    CLIENT_LEFT,
    HEADERS,
    Token,
    is_from_elsewhere,
    known_route,
    log_line,
    names_this_machine,
    server_config,
    with_headers,
)
from packtrain.store import Store
from packtrain.web.board import Board
from packtrain.web.endpoints import DashboardEndpoints, error_answer
from packtrain.web.news import News
from packtrain.web.query import RefusedRequest

_COOKIE = "packtrain-ui"
_ROUTES = (
    "/", "/assets/", "/api/runs", "/api/runs/", "/api/series", "/api/bands", "/api/machines", "/api/logs",
    "/api/samples", "/api/picture", "/api/difference", "/api/sweeps", "/api/sweeps/", "/api/stream",
)  # fmt: skip


class DashboardServer(uvicorn.Server):
    """Uvicorn, which ends at the first signal: all that it interrupts are streams of news."""

    def __init__(
        self, store: Store, listener: socket.socket, token: str, log: Callable[[str], None], **options: Any
    ) -> None:
        self.news, self.is_interrupted = News(Board(store)), False
        is_local = names_this_machine(_named(listener))
        door = DashboardDoor(
            DashboardEndpoints(store, self.news), Token(token), is_local, "ssl_certfile" in options, log
        )
        super().__init__(server_config(door, **options))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
        self.is_interrupted = sig == signal.SIGINT
        # Not kept in uvicorn's list of signals: it would raise them again at the end, and the exit code would not be 0.
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.news.start(asyncio.get_running_loop())
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.news.close()  # first: streams would keep the server from ending
        await super().shutdown(sockets)


def _named(listener: socket.socket) -> str:
    name = listener.getsockname()[0]
    return f"[{name}]" if ":" in name else name


class DashboardDoor:
    """Every request passes it, in and out."""

    def __init__(
        self, endpoints: DashboardEndpoints, token: Token, is_local: bool, is_secure: bool, log: Callable[[str], None]
    ) -> None:
        self._app, self._token, self._log = endpoints.application(), token, log
        self._is_local, self._is_secure = is_local, is_secure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, status = time.perf_counter(), CLIENT_LEFT

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        answer = with_headers(send_on, HEADERS)
        try:
            entered = self._admit(Request(scope))
            await (self._app if entered is None else entered)(scope, receive, answer)
        except RefusedRequest as refused:
            await error_answer(refused.status, str(refused))(scope, receive, answer)
        finally:
            if status >= 400 and status != CLIENT_LEFT:  # a page asks all the time; a person reads the log
                route = known_route(scope["path"], _ROUTES)
                self._log(log_line(scope, route, status, time.perf_counter() - started))

    def _admit(self, request: Request) -> Response | None:
        """Return the answer to a request that brings the token in its address; refuse those that may not enter."""
        host = request.headers.get("host", "")
        # A name that leads here only today (DNS rebinding) is not the address that the page was opened with.
        if self._is_local and not names_this_machine(host):
            raise RefusedRequest(403, f"the host {quoted(host)} is not this machine; use localhost")
        if is_from_elsewhere(request):
            raise RefusedRequest(403, "requests from pages of other sites are refused")
        if request.method not in ("GET", "HEAD"):
            raise RefusedRequest(405, "this server only answers GET; it changes nothing")
        given = request.query_params.get("token")
        if request.url.path == "/" and given is not None and self._token.is_equal(given):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(_COOKIE, given, httponly=True, samesite="strict", secure=self._is_secure)
            return answer
        cookie = request.cookies.get(_COOKIE, "")
        if not (self._token.is_equal(cookie) or self._token.is_sent_in(request)):
            raise RefusedRequest(401, "the token is missing or wrong; open the address that `packtrain ui` printed")
        return None
