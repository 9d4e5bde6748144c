from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from packtrain.job import Adam
from packtrain.train.optimizer import load_optimizer, optimizer_of, optimizer_tensors


def a_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (step + 1)
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def test_a_state_that_went_through_a_file_leads_to_the_same_steps_bit_for_bit(tmp_path: Path) -> None:
    settings = Adam.model_validate({"decay": 0.1})
    straight, resumed = a_model(), a_model()
    optimizer = optimizer_of(settings, straight)
    train(straight, optimizer, range(5))
    save_file(optimizer_tensors(optimizer, straight), tmp_path / "optimizer")

    resumed.load_state_dict(straight.state_dict())
    again = optimizer_of(settings, resumed)
    load_optimizer(again, resumed, load_file(tmp_path / "optimizer"))
    train(straight, optimizer, range(5, 10))
    train(resumed, again, range(5, 10))
    for name, tensor in straight.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
    for name, tensor in optimizer_tensors(optimizer, straight).items():
        assert torch.equal(tensor, optimizer_tensors(again, resumed)[name]), name


def test_a_state_that_is_not_restored_leads_elsewhere() -> None:
    """So that the test above proves something."""
    straight, resumed = a_model(), a_model()
    optimizer = optimizer_of(Adam(), straight)
    train(straight, optimizer, range(5))
    resumed.load_state_dict(straight.state_dict())
    train(straight, optimizer, range(5, 6))
    train(resumed, optimizer_of(Adam(), resumed), range(5, 6))
    assert not torch.equal(next(straight.parameters()), next(resumed.parameters()))


def test_the_state_has_names_that_say_whose_it_is() -> None:
    model = a_model()
    optimizer = optimizer_of(Adam(), model)
    assert optimizer_tensors(optimizer, model) == {}
    train(model, optimizer, range(1))
    names = set(optimizer_tensors(optimizer, model))
    assert {"0.weight/exp_avg", "0.weight/exp_avg_sq", "0.weight/step"} <= names
    assert {name.rpartition("/")[0] for name in names} == {name for name, _ in model.named_parameters()}


def test_what_is_loaded_is_a_copy() -> None:
    model = a_model()
    optimizer = optimizer_of(Adam(), model)
    train(model, optimizer, range(1))
    tensors = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, model).items()}
    load_optimizer(optimizer, model, tensors)
    before = tensors["0.weight/exp_avg"].clone()
    train(model, optimizer, range(1, 3))
    assert torch.equal(tensors["0.weight/exp_avg"], before)


def test_decay_spares_norms_and_biases() -> None:
    model = a_model()
    groups = optimizer_of(Adam.model_validate({"decay": 0.1}), model).param_groups
    decays = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    assert {name: decays[id(parameter)] for name, parameter in model.named_parameters()} == {
        "0.weight": 0.1, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0, "2.weight": 0.1, "2.bias": 0.0,
    }  # fmt: skip


def test_frozen_parameters_are_left_alone() -> None:
    model = a_model()
    model[0].requires_grad_(False)  # type: ignore[index]
    optimizer = optimizer_of(Adam(), model)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 4
