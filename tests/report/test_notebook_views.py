"""Runs in a notebook: what is shown of them, and what an interrupt ends."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from packtrain.errors import PacktrainError, harmless
from packtrain.observe.status import read_end
from packtrain.report.notebook import PrintedLines, Report, Shown, draw, panel_of, runs_table
from packtrain.run.records import Event, Point, Result
from packtrain.run.run import Run
from packtrain.store import Store
from parts.runs import MEASURED, new_run, program_job, recipe_job

SCRIPT = "<script>alert(1)</script>\x1b[2J"


class Elements(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def assert_harmless(page: str) -> None:
    """Assert that nothing in it runs, loads anything or changes the style of the page around it."""
    for tag, attributes in Elements(page).found:
        assert tag not in ("script", "style", "link", "iframe", "object")
        assert not any(name.startswith("on") for name in attributes)
        assert (attributes.get("src") or "data:").startswith("data:")
    assert "\x1b" not in page


@pytest.fixture
def run(directory_store: Store) -> Run:
    run = new_run(directory_store, recipe_job())
    points, events = run.point_writer("000001-rank-0"), run.event_writer("a")
    for step in (1, 2):
        points.append(Point("train", 1, step, 10.0 * step, {**MEASURED, "loss": 4.0 - step}))
    points.append(Point("valid", 1, 2, 20.0, {"bleu": 12.5, SCRIPT: 1.0}))
    events.append(Event(1.0, "warning", SCRIPT, 1))
    for writer in (points, events):
        writer.flush()
    return run


class Place:
    """Notes what is shown; `fault` is raised after so many updates."""

    def __init__(self, fault_after: int | None = None) -> None:
        self.shown: list[Shown] = []
        self._fault_after = fault_after

    def update(self, shown: Shown) -> None:
        self.shown.append(shown)
        if len(self.shown) == self._fault_after:
            raise KeyboardInterrupt


def test_a_panel_shows_state_progress_scores_and_curves(run: Run) -> None:
    shown = panel_of(run)
    for words in ("job-1", "● waiting", "2 of 10", "12.50 at step 2", "width:20.0%"):
        assert words in shown.html
    assert [attributes["alt"] for tag, attributes in Elements(shown.html).found if tag == "img"] == [
        "loss",
        "valid bleu",
    ]
    assert repr(shown) == "job-1  waiting  step 2  loss 2.500  valid bleu 12.50"


def test_text_from_the_store_cannot_do_anything_in_a_notebook(run: Run, directory_store: Store) -> None:
    run.finish(Result("failed", SCRIPT, 2, 1.0))
    other = new_run(directory_store, program_job(program=["train.py", SCRIPT]))
    rows = [(one.name, read_end(one, "failed")) for one in (run, other)]
    damaged = ("bad-1", PacktrainError(SCRIPT.replace("\x1b", "")))
    for page in (panel_of(run).html, runs_table([*rows, damaged], "store")):
        assert_harmless(page)
        assert "&lt;script&gt;" in page


def test_a_run_is_drawn_until_it_ends(run: Run) -> None:
    class Ending(Place):
        def update(self, shown: Shown) -> None:
            super().update(shown)
            run.finish(Result("finished", "reached 2 steps", 2, 1.0))

    place = Ending()
    draw(run, place, 0.01)
    assert "● waiting" in place.shown[0].html
    assert "● finished: reached 2 steps" in place.shown[-1].html


def test_an_interrupt_ends_the_drawing_and_not_the_run(run: Run) -> None:
    place = Place(fault_after=2)
    draw(run, place, 0.01)
    assert "job-1 keeps running" in place.shown[-1].html
    assert (run.result(), run.stop_request()) == (None, None)


def test_outside_of_a_notebook_each_change_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    place = PrintedLines()
    for text in ("step 1", "step 1", "step 2"):
        place.update(Shown("", text))
    assert capsys.readouterr().out == "step 1\nstep 2\n"


def test_a_table_without_a_price_has_no_column_for_it(run: Run, directory_store: Store) -> None:
    assert "cost" not in runs_table([("job-1", read_end(run, "stopped"))], "store")
    priced = new_run(directory_store, recipe_job("rented", fleet={"local": {}, "price": 2.0}))
    assert "cost" in runs_table([("rented-1", read_end(priced, "stopped"))], "store")
    assert "No runs in s3://here" in runs_table([], "s3://here")


def test_a_report_is_shown_in_a_frame_that_runs_nothing() -> None:
    report = Report("store/report.html", f"<p>{SCRIPT}</p>")
    ((tag, attributes),) = Elements(report._repr_html_()).found
    assert (tag, attributes["sandbox"], attributes["srcdoc"]) == ("iframe", None, harmless(report.html))
    assert str(report) == "store/report.html"
