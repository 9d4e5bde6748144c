"""An unmodified torchrun script as a job, started from Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import packtrain as pt
from packtrain.errors import Mistake
from packtrain.store import open_store

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "program"


def test_the_example_runs_under_torchrun_without_packtrain(tmp_path: Path) -> None:
    script = (EXAMPLE / "train.py").read_text()
    assert "import packtrain" not in script
    assert "from packtrain" not in script
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, str(EXAMPLE / "train.py"), "--lr", "0.5", "--steps", "400"],
                          cwd=tmp_path, capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "y = 3.00 x + 2.00" in done.stdout


def test_the_example_runs_under_packtrain_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    run = pt.run(EXAMPLE / "job.yaml")
    result = run.wait(120)
    assert result is not None
    assert result.status == "finished", result.reason
    assert "y = 3.00 x + 2.00" in [line.text for line in run.logs() if line.rank == 0]
    assert "<iframe sandbox" in run._repr_html_()
    assert pt.open("line").state() == "finished"
    committed = [entry.key for entry in open_store("./store").list("runs/line-1/checkpoints")]
    assert any(key.endswith("/model.safetensors") for key in committed)
    with pytest.raises(Mistake, match="runs a program"):
        run.predict(["x"])
