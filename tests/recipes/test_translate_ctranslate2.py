from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pack.corpus import GREETINGS, QUESTIONS, job_of, write_pairs
from packtrain.data.pack import pad
from packtrain.errors import Mistake
from packtrain.export.predict import TrainedModel, load_model
from packtrain.pack.shard import Ragged
from packtrain.pack.vocabulary import EOS, PAD
from packtrain.recipes.decode import TorchText
from packtrain.recipes.pairs import PairRecipe
from packtrain.recipes.recipe import Decoding
from packtrain.recipes.transformer import Transformer
from packtrain.recipes.translate import ctranslate2
from packtrain.recipes.translate.ctranslate2 import Ctranslate2Form
from parts.models import commit_model, packed_run


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainedModel:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    run = packed_run(tmp_path, job_of(tmp_path))
    commit_model(run, tmp_path, 10)
    return load_model(run)


def sources(trained: TrainedModel) -> np.ndarray:
    assert isinstance(trained.recipe, PairRecipe)
    rows = trained.recipe.encode([source for source, _ in [*GREETINGS, *QUESTIONS]])
    return pad(Ragged.from_rows(rows, np.dtype("<u4")), np.arange(len(rows)), PAD)


@pytest.mark.parametrize("beam", [1, 4])
def test_it_finds_what_torch_finds_and_scores_it_the_same(trained: TrainedModel, tmp_path: Path, beam: int) -> None:
    assert isinstance(trained.model, Transformer)
    Ctranslate2Form().write(trained.recipe, trained.model, tmp_path, "fp32")
    given = sources(trained)
    limits = np.full(len(given), 20)
    asked = given, limits, Decoding(beam, n_best=min(2, beam)), range(len(given))
    ours = TorchText(trained.model).search(*asked)
    found = Ctranslate2Form().load(trained.recipe, tmp_path, 1).search(*asked)
    assert [len(own) for own in found] == [min(2, beam)] * len(given)
    same = [one[0].tokens == other[0].tokens for one, other in zip(found, ours, strict=True)]
    assert sum(same) >= len(same) - 1  # its length penalty ranks a pair of close hypotheses the other way
    for one, other, is_same in zip(found, ours, same, strict=True):
        assert not is_same or one[0].score == pytest.approx(other[0].score, abs=0.01)


def test_a_short_text_is_not_written_up_to_the_limit_of_a_long_one(trained: TrainedModel, tmp_path: Path) -> None:
    Ctranslate2Form().write(trained.recipe, trained.model, tmp_path, "fp32")
    network = Ctranslate2Form().load(trained.recipe, tmp_path, 1)
    given = sources(trained)
    alone = network.search(given, np.full(len(given), 20), Decoding(2), range(len(given)))
    limits: list[int] = []
    translator = network._translator

    class Recorder:
        def translate_batch(self, rows: list[list[str]], **options: Any) -> Any:
            limits.extend([options["max_decoding_length"]] * len(rows))
            return translator.translate_batch(rows, **options)

    network._translator = Recorder()
    mixed = np.full(len(given), 20)
    mixed[3] = 1000
    found = network.search(given, mixed, Decoding(2), range(len(given)))
    assert sorted(limits) == [20] * (len(given) - 1) + [1000]
    assert [one[0].tokens for one in found][:3] == [one[0].tokens for one in alone][:3]
    assert [one[0].tokens for one in found][4:] == [one[0].tokens for one in alone][4:]


def test_losses_are_those_of_torch(trained: TrainedModel, tmp_path: Path) -> None:
    assert isinstance(trained.model, Transformer)
    Ctranslate2Form().write(trained.recipe, trained.model, tmp_path, "fp32")
    given = sources(trained)
    target = np.concatenate([np.full((len(given), 1), 2), given[::-1]], axis=1)
    expected = TorchText(trained.model).losses(given, target)
    found = Ctranslate2Form().load(trained.recipe, tmp_path, 1).losses(given, target)
    # Torch's loss also counts the mass of PAD and BOS, which no search writes; an untrained model has some there.
    assert found == pytest.approx(expected, rel=0.01)


def test_int8_is_smaller_and_close(trained: TrainedModel, tmp_path: Path) -> None:
    networks, sizes = {}, {}
    before = {name: tensor.clone() for name, tensor in trained.model.state_dict().items()}
    for precision in ("fp32", "int8"):
        folder = tmp_path / precision
        folder.mkdir()
        Ctranslate2Form().write(trained.recipe, trained.model, folder, precision)
        networks[precision] = Ctranslate2Form().load(trained.recipe, folder, 1)
        sizes[precision] = (folder / "ctranslate2" / "model.bin").stat().st_size
    assert sizes["int8"] < 0.8 * sizes["fp32"]
    assert all(tensor.equal(before[name]) for name, tensor in trained.model.state_dict().items())
    given = sources(trained)
    target = np.concatenate([np.full((len(given), 1), 2), given], axis=1)
    exact, rounded = (networks[precision].losses(given, target) for precision in ("fp32", "int8"))
    assert rounded == pytest.approx(exact, rel=0.05)
    assert (exact != rounded).any()


def test_no_sum_of_two_products_overflows_16_bits(trained: TrainedModel) -> None:
    assert isinstance(trained.model, Transformer)
    spec = ctranslate2._spec_of(trained.model)
    ctranslate2._round_weights(spec)
    layers = [
        spec.decoder.projection,
        spec.encoder.embeddings[0],
        *(layer.ffn.linear_1 for layer in spec.decoder.layer),
    ]
    for layer in layers:
        pairs = layer.weight.astype(int).reshape(len(layer.weight), -1, 2)
        most = 255 * pairs.clip(min=0).sum(2).max(1), -255 * pairs.clip(max=0).sum(2).min(1)
        assert layer.weight.dtype == np.int8
        assert 2**14 < np.maximum(*most).min() <= np.maximum(*most).max() < 2**15
        assert layer.weight_scale.shape == (len(layer.weight),)
    assert spec.decoder.projection.weight / spec.decoder.projection.weight_scale[:, None] == pytest.approx(
        trained.model.embedding.weight[: trained.model.vocabulary].numpy(force=True), abs=0.01
    )


LOSSES = """
import sys
import numpy as np
from pathlib import Path
from packtrain.recipes.translate.ctranslate2 import Ctranslate2Text
given, target = np.load(sys.argv[2]), np.load(sys.argv[3])
print(*Ctranslate2Text(Path(sys.argv[1]), int(sys.argv[4]), 1).losses(given, target).tolist())
"""


@pytest.mark.usefixtures("processes")
def test_int8_computes_the_same_on_a_processor_without_vnni(trained: TrainedModel, tmp_path: Path) -> None:
    Ctranslate2Form().write(trained.recipe, trained.model, tmp_path, "int8")
    given = sources(trained)
    target = np.concatenate([np.full((len(given), 1), 2), given], axis=1)
    np.save(tmp_path / "given.npy", given)
    np.save(tmp_path / "target.npy", target)
    found = []
    for instructions in ("AVX2", "DEFAULT"):
        # MKL, which CTranslate2 prefers on Intel's processors, has other names for them.
        environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": instructions, "CT2_USE_MKL": "0"}
        files = [str(tmp_path / name) for name in ("ctranslate2", "given.npy", "target.npy")]
        command = [sys.executable, "-c", LOSSES, *files, str(len(trained.recipe.pack.vocabulary))]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment)
        found.append([float(word) for word in done.stdout.split()])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_a_source_with_only_its_end_and_no_sources_at_all(trained: TrainedModel, tmp_path: Path) -> None:
    Ctranslate2Form().write(trained.recipe, trained.model, tmp_path, "fp32")
    network = Ctranslate2Form().load(trained.recipe, tmp_path, 1)
    none = np.zeros((0, 1), np.int64)
    assert network.search(none, np.zeros(0, np.int64), Decoding(), []) == []
    assert network.losses(none, none).tolist() == []
    [[one]] = network.search(np.array([[EOS]]), np.array([5]), Decoding(2), [0])
    assert len(one.tokens) <= 5


def test_sampling_and_models_with_other_layers_are_refused(trained: TrainedModel, tmp_path: Path) -> None:
    Ctranslate2Form().write(trained.recipe, trained.model, tmp_path, "fp32")
    with pytest.raises(Mistake, match="does not sample; export it with --format onnx"):
        Ctranslate2Form().load(trained.recipe, tmp_path, 1).search(
            np.array([[5, EOS]]), np.array([5]), Decoding(1, nucleus=0.9), [0]
        )
    other = tmp_path / "chat"
    data = {"train": [{"dialogue": write_pairs(other / "talk.tsv", GREETINGS)}], "vocabulary": 300}
    run = packed_run(other, job_of(other, recipe="chat", data=data))
    commit_model(run, other, 1)
    recipe, model, _ = load_model(run)
    with pytest.raises(Mistake, match="no layers for the model of chat; use --format onnx"):
        Ctranslate2Form().write(recipe, model, other, "fp32")
