from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from packtrain.job.kinds import OPTIMIZERS, kind_class
from packtrain.run.checkpoint import CorruptCheckpoint
from packtrain.train.optimizer import AdamSettings, AdamWSettings, SgdSettings, load_optimizer, optimizer_tensors

ENTRIES = [
    *[("weight", shape, entry) for entry, shape in (("step", ()), ("exp_avg", (2, 4)), ("exp_avg_sq", (2, 4)))],
    *[("bias", shape, entry) for entry, shape in (("step", ()), ("exp_avg", (2,)), ("exp_avg_sq", (2,)))],
]


def a_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def a_model_with_channels_last() -> nn.Module:
    """Its weights are in another order in memory than in a file."""
    torch.manual_seed(3)
    layers = nn.Unflatten(1, (4, 1, 1)), nn.Conv2d(4, 8, 3, padding=1), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 2)
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (step + 1)
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("make", [a_model, a_model_with_channels_last])
def test_optimizer_state_restored_from_a_file_continues_bit_for_bit(
    tmp_path: Path, make: Callable[[], nn.Module], kind: str
) -> None:
    settings = kind_class(OPTIMIZERS, kind).model_validate({"decay": 0.1})
    straight, resumed = make(), make()
    optimizer = settings.build(straight)
    train(straight, optimizer, range(5))
    state = {name: tensor.contiguous() for name, tensor in optimizer_tensors(optimizer, straight).items()}
    save_file(state, tmp_path / "optimizer")

    resumed.load_state_dict(straight.state_dict())
    again = settings.build(resumed)
    load_optimizer(again, resumed, load_file(tmp_path / "optimizer"))
    train(straight, optimizer, range(5, 10))
    train(resumed, again, range(5, 10))
    for name, tensor in straight.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
    for name, tensor in optimizer_tensors(optimizer, straight).items():
        assert torch.equal(tensor, optimizer_tensors(again, resumed)[name]), name


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_without_its_state_an_optimizer_makes_other_steps(kind: str) -> None:
    """So that the test above proves something."""
    straight, resumed = a_model(), a_model()
    settings = kind_class(OPTIMIZERS, kind).model_validate({})
    optimizer = settings.build(straight)
    train(straight, optimizer, range(5))
    resumed.load_state_dict(straight.state_dict())
    train(straight, optimizer, range(5, 6))
    train(resumed, settings.build(resumed), range(5, 6))
    assert not torch.equal(next(straight.parameters()), next(resumed.parameters()))


def test_optimizer_state_is_named_after_its_parameters() -> None:
    model = a_model()
    optimizer = AdamSettings().build(model)
    assert optimizer_tensors(optimizer, model) == {}
    train(model, optimizer, range(1))
    names = set(optimizer_tensors(optimizer, model))
    assert {"0.weight/exp_avg", "0.weight/exp_avg_sq", "0.weight/step"} <= names
    assert {name.rpartition("/")[0] for name in names} == {name for name, _ in model.named_parameters()}


def test_loaded_optimizer_state_is_a_copy() -> None:
    model = a_model()
    optimizer = AdamSettings().build(model)
    train(model, optimizer, range(1))
    tensors = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, model).items()}
    load_optimizer(optimizer, model, tensors)
    before = tensors["0.weight/exp_avg"].clone()
    train(model, optimizer, range(1, 3))
    assert torch.equal(tensors["0.weight/exp_avg"], before)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_decay_spares_norms_and_biases(kind: str) -> None:
    model = a_model()
    groups = kind_class(OPTIMIZERS, kind).model_validate({"decay": 0.1}).build(model).param_groups
    decays = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    assert {name: decays[id(parameter)] for name, parameter in model.named_parameters()} == {
        "0.weight": 0.1, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0, "2.weight": 0.1, "2.bias": 0.0,
    }  # fmt: skip


def test_frozen_parameters_are_left_alone() -> None:
    model = a_model()
    model[0].requires_grad_(False)  # type: ignore[index]
    optimizer = AdamSettings().build(model)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 4


def test_sgd_without_momentum_has_no_state() -> None:
    model = a_model()
    optimizer = SgdSettings(momentum=0.0).build(model)
    train(model, optimizer, range(2))
    assert optimizer_tensors(optimizer, model) == {}
    load_optimizer(optimizer, model, {})


def test_adamw_decays_the_weights_and_adam_decays_through_its_moments() -> None:
    """With a gradient of nothing AdamW shrinks by rate x decay, and Adam steps by its rate."""
    for settings, wanted in ((AdamWSettings(decay=0.1), 1 - 0.01 * 0.1), (AdamSettings(decay=0.1), 1 - 0.01)):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = settings.build(model)
        optimizer.param_groups[0]["lr"] = 0.01
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
        assert model.weight.item() == pytest.approx(wanted, rel=1e-6)


def test_optimizer_state_of_another_model_is_refused_by_name() -> None:
    model = a_model()
    optimizer = AdamSettings().build(model)
    train(model, optimizer, range(1))
    tensors = optimizer_tensors(optimizer, model)
    with pytest.raises(CorruptCheckpoint, match=r"^the optimizer's state does not fit the model: 3\.weight$"):
        load_optimizer(optimizer, model, {**tensors, "3.weight/exp_avg": torch.zeros(1)})


def test_a_weight_that_never_had_a_gradient_has_no_state_and_needs_none() -> None:
    model = a_model()
    optimizer = AdamSettings().build(model)
    train(model, optimizer, range(1))
    kept = {key: it for key, it in optimizer_tensors(optimizer, model).items() if not key.startswith("0.bias")}
    load_optimizer(optimizer, model, kept)
    assert optimizer_tensors(optimizer, model).keys() == kept.keys()


def test_restored_optimizer_state_is_on_the_device_of_the_weights() -> None:
    """Its counter too: a fused optimiser refuses one that is elsewhere. Here the other device is one without memory."""
    model = nn.Linear(4, 2, device="meta")
    optimizer = torch.optim.Adam(model.parameters())
    saved = {f"{name}/{entry}": torch.zeros(shape) for name, shape, entry in ENTRIES}
    load_optimizer(optimizer, model, saved)
    restored = optimizer_tensors(optimizer, model)
    assert restored.keys() == saved.keys()
    assert {tensor.device.type for tensor in restored.values()} == {"meta"}
