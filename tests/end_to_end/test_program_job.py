"""Any program: the example script, unmodified, under the same command; and the interface in Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import packtrain as pt
from packtrain.errors import Mistake
from packtrain.store import open_store

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "program"


def test_the_example_knows_nothing_of_packtrain() -> None:
    script = (EXAMPLE / "train.py").read_text()
    assert "import packtrain" not in script
    assert "from packtrain" not in script


def test_the_example_runs_under_torchrun_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, str(EXAMPLE / "train.py"), "--lr", "0.5", "--steps", "400"],
                          cwd=tmp_path, capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "y = 3.00 x + 2.00" in done.stdout


def test_the_example_runs_under_packtrain_and_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
