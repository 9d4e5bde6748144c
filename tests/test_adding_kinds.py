"""A kind is one new file and one line in a registry: a fleet and a raw format are added here, and used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import packtrain as pt
from packtrain.errors import Mistake
from packtrain.job.kinds import EXCHANGES, FLEETS, FORMATS, OPTIMIZERS, SCHEDULES
from packtrain.launch.check import pack_data
from packtrain.launch.load import load
from packtrain.pack.build import PlainProgress
from packtrain.pack.workers import InProcess
from packtrain.run.run import Run
from packtrain.store import open_store

SHED = """
import sys

from packtrain.fleet.fleet import Fleet, FleetBuilder, LaunchPlan, Machine, node_arguments
from packtrain.fleet.host import start_process
from packtrain.job.part import Name


class ShedSettings(FleetBuilder):
    tool: Name

    def build(self):
        return ShedFleet(self)


class ShedFleet(Fleet):
    trains_here = True

    def __init__(self, settings):
        self.settings = settings

    def plan(self, run):
        command = node_arguments(run, sys.executable, self.settings)
        return [LaunchPlan(self.settings.tool, (*command, "--address", "127.0.0.1"))]

    def start(self, run, plans, tied, say):
        return [start_process(run.name, plan.arguments, tied) for plan in plans]

    def machines(self, run):
        return [Machine(self.settings.tool, "running")]

    def end(self, run):
        pass
"""

ARROWS = """
from pathlib import Path

from packtrain.job.kinds import Source
from packtrain.pack.raw import TextPair, read_lines


class ArrowSource(Source):
    contents = frozenset({"pairs"})
    path_counts = (1,)
    example = "pairs.txt"

    def pack_kind(self):
        return "pairs"

    def pairs(self, drop):
        for line in read_lines(Path(self.paths[0])):
            yield TextPair(*line.split(" -> "))
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that Python imports from, here and in the processes that a run starts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("processes")
def test_a_new_fleet_runs_a_job(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "shed.py").write_text(SHED)
    line = 'FLEETS["shed"] = "shed:ShedSettings"'
    monkeypatch.setitem(FLEETS, "shed", "shed:ShedSettings")
    # The line for the processes of the run; in the source it would be in the dict itself.
    (project / "sitecustomize.py").write_text(f"from packtrain.job.kinds import FLEETS\n{line}\n")
    (project / "code").mkdir()
    (project / "code" / "train.py").write_text("print('dug')\n")
    (project / "job.yaml").write_text("name: dig\nprogram: [train.py]\ncode: code\nfleet: {shed: {tool: spade}}\n")
    run = pt.run(project / "job.yaml")
    result = run.wait(120)
    assert result is not None
    assert result.status == "finished", result.reason
    assert "dug" in [line.text for line in run.logs()]
    assert Run(open_store("./store"), run.name).job.model_dump()["fleet"]["shed"]["tool"] == "spade"


def test_a_new_fleet_s_settings_are_checked_with_their_line(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "shed.py").write_text(SHED)
    monkeypatch.setitem(FLEETS, "shed", "shed:ShedSettings")
    (project / "job.yaml").write_text("name: dig\nprogram: [train.py]\nfleet:\n  shed: {tol: spade}\n")
    with pytest.raises(Mistake) as refused:
        load(project / "job.yaml")
    assert str(refused.value).endswith("job.yaml:4: fleet.shed.tol: unknown key; did you mean 'tool'? (and 1 more)")


def test_a_new_raw_format_is_packed(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "arrows.py").write_text(ARROWS)
    monkeypatch.setitem(FORMATS, "arrows", "arrows:ArrowSource")
    (project / "pairs.txt").write_text("".join(f"number {n} -> Zahl {n}\n" for n in range(50)))
    job = "name: count\nrecipe: translate\ndata: {train: {arrows: pairs.txt}, vocabulary: 300}\n"
    (project / "job.yaml").write_text(job)
    loaded = load(project / "job.yaml")
    manifest = pack_data(loaded, open_store("./store", create=True), PlainProgress(lambda _: None), InProcess())
    assert manifest is not None
    assert (manifest.kind, manifest.splits["train"].samples) == ("pairs", 50)


def test_a_recipe_that_cannot_learn_from_a_new_format_refuses_it(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "arrows.py").write_text(ARROWS)
    monkeypatch.setitem(FORMATS, "arrows", "arrows:ArrowSource")
    (project / "job.yaml").write_text("name: count\nrecipe: classify\ndata: {train: {arrows: pairs.txt}}\n")
    with pytest.raises(Mistake, match=r"classify does not support arrows data; use folder, imagenet$"):
        load(project / "job.yaml")


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from packtrain.job import kinds
for family in (kinds.EXCHANGES, kinds.FLEETS, kinds.FORMATS, kinds.OPTIMIZERS, kinds.SCHEDULES):
    for word in family:
        assert kinds.word_of(family, kinds.kind_class(family, word).model_construct()) == word
"""


@pytest.mark.usefixtures("processes")
def test_every_kind_in_a_registry_is_found_without_torch() -> None:
    assert all((EXCHANGES, FLEETS, FORMATS, OPTIMIZERS, SCHEDULES))
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
