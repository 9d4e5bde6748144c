"""The full-size jobs of examples/: their models have the published sizes and train on data of the same format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pack.corpus import GREETINGS, write_pairs
from pack.rawsets import class_tars, numbered, picture, tar, write
from packtrain.data.pack import Pack
from packtrain.files import sha256_of
from packtrain.job import Job
from packtrain.job.part import FILES
from packtrain.launch.load import load
from packtrain.pack.build import PlainProgress, pack
from packtrain.pack.workers import InProcess
from packtrain.recipes import Recipe, recipe_class
from packtrain.recipes.images import RESNETS
from packtrain.recipes.resnet import ResNet
from packtrain.store import open_store
from packtrain.train.ddp import DdpSettings
from recipes.captioned import THINGS, write_set

EXAMPLES = Path(__file__).parent.parent.parent / "examples"

RESNET101 = 44_549_160  # as published, with its last layer
LAST_LAYER = 2048 * 1000 + 1000
FULL = ("caption-coco-vizwiz", "chat-cornell", "classify-imagenet", "translate-wmt14")


def numbers_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def sized(name: str) -> nn.Module:
    """Return the job's model for the published data, without memory for its weights."""
    job = load(EXAMPLES / f"{name}.yaml").job
    data = SimpleNamespace(vocabulary=range(job.data.vocabulary), manifest=SimpleNamespace(classes=range(1000)))
    with torch.device("meta"):
        return recipe_class(str(job.recipe))(job, cast(Pack, data)).build_model()


def test_every_full_size_job_is_tested() -> None:
    small = ("caption", "chat", "classify", "translate")
    assert sorted(path.stem for path in EXAMPLES.glob("*.yaml")) == sorted([*FULL, *small])


def test_imagenet_has_the_published_resnet_50() -> None:
    assert numbers_of(sized("classify-imagenet")) == 25_557_032


def test_captions_have_the_published_resnet_101_and_a_decoder_of_width_500() -> None:
    model = sized("caption-coco-vizwiz")
    assert numbers_of(cast(nn.Module, model.encoder)) == RESNET101 - LAST_LAYER
    channels, width = 2048, 500
    words = 10_000 * width + 10_000  # one embedding for input and output
    look = channels * width + width + width * width + width + width + width * channels + channels
    cell = 3 * width * (width + channels) + 3 * width * width + 6 * width
    first_state = channels * width + width
    assert numbers_of(model) == RESNET101 - LAST_LAYER + words + look + cell + first_state


def test_the_caption_job_has_the_recipes_default_schedule() -> None:
    train = load(EXAMPLES / "caption-coco-vizwiz.yaml").job.train
    assert train.schedule == type(train).model_validate(recipe_class("caption").defaults["train"]).schedule


def test_the_wmt14_job_sends_gradients_in_16_bits() -> None:
    assert load(EXAMPLES / "translate-wmt14.yaml").job.train.exchange == DdpSettings(compress="fp16")


def layers_of(width: int, inner: int) -> int:
    """Return the number of parameters of 6 + 6 layers and the last two norms."""
    attention = 4 * width * width + 4 * width
    feedforward = 2 * width * inner + inner + width
    norm = 2 * width
    return 6 * (attention + feedforward + 2 * norm) + 6 * (2 * attention + feedforward + 3 * norm) + 2 * norm


def test_wmt14_has_the_base_model_whose_gradients_were_365_megabytes_per_step_and_link() -> None:
    parameters = numbers_of(sized("translate-wmt14"))
    assert parameters == layers_of(512, 2048) + 32768 * 512  # one embedding for source, target and softmax
    assert parameters * 4 * 1.5 == pytest.approx(365e6, rel=0.01)  # 32 bits each, and a ring of four workers


def test_cornell_has_the_dialogue_transformer_of_width_1024() -> None:
    width, vocabulary = 1024, 8000
    embedding, positions, softmax = vocabulary * width, (15 + 16) * width, vocabulary * width + vocabulary
    assert numbers_of(sized("chat-cornell")) == layers_of(width, 4096) + embedding + positions + softmax


# One batch at full size, on toy data of the same format.


def captions(folder: Path) -> dict[str, Any]:
    torch.manual_seed(1)
    weights = ResNet(RESNETS["resnet101"], 1000).state_dict()
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "resnet101.safetensors")
    sources = [{"coco": write_set(folder, THINGS, "coco")}, {"vizwiz": write_set(folder, THINGS[:2], "vizwiz")}]
    return {"train": sources, "valid": sources, "vocabulary": 300}


def dialogue(folder: Path) -> dict[str, Any]:
    said = [{"dialogue": write_pairs(folder / "talk.tsv", GREETINGS)}]
    return {"train": said, "valid": said, "vocabulary": 300}


def tars(folder: Path) -> dict[str, Any]:
    train = write(folder / "train.tar", class_tars({"n01": ["1.JPEG", "2.JPEG"], "n02": ["3.JPEG"]}))
    pictures = write(folder / "val.tar", tar((name, picture(5)) for name in numbered(2)))
    truth, synsets = write(folder / "truth.txt", "1\n2\n"), write(folder / "synsets.txt", "n01 dog\nn02 cat\n")
    return {"train": [{"imagenet": train}], "valid": [{"imagenet": [pictures, truth, synsets]}]}


def bitext(folder: Path) -> dict[str, Any]:
    pairs = [{"bitext": write_pairs(folder / "pairs.tsv", GREETINGS)}]
    return {"train": pairs * 3, "valid": pairs, "test": pairs, "vocabulary": 300}


DATA: dict[str, Callable[[Path], dict[str, Any]]] = dict(zip(FULL, (captions, dialogue, tars, bitext), strict=True))


@pytest.mark.usefixtures("training")
@pytest.mark.parametrize("name", FULL)
def test_a_batch_of_data_in_the_same_format_has_a_loss_and_gradients(name: str, tmp_path: Path) -> None:
    data = DATA[name](tmp_path)
    recipe = recipe_on(load(EXAMPLES / f"{name}.yaml").job, data, tmp_path)
    model = recipe.build_model()
    model.load_state_dict(recipe.initial_weights(model), strict=False)
    recipe.prepare(0, model)
    batch = {key: torch.from_numpy(rows) for key, rows in recipe.batch(np.arange(2), 0).items()}
    loss = recipe.loss(model.train(), batch)
    loss.backward()
    assert torch.isfinite(loss)
    learnt = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert all(parameter.grad is not None and torch.isfinite(parameter.grad).all() for parameter in learnt)


def recipe_on(job: Job, data: dict[str, Any], folder: Path) -> Recipe:
    """Return the job's recipe on other data, with the files of its model from `folder`."""
    store = open_store(str(folder / "store"), create=True)
    options = dict(job.model.options)
    if "weights" in options:
        weights = folder / Path(str(options["weights"])).name
        key = f"{FILES}{sha256_of(weights)}"
        store.put_file(key, weights)
        options["weights"] = f"store:{key}"
    changed = job.model_copy(
        update={
            "data": type(job.data).model_validate({**data, "sizes": job.data.sizes}),
            "model": job.model.model_copy(update={"options": options}),
        }
    )
    manifest = pack(job.name, changed.data, store, InProcess(), PlainProgress(lambda _: None))
    return recipe_class(str(job.recipe))(changed, Pack(store, manifest.name, folder / "cache"))
