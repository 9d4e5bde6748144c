"""The rows of the dashboard: which runs are read again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from packtrain.run.records import FleetLaunch, Point, Result
from packtrain.store import Store
from packtrain.web import run_list
from packtrain.web.run_list import RunList
from parts.dashboard import a_step, trained_run, write_points
from parts.runs import a_generation, a_lease, new_run, program_job, recipe_job


def test_a_run_that_a_page_shows_is_read_at_every_look(
    directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it seems to be at rest: no machine works on it, and its folder has not changed for a while."""
    monkeypatch.setattr(run_list, "_LIST_SHARE", 1e9)  # every look lists all runs
    monkeypatch.setattr(run_list, "_LIST_SHARE_ASIDE", 1e9)
    run = trained_run(directory_store, steps=20, ended=False)
    run.propose(a_generation(1, "a"))
    run.renew(a_lease("a", left=True))
    for folder in (run.key(""), run.key("nodes")):
        os.utime(tmp_path / "store" / folder, (0, 0))
    rows = RunList(directory_store)
    rows.look()
    assert (rows.row(run.name) or {})["state"] == "interrupted"

    points = run.point_writer("later")
    points.append(a_step(21))
    points.flush()
    rows.look()
    assert (rows.row(run.name) or {})["step"] == 20
    rows.look(shown={run.name})
    assert (rows.row(run.name) or {})["step"] == 21


def test_a_row_says_of_what_split_step_and_samples_its_scores_are(directory_store: Store) -> None:
    source = {"bitext": ["a.en", "a.de"]}
    job = recipe_job(data={"train": [source], "valid": [source]}, evaluate={"every": "10 steps"})
    run = new_run(directory_store, job)
    run.propose(a_generation(1, "a"))
    scores = ((10, 20.0), (20, 18.0))
    evaluations = [Point("valid", 1, step, 1e9 + step, {"bleu": bleu}, counts={"bleu": 100}) for step, bleu in scores]
    write_points(run, a_step(10), *evaluations[:1], a_step(20), *evaluations[1:])
    rows = RunList(directory_store)
    rows.look()
    running = rows.row(run.name) or {}
    assert running["score"] == {"name": "valid.bleu", "value": 18.0, "step": 20, "samples": 100}
    assert (running["test"], running["machines"]) == (None, 0)

    run.finish(Result("finished", "reached 20 steps", 20, 9.0, {"test.bleu": 17.0}, counts={"test.bleu": 800}))
    rows.look()
    ended = rows.row(run.name) or {}
    assert ended["score"] == running["score"], "the test split is not what runs are compared by"
    assert ended["test"] == {"name": "test.bleu", "value": 17.0, "step": 20, "samples": 800}
    assert ended["machines"] == 1, "those that worked on it to its end"


def test_a_row_has_the_score_that_a_program_counts_by_epochs_also_after_later_steps(directory_store: Store) -> None:
    run = new_run(directory_store, program_job())
    run.propose(a_generation(1, "a"))
    rows = RunList(directory_store)
    write_points(run, Point("log", 1, 100, 1e9, {"loss": 2.0}), Point("log", 1, 1, 1e9, {"val_score": 0.5}))
    rows.look()
    assert (rows.row(run.name) or {})["score"] == {"name": "val_score", "value": 0.5, "step": 1, "samples": None}
    points = run.point_writer("later")
    points.append(Point("log", 1, 200, 1e9 + 1, {"loss": 1.0}))
    points.flush()
    rows.look(shown={run.name})
    row = rows.row(run.name) or {}
    assert (row["step"], row["loss"], row["score"]["value"]) == (200, 1.5, 0.5)


def test_a_run_is_as_old_as_its_first_start(directory_store: Store, tmp_path: Path) -> None:
    """The file of its job is newer in a copy of the store, and after `resume --set`."""
    run = trained_run(directory_store, steps=2)
    for time in (5e8, 6e8):
        run.record_launch(FleetLaunch(time, "me@here", {"local": {}}))
    path = tmp_path / "store" / run.key("job.json")
    assert path.stat().st_mtime > 6e8
    rows = RunList(directory_store)
    rows.look()
    assert (rows.row(run.name) or {})["created"] == 5e8
