"""Sizes by arithmetic are those of the models themselves, which are built on the meta device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from packtrain.data.pack import Pack
from packtrain.job import Job
from packtrain.job.job import expand
from packtrain.pack.manifest import Manifest, ShardFile, Split
from packtrain.plan.workload import known_data, known_model
from packtrain.recipes import RECIPES, recipe_class
from packtrain.recipes.caption import SIZES as CAPTIONERS
from packtrain.recipes.chat import SIZES as CHATS
from packtrain.recipes.classify import SIZES as CLASSIFIERS
from packtrain.recipes.translate import SIZES as TRANSLATORS

SIZES = {"translate": TRANSLATORS, "chat": CHATS, "classify": CLASSIFIERS, "caption": CAPTIONERS}


def job_with(recipe: str, model: Any) -> Job:
    source = {"translate": {"bitext": ["a", "b"]}, "chat": {"bitext": ["a", "b"]}, "classify": {"imagenet": ["a"]}}
    defaults = dict(recipe_class(recipe).defaults)
    data = {**cast("dict[str, Any]", defaults["data"]), "train": [source.get(recipe, {"coco": ["a", "b"]})]}
    return Job.model_validate(expand({**defaults, "name": "sized", "recipe": recipe, "data": data, "model": model}))


def manifest_of(kind: str, samples: int = 100, size: int = 100_000, vocabulary: int = 1003) -> Manifest:
    shard = ShardFile("train-00000.safetensors", size, "0" * 64, samples)
    split = Split(samples, {}, {}, (samples,), (shard,))
    return Manifest(3, "sized", cast(Any, kind), {"vocabulary": vocabulary}, {"train": split}, ("a", "b", "c"))


def cases() -> list[Any]:
    plain = [(recipe, size) for recipe, sizes in SIZES.items() for size in sizes]
    options: list[tuple[str, Any]] = [
        ("translate", {"size": "tiny", "width": 64, "encoder_layers": 1}),
        ("chat", {"size": "small", "prompt": 20, "reply": 30}),
        ("classify", {"size": "resnet18", "width": 32, "stem": "small"}),
        ("caption", {"size": "resnet18", "cell": "lstm"}),
        ("caption", {"size": "resnet50", "weights": "w.safetensors", "tuned_stages": 2}),
        ("caption", {"size": "resnet18", "weights": "w.safetensors", "tuned_stages": 0}),
    ]
    return [pytest.param(*case, id=f"{case[0]}-{case[1]}") for case in [*plain, *options]]


@pytest.mark.parametrize(("recipe", "model"), cases())
def test_arithmetic_counts_the_weights_of_the_model(recipe: str, model: Any) -> None:
    job, kind = job_with(recipe, model), recipe_class(recipe)
    manifest = manifest_of(kind.kind)
    counted = known_model(job, manifest)
    assert counted is not None
    assert 0 < counted.checkpointed_bytes <= counted.activation_bytes
    pack = SimpleNamespace(manifest=manifest, vocabulary=range(manifest.settings["vocabulary"]))
    with torch.device("meta"):
        built = kind(job, cast(Pack, pack)).build_model()
    parameters = list(built.parameters())
    assert counted.parameters == sum(one.numel() for one in parameters)
    assert counted.trained == sum(one.numel() for one in parameters if one.requires_grad)
    assert counted.buffer_bytes == sum(one.numel() * one.element_size() for one in built.buffers())


def test_every_recipe_has_its_arithmetic_and_a_recipe_of_ones_own_has_none() -> None:
    assert SIZES.keys() == RECIPES.keys()
    own = job_with("translate", "tiny").model_copy(update={"recipe": "mine:Mine"})
    assert known_model(own, manifest_of("pairs")) is None


def test_the_manifest_tells_the_steps_of_an_epoch() -> None:
    images = known_data(job_with("classify", "tiny"), manifest_of("labels", samples=2560))
    assert (images.steps_per_epoch, images.samples_per_step) == (10.0, 256.0)
    # Of 1,000 bytes for a pair, 16 are ends of rows; half of the others are the target, two bytes for each token.
    pairs = known_data(job_with("chat", "tiny"), manifest_of("pairs", samples=100, size=100_000))
    assert pairs.steps_per_epoch * pairs.units_per_step == pytest.approx(100 * 984 / 4)
    few = known_data(job_with("classify", "tiny"), manifest_of("labels", samples=3))
    assert (few.steps_per_epoch, few.samples_per_step) == (1.0, 3.0)
