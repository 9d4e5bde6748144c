"""The page of a sweep."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from packtrain.observe.status import read_end
from packtrain.report.sweep import (
    SweepRow,
    SweepTable,
    as_json,
    axis_of,
    find_sweep,
    sweep_markdown,
    sweep_page,
    sweep_table,
)
from packtrain.run.records import Point, Result
from packtrain.run.sweeps import Rung, RungResult, Sweep, SweepPlan, Trial, TrialStart, add_trial_run
from packtrain.store import Store
from parts.dashboard import a_step, write_points
from parts.runs import new_run, recipe_job
from report.pages import Page

EVIL = "<script>alert(1)</script>"


def a_row(trial: int, score: float | None, early: bool = False, **values: str) -> SweepRow:
    return SweepRow(trial, f"s-{trial}", "finished", "finished", values, score, 10, early)


def a_table(*rows: SweepRow, lower: bool = False) -> SweepTable:
    return SweepTable("s", "job", ("rate", "size"), "bleu", lower, "2 runs to the end", rows)


def test_numbers_are_placed_by_size_and_words_in_order() -> None:
    assert axis_of("seed", ["1", "5", "3"]).places == {"1": 0.0, "5": 1.0, "3": 0.5}
    assert axis_of("warmup", ["100 steps", "300 steps"]).places == {"100 steps": 0.0, "300 steps": 1.0}
    assert axis_of("rate", ["0.001", "0.01", "0.1"]).places["0.01"] == pytest.approx(0.5), "a logarithmic scale"
    assert axis_of("size", ["tiny", "base", "7"]).places == {"tiny": 0.0, "base": 0.5, "7": 1.0}
    assert axis_of("one", ["x"]).places == {"x": 0.5}
    assert len(axis_of("many", [str(number) for number in range(50)]).ticks) == 3


def test_every_run_with_a_score_is_a_line_and_the_best_is_marked() -> None:
    rows = (a_row(2, 9.0, rate="0.1", size="tiny"), a_row(1, 5.0, True, rate="0.2", size="base"), a_row(3, None))
    page = Page(sweep_page(a_table(*rows)))
    assert sorted(value for value in page.values("class") if value.startswith("run")) == ["run best", "run early"]
    lines = [[tuple(map(float, one.split(","))) for one in value.split()] for value in page.values("points")]
    assert [len(line) for line in lines] == [3, 3]
    best, early = lines[-1], lines[0]
    assert best[-1][1] < early[-1][1], "the better score is higher up"
    lower = Page(sweep_page(a_table(*reversed(rows[:2]), lower=True)))
    drawn = [[tuple(map(float, one.split(","))) for one in value.split()] for value in lower.values("points")]
    assert drawn[-1][-1][1] < drawn[0][-1][1], "also if it is the lower one"


def test_the_page_escapes_everything_and_fetches_nothing() -> None:
    rows = (a_row(1, 1.0, rate=EVIL, size=EVIL), a_row(2, 2.0, rate="1", size="2"))
    table = SweepTable(EVIL, EVIL, ("rate", "size"), EVIL, False, EVIL, rows)
    page = Page(sweep_page(table))
    assert not {"script", "link", "img", "iframe", "a"} & set(page.tags)
    assert "".join(page.text).count(EVIL) > 5


def test_markdown_has_the_table_and_the_best_run_and_escapes_everything() -> None:
    rows = (a_row(2, 9.0, rate="0.1", size="*|"), a_row(1, None, rate=EVIL, size="base"))
    lines = sweep_markdown(a_table(*rows)).splitlines()
    assert lines[0] == "# s"
    assert lines[4] == r"Best so far: s-2, bleu 9.00, with rate = 0.1, size = \*\|."
    assert lines[6:] == [
        "| run | state | rate | size | step | bleu |",
        "| --- | --- | --- | --- | --- | --- |",
        r"| s-2 | finished | 0.1 | \*\| | 10 | 9.00 |",
        r"| s-1 | finished | \<script\>alert(1)\</script\> | base | 10 |  |",
    ]


def test_the_table_says_of_how_many_samples_the_scores_are() -> None:
    rows = [replace(a_row(trial, 9.0, rate="1", size="2"), samples=100) for trial in (1, 2)]
    lines = sweep_markdown(a_table(*rows)).splitlines()
    assert lines[4] == "Best so far: s-1, bleu 9.00 (100 samples), with rate = 1, size = 2."
    assert lines[6].endswith("| step | bleu (100 samples) |")
    assert lines[8].endswith("| 10 | 9.00 |")
    mixed = sweep_markdown(a_table(rows[0], replace(rows[1], samples=800))).splitlines()
    assert mixed[6].endswith("| step | bleu |")
    assert [line.split("|")[-2].strip() for line in mixed[8:]] == ["9.00 (100 samples)", "9.00 (800 samples)"]


def test_a_sweep_shows_the_score_that_ls_shows(directory_store: Store) -> None:
    """The full validation split at the end, and not the part of it that was measured just before."""
    source = {"bitext": ["a.en", "a.de"]}
    trials = tuple(Trial(number, f"s-{number}", {"a": str(number)}) for number in (1, 2))
    plan = SweepPlan("s", "job", "d", ("a",), trials, 1, {}, "bleu", False, (Rung(10, 1),))
    sweep = Sweep(directory_store, "s")
    sweep.put_plan(plan)
    job = recipe_job(data={"train": [source], "valid": [source]}, evaluate={"every": "10 steps"})
    for trial, bleu in zip(trials, (30.0, 3.66), strict=True):
        sweep.claim(TrialStart(trial.number, 1, 1, 0, 1e9, 1))
        run = add_trial_run(sweep, trial, job.model_dump_json().encode(), b"", None)
        points = [a_step(10), Point("valid", 1, 10, 1e9, {"bleu": bleu, "loss": 2.0}, counts={"bleu": 100})]
        write_points(run, *points)
    sweep.settle(1, RungResult({"1": 30.0, "2": 3.66}, (2,)))
    run.finish(Result("finished", "", 10, 9.0, {"valid.bleu": 1.84}, counts={"valid.bleu": 800}))
    table = sweep_table(directory_store, "s")
    assert [(row.run, row.score, row.samples) for row in table.rows] == [("s-2", 1.84, 800), ("s-1", 30.0, 100)]
    assert read_end(run, "finished").headline == "valid bleu 1.84 (800 samples)"


def test_a_name_is_that_of_a_run_before_it_is_that_of_a_sweep(directory_store: Store) -> None:
    assert [find_sweep(directory_store, name) for name in (None, "s", "../s")] == [None, None, None]
    Sweep(directory_store, "job-1").put_plan(
        SweepPlan("job-1", "job", "d", ("a",), (Trial(1, "x", {"a": "1"}),), 1, {})
    )
    assert find_sweep(directory_store, "job-1") == "job-1"
    assert new_run(directory_store).name == "job-1"
    assert find_sweep(directory_store, "job-1") is None


def test_a_sweep_without_scores_has_a_page_and_json() -> None:
    table = a_table(a_row(1, None, rate="1", size="2"))
    assert "svg" not in Page(sweep_page(table)).tags
    assert json.loads(json.dumps(as_json(table)))["best"] is None
