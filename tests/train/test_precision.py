from __future__ import annotations

import pytest
import torch

from packtrain.errors import Mistake
from packtrain.train.precision import FIRST_LOSS_SCALE, Precision, resolve

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_auto_is_fp32_on_a_cpu() -> None:
    assert resolve("auto", CPU) == "fp32"


@pytest.mark.parametrize(("can_bf16", "chosen"), [(True, "bf16"), (False, "fp16")])
def test_auto_is_what_the_gpu_can_do(monkeypatch: pytest.MonkeyPatch, can_bf16: bool, chosen: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: can_bf16)
    assert resolve("auto", GPU) == chosen


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_persons_choice_is_kept(precision: str) -> None:
    assert resolve(precision, CPU) == precision
    assert resolve(precision, GPU) == precision


def test_fp16_on_a_cpu_is_refused_with_what_to_do() -> None:
    with pytest.raises(Mistake, match=r"^train\.precision: fp16 needs a GPU; use fp32 or auto on a CPU$"):
        Precision("fp16", CPU)


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_products_are_computed_in_the_precision_and_weights_stay(name: str, dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(4, 4)
    with Precision(name, CPU).compute():
        assert layer(torch.ones(1, 4)).dtype == dtype
    assert layer.weight.dtype == torch.float32


def test_where_nothing_is_scaled_there_is_no_scale_to_keep() -> None:
    precision = Precision("fp32", CPU)
    assert precision.loss_scale() == (None, 0)
    precision.restore(8.0, 3)
    assert precision.loss_scale() == (None, 0)
    assert precision.scaler.scale(torch.tensor(3.0)).item() == 3.0


def test_the_loss_scale_of_fp16_survives_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the choice of fp16 forced, so that it can be tried without a GPU."""
    monkeypatch.setattr("packtrain.train.precision.resolve", lambda _precision, _device: "fp16")
    first, second = Precision("fp16", CPU), Precision("fp16", CPU)
    assert first.loss_scale() == (FIRST_LOSS_SCALE, 0)
    first.restore(1024.0, 17)
    second.restore(*first.loss_scale())
    assert second.loss_scale() == (1024.0, 17)
    assert second.scaler.scale(torch.tensor(3.0)).item() == 3072.0
