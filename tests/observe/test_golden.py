"""The answers for scripts, to nine digits: `ls`, `show` and `report` with --json, and the dashboard's API.

The runs are made of records whose times are fixed. After a change that is meant, record the answers again with
`PACKTRAIN_RECORD=1 pytest tests/observe/test_golden.py`, and read the difference.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from packtrain.run.chunks import encode_line
from packtrain.run.records import (
    Event,
    FleetLaunch,
    Forecast,
    JobSource,
    LogLine,
    MachineFacts,
    Notes,
    Point,
    Result,
    Sample,
)
from packtrain.run.run import Run, add_run
from packtrain.store import Store, open_store
from packtrain.store.records import encode
from packtrain.web.endpoints import DashboardEndpoints
from packtrain.web.news import News
from packtrain.web.run_list import RunList
from parts.command import Packtrain
from parts.runs import a_lease, program_job, recipe_job
from report.made import evaluations_of, falling, generation_of, spent_of, steps_of, telemetry_of

GOLDEN = Path(__file__).parent / "golden"
START = 1_000_000.0
VOLATILE = {"cursor", "edition"}
FORECAST = Forecast(
    "measured", "compute", 2, 400, 0.11, 5800.0, 60.0, 0.04, 600_000_000, 1_600_000, 6_500_000, 26_000_000, "400 steps"
)


def shifted(point: Point, generation: int, seconds: float) -> Point:
    return replace(point, generation=generation, time=point.time + seconds)


def restarted_points() -> list[Point]:
    """Return a training that lost steps 121 to 160 and the evaluations in them, and was evaluated at step 120 again."""
    steps, scores = steps_of(400, data=0.01, communication=0.004), evaluations_of(falling)
    bleu = evaluations_of(lambda step: 30 - falling(step), name="bleu", noise=0.2)
    valid = [replace(loss, values={**loss.values, **score.values}) for loss, score in zip(scores, bleu, strict=True)]
    sample = Sample("The file is open.", "Die Datei ist geöffnet.", "Die Datei ist offen.")
    valid = [replace(point, samples=(sample,), counts={"bleu": 100}) for point in valid]
    saved = {20: {"save_seconds": 0.2}, 40: {"evaluation_seconds": 1.5}}
    steps = [
        replace(
            point,
            values={
                **point.values,
                **(extra := saved.get(point.step % 60, {})),
                "step_seconds": point.values["step_seconds"] + sum(extra.values()),
            },
        )
        for point in steps
    ]
    first = [Point("start", 1, 0, START, {"link_bytes_per_second": 1e8})]
    first += [shifted(point, 1, START) for point in (*steps, *valid) if point.step <= 160]
    second = [Point("start", 2, 120, START + 1100, {})]
    second += [shifted(point, 2, START + 100) for point in steps if point.step > 120]
    second += [shifted(point, 2, START + 100) for point in valid if point.step >= 120]
    second += [Point("test", 2, 400, START + 1200, {"loss": 2.4, "bleu": 27.5}, (sample,), {"bleu": 400})]
    return first + second


def put(run: Run, name: str, *records: Any) -> None:
    run.store.put(run.key(name), b"".join(map(encode_line, records)))


def trained(store: Store) -> Run:
    sections = {
        "train": {"duration": "400 steps", "batch": "640 tokens"},
        "data": {"train": [{"bitext": ["a", "b"]}], "valid": [{"bitext": ["c", "d"]}]},
        "evaluate": {"every": "20 steps"},
        "fleet": {"local": {}, "price": 2.5},
    }
    run = add_run(store, recipe_job("trained", **sections), b"", "words-0123456789abcdef")
    points = restarted_points()
    half = len(points) // 2
    put(run, "metrics/a/00000000.jsonl", *points[:half])
    put(run, "metrics/b/00000000.jsonl", *points[half:])
    put(
        run, "events/a/00000000.jsonl",
        Event(START, "generation", "generation 1: started 2 workers"),
        Event(START + 1090, "failure", "rank 1 was killed (SIGKILL)"),
        Event(START + 1099, "generation", "generation 2: started 2 workers"),
    )  # fmt: skip
    spent = spent_of(
        {0: {"forward": 0.03, "backward": 0.06, "data": 0.01}, 1: {"forward": 0.03, "backward": 0.07}}, 160
    )
    later = spent_of({0: {"forward": 0.03, "backward": 0.06, "start": 0.02}, 1: {"forward": 0.03, "wait": 0.01}}, 280)
    put(run, "time/a/00000000.jsonl", *(replace(record, time=record.time + START) for record in spent))
    later = [replace(record, time=record.time + START + 1100, generation=2, step=400) for record in later]
    put(run, "time/b/00000000.jsonl", *later)
    for node in ("a", "b"):
        put(
            run, f"telemetry/{node}/00000000.jsonl",
            *(replace(sample, time=sample.time + START) for sample in telemetry_of(20, node, 0.7, 0.9, 1e6)),
        )  # fmt: skip
        facts = MachineFacts("Linux", "cpu", 2, versions={"torch": "2.8"})
        store.put(run.key(f"nodes/{node}.json"), encode(a_lease(node, facts=facts, used_seconds=70.0)))
    put(run, "logs/a/00000000.jsonl", *(LogLine(START + at, 1, "a", 0, "out", f"line {at}") for at in range(5)))
    for number, cause in ((1, "start"), (2, "program")):
        generation = generation_of(1, 1, number=number, reason=cause, cause=cause, step=0 if number == 1 else 120)
        store.put(run.key(f"generations/{number:06d}.json"), encode(generation))
    store.put(run.key("launches/000001.json"), encode(FleetLaunch(START - 10, "me@here", {"local": {}})))
    store.put(
        run.key("source.json"), encode(JobSource("trained.yaml", "name: trained\n", ("train.duration=400 steps",)))
    )
    store.put(run.key("notes.json"), encode(Notes(("good",), "the first that learned")))
    store.put(run.key("plan.json"), encode(FORECAST))
    scores = {"train.loss": 2.5, "valid.loss": 2.45, "valid.bleu": 27.6, "test.loss": 2.4, "test.bleu": 27.5}
    store.put(run.key("result.json"), encode(Result("finished", "reached 400 steps", 400, 75.0, scores)))
    return run


def logged(store: Store) -> Run:
    """Return a program that logged its numbers, one of them not finite, and was restarted."""
    run = add_run(store, program_job("logged"), b"", None)
    points = [Point("log", 1, step, START + step, {"loss": 8.0 / step, "lr": 0.1}) for step in range(1, 61)]
    points += [Point("start", 2, 40, START + 70, {})]
    points += [Point("log", 2, step, START + 40 + step, {"loss": 8.0 / step, "lr": 0.1}) for step in range(41, 91)]
    points += [Point("log", 2, step, START + 40 + step, {"val_accuracy": step / 100}) for step in (50, 70, 90)]
    points += [Point("log", 2, 91, START + 131, {"loss": math.inf, "lr": 0.1})]
    put(run, "metrics/a/00000000.jsonl", *points)
    store.put(run.key("generations/000001.json"), encode(generation_of(1, number=1)))
    store.put(run.key("generations/000002.json"), encode(generation_of(1, number=2, cause="program")))
    store.put(run.key("launches/000001.json"), encode(FleetLaunch(START - 5, "me@here", {"local": {}})))
    store.put(run.key("nodes/a.json"), encode(a_lease("a", used_seconds=131.0)))
    store.put(run.key("result.json"), encode(Result("failed", "the program exited with code 1", 0, 131.0, {})))
    return run


def settled(answer: Any, store: Store) -> Any:
    """Return an answer without what is different each time; numbers do not depend on the order of sums."""
    if isinstance(answer, dict):
        return {name: settled(value, store) for name, value in answer.items() if name not in VOLATILE}
    if isinstance(answer, list):
        return [settled(value, store) for value in answer]
    if isinstance(answer, float):
        return float(f"{answer:.9g}")
    return answer.replace(store.url, "STORE") if isinstance(answer, str) else answer


def check(name: str, answer: Any, store: Store) -> None:
    text = json.dumps(settled(answer, store), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    path = GOLDEN / f"{name}.json"
    if os.environ.get("PACKTRAIN_RECORD"):
        path.write_text(text, "utf-8")
        pytest.fail(f"recorded {path}; read the difference, and run the test without PACKTRAIN_RECORD")
    assert text == path.read_text("utf-8")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = open_store(str(tmp_path / "store"), create=True)
    trained(made)
    logged(made)
    return made


@pytest.mark.parametrize("run", ["trained-1", "logged-1"])
@pytest.mark.parametrize("command", ["show", "report"])
def test_what_scripts_read_of_a_run_is_unchanged(command: str, run: str, store: Store, packtrain: Packtrain) -> None:
    done = packtrain(command, run, "--json", "--store", store.url)
    assert done.stderr == ""
    check(f"{command}-{run}", json.loads(done.stdout), store)


def test_what_scripts_read_of_all_runs_is_unchanged(store: Store, packtrain: Packtrain) -> None:
    check("ls", json.loads(packtrain("ls", "--json", "--store", store.url).stdout), store)


def test_what_scripts_read_of_a_difference_is_unchanged(store: Store, packtrain: Packtrain) -> None:
    add_run(store, recipe_job("trained", train={"duration": "20 steps"}), b"", "words-0123456789abcdef")
    done = packtrain("compare", "trained-1", "trained-2", "--json", "--store", store.url)
    check("compare", json.loads(done.stdout), store)


PAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "runs": ("/api/runs", {}),
    "run-trained": ("/api/runs/trained-1", {}),
    "run-logged": ("/api/runs/logged-1", {}),
    "answers": ("/api/answers", {"run": "trained-1"}),
    "series": (
        "/api/series",
        {"run": ["trained-1", "logged-1"], "name": ["train.loss", "train.throughput", "valid.bleu", "log.loss"]},
    ),
    "series-thinned": ("/api/series", {"run": "trained-1", "name": ["train.loss", "valid.loss"], "points": 40}),
    "series-by-epoch": ("/api/series", {"run": "trained-1", "name": "valid.bleu", "x": "epoch"}),
    "bands": ("/api/bands", {"run": "trained-1", "points": 20}),
    "machines": ("/api/machines", {"run": "trained-1", "points": 5}),
    "logs": ("/api/logs", {"run": "trained-1"}),
    "samples": ("/api/samples", {"run": "trained-1"}),
    "sample": ("/api/samples", {"run": "trained-1", "step": 120}),
    "difference": ("/api/difference", {"run": ["trained-1", "logged-1"]}),
}


@pytest.mark.parametrize("page", PAGES)
def test_what_the_dashboard_answers_is_unchanged(page: str, store: Store) -> None:
    runs = RunList(store)
    runs.look()
    app = DashboardEndpoints(store, News(runs)).application()
    path, query = PAGES[page]

    async def ask() -> Any:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            answer = await client.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    answer = asyncio.run(ask())
    answer.pop("time", None)
    check(f"api-{page}", answer, store)
