"""Sizes of a job, for the smallest job of every recipe."""

from __future__ import annotations

import pytest

from packtrain.plan.workload import counted_size, data_size, estimated_data, model_size, workload_of
from packtrain.recipes import Recipe
from packtrain.recipes.recipe import ModelSize
from recipes.conftest import MakeRecipe
from recipes.small import SMALL


@pytest.fixture(scope="module", params=SMALL)
def small(request: pytest.FixtureRequest, make_recipe: MakeRecipe, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return SMALL[request.param](make_recipe, tmp_path_factory.mktemp("small"))


def test_a_model_is_sized_without_memory_for_its_weights(small: Recipe) -> None:
    size = counted_size(small)
    real = small.build_model()
    assert size.parameters == sum(one.numel() for one in real.parameters())
    assert size.flops > 2 * size.parameters / max(1.0, data_size(small).units_per_step)
    assert size.activation_bytes > size.checkpointed_bytes > 0
    assert 0 < size.block_flops < size.flops / 2


def test_arithmetic_and_counting_agree_about_a_step(small: Recipe) -> None:
    """Small batches are padded more than those that the arithmetic is about."""
    size, counted = model_size(small), counted_size(small)
    assert size.flops == pytest.approx(counted.flops, rel=0.35)
    assert size.activation_bytes == pytest.approx(counted.activation_bytes, rel=0.35)
    assert size.checkpointed_bytes == pytest.approx(counted.checkpointed_bytes, rel=0.5)


def test_data_is_sized_by_its_batches(small: Recipe) -> None:
    size = data_size(small)
    assert size.samples == small.count("train")
    assert size.steps_per_epoch * size.samples_per_step == pytest.approx(size.samples)
    assert size.units_per_step <= small.job.train.batch.value
    assert size.exact


def test_data_that_was_not_read_fills_the_batch_and_counts_each_source_by_its_weight(small: Recipe) -> None:
    [source] = small.job.data.train
    mix = (source, source.model_copy(update={"weight": 2.0}))
    job = small.job.model_copy(update={"data": small.job.data.model_copy(update={"train": mix})})
    size = estimated_data(job, [100_000, 50_000], [1.0, 3.0], 1e6, 10, 0)
    batch = job.train.batch.value
    assert (size.samples, size.exact) == (150_000, False)
    assert size.units_per_step == pytest.approx(batch)
    # 100,000 samples once, and 50,000 twice.
    assert size.steps_per_epoch == pytest.approx((100_000 + 2 * 50_000 * 3.0) / batch)
    assert size.samples_per_step == pytest.approx(200_000 / size.steps_per_epoch)


def test_a_recipe_knows_the_family_of_its_model(small: Recipe) -> None:
    assert (
        counted_size(small).family
        == model_size(small).family
        == {"tokens": "transformer", "samples": "basic"}[small.unit]
    )


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
        ({}, "activation_bytes", 1.0),
        ({"activation_checkpointing": True}, "activation_bytes", 0.5),
        ({"activation_checkpointing": True}, "flops", 1.25),
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
    work = workload_of(
        recipe.job.train, "tokens", ModelSize(1, 1, 0, 1.0, 1.0, 0.25, 0.5), data_size(recipe), on_gpu=False
    )
    assert getattr(work, field) == value
