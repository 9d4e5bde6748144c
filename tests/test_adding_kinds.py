"""A kind is one new file and one line in a registry: a fleet, a raw format and a recipe are added here, and used.

The recipe comes with a raw format and a kind of pack of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

import packtrain as pt
from packtrain.errors import Mistake
from packtrain.export.model import read_model
from packtrain.export.service import ServedModel
from packtrain.job.kinds import EXCHANGES, FLEETS, FORMATS, OPTIMIZERS, SCHEDULES
from packtrain.launch.check import pack_data
from packtrain.launch.load import load
from packtrain.pack.build import PlainProgress
from packtrain.pack.kind import PACK_KINDS
from packtrain.pack.workers import InProcess
from packtrain.recipes import RECIPES
from packtrain.run.run import Run
from packtrain.store import open_store
from packtrain.web.endpoints import DashboardEndpoints
from packtrain.web.news import News
from packtrain.web.run_list import RunList
from parts.command import Packtrain
from parts.service import running

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


SIGNALS = """
import re
from pathlib import Path

import numpy as np

from packtrain.job.kinds import Source
from packtrain.pack.build import ShardTarget, empty_contents, splits_of
from packtrain.pack.kind import PackKind, ShownSample
from packtrain.pack.raw import DropCounter, read_lines
from packtrain.pack.shard import Columns, Ragged
from packtrain.recipes import Measurement, Prediction, Scores
from packtrain.recipes.forms import Exportable
from packtrain.recipes.recipe import Network, TaskWords
from packtrain.recipes.statistics import mean
from packtrain.run.records import Sample

LENGTH = 3


class SignalSource(Source):
    contents = frozenset({"signals"})
    path_counts = (1,)
    example = "signals.txt"

    def pack_kind(self):
        return "signals"

    def signals(self):
        for line in read_lines(Path(self.paths[0])):
            *numbers, label = line.split()
            yield [int(number) for number in numbers], label


class SignalPacks(PackKind):
    noun, nouns, title = "signal", "signals", "signals with classes"
    heads = ("signal", "class")

    def settings(self, data):
        return {}

    def samples(self, source, drop, filtered, classes=()):
        return source.signals()

    def raw_bytes(self, sample):
        return 2 * len(sample[0])

    def pack(self, packing):
        contents = empty_contents(packing.data)
        splits = {split: [list(one.signals()) for one in raw] for split, raw in splits_of(packing.data).items()}
        contents.classes = tuple(sorted({label for signals in splits["train"] for _, label in signals}))
        for split, read in splits.items():
            for number, signals in enumerate(read):
                rows, labels = zip(*signals[: packing.first])
                classes = np.array([contents.classes.index(label) for label in labels], "<i4")
                columns = Columns({"signal": Ragged.from_rows(rows, np.dtype("<i4"))}, {"label": classes})
                target = ShardTarget(packing.name, split, number, number)
                contents.splits[split].shards.append(target.put(packing.store, columns, DropCounter()))
        return contents

    def measures(self):
        return {"numbers, per signal": lambda shard: shard.ragged["signal"].lengths}

    def shown(self, shard, row, classes, vocabularies):
        return ShownSample([" ".join(map(str, shard.ragged["signal"][row])), classes[int(shard.plain["label"][row])]])


class SignalNetwork(Network):
    def __init__(self, logits):
        self.logits = logits


class Signals(Exportable):
    unit = "samples"
    contents = frozenset({"signals"})
    kind = "signals"
    best_metric = "accuracy"
    defaults = {"model": "linear", "train": {"batch": "8 samples", "schedule": {"constant": {"rate": 0.1}}}}
    tolerances = {"accuracy": 1.0}
    decode_options = frozenset()
    words = TaskWords("audio-classification", "recognize", "recognizing", "recognized", "recognition", input="Signal")
    width = LENGTH

    @classmethod
    def check(cls, job):
        pass

    def count(self, split):
        splits = self.pack.manifest.splits
        return splits[split].samples if split in splits else 0

    @property
    def costs(self):
        return np.ones(self.count("train"), np.int64)

    lengths = sort_keys = costs

    def _rows(self, split, ids):
        rows = [self.pack.split(split).at(sample) for sample in ids.tolist()]
        signals = [shard.ragged["signal"][row] for shard, row in rows]
        labels = np.array([shard.plain["label"][row] for shard, row in rows], np.int64)
        return np.array(signals, np.float32).reshape(-1, LENGTH), labels

    def batch(self, ids, epoch, repeats=None):
        signal, label = self._rows("train", ids)
        return {"signal": signal, "label": label}

    def build_model(self):
        from torch import nn

        return nn.Linear(LENGTH, len(self.pack.manifest.classes))

    def loss(self, model, batch):
        from torch.nn.functional import cross_entropy

        return cross_entropy(model(batch["signal"]), batch["label"], reduction="sum")

    def _classes(self, model, signals):
        if isinstance(model, SignalNetwork):
            return model.logits(signals).argmax(1)
        import torch

        with torch.inference_mode():
            device = next(model.parameters()).device
            return model(torch.from_numpy(signals).to(device)).argmax(1).cpu().numpy()

    def measure(self, model, request):
        request.on_batch()
        signals, labels = self._rows(request.split, request.ids)
        right = (self._classes(model, signals) == labels).astype(np.float64)
        names = self._classes(model, self._rows(request.split, request.decode_ids)[0])
        sums = {"right": float(right.sum()), "samples": float(len(labels))}
        return Measurement(sums, [self.labels[label] for label in names], {"right": right.tolist()})

    def score(self, split, decode_ids, parts):
        samples = sum(part.sums["samples"] for part in parts)
        scores = {"accuracy": 100 * sum(part.sums["right"] for part in parts) / samples}
        signals, labels = self._rows(split, decode_ids)
        texts = [" ".join(f"{number:g}" for number in row) for row in signals.tolist()]
        references = [self.labels[label] for label in labels]
        outputs = [output for part in parts for output in part.outputs]
        shown = tuple(Sample(*row) for row in zip(texts, references, outputs))[:5]
        return Scores(scores, samples=shown, counts={"accuracy": int(samples)})

    def statistics(self, split, ids, measured):
        return {"accuracy": mean(measured.rows["right"], 100)}

    def predict(self, model, inputs, decoding):
        numbers = [[*map(int, re.findall("[0-9]+", text)), *[0] * LENGTH][:LENGTH] for text in inputs]
        return [Prediction(self.labels[label]) for label in self._classes(model, np.array(numbers, np.float32))]

    def graphs(self, model):
        import torch

        from packtrain.recipes.graphs import Graph, Input

        example = Input(torch.zeros(2, LENGTH), {0: torch.export.Dim("signals")})
        return {"classifier": Graph(model, {"signal": example}, ["logits"])}

    def onnx_network(self, session):
        graph = session("classifier")
        return SignalNetwork(lambda signals: graph(["logits"], {"signal": signals})[0])
"""

REGISTERED = """
from packtrain.job.kinds import FORMATS
from packtrain.pack.kind import PACK_KINDS
from packtrain.recipes import RECIPES

FORMATS["signals"] = "signals:SignalSource"
PACK_KINDS["signals"] = "signals:SignalPacks"
RECIPES["signals"] = "signals:Signals"
"""

SIGNALS_JOB = """
name: beeps
recipe: signals
data: {train: [{signals: train.txt}], valid: [{signals: valid.txt}]}
train: {duration: 20 epochs}
evaluate: {every: 10 epochs}
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


def write_signals(path: Path, seed: int) -> None:
    """Write signals whose class is the place of their largest number."""
    rows = np.random.default_rng(seed).permuted(np.tile([1, 5, 9], (60, 1)), axis=1)
    path.write_text("".join(f"{' '.join(map(str, row))} {'abc'[row.argmax()]}\n" for row in rows))


@pytest.mark.usefixtures("processes", "training")
def test_a_new_recipe_with_a_new_kind_of_pack_trains_is_evaluated_exported_served_and_shown(
    project: Path, monkeypatch: pytest.MonkeyPatch, packtrain: Packtrain
) -> None:
    (project / "signals.py").write_text(SIGNALS)
    (project / "sitecustomize.py").write_text(REGISTERED)
    for family, attribute in ((FORMATS, "SignalSource"), (PACK_KINDS, "SignalPacks"), (RECIPES, "Signals")):
        monkeypatch.setitem(family, "signals", f"signals:{attribute}")
    for seed, split in enumerate(("train", "valid", "later")):
        write_signals(project / f"{split}.txt", seed)
    (project / "job.yaml").write_text(SIGNALS_JOB)

    run = pt.run(project / "job.yaml")
    result = run.wait(120)
    assert result is not None
    assert result.status == "finished", result.reason
    assert result.scores["valid.accuracy"] == 100.0

    done = packtrain("evaluate", "beeps")
    assert (done.returncode, "accuracy" in done.stdout) == (0, True), done.stderr
    done = packtrain("show", "beeps")
    assert "accuracy" in done.stdout
    assert "signals linear" in done.stdout
    store = open_store("./store")
    runs = RunList(store)
    runs.look()
    with TestClient(DashboardEndpoints(store, News(runs)).application(), base_url="http://localhost") as page:
        [*_, step] = page.get("/api/samples", params={"run": run.name}).json()["steps"]
        shown = page.get("/api/samples", params={"run": run.name, "step": step}).json()
    assert (shown["words"]["input"], len(shown["samples"])) == ("Signal", 5)
    assert all(sample["reference"] == sample["prediction"] for sample in shown["samples"])

    done = packtrain("export", "beeps")
    assert done.returncode == 0, done.stderr
    assert "pipeline_tag: audio-classification" in (project / "model" / "README.md").read_text()
    done = packtrain("predict", "model/", "9 1 5", "1 5 9")
    assert (done.returncode, done.stdout) == (0, "a\nc\n"), done.stderr
    with running(ServedModel.of(read_model(project / "model"), 1)) as service, service.client() as client:
        facts = client.get("/v1/models").json()["data"][0]["packtrain"]
        assert (facts["recipe"], facts["words"]["action"]) == ("signals", "recognize")
        answer = client.post("/v1/predict", json={"inputs": ["1 9 5", "9 5 1"]}).json()
    assert [prediction["output"] for prediction in answer["predictions"]] == ["b", "a"]


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
