"""The notebook of the documentation, executed by a real kernel with a job that is smaller than the one in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from packtrain.observe.history import read_points
from packtrain.run.run import open_run, run_names
from packtrain.store import open_store

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook.ipynb"
SMALL = [
    "train.duration=12 steps", "train.batch=100 tokens", "fleet.workers=1", "evaluate={every: 6 steps, samples: 4}",
    "model={size: tiny, width: 32, heads: 2, feedforward: 64, encoder_layers: 1, decoder_layers: 1}",
]  # fmt: skip


def test_the_notebook_is_stored_without_outputs(needs_nbclient: None) -> None:
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [(cell.outputs, cell.execution_count) for cell in codes] == [([], None)] * len(codes)


@pytest.mark.timeout(1200)
def test_every_cell_of_the_notebook_runs_and_shows_something(
    needs_nbclient: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nbformat
    from nbclient import NotebookClient

    for variable in ("PACKTRAIN_CACHE", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    subprocess.run([sys.executable, "-m", "packtrain", "init", "translate"], cwd=tmp_path, check=True)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    parameters.source += f"\noverrides = {SMALL}"
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    kinds = [
        {kind for output in cell.outputs for kind in output.get("data", ())}
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    table, picture = {"text/html", "text/plain"}, {"image/svg+xml", "text/plain"}
    assert kinds == [set(), table, table, picture, table, picture, table, {"text/plain"}, table]
    store = open_store(str(tmp_path / "store"))
    assert run_names(store) == ["translate-1", "translate-2"]
    watched = notebook.cells[3].outputs[-1].data["text/html"]
    assert "● finished: reached 12 steps" in watched
    assert [point.step for point in read_points(open_run(store, "translate-1")) if point.kind == "valid"] == [6, 12]
