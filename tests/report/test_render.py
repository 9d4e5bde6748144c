from __future__ import annotations

import hashlib
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pack.corpus import job_of
from packtrain.job import Job
from packtrain.observe.evidence import Evidence
from packtrain.observe.goodput import Goodput
from packtrain.observe.status import Status, status_in_full
from packtrain.report import findings_of, report_page, report_url, write_report
from packtrain.report.finding import Chart, Finding, Rows, Shares, Text, Verdict
from packtrain.report.page import Series
from packtrain.report.render import render
from packtrain.run.records import Event, Generation, Member, Point, Result, Sample, TimeSpent
from packtrain.run.run import Run, add_run
from packtrain.store import Store
from parts.runs import a_lease
from report.pages import Page

EVIL = "<script>alert(1)</script>\"'&"


def trained(step: int, **values: float) -> Point:
    spans = dict.fromkeys(["data_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds"], 0.1)
    measured = {"loss": 4.0, "rate": 0.001, "epoch": 0.5, "gradient_norm": 1.0, "tokens": 64.0, "step_seconds": 0.5}
    return Point("train", 1, step, 100.0 + step, {**measured, **spans, "elapsed_seconds": 9.0 + step, **values})


def validated(step: int, samples: tuple[Sample, ...] = (), **values: float) -> Point:
    return Point("valid", 1, step, 100.0 + step, {**values, "evaluation_seconds": 2.0}, samples)


@pytest.fixture
def run(directory_store: Store, tmp_path: Path) -> Run:
    return add_run(directory_store, job_of(tmp_path), b"", None)


def page_of(run: Run, points: list[Point], result: Result | None = None, **records: object) -> Page:
    state = result.status if result else "running"
    summary = status_in_full(run, state, points, result)
    evidence = Evidence(run.job, summary, raw=points, result=result, **records)  # type: ignore[arg-type]
    return Page(render(evidence, findings_of(evidence)))


def test_a_run_without_metrics_has_a_report(run: Run) -> None:
    page = page_of(run, [])
    assert run.name in page.text
    assert "svg" not in page.tags
    assert "Not enough data: no generation has started yet." in page.text


def test_the_run_of_a_program_has_a_report(directory_store: Store) -> None:
    job = Job.model_validate({"name": "mine", "program": ["train.py", "--lr", "0.1"]})
    run = add_run(directory_store, job, b"", None)
    page = page_of(run, [], Result("finished", "the program exited with code 0", 0, 3.0))
    assert "train.py --lr 0.1" in page.text
    assert "finished: the program exited with code 0" in page.text
    assert "svg" not in page.tags


def test_every_number_that_a_program_logs_has_a_curve(directory_store: Store) -> None:
    run = add_run(directory_store, Job.model_validate({"name": "mine", "program": ["train.py"]}), b"", None)
    points = [Point("log", 1, step, 1.0 + step, {"train/loss": 1 / (1 + step), EVIL: 1.0}) for step in range(30)]
    page = page_of(run, [*points, Point("log", 1, 30, 31.0, {"accuracy": math.nan})])
    assert page.tags.count("svg") == 2
    assert "train/loss" in page.text
    assert EVIL in page.text


def test_the_report_has_the_dollars_so_far_and_expected(directory_store: Store, tmp_path: Path) -> None:
    job = job_of(tmp_path, fleet={"local": {}, "price": 36.0})
    run = add_run(directory_store, job, b"", None)
    run.renew(a_lease("a", machine_seconds=600.0, dollars_per_hour=36.0))
    text = page_of(run, [trained(1), trained(2)]).text
    assert text[text.index("$6.00") - 1] == "cost so far"
    assert text[text.index("$6.08") - 1] == "cost expected", "8 steps of a second each"
    ended = page_of(run, [trained(1)], Result("stopped", "stopped by user", 1, 3.0)).text
    assert ended[ended.index("$6.00") - 1] == "cost"


def test_the_report_of_a_finished_run_has_scores_answers_curves_and_samples(run: Run) -> None:
    points = [trained(1), trained(2), validated(2, (Sample("in", "expected", "out"),), loss=3.0, bleu=12.345)]
    result = Result("finished", "reached 10 steps", 2, 4.0, {"test.bleu": 20.0}, {"test.bleu": "tok:13a|v:2"})
    spent = [TimeSpent(1.0, 1, rank, 2, {"forward": 3.0, "wait": 1.0}) for rank in (0, 1)]
    writer = run.time_spent_writer("0")
    for record in spent:
        writer.append(record)
    writer.flush()
    page = page_of(run, points, result, spent=spent)
    text = " ".join(page.text)
    assert "4.0 s; 100% of it went into steps that counted." in text
    for words in ("finished: reached 10 steps", "20.00", "12.35", "tok:13a|v:2", "Is it fully trained?", "Samples"):
        assert words in text
    for words in ("prediction", "reference", "in", "expected", "out"):
        assert words in page.text
    charts = [value for name, value in page.attributes if name == "aria-label"]
    assert {"loss", "validation bleu", "learning rate", "gradient norm", "tokens/s"} <= set(charts)


def test_answers_come_before_everything_else_and_open_to_their_evidence(run: Run) -> None:
    page = page_of(run, [trained(step) for step in range(1, 50)])
    titles = ["The model", "Speed", "The run", "Curves"]
    assert [text for text in page.text if text in titles] == titles
    assert page.tags.count("details") == page.tags.count("summary") >= 12
    assert "trained" in page.values("id")
    assert "open" not in dict(page.attributes)


def test_every_verdict_has_a_mark_and_a_word(run: Run) -> None:
    verdicts: tuple[Verdict, ...] = ("good", "note", "bad", "unknown")
    findings = [Finding(one, "model", "A question?", "An answer.", one) for one in verdicts]
    evidence = Evidence(run.job, status_in_full(run, "running", [], None))
    text = "".join(Page(render(evidence, findings)).text)
    assert "✓ 1 good! 1 worth knowing✕ 1 worth changing? 1 not enough data" in text
    assert "A question? (worth changing)" in text, "for those who do not see the mark"


def test_every_kind_of_figure_is_drawn(run: Run) -> None:
    figures = (
        Chart("speed", (Series("line", [(1.0, 1.0), (2.0, 3.0)]),), marks=((1.5, "restart"), (99.0, "far away"))),
        Shares("time", (("forward", 3.0), ("something new", 1.0))),
        Rows(("head",), (("cell",),)),
        Text("command", "packtrain run"),
    )
    evidence = Evidence(run.job, status_in_full(run, "running", [], None))
    page = Page(render(evidence, [Finding("x", "run", "Q", "A", "good", ("a fact",), figures)]))
    for text in ("restart", "forward 75.0%", "something new 25.0%", "head", "cell", "packtrain run", "a fact"):
        assert text in page.text
    assert "far away" not in page.text, "beyond the axis"


def test_restarts_are_marked_on_the_curves(run: Run) -> None:
    members = (Member("a", "::1", 1),)
    generations = [Generation(1, members, 1, ""), Generation(2, members, 1, "killed", step=5, cause="program")]
    page = page_of(run, [trained(step) for step in range(1, 9)], generations=generations)
    assert page.text.count("restart") == 2


def test_only_the_newest_samples_are_shown(run: Run) -> None:
    older, newer = Sample("q", "a", "first try"), Sample("q", "a", "second try")
    page = page_of(run, [validated(1, (older,), loss=3.0), validated(2, (newer,), loss=2.0)])
    assert "second try" in page.text
    assert "first try" not in page.text


def test_the_last_200_events_are_shown_with_their_times(run: Run) -> None:
    events = [Event(float(number), "checkpoint", f"event {number}") for number in range(250)]
    text = page_of(run, [], events=events).text
    assert "event 249" in text
    assert "event 49" not in text
    assert "event 50" in text
    assert "last 200 of 250" in text
    assert "1970-01-01 00:04:09" in text


# Safety.


def test_all_text_is_escaped(run: Run) -> None:
    names = {f"valid.{EVIL}": 1.0}
    summary = Status(
        run=EVIL, state="failed", reason=EVIL, description=EVIL, step=1, goal=None, loss=None, loss_steps=0, rate=None,
        measure=EVIL, lower=False, unit=EVIL, units_per_second=1.0, seconds=1.0, score=None, test=None, best=None,
        scores=names, counts={}, signatures={EVIL: EVIL}, generations=1, machines=(),
        goodput=Goodput(0.0, {"data": 1.0}), cost=None,
    )  # fmt: skip
    points = [
        trained(1, **{EVIL: 5.0}),
        validated(1, (Sample(EVIL, EVIL, EVIL),), **{"loss": 1.0, EVIL: 2.0}),
    ]
    generations = (
        Generation(1, (Member("a", "::1", 1),), 1, ""),
        Generation(2, (Member("a", "::1", 1),), 1, EVIL, cause="program", culprit=None),
    )
    evidence = Evidence(
        run.job, summary, raw=points, events=[Event(1.0, "warning", EVIL)], generations=generations, store=EVIL,
        versions={EVIL: EVIL}, pack=EVIL,
    )  # fmt: skip
    everything = Finding(
        "x", "run", EVIL, EVIL, "good", (EVIL,),
        (Chart(EVIL, (Series(EVIL, [(1.0, 1.0)], True),), EVIL, ((1.0, EVIL),)), Shares(EVIL, ((EVIL, 1.0),)),
         Rows((EVIL,), ((EVIL,),)), Text(EVIL, EVIL)),
    )  # fmt: skip
    job = Job.model_validate({"name": "mine", "program": ["train.py", EVIL]})
    program = replace(evidence, job=job)
    html = render(evidence, [everything, *findings_of(evidence), *findings_of(program)])
    page = Page(html)
    assert "script" not in page.tags
    assert "<script" not in html
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    shown = "".join(page.text)
    assert shown.count("<script>alert(1)</script>") >= 12


def test_the_report_can_neither_fetch_nor_run_anything(run: Run) -> None:
    page = page_of(run, [trained(1), validated(1, loss=2.0)])
    policies = [value for name, value in page.attributes if name == "content" and "default-src" in value]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]
    assert not {"script", "link", "img", "iframe", "object", "form", "a"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in ("src", "href", "action")]
    assert not re.search(r"url\(|@import", "".join(page.text))


def test_nan_and_infinity_are_not_drawn(run: Run) -> None:
    strange = [math.nan, math.inf, -math.inf]
    points = [trained(1)]
    points += [trained(2 + n, loss=value, gradient_norm=value, rate=value) for n, value in enumerate(strange)]
    points += [validated(2 + n, loss=value, bleu=value) for n, value in enumerate(strange)]
    page = page_of(run, points)
    placed = [
        value for name, value in page.attributes if name in ("points", "cx", "cy", "x1", "x2", "y1", "y2", "x", "y")
    ]
    assert placed
    assert not [value for value in placed if "nan" in value or "inf" in value]


# In the store.


def test_the_report_is_written_to_the_url_that_is_returned(any_store: Store, tmp_path: Path) -> None:
    run = add_run(any_store, job_of(tmp_path), b"", None)
    metrics, events = run.point_writer("0"), run.event_writer("0")
    metrics.append(trained(1))
    events.append(Event(2.0, "finished", "came second"))
    events.append(Event(1.0, "generation", "came first"))
    metrics.flush()
    events.flush()
    run.finish(Result("finished", "reached 1 step", 1, 5.0))
    place = write_report(run)
    assert place == report_url(run) == f"{any_store.url}/runs/{run.name}/report.html"
    text = Page(any_store.get(run.key("report.html")).decode()).text
    assert text.index("came first") < text.index("came second")
    assert "finished: reached 1 step" in text


def test_a_report_can_be_rewritten(directory_store: Store, tmp_path: Path) -> None:
    run = add_run(directory_store, job_of(tmp_path), b"", None)
    write_report(run)
    assert "waiting" in directory_store.get(run.key("report.html")).decode()
    run.finish(Result("stopped", "asked to", 0, 5.0))
    write_report(run)
    assert "asked to" in directory_store.get(run.key("report.html")).decode()


def test_the_pictures_of_samples_are_in_the_page(run: Run) -> None:
    run.put_picture(b"\xff\xd8 a picture")
    digest = hashlib.sha256(b"\xff\xd8 a picture").hexdigest()
    writer = run.point_writer("0")
    sample = Sample("x.jpg", "cat", "dog", digest, confidence=0.9)
    writer.append(validated(1, (sample, replace(sample, picture="0" * 64)), loss=1.0))
    writer.flush()
    html = report_page(run)
    assert html.count("url(data:image/jpeg;base64,") == 1, "the store does not have the other"
    assert "Most often confused, among these samples" in html
