"""The answers of the dashboard: the store as JSON. See docs/dashboard-api.md.

Those that read the store are plain functions, which Starlette calls in threads. Anyone may have written the store:
every record is checked where it is read, and what is damaged is named in the answer instead of ending it.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from packtrain.errors import NotFound, PacktrainError, quoted
from packtrain.http_server import FILE_KINDS, page_files
from packtrain.job.changes import FieldChange
from packtrain.observe.columns import as_json
from packtrain.observe.evidence import gather
from packtrain.observe.follower import TELEMETRY
from packtrain.observe.goodput import Goodput
from packtrain.observe.history import KINDS, RECENT_STEPS
from packtrain.observe.spans import COLORS, LABELS, RECORDED, SPANS
from packtrain.recipes import Recipe, built_in
from packtrain.report import finding_json, findings_of
from packtrain.report.account import compared
from packtrain.report.finding import VERDICTS
from packtrain.report.origin import command_of, generated_source
from packtrain.report.sweep import sweep_table
from packtrain.run.checkpoint import committed, manifest_key
from packtrain.run.liveness import attempt
from packtrain.run.records import Event, Generation, Lease
from packtrain.run.run import Run
from packtrain.run.sweeps import sweep_names
from packtrain.store import Store
from packtrain.web.logs import LogQuery, lines_after, lines_before, shown_line
from packtrain.web.news import News
from packtrain.web.query import Cursor, Query, RefusedRequest
from packtrain.web.reader import RunReader, is_away

Value = TypeVar("Value")
Limits = tuple[float | None, float | None]

_READ_SECONDS = 1.0  # that a request reads of a long history, before it answers with what is there, ...
_MORE_SECONDS = 3.0  # ... and one for more of it: every answer is work, too
_FIRST_SECONDS = 0.5  # that a list of many runs waits for their details
_MAX_RUNS, _MAX_NAMES, _MAX_POINTS, _MAX_LINES = 200, 50, 20_000, 2000
_MAX_USES = 100_000  # points of all machines together
_MAX_PICTURE_BYTES = 1 << 20
_MAX_TEXT = 20_000  # characters of any text from the store, except the job
_MAX_ANSWERED = 64  # runs whose answers are kept
_ANSWERS_SHARE = 0.05  # of the time may go into answers about a run that is watched: they read all of it
_NO_PICTURE = {"picture": None, "words": (), "attention": (), "attention_shape": None, "confidence": None}


def json_answer(value: Any, status: int = 200) -> Response:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text.encode(errors="replace"), status, media_type="application/json")


def error_answer(status: int, text: str) -> Response:
    return json_answer({"error": text}, status)


class AnswerCache:
    """Answers about runs, found anew when the run has changed, and less often the longer that takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cached: OrderedDict[str, tuple[object, float, dict[str, Any]]] = OrderedDict()

    def of(self, run: Run, version: object) -> dict[str, Any]:
        """Return findings and forecast of a run; `version` is another one when the run has something new."""
        with self._lock:
            cached = self._cached.get(run.name)
            if cached is not None and (cached[0] == version or time.monotonic() < cached[1]):
                return cached[2]
            started = time.monotonic()
            evidence = gather(run)
            answers = {
                "findings": [finding_json(finding) for finding in findings_of(evidence)],
                "forecast": [
                    {**asdict(number), "off": number.off, "is_right": number.is_right} for number in compared(evidence)
                ],
            }
            ended = time.monotonic()
            self._cached[run.name] = (version, ended + (ended - started) / _ANSWERS_SHARE, answers)
            self._cached.move_to_end(run.name)
            while len(self._cached) > _MAX_ANSWERED:
                self._cached.popitem(last=False)
            return answers


class DashboardEndpoints:
    def __init__(self, store: Store, news: News) -> None:
        self._store, self._news, self._runs = store, news, news.runs
        self._answers = AnswerCache()
        self._files = page_files(Path(__file__).parent / "page")

    def application(self) -> Starlette:
        routes = [
            Route("/", self.index),
            Route("/assets/{name:path}", self.asset),
            Route("/api/runs", self.runs),
            Route("/api/runs/{run}", self.run),
            Route("/api/answers", self.answers),
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
        app = Starlette(routes=routes, exception_handlers=kinds)
        app.router.redirect_slashes = False
        return app

    def index(self, _: Request) -> Response:
        """The page, with the words and colors that it shares with the report."""
        page = self._files["index.html"].read_text("utf-8")
        spans = [
            {"name": span.name, "label": span.label, "color": COLORS[span.color], "opacity": span.opacity}
            for span in SPANS.values()
        ]
        verdicts = {verdict: asdict(words) for verdict, words in VERDICTS.items()}
        terms = json.dumps({"spans": spans, "verdicts": verdicts, "recent_steps": RECENT_STEPS})
        return Response(page.replace("{terms}", terms.replace("<", "\\u003c")), media_type="text/html")

    def asset(self, request: Request) -> Response:
        path = self._files.get(request.path_params["name"])  # only what is there: no path of a request reaches the disk
        if path is None:
            raise RefusedRequest(404, "no such page")
        return Response(path.read_bytes(), media_type=FILE_KINDS[path.suffix])

    def runs(self, _: Request) -> Response:
        self._news.ask()
        self._news.wait_for_first(_FIRST_SECONDS)
        if self._runs.away is not None:
            raise RefusedRequest(503, self._runs.away)
        return json_answer({"store": self._store.url, "time": time.time(), "runs": self._runs.rows()})

    def run(self, request: Request) -> Response:
        run, reader = self._reader(request.path_params["run"])
        self._runs.refresh(run.name)
        problems: list[str] = []
        with reader.lock:
            problems += [reader.problem] if reader.problem else []
            events = list(reader.events)
        generations = _readable(lambda: list(run.generations()), list[Generation], problems)
        spent = _readable(lambda: reader.goodput(generations), Goodput, problems)
        result = _readable(run.result, lambda: None, problems)
        answer = {
            **(self._runs.row(run.name) or {"name": run.name}),
            "generations": [_generation(generation, events) for generation in generations],
            "events": [{**vars(event), "display": event.display} for event in events],
            "checkpoints": _readable(lambda: _checkpoints(run), list, problems),
            "goodput": {
                "useful": spent.useful,
                "seconds": spent.seconds,
                "fraction": spent.fraction,
                "parts": spent.parts,
                "labels": {span: LABELS.get(span, span) for span in spent.parts},
                "ranks": [vars(rank) for rank in spent.ranks],
            },
            "result": None if result is None else {**vars(result), "samples": []},
            "parent": _readable(
                lambda: "" if run.job.parent is None else f"started from {run.job.parent.identified}", str, problems
            ),
            "names": reader.history.names(),
        }
        source = _readable(lambda: _source(run), dict, problems)
        if problems:
            answer["problem"] = problems[0]
        return json_answer({**_clean(answer), "source": source})

    def answers(self, request: Request) -> Response:
        """Answer with what the report says; apart from `run`, because that takes the whole run."""
        run, reader = self._reader(Query(request).text("run"))
        return json_answer(_clean(self._answers.of(run, (reader.versions, run.result()))))

    def series(self, request: Request) -> Response:
        query = Query(request)
        runs, names = query.texts("run", _MAX_RUNS), query.texts("name", _MAX_NAMES)
        x = query.choice("x", ("step", "time", "epoch"), "step") or "step"
        points = query.integer("points", 1000, 2, _MAX_POINTS) or 2
        limits = query.number("from"), query.number("to")
        cursors, cursor = Cursor.of(query.text("since", 20_000)).runs, Cursor({})
        answer: list[dict[str, Any]] = []
        is_reset = False
        deadline = time.monotonic() + (_MORE_SECONDS if cursors else _READ_SECONDS)
        for place, name in enumerate(runs):
            # An equal share for each, so that all curves of many long histories begin to show at once.
            share = max(0.0, deadline - time.monotonic()) / (len(runs) - place)
            _, reader = self._reader(name, ("metrics",), share)
            with reader.lock:
                history = reader.history
                cursor.runs[name] = (history.edition, *(table.rows for table in history.tables.values()))
                edition, *begins = cursors.get(name, (0,) * (1 + len(KINDS)))
                if edition != history.edition:
                    is_reset, begins = is_reset or name in cursors, [0] * len(KINDS)
                for series in names:
                    answer += _series(reader, series, x, limits, points, begins)
        return json_answer({"cursor": str(cursor), "series": answer, "reset": is_reset})

    def bands(self, request: Request) -> Response:
        query = Query(request)
        points = query.integer("points", 300, 1, _MAX_POINTS) or 1
        _, reader = self._reader(query.text("run"), ("metrics",))
        with reader.lock:
            table = reader.history.tables["train"]
            names = [f"{span}_seconds" for span in RECORDED if f"{span}_seconds" in table.columns]
            rows, means = table.means(names, points)
            steps = table.all("step")[rows].tolist() if len(rows) else []
        spans = {name.removesuffix("_seconds"): as_json(numbers) for name, numbers in means.items()}
        return json_answer({"step": steps, "spans": spans})

    def machines(self, request: Request) -> Response:
        query = Query(request)
        points = query.integer("points", 300, 1, _MAX_POINTS) or 1
        run, reader = self._reader(query.text("run"), ("telemetry",))
        self._runs.refresh(run.name)
        listed = self._runs.find(run.name)
        watch = listed.watch if listed else None
        leases = {lease.node: lease for lease in (watch.leases if watch else _readable(run.leases, list[Lease], []))}
        with reader.lock:
            names = sorted({*leases, *reader.machines})
            points = max(1, min(points, _MAX_USES // max(1, len(names))))  # of thousands of machines fewer each
            nodes = [
                _machine(reader, node, leases.get(node), watch is not None and watch.is_alive(node), points)
                for node in names
            ]
        return json_answer(_clean({"nodes": nodes}))

    def logs(self, request: Request) -> Response:
        query = Query(request)
        limit = query.integer("limit", 200, 1, _MAX_LINES) or 1
        log_query = LogQuery(
            query.text("search").casefold(),
            query.integer("rank", None, 0, 2**31),
            query.choice("stream", ("out", "err"), None),
            query.text("node") or None,
        )
        before, after = query.place("before"), query.place("after")
        run, reader = self._reader(query.text("run"), ())
        keys = reader.read_log_keys()
        if after is not None:
            lines, end = lines_after(run, keys, after, log_query, limit)
            return json_answer(
                _clean({"lines": [shown_line(line) for line in lines], "before": None, "after": str(end)})
            )
        lines, begin, end = lines_before(run, keys, before, log_query, limit)
        places = {"before": None if begin is None else str(begin), "after": str(end)}
        return json_answer(_clean({"lines": [shown_line(line) for line in lines], **places}))

    def samples(self, request: Request) -> Response:
        query = Query(request)
        step = query.integer("step", None, 0, 2**53)
        run, reader = self._reader(query.text("run"), ("metrics",))
        if step is None:
            return json_answer({"steps": reader.sampled_steps()})
        words = (built_in(run.job.recipe) or Recipe).words
        labels = {"input": words.input, "output": words.output, "follow_references": words.follow_references}
        samples = reader.samples(step)
        rows = [{**_NO_PICTURE, **vars(sample)} for sample in samples]
        return json_answer(_clean({"step": step, "words": labels, "samples": rows}))

    def picture(self, request: Request) -> Response:
        query = Query(request)
        run, name = self._run(query.text("run")), query.text("name", 200)
        stem = name.removesuffix(".jpg")
        if not stem or not all(letter.isascii() and (letter.isalnum() or letter in "-_") for letter in stem):
            raise RefusedRequest(400, "name: not the name of a picture")
        data = run.store.find(run.key(f"pictures/{stem}.jpg"), _MAX_PICTURE_BYTES)
        if data is None or not data.startswith(b"\xff\xd8\xff"):
            raise RefusedRequest(404, f"no picture {quoted(name)}")
        return Response(data, media_type="image/jpeg")

    def difference(self, request: Request) -> Response:
        """Answer with the fields in which jobs differ, and the text of each."""
        runs = [self._run(name) for name in Query(request).texts("run", 20)]
        flat = [_flat(run.job.model_dump(mode="json"), "") for run in runs]
        fields = []
        for name in dict.fromkeys(name for job_fields in flat for name in job_fields):
            texts = [str(FieldChange("", None, job.get(name))).removeprefix(": none -> ") for job in flat]
            if len(set(texts)) > 1:
                fields.append({"field": name, "values": texts})
        return json_answer(_clean({"fields": fields}))

    def sweeps(self, _: Request) -> Response:
        tables = [sweep_table(self._store, name) for name in sweep_names(self._store)]
        sweeps = [
            {
                "name": table.name,
                "job": table.job,
                "runs": len(table.rows),
                "finished": table.finished,
                "best": None if table.best is None else table.best.run,
            }
            for table in tables
        ]
        return json_answer(_clean({"sweeps": sweeps}))

    def sweep(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in sweep_names(self._store):
            raise RefusedRequest(404, f"no sweep {quoted(name)}")
        return json_answer(_clean(sweep_table(self._store, name)))

    async def stream(self, request: Request) -> Response:
        names = tuple(Query(request).texts("run", _MAX_RUNS))
        return StreamingResponse(self._news.listen(names), media_type="text/event-stream")

    def _run(self, name: str) -> Run:
        self._news.ask()
        if listed := self._runs.find(name):
            return listed.run
        run = Run(self._store, name)  # refuses what is not a name
        if not self._store.exists(run.key("job.json")):
            raise RefusedRequest(404, f"no run {quoted(name)} in {self._store.url}")
        return run

    def _reader(
        self, name: str, streams: Sequence[str] | None = None, seconds: float = _READ_SECONDS
    ) -> tuple[Run, RunReader]:
        run = self._run(name)
        reader = self._news.readers.of(run)
        if streams is None or streams:
            reader.read(seconds, streams)
        return run, reader


async def _answer_error(_: Request, error: Exception) -> Response:
    if isinstance(error, RefusedRequest):
        return error_answer(error.status, str(error))
    if isinstance(error, PacktrainError):
        return error_answer(404 if isinstance(error, NotFound) else 503, str(error))
    if isinstance(error, HTTPException):
        return error_answer(error.status_code, "no such page" if error.status_code == 404 else error.detail)
    print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)
    return error_answer(500, "a defect of the server; its log says where")


def _readable(read: Callable[[], Value], otherwise: Callable[[], Value], problems: list[str]) -> Value:
    """Return a part of an answer. If it is damaged, the rest can still be seen, and `problems` says so."""
    try:
        return read()
    except PacktrainError as error:
        if is_away(error):
            raise
        problems.append(str(error))
        return otherwise()


def _clean(value: Any) -> Any:
    """Return plain data that JSON can write: records as mappings, long texts cut, null for numbers without a value."""
    if isinstance(value, dict):
        return {str(key): _clean(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value if len(value) <= _MAX_TEXT else f"{value[:_MAX_TEXT]}…"
    if hasattr(value, "__dataclass_fields__"):
        return _clean(vars(value))
    return value


def _series(
    reader: RunReader, series: str, x: str, limits: Limits, points: int, begins: Sequence[int]
) -> list[dict[str, Any]]:
    """Return a series of a run, in a list; an empty one if the run does not have it."""
    kind, _, name = series.partition(".")
    table = reader.history.tables.get(kind)
    if table is None or name not in table.columns or name in ("generation", "time"):
        return []
    begin, end = 0, table.rows
    if limits != (None, None) and table.rows:
        # The rows between two values of x, and one more on each side, so that lines reach the edges.
        axis = reader.history.axis(kind, x, np.arange(table.rows))
        if limits[0] is not None:
            begin = max(0, int(np.searchsorted(axis, limits[0], "left")) - 1)
        if limits[1] is not None:
            end = min(table.rows, int(np.searchsorted(axis, limits[1], "right")) + 1)
    begin = max(begin, begins[KINDS.index(kind)])
    rows = table.thinned(name, begin, max(begin, end), points)
    axis = np.nan_to_num(reader.history.axis(kind, x, rows), posinf=0.0, neginf=0.0)
    return [
        {
            "run": reader.run.name,
            "name": series,
            "x": np.round(axis, 3 if x == "time" else 6).tolist(),
            "y": as_json(table.all(name)[rows]),
            "complete": reader.complete,
        }
    ]


def _machine(reader: RunReader, node: str, lease: Lease | None, is_alive: bool, points: int) -> dict[str, Any]:
    newest = reader.newest.get(node)
    telemetry = lease.telemetry if lease is not None and is_alive else newest.telemetry if newest else None
    has_left = lease is not None and lease.left
    times: list[float] = []
    columns: dict[str, list[Any]] = {name: [] for name in TELEMETRY}
    if (use := reader.machines.get(node)) is not None:
        span_times, means = use.thinned(points)
        times = np.round(span_times, 3).tolist()
        numbers = as_json(means.T.ravel())  # all at once: there may be thousands of machines
        starts = range(0, len(numbers), len(times))
        for name, start, values in zip(TELEMETRY, starts, use.means.T, strict=True):
            columns[name] = [] if np.isnan(values).all() else numbers[start : start + len(times)]
    return {
        "node": node,
        "hostname": lease.hostname if lease else "",
        "workers": lease.workers if lease else None,
        "state": "working" if is_alive else "left" if has_left else "lost",
        "now": telemetry,
        "facts": lease.facts if lease else None,
        "time": times,
        **columns,
    }


def _generation(generation: Generation, events: Sequence[Event]) -> dict[str, Any]:
    return {
        "number": generation.number,
        "time": next((event.time for event in events if event.generation == generation.number), None),
        "step": generation.step,
        "cause": generation.cause,
        "after_fault": generation.is_after_fault,
        "reason": generation.reason,
        "culprit": generation.culprit,
        "members": [member.node for member in generation.members],
    }


def _checkpoints(run: Run) -> list[dict[str, Any]]:
    checkpoints = []
    for checkpoint in committed(run):
        entry = run.store.entry(manifest_key(run, checkpoint.name))
        checkpoints.append(
            {
                "step": checkpoint.step, "time": entry.modified.timestamp() if entry else None, "name": checkpoint.name,
                "score": checkpoint.score, "bytes": sum(file.bytes for file in checkpoint.files),
                "files": [{"name": file.name, "bytes": file.bytes} for file in checkpoint.files],
            }
        )  # fmt: skip
    return checkpoints


def _source(run: Run) -> dict[str, Any]:
    """Return the job as it was written, and the command that starts the same run again."""
    source = run.source() or generated_source(run.job)
    pack = attempt(run.pack_name) if run.job.recipe is not None else ""
    return {**vars(source), "command": command_of(source, pack if isinstance(pack, str) else "", run.job)}


def _flat(value: Any, prefix: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    fields: dict[str, Any] = {}
    for key, entry in value.items():
        fields |= _flat(entry, f"{prefix}.{key}" if prefix else key)
    return fields
