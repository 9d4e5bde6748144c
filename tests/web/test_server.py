"""A real server on loopback, real clients and real stores."""

from __future__ import annotations

import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.observe.spans import COLORS, LABELS, SPANS
from packtrain.report.finding import VERDICTS
from packtrain.run.checkpoint import commit
from packtrain.run.records import Event, JobSource, LogLine, Notes, Point, Result, Sample, Telemetry, TelemetrySample
from packtrain.run.run import Run
from packtrain.store import Store, open_store
from packtrain.web.run_list import RunList
from parts.dashboard import (
    TOKEN,
    RunningDashboard,
    a_start,
    a_step,
    an_evaluation,
    dashboard,
    trained_run,
    write_points,
)
from parts.runs import a_generation, a_lease, new_run, recipe_job, write_files
from parts.service import wait_until

HOSTILE = "<script>alert(1)</script>\x1b[31m\x00\u202e\"'&"
PATHS = [
    "/", "/assets/index.html", "/api/runs", "/api/runs/job-1", "/api/series?run=job-1&name=train.loss",
    "/api/bands?run=job-1", "/api/machines?run=job-1", "/api/logs?run=job-1", "/api/samples?run=job-1",
    "/api/picture?run=job-1&name=x", "/api/difference?run=job-1", "/api/sweeps", "/api/sweeps/x", "/api/stream",
]  # fmt: skip

pytestmark = pytest.mark.usefixtures("processes")


@pytest.fixture
def shown(directory_store: Store) -> Iterator[RunningDashboard]:
    trained_run(directory_store)
    with dashboard(directory_store) as running:
        yield running


def row_of(shown: RunningDashboard, name: str = "job-1") -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    def is_read() -> bool:
        found[:] = [row for row in shown.get("/api/runs")["runs"] if row["name"] == name]
        return bool(found) and found[0]["state"] != "loading"

    wait_until(is_read, f"{name} is read")
    return found[0]


# Who may enter.


@pytest.mark.parametrize("path", PATHS)
def test_without_the_token_nothing_answers(path: str, shown: RunningDashboard) -> None:
    with shown.client(None) as stranger:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": f"packtrain-ui={TOKEN}"}):
            answer = stranger.get(path, headers=headers)
            assert (answer.status_code, list(answer.json())) == (401, ["error"])
        for start in ("/", "/wrong", f"/{TOKEN[:-1]}", f"/{TOKEN}x", f"//{TOKEN}", f"/%00/{TOKEN}"):
            assert stranger.get(f"{start}{path}").status_code == 401, start


def test_the_token_is_in_the_address_and_in_no_cookie_or_log(shown: RunningDashboard) -> None:
    """A cookie would be sent to every server on this machine, whatever its port."""
    with shown.client(None) as browser:
        answer = browser.get(f"/{TOKEN}")
        assert (answer.status_code, answer.headers["location"]) == (303, f"/{TOKEN}/")
        for path in PATHS[:3]:
            answer = browser.get(f"/{TOKEN}{path}")
            assert (answer.status_code, "set-cookie" in answer.headers) == (200, False)
            assert TOKEN not in answer.text
        assert browser.get(f"/{TOKEN}/api/runs/none").status_code == 404
        assert browser.get(f"/{TOKEN}/{TOKEN}/").status_code == 404
        assert browser.get("/api/runs").status_code == 401
    wait_until(lambda: len(shown.log) == 3, "requests are logged after their answer")
    assert [line.split()[3] for line in shown.log] == ["/api/runs/", "/", "/api/runs"]
    assert TOKEN not in "".join(shown.log)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "localhost.evil.example", "10.0.0.1", "", "["])
def test_other_names_for_this_address_are_refused(host: str, shown: RunningDashboard) -> None:
    with shown.client() as client:
        assert client.get("/api/runs", headers={"Host": host}).status_code == 403
        assert client.get("/api/runs", headers={"Host": "localhost:1"}).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:1", "http://["])
def test_pages_of_other_sites_are_refused(origin: str, shown: RunningDashboard) -> None:
    with shown.client() as client:
        assert client.get("/api/runs", headers={"Origin": origin}).status_code == 403
        assert client.get("/api/runs", headers={"Origin": shown.url}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/runs/job-1"])
def test_nothing_can_be_changed(method: str, path: str, shown: RunningDashboard, directory_store: Store) -> None:
    before = directory_store.list()
    with shown.client() as client:
        assert client.request(method, path).status_code == 405
        for each in PATHS:
            if each != "/api/stream":
                client.get(each)
    assert directory_store.list() == before


def test_every_answer_forbids_what_the_page_does_not_need(shown: RunningDashboard) -> None:
    with shown.client() as client:
        for path in ("/", "/api/runs", "/nothing", "/api/runs/none"):
            headers = client.get(path).headers
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"
            assert headers["cache-control"] == "no-store"


@pytest.mark.parametrize("name", ["../server.py", "%2e%2e/server.py", "/etc/passwd", "", "none.js", "..%5cserver.py"])
def test_only_files_of_the_page_are_served(name: str, shown: RunningDashboard) -> None:
    with shown.client() as client:
        assert client.get(f"/assets/{name}").status_code == 404


def test_the_page_has_the_words_and_colors_of_the_report(shown: RunningDashboard) -> None:
    with shown.client() as client:
        found = re.search(r'<script type="application/json" id="terms">(.*?)</script>', client.get("/").text)
    assert found
    terms = json.loads(found[1])
    assert [(span["name"], span["label"]) for span in terms["spans"]] == list(LABELS.items())
    assert all(span["color"] == list(COLORS[SPANS[span["name"]].color]) for span in terms["spans"])
    assert terms["verdicts"] == {verdict: vars(words) for verdict, words in VERDICTS.items()}


def test_a_certificate_makes_it_https(directory_store: Store, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*made, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    with dashboard(directory_store, ssl_certfile=str(certificate), ssl_keyfile=str(key)) as running:
        trusted = ssl.create_default_context(cafile=str(certificate))
        with running.client(None, verify=trusted) as client:
            assert client.get(f"/{TOKEN}/").status_code == 200


# What it answers.


def test_a_run_is_listed(shown: RunningDashboard, directory_store: Store) -> None:
    Run(directory_store, "job-1").put_notes(Notes(("good",), "the first"))
    row = row_of(shown)
    assert (row["state"], row["step"], row["goal"], row["progress"]) == ("finished", 20, 10, 1.0)
    assert (row["job"], row["recipe"], row["measure"]) == ("job", "translate", "bleu")
    assert row["score"] == {"name": "valid.bleu", "value": 12.5, "step": 20, "samples": None}
    assert (row["tags"], row["note"], row["problem"]) == (["good"], "the first", None)
    wait_until(lambda: row_of(shown)["sparkline"], "the curve is read")
    assert row_of(shown)["sparkline"][0] == 10.0


def test_texts_of_10_megabytes_make_short_answers(shown: RunningDashboard, directory_store: Store) -> None:
    run, huge = Run(directory_store, "job-1"), "A" * 10_000_000
    logs, points, events = run.log_writer("a"), run.point_writer("000001-rank-1"), run.event_writer("a")
    logs.append(LogLine(1.0, 1, "a", 0, "out", huge))
    points.append(Point("test", 1, 20, 1.0, {"loss": 1.0}, (Sample("in", "right", huge),)))
    events.append(Event(1.0, "warning", huge))
    for writer in (logs, points, events):
        writer.flush()
    run.put_notes(Notes(("t" * 200,) * 1000, huge[:3_000_000]))
    wait_until(lambda: row_of(shown)["note"], "the note is read")
    told = [
        json.dumps(shown.get("/api/runs")),
        json.dumps(shown.get("/api/runs/job-1")),
        json.dumps(shown.get("/api/logs", run="job-1")),
        json.dumps(shown.get("/api/samples", run="job-1", step=20)),
    ]
    assert ["A" * 1000 in answer and len(answer) < 100_000 for answer in told] == [True] * 4


def test_the_job_of_a_run_is_told_as_it_was_written(shown: RunningDashboard, directory_store: Store) -> None:
    Run(directory_store, "job-1").put_source(
        JobSource("mine.yaml", "# why\nname: job\n", ("train.seed=2",), "a" * 40, 3)
    )
    told = shown.get("/api/runs/job-1")["source"]
    assert (told["file"], told["text"]) == ("mine.yaml", "# why\nname: job\n")
    assert (told["commit"], told["uncommitted"]) == ("a" * 40, 3)
    assert told["command"].startswith("packtrain run mine.yaml --set train.seed=2")


def test_a_run_is_told_in_full(shown: RunningDashboard, directory_store: Store, tmp_path: Path) -> None:
    run = Run(directory_store, "job-1")
    run.propose(a_generation(1, "a"))
    run.record_event("warning", "careful")
    commit(run, 20, 1, 12.5, write_files(tmp_path, {"model.safetensors": b"12345"}))
    told = shown.get("/api/runs/job-1")
    assert [one["members"] for one in told["generations"]] == [["a"]]
    assert [(one["text"], one["display"]) for one in told["events"]] == [("careful", "warning")]
    [checkpoint] = told["checkpoints"]
    assert (checkpoint["step"], checkpoint["bytes"], checkpoint["score"]) == (20, 5, 12.5)
    assert checkpoint["files"] == [{"name": "model.safetensors", "bytes": 5}]
    assert told["result"]["status"] == "finished"
    assert "recipe: translate" in told["source"]["text"]
    assert told["parent"] == ""
    assert "train.loss" in told["names"]
    assert told["goodput"]["seconds"] >= 0


def test_curves_have_steps_times_and_epochs(shown: RunningDashboard) -> None:
    for x, first, last in (("step", 1, 20), ("time", 1e9 + 1, 1e9 + 20), ("epoch", 0.1, 2.0)):
        told = shown.get("/api/series", run="job-1", name=["train.loss", "valid.bleu", "train.nothing"], x=x)
        loss, bleu = told["series"]
        assert (loss["x"][0], loss["x"][-1], len(loss["y"]), loss["complete"]) == (first, last, 20, True)
        assert bleu["x"] == [pytest.approx((first + last) / 2, abs=0.51)] and bleu["y"] == [12.5]
    part = shown.get("/api/series", run="job-1", name="train.loss", **{"from": 5, "to": 7})["series"][0]
    assert part["x"] == [4, 5, 6, 7, 8]


def test_a_page_gets_only_what_is_new(directory_store: Store) -> None:
    run = new_run(directory_store, recipe_job())
    writer = write_points(run, a_start(1), a_step(1), a_step(2))
    with dashboard(directory_store) as shown:
        told = shown.get("/api/series", run="job-1", name="train.loss")
        assert told["series"][0]["x"] == [1, 2]
        writer.append(a_step(3))
        writer.flush()
        told = shown.get("/api/series", run="job-1", name="train.loss", since=told["cursor"])
        assert (told["series"][0]["x"], told["reset"]) == ([3], False)
        write_points(run, a_start(2, 1), a_step(2, 0.5, 2), generation=2)
        told = shown.get("/api/series", run="job-1", name="train.loss", since=told["cursor"])
        assert (told["series"][0]["x"], told["series"][0]["y"], told["reset"]) == ([1, 2], [1.0, 0.5], True)


def test_machines_logs_bands_and_samples_are_told(shown: RunningDashboard, directory_store: Store) -> None:
    run = Run(directory_store, "job-1")
    run.renew(a_lease("a"))
    telemetry = run.telemetry_writer("a")
    telemetry.append(TelemetrySample(1e9, "a", Telemetry(cpu_fraction=0.5)))
    telemetry.flush()
    lines = run.log_writer("a")
    lines.append(LogLine(1e9, 1, "a", 0, "out", "hello"))
    lines.flush()
    [machine] = shown.get("/api/machines", run="job-1")["nodes"]
    assert (machine["hostname"], machine["state"], machine["cpu"], machine["gpu"]) == ("host-of-a", "lost", [0.5], [])
    told = shown.get("/api/logs", run="job-1")
    assert ([line["text"] for line in told["lines"]], told["before"]) == (["hello"], None)
    assert shown.get("/api/logs", run="job-1", after=told["after"])["lines"] == []
    assert shown.get("/api/bands", run="job-1", points=5)["step"] == [4, 8, 12, 16, 20]
    assert shown.get("/api/samples", run="job-1") == {"steps": [10]}
    [sample] = shown.get("/api/samples", run="job-1", step=10)["samples"]
    assert (sample["prediction"], sample["picture"]) == ("prediction", None)


def test_pictures_are_jpegs_of_the_run(shown: RunningDashboard, directory_store: Store) -> None:
    run = Run(directory_store, "job-1")
    directory_store.put(run.key("pictures/abc.jpg"), b"\xff\xd8\xff\xe0picture")
    directory_store.put(run.key("pictures/page.jpg"), b"<script>alert(1)</script>")
    with shown.client() as client:
        answer = client.get("/api/picture?run=job-1&name=abc.jpg")
        assert (answer.headers["content-type"], answer.content[-7:]) == ("image/jpeg", b"picture")
        assert client.get("/api/picture?run=job-1&name=page.jpg").status_code == 404
        for name in ("../job.json", "a/b", "", "..", ".jpg", "%00"):
            assert client.get(f"/api/picture?run=job-1&name={name}").status_code == 400


def test_jobs_are_compared_field_by_field(directory_store: Store) -> None:
    new_run(directory_store, recipe_job())
    new_run(directory_store, recipe_job(train={"duration": "20 steps"}))
    with dashboard(directory_store) as shown:
        fields = shown.get("/api/difference", run=["job-1", "job-2"])["fields"]
    assert fields == [{"field": "train.duration", "values": ["10 steps", "20 steps"]}]


# News.


def test_pages_are_told_what_changes(any_store: Store) -> None:
    run = new_run(any_store, recipe_job())
    writer = write_points(run, a_start(1), a_step(1))
    with dashboard(any_store) as shown, shown.news("job-1") as news:
        for kind, told in news:
            if kind == "run" and told["run"] == "job-1":
                break
        writer.append(a_step(2, 0.25))
        writer.append(an_evaluation(2, bleu=9.0))
        writer.flush()
        run.finish(Result("stopped", "stopped by user", 2, 2.0))
        other = new_run(any_store, recipe_job("other"))
        seen: dict[str, Any] = {}
        versions = told["versions"]
        for kind, told in news:
            if kind == "runs":
                seen |= {row["name"]: row for row in told["rows"]}
            elif kind == "run":
                versions = told["versions"]
            row = seen.get("job-1", {})
            if row.get("state") == "stopped" and row.get("step") == 2 and other.name in seen:
                break
        wait_until(lambda: shown.get("/api/series", run="job-1", name="train.loss")["series"][0]["y"][-1] == 0.25, "")
        assert versions["points"].count(".") == 4


def test_a_run_that_vanishes_while_it_is_watched_is_told_gone(directory_store: Store) -> None:
    run = trained_run(directory_store)
    with dashboard(directory_store) as shown, shown.news("job-1") as news:
        assert next(kind for kind, told in news if kind == "runs" and told["rows"])
        shown.get("/api/runs/job-1")
        shutil.rmtree(Path(directory_store.url) / run.folder)
        assert next(told["gone"] for kind, told in news if kind == "runs" and told["gone"]) == ["job-1"]
        with shown.client() as client:
            for path in ("/api/runs/job-1", "/api/series?run=job-1&name=train.loss", "/api/logs?run=job-1"):
                assert client.get(path).status_code == 404
        assert shown.get("/api/runs")["runs"] == []


def test_a_store_that_is_away_is_said_so_until_it_is_back(directory_store: Store, tmp_path: Path) -> None:
    trained_run(directory_store)
    away = tmp_path / "away"
    with dashboard(directory_store) as shown, shown.news() as news, shown.client() as client:
        assert row_of(shown)["state"] == "finished"
        Path(directory_store.url).rename(away)
        assert next(told["error"] for kind, told in news if kind == "store" and told["error"])
        for path in ("/api/runs", "/api/series?run=job-1&name=train.loss"):
            answer = client.get(path)
            assert answer.status_code == 503 and "\n" not in answer.json()["error"]
        away.rename(directory_store.url)
        assert next(told for kind, told in news if kind == "store") == {"error": None}
        assert client.get("/api/runs").json()["runs"][0]["state"] == "finished"


def test_nothing_is_read_while_nobody_looks(directory_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[None] = []
    real = RunList.look

    def look(*arguments: Any) -> Any:
        looks.append(None)
        return real(*arguments)

    monkeypatch.setattr(RunList, "look", look)
    with dashboard(directory_store) as shown:
        news = shown.server.news
        for _ in range(3):  # wakes its thread, which finds that nobody looks
            news._wake.set()
            wait_until(lambda: not news._wake.is_set(), "the thread is awake")
        assert looks == []
        shown.get("/api/runs")
        wait_until(lambda: looks, "somebody asked")


def test_a_page_too_many_is_refused(shown: RunningDashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packtrain.web.news._MAX_STREAMS", 1)
    with shown.news() as news, shown.client() as client:
        assert next(news)
        answer = client.get("/api/stream")
        assert (answer.status_code, answer.json()) == (503, {"error": "too many pages are open; close some"})


def test_the_server_ends_although_pages_are_open(directory_store: Store) -> None:
    ended = threading.Event()

    def listen(shown: RunningDashboard) -> None:
        with shown.news() as news:
            for _ in news:
                pass
        ended.set()

    with dashboard(directory_store) as shown:
        thread = threading.Thread(target=listen, args=(shown,), daemon=True)
        thread.start()
        wait_until(lambda: shown.server.news._listeners, "the page listens")
    assert ended.wait(30)


# What others wrote.


def test_damage_in_one_run_does_not_hide_the_others(directory_store: Store) -> None:
    damaged = [trained_run(directory_store) for _ in range(6)]
    places = ["job.json", "result.json", "generations/000001.json", "notes.json", "nodes/a.json"]
    for run, place in zip(damaged, places, strict=False):
        if place != "result.json":
            directory_store.delete(run.key("result.json"))
        directory_store.put(run.key(place), b'{"name": [[[')
    directory_store.put("runs/../x".replace("../", "odd-"), b"not a run")
    with dashboard(directory_store) as shown:
        rows = {name: row_of(shown, name) for name in ("job-1", "job-2", "job-5", "job-6")}
        assert rows["job-6"]["state"] == "finished"
        for name in ("job-1", "job-2", "job-5"):
            assert rows[name]["state"] == "damaged" and "damaged" in rows[name]["reason"]
        for run in damaged:
            with shown.client() as client:
                for path in PATHS[3:10]:
                    answer = client.get(path.replace("job-1", run.name))
                    assert answer.status_code in (200, 404), (path, answer.text)


def test_hostile_texts_arrive_as_texts(directory_store: Store) -> None:
    run = new_run(directory_store, recipe_job())
    write_points(run, a_start(1), a_step(1), an_evaluation(1, 1, [Sample(HOSTILE, HOSTILE, HOSTILE)], **{HOSTILE: 1.0}))
    lines = run.log_writer("a")
    lines.append(LogLine(1e9, 1, "a", 0, "out", HOSTILE))
    lines.append(LogLine(1e9, 1, "a", 0, "out", "x" * 10_000_000))
    lines.flush()
    run.record_event("warning", HOSTILE)
    run.put_notes(Notes((HOSTILE,), HOSTILE))
    run.finish(Result("failed", HOSTILE, 1, 1.0))
    with dashboard(directory_store) as shown:
        row = row_of(shown)
        assert (row["note"], row["tags"]) == (HOSTILE, [HOSTILE])
        with shown.client() as client:
            for path in PATHS[2:9]:
                answer = client.get(path)
                assert answer.headers["content-type"] == "application/json"
        told = shown.get("/api/logs", run="job-1")
        assert [len(line["text"]) for line in told["lines"]] == [len(HOSTILE), 4001]
        assert shown.get("/api/logs", run="job-1", search=HOSTILE.upper())["lines"][0]["text"] == HOSTILE
        assert shown.get("/api/samples", run="job-1", step=1)["samples"][0]["input"] == HOSTILE
        assert shown.get("/api/series", run="job-1", name=f"valid.{HOSTILE}")["series"][0]["y"] == [1.0]


@pytest.mark.parametrize(
    "path",
    [
        "/api/series?run=job-1&name=train.loss&x=size", "/api/series?run=job-1&points=0", "/api/series?points=nan",
        "/api/series?run=job-1&from=inf", "/api/series?run=job-1&since=x", "/api/series?since=a:1:2:3:-4",
        "/api/series?" + "run=a&" * 300 + "&".join(f"run=r{n}" for n in range(300)),
        "/api/logs?run=job-1&before=x", "/api/logs?run=job-1&after=1.-1", "/api/logs?run=job-1&rank=1.5",
        "/api/logs?run=job-1&stream=both", "/api/logs?run=job-1&limit=99999999", "/api/samples?run=job-1&step=-1",
    ],
)  # fmt: skip
def test_a_query_that_makes_no_sense_is_refused_in_one_line(path: str, shown: RunningDashboard) -> None:
    with shown.client() as client:
        answer = client.get(path)
        assert answer.status_code == 400
        assert len(answer.json()["error"].splitlines()) == 1


PARAMETERS = (
    "run", "name", "x", "from", "to", "points", "since", "search", "rank", "stream", "node", "before", "after",
    "limit", "step",
)  # fmt: skip
VALUES = st.one_of(
    st.sampled_from(
        ["job-1", "train.loss", "valid.bleu", "step", "time", "epoch", "out", "0", "1", "1.0", "-1", "1e309"]
    ),
    st.integers().map(str),
    st.floats().map(str),
    st.text(max_size=20),
)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDashboard]:
    store = open_store(str(tmp_path_factory.mktemp("fuzz") / "store"), create=True)
    run = trained_run(store)
    writer = run.event_writer("a")
    writer.append(Event(1e9, "warning", "text"))
    writer.flush()
    with dashboard(store) as shown:
        yield shown


@pytest.fixture(scope="module")
def fuzzing(fuzzed: RunningDashboard) -> Iterator[httpx.Client]:
    with fuzzed.client() as client:
        yield client


@settings(deadline=None, max_examples=120)
@given(
    path=st.one_of(
        st.sampled_from([path.partition("?")[0] for path in PATHS if path != "/api/stream"]),
        st.text(max_size=30).map(lambda text: f"/{text}"),
        st.text(max_size=30).map(lambda text: f"/api/runs/{text}"),
    ),
    query=st.lists(st.tuples(st.sampled_from(PARAMETERS), VALUES), max_size=6),
)
def test_any_request_is_answered(
    path: str, query: list[tuple[str, str]], fuzzed: RunningDashboard, fuzzing: httpx.Client
) -> None:
    url = quote(path.encode(errors="replace"))
    values: list[tuple[str, Any]] = [(name, value.encode(errors="replace").decode()) for name, value in query]
    answer = fuzzing.get(f"{fuzzed.url}{url}", params=values)
    assert answer.status_code in (200, 303, 400, 404), (path, query, answer.text)
    if answer.status_code >= 400:
        assert list(answer.json()) == ["error"]


def test_a_head_that_is_not_http_does_not_end_the_server(fuzzed: RunningDashboard) -> None:
    host, port = fuzzed.url.removeprefix("http://").split(":")
    two_lengths = b"GET /%s/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
    for head in (
        b"\x00\xff\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n",
        two_lengths % TOKEN.encode(),
    ):  # fmt: skip
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(head)
            assert b"200" not in connection.recv(100)
    assert fuzzed.get("/api/runs")["runs"]
