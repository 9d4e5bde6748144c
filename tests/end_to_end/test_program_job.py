"""An unmodified torchrun script as a job, started from Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import packtrain as pt
from packtrain.errors import Mistake
from packtrain.store import open_store


@pytest.fixture
def example(processes: None, tmp_path: Path) -> Path:
    """The directory in which `packtrain init` wrote its example."""
    command = [sys.executable, "-m", "packtrain", "init", "program", "job.yaml", "--name", "line"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    return tmp_path


def test_the_example_runs_under_torchrun_without_packtrain(example: Path) -> None:
    script = (example / "train.py").read_text()
    assert "import packtrain" not in script
    assert "from packtrain" not in script
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, "train.py", "--lr", "0.5", "--steps", "400"],
                          cwd=example, capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "y = 3.00 x + 2.00" in done.stdout


def test_the_example_runs_under_packtrain_from_python(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(example)
    monkeypatch.setenv("PACKTRAIN_CACHE", str(example / "cache"))
    program = 'program=[train.py, --lr, "0.5", --steps, "400"]'
    run = pt.run("job.yaml", [program])
    result = run.wait(120)
    assert result is not None
    assert result.status == "finished", result.reason
    assert "y = 3.00 x + 2.00" in [line.text for line in run.logs() if line.rank == 0]
    assert "● finished" in run._repr_html_()
    assert "<iframe sandbox" in run.report()._repr_html_()
    assert pt.open("line").state() == "finished"
    committed = [entry.key for entry in open_store("./store").list("runs/line-1/checkpoints")]
    assert any(key.endswith("/model.safetensors") for key in committed)
    with pytest.raises(Mistake, match="runs a program"):
        run.predict(["x"])
