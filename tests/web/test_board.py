"""The rows of the dashboard: which runs are read again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from packtrain.store import Store
from packtrain.web import board
from packtrain.web.board import Board
from parts.dashboard import a_step, trained_run
from parts.runs import a_generation, a_lease


def test_a_run_that_a_page_shows_is_read_at_every_look(
    directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it seems to be at rest: no machine works on it, and its folder has not changed for a while."""
    monkeypatch.setattr(board, "_LIST_SHARE", 1e9)  # every look lists all runs
    monkeypatch.setattr(board, "_LIST_SHARE_ASIDE", 1e9)
    run = trained_run(directory_store, steps=20, ended=False)
    run.propose(a_generation(1, "a"))
    run.renew(a_lease("a", left=True))
    for folder in (run.key(""), run.key("nodes")):
        os.utime(tmp_path / "store" / folder, (0, 0))
    rows = Board(directory_store)
    rows.look()
    assert (rows.row(run.name) or {})["state"] == "interrupted"

    points = run.point_writer("later")
    points.append(a_step(21))
    points.flush()
    rows.look()
    assert (rows.row(run.name) or {})["step"] == 20
    rows.look(shown={run.name})
    assert (rows.row(run.name) or {})["step"] == 21
