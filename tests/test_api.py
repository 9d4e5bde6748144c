"""The Python interface on runs that exist."""

from __future__ import annotations

import subprocess
import sys

import pytest

import packtrain as pt
from packtrain.run.records import Point, Result
from packtrain.store import Store
from parts.runs import MEASURED, new_run, recipe_job


@pytest.fixture
def store(directory_store: Store) -> str:
    """A store with three runs of two steps, the second one damaged."""
    for number in (1, 2, 3):
        run = new_run(directory_store, recipe_job())
        writer = run.point_writer("000001-rank-0")
        for step in (1, 2):
            writer.append(Point("train", 1, step, 1.0, {**MEASURED, "loss": float(number)}))
        writer.flush()
        run.finish(Result("finished", "reached 2 steps", 2, 1.0))
        if number == 2:
            directory_store.put(run.key("result.json"), b"{")
    return directory_store.url


def test_the_runs_of_a_store_are_a_list_newest_first(store: str) -> None:
    runs = pt.runs(store)
    assert [run.name for run in runs] == ["job-3", "job-2", "job-1"]
    assert runs[0].name == "job-3"
    assert repr(runs[:2]) == f"<2 runs in {store}: job-3, job-2>"


def test_a_notebook_shows_a_table_in_which_a_damaged_run_does_not_hide_the_others(store: str) -> None:
    page = pt.runs(store)._repr_html_()
    assert page.count("● finished") == 2
    assert "result.json of run job-2" in page


def test_runs_are_plotted_together(store: str) -> None:
    runs = pt.runs(store)
    assert [one.name for one in runs[::2].plot("train.loss").series] == ["job-3", "job-1"]
    plot = pt.open("job-1", store).plot("train.loss", against=runs[0])
    assert [(one.name, one.points[-1]) for one in plot.series] == [("job-1", (2.0, 1.0)), ("job-3", (2.0, 3.0))]


def test_metrics_are_a_table_and_points_a_list(needs_pandas: None, store: str) -> None:
    run = pt.open("job-3", store)
    assert run.metrics()["train.loss"].tolist() == [3.0, 3.0]
    assert run.metrics("polars")["step"].to_list() == [1, 2]
    assert [point.step for point in run.points()] == [1, 2]


def test_a_report_is_written_and_shown(store: str) -> None:
    report = pt.open("job-1", store).report()
    assert report.url == f"{store}/runs/job-1/report.html"
    assert "job-1" in report.html


@pytest.mark.usefixtures("processes")
def test_neither_a_notebook_nor_a_table_library_is_imported_before_it_is_needed(store: str) -> None:
    heavy = ["IPython", "pandas", "polars", "torch"]
    code = f"""
import sys, packtrain as pt
run = pt.open("job-3", {store!r})
run.watch(), run.plot("loss").svg(), run._repr_html_()
print([name for name in {heavy} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["job-3  finished: reached 2 steps  step 2  loss 3.000", "[]"]
