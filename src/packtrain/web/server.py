"""The dashboard's HTTP server. It answers GET only and changes nothing.

The way of a request:

    door       host, origin, method and token, which is the first part of the path: cookies would reach every server
               on this machine, whatever its port
    query      checked: names, numbers and choices (query.py)
    answer     in a thread, from readers that know what was read before (endpoints.py, reader.py, run_list.py)
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
from starlette.responses import RedirectResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from packtrain.errors import quoted
from packtrain.http_server import (
    CLIENT_LEFT,
    SendAnswer,
    Token,
    is_from_elsewhere,
    log_line,
    names_this_machine,
    server_config,
)
from packtrain.store import Store
from packtrain.web.endpoints import DashboardEndpoints, error_answer
from packtrain.web.news import News
from packtrain.web.query import RefusedRequest
from packtrain.web.run_list import RunList


class DashboardServer(uvicorn.Server):
    """Uvicorn, which ends at the first signal: all that it interrupts are streams of news.

    `started` is called when it answers, and a signal ends it instead of the process.
    """

    def __init__(
        self,
        store: Store,
        listener: socket.socket,
        token: str,
        log: Callable[[str], None],
        started: Callable[[], object] = lambda: None,
        **options: Any,
    ) -> None:
        self._started = started
        self.news, self.is_interrupted = News(RunList(store)), False
        address = listener.getsockname()[0]
        is_local = names_this_machine(f"[{address}]" if ":" in address else address)
        door = DashboardDoor(DashboardEndpoints(store, self.news), Token(token), is_local, log)
        super().__init__(server_config(door, **options))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
        self.is_interrupted = sig == signal.SIGINT
        # Not kept in uvicorn's list of signals: it would raise them again at the end, and the exit code would not be 0.
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.news.start(asyncio.get_running_loop())
        await super().startup(sockets)
        self._started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.news.close()  # first: streams would keep the server from ending
        await super().shutdown(sockets)


class DashboardDoor:
    """Every request passes it, in and out."""

    def __init__(self, endpoints: DashboardEndpoints, token: Token, is_local: bool, log: Callable[[str], None]) -> None:
        self._app, self._token, self._is_local, self._log = endpoints.application(), token, is_local, log
        self._routes = [route.path.partition("{")[0] for route in self._app.routes if isinstance(route, Route)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, answer = time.perf_counter(), SendAnswer(send)
        first, slash, path = scope["path"].removeprefix("/").partition("/")
        has_token = self._token.is_equal(first)
        inner: Scope = {**scope, "path": f"/{path}", "raw_path": b""} if has_token else scope
        try:
            self._check(Request(scope), has_token)
            is_page = not has_token or slash  # addresses in the page are relative to it
            await (self._app if is_page else RedirectResponse(f"/{first}/", 303))(inner, receive, answer)
        except RefusedRequest as refused:
            await error_answer(refused.status, str(refused))(scope, receive, answer)
        finally:
            # A page asks all the time, and a person reads the log.
            if answer.status >= 400 and answer.status != CLIENT_LEFT:
                # The longest known path that it starts with: nothing that a client can choose freely.
                path = inner["path"]
                prefixes = [
                    known for known in self._routes if path == known or (known.endswith("/") and path.startswith(known))
                ]
                route = max(prefixes, key=len, default="other")
                self._log(log_line(scope, route, answer.status, time.perf_counter() - started))

    def _check(self, request: Request, has_token: bool) -> None:
        """Refuse a request that may not enter; `has_token` if it has the token in its path."""
        host = request.headers.get("host", "")
        # A name that leads here only today (DNS rebinding) is not the address that the page was opened with.
        if self._is_local and not names_this_machine(host):
            raise RefusedRequest(403, f"the host {quoted(host)} is not this machine; use localhost")
        if is_from_elsewhere(request):
            raise RefusedRequest(403, "requests from pages of other sites are refused")
        if request.method not in ("GET", "HEAD"):
            raise RefusedRequest(405, "this server only answers GET; it changes nothing")
        if not (has_token or self._token.is_sent_in(request)):
            raise RefusedRequest(401, "the token is missing or wrong; open the address that `packtrain ui` printed")
