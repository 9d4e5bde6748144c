"""Every view shows every run whose records are valid, however odd their numbers, names and texts are."""

from __future__ import annotations

import asyncio
import json
import math
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from packtrain.cli.follow import Follower
from packtrain.cli.screen import console
from packtrain.errors import Mistake, PacktrainError
from packtrain.observe.history import read_points
from packtrain.observe.status import read_end, read_status
from packtrain.report import compare, report_page, write_report
from packtrain.report import sweep as sweep_report
from packtrain.report.compare_render import compare_page, text_lines
from packtrain.report.frame import MetricColumns
from packtrain.report.mirror import metrics_of
from packtrain.report.notebook import panel_of, runs_table
from packtrain.report.plot import Axis, plot_of
from packtrain.run.chunks import encode_line
from packtrain.run.records import (
    Event,
    FleetLaunch,
    Forecast,
    Generation,
    JobSource,
    Lease,
    LogLine,
    MachineFacts,
    Notes,
    Point,
    Result,
    Sample,
    TelemetrySample,
    TimeSpent,
)
from packtrain.run.run import Run
from packtrain.run.sweeps import Rung, Sweep, SweepPlan, Trial, TrialStart
from packtrain.store import Store, open_store
from packtrain.store import records as store_records
from packtrain.store.records import decode, encode
from packtrain.web.endpoints import DashboardEndpoints
from packtrain.web.news import News
from packtrain.web.run_list import RunList
from parts.command import Packtrain
from parts.runs import MEASURED, a_lease, new_run, program_job, recipe_job

History = Mapping[str, Any]
"""Records of a run by their names, and lists of them by their streams."""

HOSTILE = "<b>\x1b[31m\u202e\x00\u2067\x9b"
ODD = ["", HOSTILE, "[red]x[/bold]", "<script>alert(1)</script>", "x" * 200, "a.b/c%s{0}", "ü", "5"]
NAMES = [
    "loss",
    "bleu",
    "tokens",
    "rate",
    "gradient_norm",
    "epoch",
    "perplexity",
    "train/loss",
    "val_loss",
    "step",
    "time",
    "save_seconds",
]
NUMBERS = [0.0, -0.0, 1.0, 0.5, -1.0, 5e-324, 1e15, 1e22, 1e154, 1e308, -1e308, math.inf, -math.inf, math.nan]
texts = st.sampled_from([*ODD, "words of a person"])
labels = st.sampled_from([*NAMES, *ODD])
numbers = st.sampled_from(NUMBERS)
counts = st.sampled_from([0, 1, 2, 3, 7, 2**31, 2**53, 2**53 + 1, store_records.MAX_NUMBER])
limited = st.sampled_from([0.0, 1.0, 0.5, -1.0, 5e-324, store_records.MAX_SECONDS, -store_records.MAX_SECONDS])
measurements = st.dictionaries(labels, numbers, max_size=4)
# Of the types that records have: a field of a new type needs a line here.
OF_TYPE: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (store_records.FileName, st.sampled_from(["a", "b", "000001-rank-0"])),
    (store_records.Digest, st.just("0" * 64)),
    (store_records.Address, texts),
    (store_records.Count, counts),
    (store_records.Port, st.sampled_from([0, 65535])),
    (store_records.WorkerCount, st.sampled_from([1, 1024])),
    (store_records.Number, limited),
    (store_records.Time, st.sampled_from([0.0, 1e9, 1e9 + 1, 2e9, 253402300799.0])),
    (store_records.Price, st.sampled_from([0.0, 1e-9, 1e9])),
    (store_records.Label, labels),
    (store_records.Measurements, measurements),
]


def of_type(kind: Any) -> st.SearchStrategy[Any]:
    """Return values of a type that a record has."""
    for known, values in OF_TYPE:
        if kind == known:
            return values
    if isinstance(kind, type) and is_dataclass(kind):
        return record_of(kind)
    parts, origin = get_args(kind), get_origin(kind)
    if origin is Literal:
        return st.sampled_from(parts)
    if origin in (Union, types.UnionType):
        return st.one_of(*(st.none() if part is type(None) else of_type(part) for part in parts))
    if origin is dict:
        return st.dictionaries(of_type(parts[0]), of_type(parts[1]), max_size=3)
    if origin is tuple:
        return st.lists(of_type(parts[0]), max_size=3).map(tuple)
    if hasattr(kind, "__metadata__"):
        return of_type(parts[0])
    return {str: texts, float: numbers, bool: st.booleans(), int: counts, Any: st.none()}[kind]


def record_of(kind: type, **given: Any) -> st.SearchStrategy[Any]:
    """Return records of a kind that `decode` accepts; what has a default may be missing."""
    hints = get_type_hints(kind, include_extras=True)
    required: dict[Any, Any] = {}
    optional: dict[Any, Any] = {}
    for field in fields(kind):
        has_default = field.default is not MISSING or field.default_factory is not MISSING
        (optional if has_default else required)[field.name] = (
            given[field.name] if field.name in given else of_type(hints[field.name])
        )
    return st.fixed_dictionaries(required, optional=optional).map(lambda values: kind(**values)).filter(is_valid)


def is_valid(record: Any) -> bool:
    try:
        decode(type(record), encode(record), "")
    except PacktrainError:
        return False
    return True


OF_TYPE.append((Sample, st.builds(Sample, texts, texts, texts)))
points = st.one_of(
    st.builds(
        lambda values, **place: Point("train", values={**MEASURED, **values}, **place),
        measurements,
        generation=st.sampled_from([1, 2]),
        step=counts,
        time=st.just(1e9),
    ),
    record_of(Point, generation=st.sampled_from([1, 2, store_records.MAX_NUMBER])),
).filter(is_valid)


@st.composite
def trainings(draw: st.DrawFn) -> list[Point]:
    """Return the points of a run that trains and evaluates at every step, which is enough to compare it."""
    start = draw(st.sampled_from([0, 2**53 - 9, store_records.MAX_NUMBER - 9]))
    found = [Point("start", 1, start, 1e9, draw(measurements.filter(lambda values: "save_seconds" not in values)))]
    for step in range(start + 1, start + 7):
        spans = draw(st.dictionaries(st.sampled_from(["forward_seconds", "save_seconds", "data_seconds"]), limited))
        values = {"loss": draw(numbers), "tokens": draw(numbers), "step_seconds": draw(limited)}
        found.append(Point("train", 1, step, 1e9 + step - start, MEASURED | values | spans))
        scores = st.fixed_dictionaries({"loss": numbers, "bleu": numbers})
        found.append(Point("valid", 1, step, 1e9 + step - start, draw(scores)))
    return found


STREAMS: Mapping[str, st.SearchStrategy[Any]] = {
    "metrics": trainings() | st.lists(points, max_size=6),
    "events": st.lists(record_of(Event), max_size=3),
    "time": st.lists(record_of(TimeSpent), max_size=3),
    "logs": st.lists(record_of(LogLine), max_size=3),
    "telemetry": st.lists(record_of(TelemetrySample), max_size=3),
}
SINGLE: Mapping[str, st.SearchStrategy[Any]] = {
    "plan.json": record_of(Forecast),
    "source.json": record_of(JobSource),
    "notes.json": record_of(Notes),
    "launches/000001.json": record_of(FleetLaunch, fleet=st.just({"local": {}})),
    "nodes/a.json": record_of(Lease, node=st.just("a")),
    "generations/000001.json": record_of(Generation, number=st.just(1)),
}
histories = st.fixed_dictionaries({"result.json": record_of(Result)}, optional={**STREAMS, **SINGLE})


def write(run: Run, history: History) -> None:
    for name, written in history.items():
        if name not in STREAMS:
            run.store.put(run.key(name), encode(written))
        elif written:
            run.store.put(run.key(f"{name}/a/00000000.jsonl"), b"".join(map(encode_line, written)))


def ask(store: Store, runs: Sequence[Run], run: Run) -> None:
    """Ask the dashboard for all that it shows of a run."""
    run_list = RunList(store)
    run_list.look()
    for row in run_list.rows():
        assert not str(row["problem"]).startswith("a defect"), row
        json.dumps(row, allow_nan=False)
    app = DashboardEndpoints(store, News(run_list)).application()

    async def get(path: str, **query: Any) -> Any:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            answer = await client.get(path, params={"run": run.name, **query})
        assert answer.status_code == 200, (path, answer.text)
        return answer.json()

    async def get_all() -> None:
        names = (await get(f"/api/runs/{run.name}"))["names"]
        for axis in ("step", "epoch", "time"):
            await get("/api/series", name=names, x=axis, points=2 if axis == "time" else 1000)
        for part in ("answers", "bands", "machines", "logs", "samples"):
            await get(f"/api/{part}")
        await get("/api/difference", run=[one.name for one in runs])

    asyncio.run(get_all())


def views(runs: Sequence[Run], packtrain: Packtrain) -> Iterator[Callable[[], object]]:
    """Yield all that shows these runs."""
    store = runs[0].store
    for run in runs:
        yield partial(check_page, partial(report_page, run))
        yield partial(check_page, partial(panel_html, run))
        yield partial(write_report, run)
        yield partial(ask, store, runs, run)
        yield partial(MetricColumns, read_points(run))
        yield partial(read_status, run, "running")
        yield from (partial(metrics_of, point, "tokens") for point in read_points(run))
        yield partial(follow, run)
        for axis in ("step", "epoch", "hours"):
            yield partial(draw, run, axis)
        for command in (["show"], ["show", "--json"], ["logs"], ["report", "--markdown"], ["report", "--json"]):
            yield partial(call, packtrain, command[0], run.name, *command[1:], "--store", store.url)
    yield partial(call, packtrain, "ls", "--json", "--store", store.url)
    yield partial(call, packtrain, "ls", "--store", store.url)
    yield partial(check_page, lambda: runs_table([(run.name, read_end(run, "running")) for run in runs], ""))
    yield partial(compared, runs)
    yield partial(swept, runs)


def panel_html(run: Run) -> str:
    return panel_of(run).html


def check_page(make: Callable[[], str]) -> None:
    """Texts from the store neither steer a terminal nor turn the direction of what is around them."""
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", make())


def call(packtrain: Packtrain, *words: str) -> None:
    done = packtrain(*words)
    assert done.returncode in (0, 100, 103), (words, done.stderr)
    if "--json" in words:
        json.loads(done.stdout, parse_constant=pytest.fail)


def follow(run: Run) -> None:
    follower = Follower(run, [], console())
    follower.read()
    follower.line()


def draw(run: Run, axis: Axis) -> None:
    points = read_points(run)
    drawn = {point.column(name) for point in points for name in point.values if point.kind != "start"}
    with suppress(Mistake):  # none of its numbers is finite
        check_page(plot_of({run.name: points}, sorted(drawn), axis).svg)


def swept(runs: Sequence[Run]) -> None:
    """Show the runs as those of a sweep."""
    trials = tuple(Trial(number, run.name, {"a": HOSTILE}) for number, run in enumerate(runs, 1))
    sweep = Sweep(runs[0].store, "sweep")
    sweep.put_plan(SweepPlan("sweep", "job", "d", ("a",), trials, 1, {}, "bleu", False, (Rung(10, 1),)))
    for trial in trials:
        sweep.claim(TrialStart(trial.number, 1, 1, 0, 1e9, 1))
    table = sweep_report.sweep_table(sweep.store, "sweep")
    assert len(table.rows) == len(runs)
    check_page(partial(sweep_report.sweep_page, table))
    check_page(partial(sweep_report.sweep_markdown, table))
    json.dumps(sweep_report.as_json(table), allow_nan=False)


def compared(runs: Sequence[Run]) -> None:
    found = compare.compare_runs([compare.gather(run, run.name, "running") for run in runs])
    text_lines(found, 80)
    check_page(partial(compare_page, found))
    json.dumps(compare.as_json(found))


def show(packtrain: Packtrain, folder: Path, histories: Sequence[History]) -> None:
    """Show a recipe's run, a program's and another recipe's in every view."""
    store = open_store(str(folder), create=True)
    runs = [new_run(store, recipe_job("a")), new_run(store, program_job("b")), new_run(store, recipe_job("c"))]
    for run, history in zip(runs, histories, strict=True):
        store.put(run.key("pack.txt"), b"pack")
        write(run, history)
    for view in views(runs, packtrain):
        view()


@pytest.mark.usefixtures("thorough")
@settings(
    max_examples=12,
    deadline=None,
    phases=[Phase.reuse, Phase.generate],  # to shrink such an example takes minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.tuples(histories, histories, histories))
def test_every_view_shows_valid_records(
    packtrain: Packtrain, tmp_path_factory: pytest.TempPathFactory, chosen: Sequence[History]
) -> None:
    show(packtrain, tmp_path_factory.mktemp("store"), chosen)


@pytest.mark.parametrize("score", [1e308, math.nan])
def test_every_view_shows_huge_scores_points_of_another_kind_and_hostile_texts(
    score: float, packtrain: Packtrain, tmp_path: Path
) -> None:
    steps = [Point("train", 1, step, 1e9 + step, MEASURED | {"loss": score}) for step in range(1, 9)]
    valid = [Point("valid", 1, step, 1e9 + step, {"bleu": score if step % 2 else 1.0}) for step in range(1, 9)]
    logged = Point("log", 1, 9, 1e9 + 9, {"loss": score, "epoch": score})
    sampled = Point("test", 1, 8, 1e9 + 8, {HOSTILE: score}, (Sample(HOSTILE, HOSTILE, HOSTILE),))
    history = {
        "metrics": [*steps, *valid, sampled, logged],
        "events": [Event(1e9, "warning", HOSTILE)],
        "source.json": JobSource(HOSTILE, HOSTILE, (HOSTILE,)),
        "notes.json": Notes((HOSTILE,), HOSTILE),
        "nodes/a.json": a_lease("a", facts=MachineFacts(HOSTILE, HOSTILE, versions={"torch": HOSTILE})),
        "result.json": Result("finished", HOSTILE, 8, 8.0, {"test.bleu": score}),
    }
    show(packtrain, tmp_path / "store", [history, history, history])
