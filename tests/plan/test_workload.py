"""Sizes of a job, for the smallest job of every recipe."""

from __future__ import annotations

import pytest

from packtrain.plan.workload import ModelSize, data_size, model_size, workload_of
from packtrain.recipes import Recipe
from recipes.conftest import MakeRecipe
from recipes.small import SMALL


@pytest.fixture(scope="module", params=SMALL)
def small(request: pytest.FixtureRequest, make_recipe: MakeRecipe, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return SMALL[request.param](make_recipe, tmp_path_factory.mktemp("small"))


def test_a_model_is_sized_without_memory_for_its_weights(small: Recipe) -> None:
    size = model_size(small)
    real = small.build_model()
    assert size.parameters == sum(one.numel() for one in real.parameters())
    assert size.flops > 2 * size.parameters / max(1.0, data_size(small).units_per_step)
    assert size.activation_bytes > 0


def test_data_is_sized_by_its_batches(small: Recipe) -> None:
    size = data_size(small)
    assert size.samples == small.count("train")
    assert size.steps_per_epoch * size.samples_per_step == pytest.approx(size.samples)
    assert size.units_per_step <= small.job.train.batch.value
    larger = data_size(small, {"train": 10.0, "valid": 2.0})
    assert (larger.samples, larger.steps_per_epoch) == (10 * size.samples, 10 * size.steps_per_epoch)
    assert larger.valid_samples == 2 * size.valid_samples
    assert size.exact
    assert not larger.exact


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"exchange": {"ddp": {"compress": "bf16"}}}, "exchange_bytes", 2),
        ({"exchange": {"ddp": {}}}, "exchange_bytes", 4),
        ({"exchange": {"local": {"every": "20 steps"}}}, "exchange_every", 20),
        ({"exchange": {"local": {"every": "20 steps"}}}, "copies", 2),
        ({"exchange": {"fsdp": {}}}, "sharded", True),
        ({"exchange": {"fsdp": {}}}, "whole_gradients", True),
        ({"exchange": {"fsdp": {"accumulate": "sharded"}}}, "whole_gradients", False),
        ({"optimizer": {"sgd": {"momentum": 0.0}}}, "optimizer_copies", 0),
        ({"optimizer": {"sgd": {}}}, "optimizer_copies", 1),
        ({"optimizer": {"adamw": {}}}, "optimizer_copies", 2),
        ({"ema": 0.99}, "averaged", True),
        ({"precision": "fp32"}, "half", False),
        ({"precision": "bf16"}, "half", True),
    ],
)
def test_settings_decide_what_is_sent_and_kept(
    make_recipe: MakeRecipe,
    change: dict[str, object],
    field: str,
    value: object,
) -> None:
    base = {"duration": "10 steps", "batch": "64 tokens", "schedule": {"constant": {"rate": 0.1}}}
    recipe = make_recipe(train={**base, **change})
    work = workload_of(recipe.job.train, "tokens", ModelSize(1, 1, 0, 1.0, 1.0), data_size(recipe), on_gpu=False)
    assert getattr(work, field) == value
