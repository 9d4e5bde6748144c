"""The dashboard's HTTP server: a page, and the store as JSON. It answers GET only and changes nothing.

The way of a request:

    door       host, origin and token; one line in the log when it is done, unless it went well
    query      checked: names, numbers and choices
    answer     in a thread, from readers that know what was read before (reader.py, board.py)

Stores may be written by anyone: every record is checked where it is read, every text is sent as JSON, and what is
damaged is named in the answer instead of ending it.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import uvicorn
import yaml
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from packtrain.errors import NotFound, PacktrainError, quoted
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
from packtrain.job.changes import FieldChange
from packtrain.report.goodput import LABELS
from packtrain.run.checkpoint import committed, manifest_key
from packtrain.run.run import Run
from packtrain.store import ObjectNotFound, Store, StoreError
from packtrain.web import insight
from packtrain.web.board import Board, Row
from packtrain.web.reader import (
    TELEMETRY,
    LogPlace,
    LogQuery,
    Readers,
    RunReader,
    is_away,
    lines_after,
    lines_before,
    shown_line,
)
from packtrain.web.table import as_json

_PAGE = Path(__file__).parent / "page"
_COOKIE = "packtrain-ui"
_TICK_SECONDS = 1.0
_COMMENT_SECONDS = 15.0
_READ_SECONDS = 1.0  # that a request reads of a long history, before it answers with what is there
_FIRST_SECONDS = 0.5  # that a list of many runs waits for their details
_MAX_RUNS, _MAX_NAMES, _MAX_POINTS, _MAX_LINES = 200, 50, 20_000, 2000
_MAX_STREAMS = 64
_MAX_PICTURE_BYTES = 1 << 20
_KINDS = {
    ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml", ".png": "image/png", ".txt": "text/plain; charset=utf-8", ".woff2": "font/woff2",
}  # fmt: skip
_SPANS = ("data", "forward", "backward", "communication", "wait", "optimizer", "save", "evaluation", "start", "other")
_ROUTES = (
    "/", "/assets/", "/api/runs", "/api/runs/", "/api/series", "/api/bands", "/api/machines", "/api/logs",
    "/api/samples", "/api/picture", "/api/difference", "/api/sweeps", "/api/sweeps/", "/api/stream",
)  # fmt: skip


class Refused(PacktrainError):
    """A request that gets an error for an answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class DashboardServer(uvicorn.Server):
    """Uvicorn, which ends at the first signal: all that it interrupts are streams of news."""

    def __init__(
        self, store: Store, listener: socket.socket, token: str, log: Callable[[str], None], **options: Any
    ) -> None:
        self.news = News(Board(store))
        is_local = names_this_machine(_named(listener))
        door = DashboardDoor(Endpoints(store, self.news), Token(token), is_local, "ssl_certfile" in options, log)
        super().__init__(server_config(door, **options))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
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
        self, endpoints: Endpoints, token: Token, is_local: bool, is_secure: bool, log: Callable[[str], None]
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
        except Refused as refused:
            await _error(refused.status, str(refused))(scope, receive, answer)
        finally:
            if status >= 400 and status != CLIENT_LEFT:  # a page asks all the time; a person reads the log
                route = known_route(scope["path"], _ROUTES)
                self._log(log_line(scope, route, status, time.perf_counter() - started))

    def _admit(self, request: Request) -> Response | None:
        """Raise Refused if the request may not enter. Return the answer to one that brings the token in its address."""
        host = request.headers.get("host", "")
        # A name that leads here only today (DNS rebinding) is not the address that the page was opened with.
        if self._is_local and not names_this_machine(host):
            raise Refused(403, f"the host {quoted(host)} is not this machine; use localhost")
        if is_from_elsewhere(request):
            raise Refused(403, "requests from pages of other sites are refused")
        if request.method not in ("GET", "HEAD"):
            raise Refused(405, "this server only answers GET; it changes nothing")
        given = request.query_params.get("token")
        if request.url.path == "/" and given is not None and self._token.is_equal(given):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(_COOKIE, given, httponly=True, samesite="strict", secure=self._is_secure)
            return answer
        cookie = request.cookies.get(_COOKIE, "")
        if not (self._token.is_equal(cookie) or self._token.is_sent_in(request)):
            raise Refused(401, "the token is missing or wrong; open the address that `packtrain ui` printed")
        return None


def _error(status: int, text: str) -> Response:
    return _json({"error": text}, status)


def _json(value: Any, status: int = 200) -> Response:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text.encode(errors="replace"), status, media_type="application/json")


# News: the thread that looks at the store while somebody listens.


class News:
    """Looks at the store every second while a page is open, and tells every page what has changed."""

    def __init__(self, board: Board) -> None:
        self.board, self.readers = board, Readers()
        self._listeners: dict[asyncio.Queue[str | None], tuple[str, ...]] = {}
        self._versions: dict[str, dict[str, Any]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock, self._wake, self._over = threading.Lock(), threading.Event(), threading.Event()
        self._asked = 0.0
        self._first = threading.Event()
        self._thread = threading.Thread(target=self._work, name="news", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._wake.set()
        for queue in list(self._listeners):
            queue.put_nowait(None)

    def ask(self) -> None:
        """Have the store looked at now, and for some seconds: somebody asked something."""
        is_new = time.monotonic() - self._asked > 2 * _TICK_SECONDS and not self._listeners
        self._asked = time.monotonic()
        if is_new:
            self._first.clear()
            self._wake.set()

    def wait_for_first(self, seconds: float) -> None:
        self._first.wait(seconds)

    async def listen(self, runs: tuple[str, ...]) -> AsyncIterator[str]:
        """Yield server-sent events until the server ends."""
        if len(self._listeners) >= _MAX_STREAMS:
            raise Refused(503, "too many pages are open; close some")
        queue: asyncio.Queue[str | None] = asyncio.Queue(1000)
        self._listeners[queue] = runs
        self._wake.set()
        try:
            yield ": hello\n\n"
            yield _event("runs", {"rows": self.board.rows(), "gone": []})
            while True:
                try:
                    text = await asyncio.wait_for(queue.get(), _COMMENT_SECONDS)
                except TimeoutError:
                    text = ": still here\n\n"
                if text is None or queue.full():  # a page that does not read; it comes back and starts anew
                    return
                yield text
        finally:
            del self._listeners[queue]

    def _work(self) -> None:
        while not self._over.is_set():
            if self._listeners or time.monotonic() - self._asked < 10 * _TICK_SECONDS:
                try:
                    self.board.look(self._tell_rows)
                    self._first.set()
                    self._look_at_runs()
                except Exception:
                    # A defect in one look must not end all later ones.
                    print(traceback.format_exc(), file=sys.stderr, flush=True)
                self._first.set()
                self._wake.wait(_TICK_SECONDS)
            else:
                self._wake.wait()
            self._wake.clear()

    def _look_at_runs(self) -> None:
        """Read what is new of the runs that pages show."""
        shown = {name for names in self._listeners.values() for name in names}
        for name in [known for known in self._versions if known not in shown]:
            del self._versions[name]
        for name in shown:
            run = self.board.run(name)
            if run is None:
                continue
            try:
                versions = vars(self.readers.of(run).look(0.3))
            except PacktrainError:
                continue  # the row says what is wrong
            versions = {part: str(value) for part, value in versions.items()}
            if self._versions.get(name) != versions:
                self._versions[name] = versions
                self._tell(_event("run", {"run": name, "versions": versions}), name)

    def _tell_rows(self, rows: Sequence[Row], gone: Sequence[str]) -> None:
        for name in gone:
            self.readers.forget(name)
        if rows or gone:
            self._tell(_event("runs", {"rows": list(rows), "gone": list(gone)}), None)

    def _tell(self, text: str, run: str | None) -> None:
        def put() -> None:
            for queue, names in list(self._listeners.items()):
                if run is None or run in names:
                    with suppress(asyncio.QueueFull):
                        queue.put_nowait(text)

        if self._loop is not None and not self._over.is_set():
            with suppress(RuntimeError):  # the loop has just ended
                self._loop.call_soon_threadsafe(put)


def _event(kind: str, value: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps(value, ensure_ascii=True, allow_nan=False)}\n\n"


# Queries.


class Query:
    """The parameters of a request, checked."""

    def __init__(self, request: Request) -> None:
        self._given = request.query_params

    def text(self, name: str, limit: int = 1000) -> str:
        value = self._given.get(name, "")
        if len(value) > limit:
            raise Refused(400, f"{name}: is longer than {limit} characters")
        return value

    def texts(self, name: str, limit: int) -> list[str]:
        values = list(dict.fromkeys(self._given.getlist(name)))
        if len(values) > limit:
            raise Refused(400, f"{name}: more than {limit} values")
        return values

    def number(self, name: str, default: float | None = None) -> float | None:
        value = self.text(name)
        if not value:
            return default
        try:
            number = float(value)
        except ValueError:
            raise Refused(400, f"{name}: not a number") from None
        if not math.isfinite(number):
            raise Refused(400, f"{name}: not a finite number")
        return number

    def integer(self, name: str, default: int | None, least: int, most: int) -> int | None:
        number = self.number(name, default)
        if number is None:
            return None
        if number != int(number) or not least <= number <= most:
            raise Refused(400, f"{name}: must be a whole number from {least} to {most}")
        return int(number)

    def choice(self, name: str, choices: Sequence[str], default: str | None) -> str | None:
        value = self.text(name) or default
        if value is not None and value not in choices:
            raise Refused(400, f"{name}: must be one of {', '.join(choices)}")
        return value

    def place(self, name: str) -> LogPlace | None:
        value = self.text(name, 40)
        if not value:
            return None
        try:
            place = LogPlace.of(value)
        except ValueError:
            raise Refused(400, f"{name}: not a place that this server gave") from None
        if min(place.chunk, place.line) < 0:
            raise Refused(400, f"{name}: not a place that this server gave")
        return place


class Cursor:
    """How much of each run a page has: the edition of the run's rows, and their number by kind."""

    def __init__(self, runs: dict[str, tuple[int, ...]]) -> None:
        self.runs = runs

    @classmethod
    def of(cls, text: str) -> Cursor:
        runs = {}
        for part in text.split(",") if text else ():
            name, *numbers = part.split(":")
            try:
                runs[name] = tuple(map(int, numbers))
            except ValueError:
                raise Refused(400, "since: not a cursor that this server gave") from None
            if len(runs[name]) != 4 or min(runs[name]) < 0:
                raise Refused(400, "since: not a cursor that this server gave")
        return cls(runs)

    def __str__(self) -> str:
        return ",".join(f"{name}:{':'.join(map(str, numbers))}" for name, numbers in self.runs.items())


# Endpoints. Those that read the store are plain functions: Starlette calls them in threads.


class Endpoints:
    def __init__(self, store: Store, news: News) -> None:
        self._store, self._news, self._board = store, news, news.board

    def application(self) -> Starlette:
        routes = [
            Route("/", self.index),
            Route("/assets/{name:path}", self.asset),
            Route("/api/runs", self.runs),
            Route("/api/runs/{run}", self.run),
            Route("/api/series", self.series),
            Route("/api/bands", self.bands),
            Route("/api/machines", self.machines),
            Route("/api/logs", self.logs),
            Route("/api/samples", self.samples),
            Route("/api/picture", self.picture),
            Route("/api/difference", self.difference),
            Route("/api/sweeps", self.sweeps),
            Route("/api/sweeps/{name}", self.sweep),
            Route("/api/stream", self.stream),
        ]
        kinds: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = dict.fromkeys(
            (PacktrainError, HTTPException, Exception), _answer_error
        )
        return Starlette(routes=routes, exception_handlers=kinds)

    def index(self, _: Request) -> Response:
        return _file("index.html")

    def asset(self, request: Request) -> Response:
        return _file(request.path_params["name"])

    def runs(self, _: Request) -> Response:
        self._news.ask()
        self._news.wait_for_first(_FIRST_SECONDS)
        if self._board.away is not None:
            raise Refused(503, self._board.away)
        return _json({"store": self._store.url, "time": time.time(), "runs": self._board.rows()})

    def run(self, request: Request) -> Response:
        run, reader = self._reader(request.path_params["run"])
        row = self._board.row(run.name)
        if row is None or row["state"] == "loading":
            self._board.look()
            row = self._board.row(run.name)
        generations = run.generations()
        result, events = run.result(), reader.events
        spent = reader.goodput(generations)
        return _json(
            _clean(
                {
                    **(row or {"name": run.name}),
                    "problem": reader.problem or (row or {}).get("problem"),
                    "generations": [_generation(one, events) for one in generations],
                    "events": [{**vars(event), "display": event.display} for event in events],
                    "checkpoints": _checkpoints(run),
                    "goodput": {
                        "useful": spent.useful, "seconds": spent.seconds, "fraction": spent.fraction,
                        "parts": spent.parts, "labels": {span: LABELS.get(span, span) for span in spent.parts}, "ranks": [vars(rank) for rank in spent.ranks],
                    },
                    "prediction": insight.prediction(run),
                    "findings": insight.findings(run),
                    "result": None if result is None else {**vars(result), "samples": []},
                    "job_file": _job_file(run),
                    "names": reader.names(),
                }
            )
        )  # fmt: skip

    def series(self, request: Request) -> Response:
        query = Query(request)
        runs, names = query.texts("run", _MAX_RUNS), query.texts("name", _MAX_NAMES)
        x = query.choice("x", ("step", "time", "epoch"), "step")
        points = query.integer("points", 1000, 2, _MAX_POINTS)
        low, high = query.number("from"), query.number("to")
        cursor, after = Cursor.of(query.text("since", 20_000)), Cursor({})
        found: list[dict[str, Any]] = []
        is_reset = False
        assert x is not None and points is not None
        deadline = time.monotonic() + _READ_SECONDS
        for name in runs:
            _, reader = self._reader(name, ("metrics",), max(0.05, deadline - time.monotonic()))
            with reader.lock:
                known = cursor.runs.get(name)
                now = (reader.edition, *(table.rows for table in reader.tables.values()))
                is_new = known is None or known[0] != reader.edition
                is_reset |= known is not None and is_new
                after.runs[name] = now
                begins = (0, 0, 0) if is_new or known is None else known[1:]
                found += [
                    one
                    for series in names
                    if (one := _series(reader, series, x, (low, high), points, begins)) is not None
                ]
        return _json({"cursor": str(after), "series": found, "reset": is_reset})

    def bands(self, request: Request) -> Response:
        query = Query(request)
        points = query.integer("points", 300, 1, _MAX_POINTS) or 1
        _, reader = self._reader(query.text("run"), ("metrics",))
        with reader.lock:
            table = reader.tables["train"]
            names = [f"{span}_seconds" for span in _SPANS if f"{span}_seconds" in table.columns]
            rows, means = table.means(names, points)
            steps = table.all("step")[rows].tolist() if len(rows) else []
        spans = {name.removesuffix("_seconds"): as_json(numbers) for name, numbers in means.items()}
        return _json({"step": steps, "spans": spans})

    def machines(self, request: Request) -> Response:
        query = Query(request)
        points = query.integer("points", 300, 1, _MAX_POINTS) or 1
        run, reader = self._reader(query.text("run"), ("telemetry",))
        watch = self._board.machines(run.name)
        leases = {lease.node: lease for lease in (watch.leases if watch else run.leases())}
        nodes = []
        with reader.lock:
            for node in sorted({*leases, *reader.machines}):
                lease, newest = leases.get(node), reader.newest.get(node)
                is_alive = watch is not None and watch.is_alive(node)
                telemetry = lease.telemetry if lease and is_alive else newest.telemetry if newest else None
                nodes.append(
                    {
                        "node": node,
                        "hostname": lease.hostname if lease else "",
                        "workers": lease.workers if lease else None,
                        "state": "left" if lease and lease.left else "working" if is_alive else "lost"
                        if watch is not None else "left",
                        "now": None if telemetry is None else telemetry,
                        **_over_time(reader, node, points),
                    }
                )  # fmt: skip
        return _json(_clean({"nodes": nodes}))

    def logs(self, request: Request) -> Response:
        query = Query(request)
        limit = query.integer("limit", 200, 1, _MAX_LINES) or 1
        wanted = LogQuery(
            query.text("search").casefold(),
            query.integer("rank", None, 0, 2**31),
            query.choice("stream", ("out", "err"), None),
            query.text("node") or None,
        )
        before, after = query.place("before"), query.place("after")
        run, reader = self._reader(query.text("run"), ())
        keys = reader.refresh_logs()
        if after is not None:
            lines, end = lines_after(run, keys, after, wanted, limit)
            return _json(_clean({"lines": [shown_line(one) for one in lines], "before": None, "after": str(end)}))
        lines, begin, end = lines_before(run, keys, before, wanted, limit)
        places = {"before": None if begin is None else str(begin), "after": str(end)}
        return _json(_clean({"lines": [shown_line(one) for one in lines], **places}))

    def samples(self, request: Request) -> Response:
        query = Query(request)
        step = query.integer("step", None, 0, 2**53)
        _, reader = self._reader(query.text("run"), ("metrics",))
        found = reader.samples(step)
        if isinstance(found, list):
            return _json({"steps": found})
        extra: dict[str, Any] = {
            "picture": None,
            "words": [],
            "attention": [],
            "attention_shape": None,
            "confidence": None,
        }
        return _json(_clean({"step": found[0], "samples": [{**extra, **vars(one)} for one in found[1]]}))

    def picture(self, request: Request) -> Response:
        query = Query(request)
        run, name = self._run(query.text("run")), query.text("name", 200)
        stem = name.removesuffix(".jpg")
        if not stem or not all(one.isascii() and (one.isalnum() or one in "-_") for one in stem):
            raise Refused(400, "name: not the name of a picture")
        data = run.store.find(run.key(f"pictures/{stem}.jpg"), _MAX_PICTURE_BYTES)
        if data is None or not data.startswith(b"\xff\xd8\xff"):
            raise Refused(404, f"no picture {quoted(name)}")
        return Response(data, media_type="image/jpeg")

    def difference(self, request: Request) -> Response:
        runs = [self._run(name) for name in Query(request).texts("run", 20)]
        return _json(_clean({"fields": _difference(runs)}))

    def sweeps(self, _: Request) -> Response:
        return _json(_clean({"sweeps": insight.sweeps(self._store)}))

    def sweep(self, request: Request) -> Response:
        found = insight.sweep(self._store, request.path_params["name"])
        if found is None:
            raise Refused(404, f"no sweep {quoted(request.path_params['name'])}")
        return _json(_clean(found))

    async def stream(self, request: Request) -> Response:
        names = tuple(Query(request).texts("run", _MAX_RUNS))
        return StreamingResponse(self._news.listen(names), media_type="text/event-stream")

    def _run(self, name: str) -> Run:
        """Return the run of that name, if it exists."""
        self._news.ask()
        run = self._board.run(name)
        if run is None:
            run = Run(self._store, name)  # refuses what is not a name
            if not self._store.exists(run.key("job.json")):
                raise Refused(404, f"no run {quoted(name)} in {self._store.url}")
        return run

    def _reader(
        self, name: str, streams: Sequence[str] | None = None, seconds: float = _READ_SECONDS
    ) -> tuple[Run, RunReader]:
        run = self._run(name)
        reader = self._news.readers.of(run)
        if streams is None or streams:
            reader.refresh(seconds, streams)
        return run, reader


async def _answer_error(_: Request, error: Exception) -> Response:
    if isinstance(error, Refused):
        return _error(error.status, str(error))
    if isinstance(error, PacktrainError):
        if is_away(error):
            return _error(503, str(error))
        if isinstance(error, (NotFound, ObjectNotFound)):
            return _error(404, str(error))
        return _error(503 if isinstance(error, StoreError) else 500, str(error))
    if isinstance(error, HTTPException):
        return _error(error.status_code, {404: "no such page", 405: "GET only"}.get(error.status_code, error.detail))
    print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)
    return _error(500, "a defect of the server; its log says where")


def _file(name: str) -> Response:
    # Only files that are there, by their names: no path of a request reaches the disk.
    known = {path.relative_to(_PAGE).as_posix(): path for path in _PAGE.rglob("*") if path.is_file()}
    path = known.get(name)
    kind = _KINDS.get(path.suffix) if path else None
    if path is None or kind is None:
        raise Refused(404, "no such page")
    return Response(path.read_bytes(), media_type=kind)


def _clean(value: Any) -> Any:
    """Return plain data that JSON can write: records as mappings, null for numbers that are not finite."""
    if isinstance(value, dict):
        return {str(key): _clean(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "__dataclass_fields__"):
        return _clean(vars(value))
    return value


def _series(
    reader: RunReader,
    series: str,
    x: str,
    limits: tuple[float | None, float | None],
    points: int,
    begins: Sequence[int],
) -> dict[str, Any] | None:
    kind, _, name = series.partition(".")
    table = reader.tables.get(kind)
    if table is None or name not in table.columns or name in ("step", "generation", "time"):
        return None
    begin, end = 0, table.rows
    if limits != (None, None) and table.rows:
        axis = reader.axis(kind, x, np.arange(table.rows)) if x == "epoch" and kind != "train" else table.all(x)
        if limits[0] is not None:
            begin = max(0, int(np.searchsorted(axis, limits[0], "left")) - 1)
        if limits[1] is not None:
            end = min(table.rows, int(np.searchsorted(axis, limits[1], "right")) + 1)
    begin = max(begin, begins[list(reader.tables).index(kind)])
    rows = table.thinned(name, begin, max(begin, end), points)
    axis = reader.axis(kind, x, rows)
    xs = np.round(np.nan_to_num(axis, posinf=0.0, neginf=0.0), 3 if x == "time" else 6)
    return {
        "run": reader.run.name, "name": series, "x": xs.tolist(), "y": as_json(table.all(name)[rows]),
        "complete": reader.complete,
    }  # fmt: skip


def _over_time(reader: RunReader, node: str, points: int) -> dict[str, Any]:
    table = reader.machines.get(node)
    if table is None:
        return {"time": [], **{name: [] for name in TELEMETRY}}
    present = [name for name in TELEMETRY if not np.isnan(table.all(name)).all()]
    rows, means = table.means(present, points)
    times = np.round(table.all("time")[rows], 3).tolist() if len(rows) else []
    return {"time": times, **{name: as_json(means[name]) if name in means else [] for name in TELEMETRY}}


def _generation(generation: Any, events: Sequence[Any]) -> dict[str, Any]:
    time_of = next((one.time for one in events if one.generation == generation.number), None)
    return {
        "number": generation.number, "time": time_of, "step": generation.step, "cause": generation.cause,
        "reason": generation.reason, "culprit": generation.culprit,
        "members": [member.node for member in generation.members],
    }  # fmt: skip


def _checkpoints(run: Run) -> list[dict[str, Any]]:
    found = []
    for one in committed(run):
        entry = run.store.entry(manifest_key(run, one.name))
        found.append(
            {
                "step": one.step, "time": entry.modified.timestamp() if entry else None, "name": one.name,
                "score": one.score, "bytes": sum(file.bytes for file in one.files),
                "files": [{"name": file.name, "bytes": file.bytes} for file in one.files],
            }
        )  # fmt: skip
    return found


def _job_file(run: Run) -> str:
    """Return the job as YAML, without what it does not say."""
    document = _without_nulls(run.job.model_dump(mode="json"))
    return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _difference(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the fields in which jobs differ, with the text of each."""
    flat = [_flat(run.job.model_dump(mode="json"), "") for run in runs]
    names = dict.fromkeys(name for fields in flat for name in fields)
    shown = [(name, [_shown(fields.get(name)) for fields in flat]) for name in names]
    return [{"field": name, "values": values} for name, values in shown if len(set(values)) > 1]


def _flat(value: Any, prefix: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    fields: dict[str, Any] = {}
    for key, entry in value.items():
        fields |= _flat(entry, f"{prefix}.{key}" if prefix else key)
    return fields


def _shown(value: Any) -> str:
    return str(FieldChange("", None, value)).removeprefix(": none -> ")
