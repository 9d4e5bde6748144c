"""From a run to an answer on an arm64 board: exported here, delivered by ssh, asked there, without torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pack.corpus import job_of
from packtrain.export.deliver import deliver
from packtrain.export.export import ExportOptions, export_run
from packtrain.recipes.forms import Precision
from packtrain.run.run import Run
from parts import arm64, hosts
from parts.hosts import Host
from parts.models import commit_model, packed_run

TEXTS = ["good morning", "how are you today", "hello"]


@pytest.fixture(scope="module")
def folder(needs_hosts: None, needs_arm64: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("arm64")


@pytest.fixture(scope="module")
def board(folder: Path) -> Iterator[Host]:
    """A host that ssh reaches; its files are those of the arm64 machine."""
    arm64.install(folder / "packages")
    with hosts.hosts(folder / "hosts", 1) as network, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", network.search_path())
        yield network[0]


@pytest.fixture(scope="module")
def run(folder: Path) -> Iterator[Run]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACKTRAIN_CACHE", str(folder / "cache"))
        run = packed_run(folder, job_of(folder))
        commit_model(run, folder, 10)
        yield run


@pytest.mark.parametrize(("form", "precision"), [("ctranslate2", "int8"), ("onnx", "fp32")])
def test_an_arm64_board_answers_with_the_same_words(
    run: Run, board: Host, folder: Path, tmp_path: Path, form: str, precision: Precision
) -> None:
    model = tmp_path / "model"
    export_run(run, model, ExportOptions(form=form, precision=precision), lambda _: None)
    deliver(model, f"{board.name}:{form}-{precision}", lambda _: None)
    words = ["-m", "packtrain", "predict"]
    here = subprocess.run([sys.executable, *words, model, *TEXTS], capture_output=True, text=True)
    there = arm64.python_on_arm64([*words, f"/work/{form}-{precision}", *TEXTS], board.home, folder / "packages")
    assert (here.returncode, there.returncode) == (0, 0), here.stderr + there.stderr
    assert len(here.stdout.splitlines()) == len(TEXTS)
    assert there.stdout == here.stdout


def test_that_board_is_an_arm64_machine_without_torch(board: Host, folder: Path) -> None:
    ask = "import importlib.util, platform; print(platform.machine(), importlib.util.find_spec('torch'))"
    assert arm64.python_on_arm64(["-c", ask], board.home, folder / "packages").stdout == "aarch64 None\n"
