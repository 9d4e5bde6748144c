from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from packtrain.node.mirror_process import MirrorProcess
from packtrain.run.records import Result
from packtrain.store import Store
from parts.nodes import Make
from parts.runs import new_run, recipe_job


class FakeProcess:
    """Runs until the test ends it."""

    def __init__(self, command: list[str], **_: Any) -> None:
        started.append(command)

    def poll(self) -> int | None:
        return None


started: list[list[str]] = []


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started.clear()
    monkeypatch.setattr(subprocess, "Popen", FakeProcess)


@pytest.mark.usefixtures("no_process")
def test_the_first_of_two_machines_mirrors_the_run_and_the_other_one_when_it_is_lost(make: Make) -> None:
    cluster = make("1..2", 2, report={"mlflow": "http://mlflow.internal"})
    cluster.wait(5)
    assert cluster.run.latest_generation() is not None
    [command] = started
    assert command[:6] == [sys.executable, "-P", "-m", "packtrain", "mirror", cluster.run.name]
    assert command[-4:] == ["--mlflow", "http://mlflow.internal", "--node", "m0000"]
    cluster.gone.add("m0000")
    cluster.wait(60)
    assert [one[-1] for one in started] == ["m0000", "m0001"]


@pytest.mark.usefixtures("no_process")
def test_a_job_that_does_not_ask_for_mlflow_starts_no_process(make: Make) -> None:
    make(1, 1).wait(5)
    assert started == []


@pytest.mark.usefixtures("needs_mlflow")
def test_the_process_mirrors_the_end_of_a_run_and_a_node_waits_for_it(directory_store: Store, tmp_path: Path) -> None:
    run = new_run(directory_store, recipe_job(report={"mlflow": str(tmp_path / "mlruns")}))
    run.finish(Result("finished", "done", 3, 5.0))
    process = MirrorProcess(run, "a")
    process.start()
    process.finish()
    process.end()
    assert run.mirrored() is not None
    assert list((tmp_path / "mlruns").rglob("report.html"))
    assert [event.text for event in run.events().read()] == []


def test_a_process_that_cannot_be_started_costs_a_line(
    directory_store: Store, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    process = MirrorProcess(new_run(directory_store, recipe_job(report={"mlflow": "/elsewhere"})), "a")
    process.start()
    process.finish()
    process.end()
    assert "no more processes" in capfd.readouterr().out
