from __future__ import annotations

from typing import Any

import pytest
import torch

from packtrain.job.job import TrainSettings
from packtrain.train.numerics import (
    CLEAN_STEPS_TO_DOUBLE,
    FIRST_LOSS_SCALE,
    MIN_LOSS_SCALE,
    LossScale,
    Precision,
    resolve,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def settings(precision: str, **fields: Any) -> TrainSettings:
    train = {"duration": "1 steps", "batch": "1 samples", "schedule": {"constant": {"rate": 0.1}}}
    return TrainSettings.model_validate({**train, "precision": precision, **fields})


def test_auto_is_fp32_on_a_cpu() -> None:
    assert resolve(settings("auto"), CPU, has_bf16=True) == "fp32"


@pytest.mark.parametrize(("can_bf16", "chosen"), [(True, "bf16"), (False, "fp16")])
def test_auto_follows_what_all_gpus_support(can_bf16: bool, chosen: str) -> None:
    assert resolve(settings("auto"), GPU, can_bf16) == chosen


def test_auto_is_never_fp16_with_local_steps() -> None:
    assert resolve(settings("auto", exchange={"local": {"every": "2 steps"}}), GPU, has_bf16=False) == "fp32"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_an_explicit_precision_is_kept(precision: str) -> None:
    for device, has_bf16 in ((CPU, True), (GPU, True), (GPU, False)):
        assert resolve(settings(precision), device, has_bf16) == precision


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_matrix_products_use_the_precision_and_weights_stay_fp32(name: str, dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(4, 4)
    with Precision(settings(name), CPU).compute():
        assert layer(torch.ones(1, 4)).dtype == dtype
    assert layer.weight.dtype == torch.float32


# The loss scale.


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_only_fp16_scales_the_loss(name: str) -> None:
    scale = Precision(settings(name), CPU).scale
    for _ in range(CLEAN_STEPS_TO_DOUBLE):
        scale.fitted()
    assert (scale.enabled, scale.value) == (False, 1.0)
    assert scale.exhausted
    assert Precision(settings("fp16"), CPU).scale.value == FIRST_LOSS_SCALE == 2**14


def test_an_overflow_halves_the_scale_and_two_thousand_clean_steps_double_it() -> None:
    scale = LossScale(enabled=True)
    scale.overflowed()
    assert scale.value == 2**13
    for _ in range(CLEAN_STEPS_TO_DOUBLE - 1):
        scale.fitted()
    assert scale.value == 2**13
    scale.fitted()
    assert (scale.value, scale.clean_steps) == (2**14, 0)


def test_an_overflow_resets_the_count_of_clean_steps() -> None:
    scale = LossScale(enabled=True)
    for _ in range(CLEAN_STEPS_TO_DOUBLE - 1):
        scale.fitted()
    scale.overflowed()
    scale.fitted()
    assert (scale.value, scale.clean_steps) == (2**13, 1)


def test_a_scale_below_the_minimum_is_exhausted() -> None:
    scale = LossScale(enabled=True)
    while not scale.exhausted:
        scale.overflowed()
    assert scale.value == MIN_LOSS_SCALE / 2
