"""Every recipe in ONNX Runtime: it computes what torch does, for sizes other than those of the export."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from pack.corpus import job_of
from packtrain.cli.template import InitRequest, write_job
from packtrain.data.pack import Pack
from packtrain.errors import Mistake
from packtrain.export.evaluate import EvaluateOptions, evaluate, run_subject
from packtrain.export.export import ExportOptions, export_run
from packtrain.export.model import CARD, MANIFEST, read_model
from packtrain.export.onnx import OnnxForm, export_own, write_weights
from packtrain.export.predict import load_model
from packtrain.launch.load import load
from packtrain.pack.build import PlainProgress
from packtrain.pack.vocabulary import BOS, EOS, PAD
from packtrain.pack.workers import InProcess
from packtrain.recipes import Batch, Recipe, recipe_class
from packtrain.recipes.caption.model import Captioner, TorchCaptioner
from packtrain.recipes.caption.onnx import OnnxCaptioner
from packtrain.recipes.classify import OnnxClassifier
from packtrain.recipes.classify.model import TorchClassifier
from packtrain.recipes.decode import TorchText
from packtrain.recipes.forms import Exportable
from packtrain.recipes.onnx import Session, external_files
from packtrain.recipes.recipe import Decoding, Hypothesis
from packtrain.recipes.resnet import ResNet
from packtrain.recipes.transformer import Transformer
from packtrain.recipes.transformer_onnx import OnnxText
from packtrain.recipes.translate import Translate
from packtrain.run.run import Run
from parts.models import commit_model, list_again, packed_run, recipe_on
from recipes.captioned import with_larger_weights
from recipes.small import SMALL

ONE_LAYER = {"size": "tiny", "encoder_layers": 1, "decoder_layers": 1}


@dataclass(frozen=True)
class Exported:
    """A run, its model and what is exported of it, in the folders `fp32` and `int8`."""

    run: Run
    recipe: Exportable
    model: nn.Module
    folder: Path

    def written(self, precision: Any) -> Path:
        """Return the model's folder, which is written once: torch takes seconds to export a graph."""
        folder: Path = self.folder / precision
        if not folder.exists() and precision == "fp32":
            export_run(self.run, folder, ExportOptions(form="onnx"), lambda _: None)
        elif not folder.exists():
            OnnxForm().write(self.recipe, self.model, folder, precision)
        return folder

    def network(self, precision: str = "fp32") -> Any:
        return OnnxForm().load(self.recipe, self.written(precision), 1)


def untrained(recipe: Recipe) -> nn.Module:
    """Return a model in which context matters, and whose batch norms have seen images."""
    torch.manual_seed(1)
    model = recipe.build_model()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if isinstance(model, Transformer) and "attention" in name and weights.ndim == 2:
                weights.mul_(4)
        for _ in range(3):
            batch = {name: torch.from_numpy(rows) for name, rows in recipe.batch(np.arange(8), 0).items()}
            recipe.loss(model, batch)
    return with_larger_weights(model).eval() if isinstance(model, Captioner) else model.eval()


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACKTRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def exported(training: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    known: dict[str, Exported] = {}

    def export(name: str) -> Exported:
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            runs: list[Run] = []

            def make(**changes: Any) -> Recipe:
                if name in ("translate", "chat"):
                    changes["model"] = ONE_LAYER
                runs.append(packed_run(folder, job_of(folder, **changes)))
                return recipe_on(runs[0], folder)

            recipe = SMALL[name](make, folder)
            assert isinstance(recipe, Exportable)
            model = untrained(recipe)
            commit_model(runs[0], folder, 10, trained=model)
            known[name] = Exported(runs[0], recipe, model, folder)
        return known[name]

    return export


def tokens_of(found: list[list[Hypothesis]]) -> list[list[list[int]]]:
    return [[one.tokens for one in own] for own in found]


def scores_of(found: list[list[Hypothesis]]) -> list[float]:
    return [one.score for own in found for one in own]


# Texts.

TEXTS = pytest.mark.parametrize("name", ["translate", "chat"])
LIMIT = 16  # positions that a reply has; beyond the places of a new cache there is a test of its own


@dataclass(frozen=True)
class TextPair:
    ours: TorchText
    theirs: OnnxText
    vocabulary: int

    def sources(self, count: int, length: int) -> NDArray[np.int64]:
        rows = np.random.default_rng(count).integers(EOS + 1, self.vocabulary, (count, length))
        rows[::2, 1 + length // 2 :] = PAD
        return rows


@pytest.fixture
def pair(exported: Callable[[str], Exported], name: str) -> TextPair:
    one = exported(name)
    assert isinstance(one.model, Transformer)
    return TextPair(TorchText(one.model), one.network(), one.model.vocabulary)


@pytest.mark.usefixtures("training")
@TEXTS
@pytest.mark.parametrize(
    "decoding",
    [
        Decoding(beam=1),
        Decoding(beam=4, n_best=2),
        Decoding(beam=12),  # asks for more candidates than a step returns
        Decoding(beam=3, repetition=1.2, no_repeat=2),
        Decoding(nucleus=0.9, temperature=1.5),
    ],
    ids=str,
)
def test_searches_find_what_they_find_in_torch(pair: TextPair, decoding: Decoding) -> None:
    for count, length in ((1, 1), (5, 9)):
        asked = pair.sources(count, length), np.arange(LIMIT - count, LIMIT), decoding, range(7, 7 + count)
        ours, theirs = pair.ours.search(*asked), pair.theirs.search(*asked)
        assert tokens_of(theirs) == tokens_of(ours)
        assert scores_of(theirs) == pytest.approx(scores_of(ours), abs=1e-4)


@pytest.mark.parametrize("name", ["translate"])
def test_an_output_may_be_longer_than_the_first_caches(pair: TextPair) -> None:
    asked = pair.sources(2, 20), np.array([70, 50]), Decoding(beam=2), range(2)
    ours, theirs = pair.ours.search(*asked), pair.theirs.search(*asked)
    assert max(len(own[0].tokens) for own in ours) > 32
    assert tokens_of(theirs) == tokens_of(ours)


@TEXTS
def test_losses_of_texts_are_those_of_torch(pair: TextPair) -> None:
    target = pair.sources(150, 11)  # more tokens than are computed at once
    target[:, 0] = BOS
    source = pair.sources(150, 9)
    assert pair.theirs.losses(source, target) == pytest.approx(pair.ours.losses(source, target), abs=1e-4)


@TEXTS
def test_nothing_in_is_nothing_out(pair: TextPair) -> None:
    none = np.zeros((0, 4), np.int64)
    assert pair.theirs.search(none, np.zeros(0, np.int64), Decoding(), []) == []
    assert pair.theirs.losses(none, none).shape == (0,)


# Images.


def images(count: int, height: int, width: int) -> NDArray[np.uint8]:
    return np.random.default_rng(count).integers(0, 256, (count, height, width, 3)).astype(np.uint8)


@pytest.mark.usefixtures("training")
def test_logits_are_those_of_torch(exported: Callable[[str], Exported]) -> None:
    one = exported("classify")
    ours, theirs = TorchClassifier(one.model), one.network()
    assert isinstance(theirs, OnnxClassifier)
    for shape in ((1, 32, 32), (7, 48, 40)):
        np.testing.assert_allclose(theirs.logits(images(*shape)), ours.logits(images(*shape)), atol=1e-4)
    assert theirs.logits(images(0, 32, 32)).shape == (0, 3)


@pytest.mark.usefixtures("training")
@pytest.mark.parametrize(("name", "file"), [("classify", "classifier"), ("caption", "encoder")])
def test_batch_norms_are_part_of_the_convolutions(exported: Callable[[str], Exported], name: str, file: str) -> None:
    kinds = Counter(
        node.op_type for node in onnx.load(exported(name).written("fp32") / "onnx" / f"{file}.onnx").graph.node
    )
    assert kinds["Conv"] > 0
    assert kinds["BatchNormalization"] == 0


def test_captions_losses_and_attention_are_those_of_torch(exported: Callable[[str], Exported]) -> None:
    one = exported("caption")
    assert isinstance(one.model, Captioner)
    ours, theirs = TorchCaptioner(one.model), one.network()
    assert isinstance(theirs, OnnxCaptioner)
    captions = np.array([[BOS, 5, 6, EOS, PAD], [BOS, 7, 8, 9, EOS], [BOS, EOS, PAD, PAD, PAD], [BOS, 4, 4, EOS, PAD]])
    for count, side in ((1, 32), (3, 64)):
        pixels = images(count, side, side)
        encoded, other = ours.encode(pixels), theirs.encode(pixels)
        for beam, n_best in ((1, 1), (5, 3), (20, 1)):
            expected, found = ours.search(encoded, beam, n_best), theirs.search(other, beam, n_best)
            assert tokens_of(found) == tokens_of(expected)
            assert scores_of(found) == pytest.approx(scores_of(expected), abs=1e-4)
        rows = np.array([0, count - 1, count - 1, 0])
        assert theirs.losses(other, rows, captions) == pytest.approx(ours.losses(encoded, rows, captions), abs=1e-4)
        maps = theirs.attention(other, count - 1, [5, 6, 7])
        np.testing.assert_allclose(maps, ours.attention(encoded, count - 1, [5, 6, 7]), atol=1e-4)
    nothing = theirs.encode(images(0, 32, 32))
    assert theirs.search(nothing, 5) == []
    assert theirs.losses(nothing, np.zeros(0, np.int64), captions[:0]).shape == (0,)
    assert theirs.attention(other, 0, []).shape == (0, 8, 8)


# Quantization.


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.onnx"))


@pytest.mark.usefixtures("training")
@pytest.mark.parametrize("name", ["translate", "classify"])
def test_int8_is_smaller_and_close_and_made_in_silence(
    exported: Callable[[str], Exported], name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    one = exported(name)
    one.written("int8")
    assert capfd.readouterr() == ("", "")
    whole, small = one.network(), one.network("int8")
    assert size_of(one.written("int8")) < 0.5 * size_of(one.written("fp32"))
    expected: NDArray[Any]
    found: NDArray[Any]
    if isinstance(whole, OnnxText):
        source = np.random.default_rng(1).integers(EOS + 1, 200, (6, 8))
        target = np.concatenate([np.full((6, 1), BOS), source], axis=1)
        expected, found = whole.losses(source, target), small.losses(source, target)
    elif isinstance(whole, OnnxClassifier):
        expected, found = (one.logits(images(6, 32, 32)) for one in (whole, small))
    else:
        captions = np.array([[BOS, 5, 6, EOS], [BOS, 7, 8, EOS]])
        losses = (one.losses(one.encode(images(2, 32, 32)), np.arange(2), captions) for one in (whole, small))
        expected, found = losses
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()
    assert np.abs(found - expected).max() > 0


# At home.

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["onnx"] = sys.modules["onnxscript"] = None
from pathlib import Path
import numpy as np
import packtrain.export.onnx
from packtrain.recipes.onnx import Session
from packtrain.recipes.transformer_onnx import OnnxText
from packtrain.recipes.recipe import Decoding
encoder, decoder = (Session(Path(sys.argv[1], "onnx", f"{name}.onnx")) for name in ("encoder", "decoder"))
source = np.arange(4, 12).reshape(2, 4)
found = OnnxText(encoder, decoder, int(sys.argv[2])).search(source, np.array([9, 9]), Decoding(), [0, 1])
print([[one.tokens for one in own] for own in found])
"""


@pytest.mark.usefixtures("processes")
def test_the_runtime_needs_neither_torch_nor_the_exporter_and_is_silent(exported: Callable[[str], Exported]) -> None:
    one = exported("translate")
    assert isinstance(one.model, Transformer)
    command = [sys.executable, "-c", WITHOUT_TORCH, str(one.written("fp32")), str(one.model.vocabulary)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    source = np.arange(4, 12).reshape(2, 4)
    expected = TorchText(one.model).search(source, np.array([9, 9]), Decoding(), [0, 1])
    assert (done.stdout.strip(), done.stderr) == (str(tokens_of(expected)), "")


@pytest.mark.parametrize("name", ["caption", "chat", "classify"])  # translate: in test_export.py, and below
def test_every_recipe_goes_home_and_says_the_same(
    exported: Callable[[str], Exported], tmp_path: Path, name: str
) -> None:
    folder, trained = exported(name).written("fp32"), load_model(exported(name).run)
    model = read_model(folder)
    if trained.recipe.inputs == "images":
        Image.new("RGB", (60, 40), (200, 30, 90)).save(tmp_path / "image.png")
        inputs = [str(tmp_path / "image.png")] * 2
    else:
        inputs = ["good morning", "how are you today"]
    expected = trained.recipe.predict(trained.model, inputs, trained.recipe.decoding)
    found = model.recipe.predict(model.network(1), inputs, model.recipe.decoding)
    assert [made.text for made in found] == [made.text for made in expected]
    assert (folder / "model.safetensors").exists() == (trained.recipe.inputs == "images")
    assert ("pictures as packs store them" in (folder / CARD).read_text()) == (trained.recipe.inputs == "images")
    [parity] = model.manifest.parity
    assert parity.exported == pytest.approx(parity.trained, rel=0.01)


EVALUATE_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
sys.argv = ["packtrain", "evaluate", *sys.argv[1:]]
from packtrain.cli import main
main()
"""


@pytest.mark.usefixtures("processes")
def test_images_are_evaluated_without_torch(exported: Callable[[str], Exported]) -> None:
    one = exported("classify")
    one.written("fp32")
    command = [sys.executable, "-c", EVALUATE_WITHOUT_TORCH, "fp32/", "--data", str(one.folder / "photos"), "--json"]
    done = subprocess.run(command, cwd=one.folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {name: score["value"] for name, score in json.loads(done.stdout)["scores"].items()}
    [trained] = evaluate([run_subject(one.run)], EvaluateOptions(), PlainProgress(lambda _: None), InProcess())
    # Pillow resizes images a little differently.
    assert found == pytest.approx({name: score.value for name, score in trained.scores.items()}, abs=0.05)


def test_a_file_that_is_not_a_graph_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "encoder.onnx").write_bytes(b"nothing")
    with pytest.raises(Mistake, match=r"encoder\.onnx: ONNX Runtime cannot load it: "):
        Session(tmp_path / "encoder.onnx")


def copied(exported: Exported, to: Path) -> Path:
    return shutil.copytree(exported.written("fp32"), to)


def with_data_outside(path: Path, location: str) -> None:
    """Move the weights of a graph to another file."""
    onnx.save_model(onnx.load(path), path, save_as_external_data=True, location=location, size_threshold=1024)


def test_data_outside_of_a_graph_is_loaded_only_if_it_is_listed(
    exported: Callable[[str], Exported], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(exported("translate"), tmp_path / "model")
    expected = read_model(folder)
    answers = expected.recipe.predict(expected.network(1), ["good morning"], Decoding())
    with_data_outside(folder / "onnx" / "decoder.onnx", "decoder.onnx.data")
    list_again(folder)
    monkeypatch.setitem(sys.modules, "onnx", None)  # a machine that only predicts does not have it
    model = read_model(folder)
    assert model.recipe.predict(model.network(1), ["good morning"], Decoding()) == answers
    document = json.loads((folder / MANIFEST).read_text())
    files = [file for file in document["files"] if not file["name"].endswith(".data")]
    (folder / MANIFEST).write_text(json.dumps({**document, "files": files}))
    with pytest.raises(Mistake, match=r"onnx/decoder\.onnx\.data is not listed in model\.json"):
        read_model(folder)
    (folder / "onnx" / "decoder.onnx.data").unlink()
    with pytest.raises(Mistake, match=r"onnx/decoder\.onnx\.data is not listed in model\.json"):
        read_model(folder)


def test_a_pipe_in_place_of_a_graph_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "onnx").mkdir()
    os.mkfifo(tmp_path / "onnx" / "decoder.onnx")
    assert OnnxForm().files(tmp_path) == {"onnx/decoder.onnx"}


def test_data_of_a_graph_in_another_folder_is_refused(exported: Callable[[str], Exported], tmp_path: Path) -> None:
    folder = copied(exported("translate"), tmp_path / "model")
    graph = onnx.load(folder / "onnx" / "decoder.onnx")
    places = ("../../secret", "/etc/passwd", "../job.json", "*/_ORT_MEM_ADDR_/*", "..", "")
    for place in places:
        tensor = graph.graph.initializer[0]
        set_external_data(tensor, place)
        (folder / "onnx" / "decoder.onnx").write_bytes(graph.SerializeToString())
        list_again(folder)
        with pytest.raises(Mistake, match=r"decoder\.onnx: its data is in '.*', which is not a file next to it$"):
            read_model(folder)


def set_external_data(tensor: onnx.TensorProto, place: str) -> None:
    tensor.ClearField("external_data")
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=place)


def test_data_of_constants_in_branches_and_functions_is_found(tmp_path: Path) -> None:
    def constant(name: str) -> onnx.NodeProto:
        tensor = onnx.TensorProto(data_type=onnx.TensorProto.FLOAT, dims=[1], name=name)
        set_external_data(tensor, f"{name}.data")
        return onnx.helper.make_node("Constant", [], [name], value=tensor)

    def sparse(name: str) -> onnx.SparseTensorProto:
        made = onnx.SparseTensorProto(dims=[4])
        set_external_data(made.values, f"{name}-values.data")
        set_external_data(made.indices, f"{name}-indices.data")
        return made

    branch = onnx.helper.make_graph([constant("branch")], "branch", [], [])
    graph = onnx.helper.make_graph([onnx.helper.make_node("If", ["yes"], ["y"], then_branch=branch)], "main", [], [])
    graph.sparse_initializer.append(sparse("sparse"))
    model = onnx.helper.make_model(graph)
    model.functions.append(onnx.helper.make_function("own", "F", [], ["f"], [constant("function")], []))
    model.training_info.add().algorithm.node.append(constant("training"))
    (tmp_path / "made.onnx").write_bytes(model.SerializeToString())
    names = ("branch", "function", "training", "sparse-values", "sparse-indices")
    assert external_files(tmp_path / "made.onnx") == {f"{name}.data" for name in names}


def test_a_foreign_graph_is_one_line(exported: Callable[[str], Exported], tmp_path: Path) -> None:
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 3]) for name in "xy"]
    graph = onnx.helper.make_graph([node], "foreign", values[:1], values[1:])
    foreign = onnx.helper.make_model(graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 18)])
    for recipe, graphs in (("translate", ("encoder", "decoder")), ("classify", ("classifier",))):
        for name in graphs:
            folder = copied(exported(recipe), tmp_path / name)
            onnx.save(foreign, folder / "onnx" / f"{name}.onnx")
            list_again(folder)
            with pytest.raises(Mistake, match=rf"its onnx files do not compute what {recipe} needs \(\w+\); export or"):
                read_model(folder).network(1)


def test_a_classifier_of_other_classes_is_refused(exported: Callable[[str], Exported], tmp_path: Path) -> None:
    folder = copied(exported("classify"), tmp_path / "model")
    document = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**document, "classes": document["classes"][1:]}))
    with pytest.raises(Mistake, match=r"its onnx files do not compute what classify needs \(ValueError\)"):
        read_model(folder).network(1)


def test_a_damaged_graph_with_the_right_digest_is_one_line(
    exported: Callable[[str], Exported], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = copied(exported("classify"), tmp_path / "model")
    file = folder / "onnx" / "classifier.onnx"
    whole = file.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], bytes(len(whole)), whole[:40] + whole, b"\xff" * 100):
        file.write_bytes(damaged)
        list_again(folder)
        with pytest.raises(Mistake, match=r"not an ONNX graph|ONNX Runtime cannot load it") as error:
            read_model(folder).network(1)
        assert "\n" not in str(error.value)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_one_line(
    exported: Callable[[str], Exported], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    one = exported("classify")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(Mistake, match=r"^export to ONNX needs more packages; run `pip install"):
        OnnxForm().write(one.recipe, one.model, tmp_path, "fp32")
    if package == "onnxruntime":
        with pytest.raises(Mistake, match=r"^this model needs ONNX Runtime; run `pip install"):
            OnnxForm().load(one.recipe, tmp_path)


def test_weights_keep_the_names_of_torchvision(exported: Callable[[str], Exported], tmp_path: Path) -> None:
    one = exported("classify")
    found = load_file(write_weights(one.model, tmp_path))
    assert {"conv1.weight", "bn1.running_mean", "layer1.0.conv1.weight", "fc.bias"} <= found.keys()
    assert isinstance(one.model, ResNet)
    copy = one.recipe.build_model()
    copy.load_state_dict(found)
    np.testing.assert_array_equal(
        TorchClassifier(copy.eval()).logits(images(2, 32, 32)), TorchClassifier(one.model).logits(images(2, 32, 32))
    )


# Own recipes.


class Mean(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(vocabulary, 8), nn.Linear(8, 2)

    def forward(self, tokens: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        mean = self.embedding(tokens).mean(1)
        return {"scores": self.output(mean) * scale, "mean": mean}


class Undecided(Mean):
    def forward(self, tokens: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        if tokens.sum() > 10:  # which code runs depends on the data: no graph can hold both
            scale = 2 * scale
        return super().forward(tokens, scale)


class Own(Translate):
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return torch.as_tensor(model(batch["source"], scale=3.0)["scores"].sum())


@pytest.fixture(scope="module")
def own(exported: Callable[[str], Exported]) -> Own:
    return Own(exported("translate").recipe.job, exported("translate").recipe.pack)


@pytest.mark.usefixtures("training")
def test_the_model_of_an_own_recipe_is_exported_as_its_loss_calls_it(
    own: Own, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = Mean(len(own.pack.vocabulary)).eval()
    graph = export_own(own, model, tmp_path)
    assert capfd.readouterr() == ("", "")
    [given] = graph.inputs
    assert (given.name, given.type, given.shape) == ("tokens", "int64", ("batch", "any"))
    outputs = [(one.name, one.type, one.shape) for one in graph.outputs]
    assert outputs == [("scores", "float", ("batch", 2)), ("mean", "float", ("batch", 8))]
    tokens = np.arange(4, 34).reshape(5, 6)
    scores, mean = Session(tmp_path / "model.onnx")([one.name for one in graph.outputs], {"tokens": tokens})
    expected = model(torch.from_numpy(tokens), scale=3.0)
    np.testing.assert_allclose(scores, expected["scores"].detach().numpy(), atol=1e-5)
    np.testing.assert_allclose(mean, expected["mean"].detach().numpy(), atol=1e-5)


def test_a_model_that_cannot_be_exported_is_one_line_with_the_reason(own: Own, tmp_path: Path) -> None:
    with pytest.raises(Mistake, match=r"^translate: torch cannot export .* data-dependent .* \(test_onnx\.py:\d+\)$"):
        export_own(own, Undecided(len(own.pack.vocabulary)), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_does_not_call_the_model_cannot_be_exported(own: Own, tmp_path: Path) -> None:
    class Around(Own):
        def loss(self, model: nn.Module, batch: Batch) -> Tensor:
            return torch.as_tensor(model.get_submodule("embedding")(batch["source"]).sum())

    with pytest.raises(Mistake, match=r"^translate: its loss does not call the model itself"):
        export_own(Around(own.job, own.pack), Mean(len(own.pack.vocabulary)), tmp_path)


@pytest.mark.usefixtures("training")
def test_the_example_of_an_own_recipe_is_exported(tmp_path: Path) -> None:
    write_job(InitRequest("own", tmp_path / "job.yaml", name="languages"))
    loaded = load(tmp_path / "job.yaml")
    run = packed_run(tmp_path, loaded.job)
    recipe = recipe_class("languages:Languages", tmp_path)(
        loaded.job, Pack(run.store, run.pack_name(), tmp_path / "cache")
    )
    graph = export_own(recipe, recipe.build_model(), tmp_path)
    assert [one.shape[0] for one in (*graph.inputs, *graph.outputs)] == ["batch", "batch"]
