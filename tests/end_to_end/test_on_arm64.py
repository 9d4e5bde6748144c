"""From a run to an answer on an arm64 board: exported and delivered here, asked there, without torch."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from pack.corpus import job_of
from packtrain.export.deliver import deliver
from packtrain.export.export import ExportOptions, export_run
from parts import arm64
from parts.models import commit_model, packed_run
from parts.presence import need

TEXTS = ["good morning", "how are you today", "hello"]
# As `packtrain predict` does, and with which processor and modules.
ASK = """
import json, platform, sys
from pathlib import Path
from packtrain.export.model import read_model

model = read_model(Path(sys.argv[1]))
answers = model.recipe.predict(model.network(1), sys.argv[2:], model.recipe.decoding)
print(json.dumps([platform.machine(), "torch" in sys.modules, [answer.text for answer in answers]]))
"""


def test_an_arm64_board_answers_with_the_same_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need(arm64.missing() is None, str(arm64.missing()))
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    run = packed_run(tmp_path, job_of(tmp_path))
    commit_model(run, tmp_path, 10)
    export_run(run, tmp_path / "model", ExportOptions(), lambda _: None)
    board, packages = tmp_path / "board", tmp_path / "packages"
    deliver(tmp_path / "model", str(board / "model"), lambda _: None)
    arm64.install(packages)
    words = ["-c", ASK]
    here = subprocess.run([sys.executable, *words, tmp_path / "model", *TEXTS], capture_output=True, text=True)
    there = arm64.python_on_arm64([*words, "/work/model", *TEXTS], board, packages)
    assert (here.returncode, there.returncode) == (0, 0), here.stderr + there.stderr
    texts = json.loads(here.stdout)[-1]
    assert all(texts)
    assert json.loads(there.stdout) == ["aarch64", False, texts]
    assert platform.machine() in here.stdout
