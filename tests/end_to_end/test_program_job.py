"""An unmodified torchrun script as a job, started from Python."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import packtrain as pt
from packtrain.errors import Mistake
from packtrain.run.checkpoint import fetch_newest
from packtrain.run.outputs import kept_files
from packtrain.store import open_store
from parts.command import in_a_process
from parts.runs import read_files, write_files


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


# A Python in which torch is not installed.
NO_TORCH = """
import sys
from importlib.machinery import PathFinder

class WithoutTorch(PathFinder):
    @classmethod
    def find_spec(cls, name, *arguments):
        return None if name.partition(".")[0] == "torch" else super().find_spec(name, *arguments)

sys.meta_path = [WithoutTorch if finder is PathFinder else finder for finder in sys.meta_path]
"""
COUNT_WORDS = """#!/bin/sh
if python -c 'import torch' 2>/dev/null; then echo 'torch is there'; exit 9; fi
if [ -n "${RANK+set}" ]; then echo 'it has a rank'; exit 9; fi
mkdir -p out
echo 'step 1: loss 2.5 accuracy_of_the_rarest_class_of_all=0.5'
wc -w < "$1" > out/words
echo done > "$PACKTRAIN_CHECKPOINTS/state"
"""


def test_a_program_in_any_language_needs_no_torch_may_read_beside_its_directory_and_prints_its_numbers(
    processes: None, tmp_path: Path
) -> None:
    job = "name: words\nprogram: [./count.sh, ../data/words.txt]\ncode: ..\ndirectory: project\noutputs: [out/]\n"
    write_files(tmp_path, {"python/sitecustomize.py": NO_TORCH.encode()})
    files = {"project/job.yaml": job, "project/count.sh": COUNT_WORDS, "data/words.txt": "a b c", ".gitignore": "data/"}
    write_files(tmp_path / "work", {name: text.encode() for name, text in files.items()})
    (tmp_path / "work" / "project" / "count.sh").chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "python"), "PACKTRAIN_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "packtrain", "run", "job.yaml", "--set", f"store={tmp_path / 'store'}"]
    done = subprocess.run(command, cwd=tmp_path / "work" / "project", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    run = pt.open("words", str(tmp_path / "store"))
    fetch_newest(run._run, tmp_path / "back", pytest.fail)
    assert read_files(tmp_path / "back") == {"state": b"done\n"}
    [point] = [point for point in run.points() if point.step == 1]
    assert point.values == {"loss": 2.5, "accuracy_of_the_rarest_class_of_all": 0.5}
    kept = kept_files(run._run)["project/out/words"]
    assert run._run.store.get(kept.key).split() == [b"3"]
    shown = in_a_process("show", "words", "--store", tmp_path / "store", directory=tmp_path).stdout.splitlines()
    assert any(re.fullmatch(r"outputs +project/out/  1 file, 2 B", line) for line in shown), shown
    assert any(re.fullmatch(r"accuracy_of_the_rarest_class_of_all +0.5\d*", line) for line in shown), shown
    told = in_a_process("show", "words", "--json", "--store", tmp_path / "store", directory=tmp_path).stdout
    assert json.loads(told)["outputs"] == {"project/out/": kept.size}
