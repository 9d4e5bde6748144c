from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from packtrain.job.kinds import OPTIMIZERS, OptimizerKind, kind_class
from packtrain.run.checkpoint import CorruptCheckpoint
from packtrain.train.optimizer import (
    AdamSettings,
    AdamWSettings,
    LambSettings,
    LarsSettings,
    SgdSettings,
    load_optimizer,
    optimizer_tensors,
)
from packtrain.train.shard_optimizers import ShardedSgd

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


def layers_of(model: nn.Module) -> list[tuple[nn.Parameter, Tensor, bool]]:
    """Return each parameter, its gradient as doubles, and if it is a layer: norms and biases are not."""
    return [(one, cast(Tensor, one.grad).double(), one.ndim > 1) for one in model.parameters()]


def ratio_of(weights: Tensor, other: float) -> float:
    norm = weights.square().sum().sqrt().item()
    return norm / other if norm and other else 1.0


def lars_by_hand(model: nn.Module, memory: dict[int, Any], rate: float, decay: float, number: int) -> None:
    for at, (parameter, gradient, is_layer) in enumerate(layers_of(model)):
        weights, change = parameter.detach().double(), gradient
        if is_layer:
            change = gradient + decay * weights
            norms = gradient.norm().item() + decay * weights.norm().item()
            change *= 0.02 * ratio_of(weights, norms) if weights.norm() and gradient.norm() else 1.0
        memory[at] = 0.8 * memory.get(at, 0.0) + change
        parameter.data = (weights - rate * memory[at]).float()


def lamb_by_hand(model: nn.Module, memory: dict[int, Any], rate: float, decay: float, number: int) -> None:
    for at, (parameter, gradient, is_layer) in enumerate(layers_of(model)):
        weights, (mean, square) = parameter.detach().double(), memory.get(at, (0.0, 0.0))
        mean, square = 0.8 * mean + 0.2 * gradient, 0.9 * square + 0.1 * gradient**2
        memory[at] = mean, square
        update = (mean / (1 - 0.8**number)) / ((square / (1 - 0.9**number)).sqrt() + 1e-5)
        if is_layer:
            update = update + decay * weights
            update *= ratio_of(weights, update.norm().item())
        parameter.data = (weights - rate * update).float()


@pytest.mark.parametrize(
    ("settings", "by_hand"),
    [
        (LarsSettings(momentum=0.8, trust=0.02, decay=0.1), lars_by_hand),
        (LambSettings(betas=(0.8, 0.9), epsilon=1e-5, decay=0.1), lamb_by_hand),
    ],
    ids=["lars", "lamb"],
)
def test_layerwise_optimizers_follow_their_formulas(settings: OptimizerKind, by_hand: Callable[..., None]) -> None:
    """One layer is zero at first: its norm says nothing."""
    model, reference = a_model(), a_model()
    for one in (model, reference):
        nn.init.zeros_(one[2].weight)  # type: ignore[index]
    optimizer, memory = settings.build(model), dict[int, Any]()
    for step in range(6):
        rate = 0.1 / (step + 1)
        for one in (model, reference):
            torch.manual_seed(step)
            one.zero_grad()
            (one(torch.randn(5, 4)) - 1).square().sum().backward()
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        by_hand(reference, memory, rate, 0.1, step + 1)
        for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)], ids=["plain", "momentum", "nesterov"]
)
def test_sgd_for_shards_equals_that_of_torch_and_has_its_state(momentum: float, nesterov: bool) -> None:
    model, reference = a_model(), a_model()
    settings = SgdSettings(momentum=momentum, nesterov=nesterov, decay=0.1)
    wanted = settings.build(reference)
    found = ShardedSgd([{**group, "params": own} for group, own in groups_like(wanted, model)], momentum, nesterov)
    train(model, found, range(5))
    train(reference, wanted, range(5))
    torch.testing.assert_close(dict(model.named_parameters()), dict(reference.named_parameters()))
    torch.testing.assert_close(optimizer_tensors(found, model), optimizer_tensors(wanted, reference))


def groups_like(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[tuple[dict[str, Any], list[nn.Parameter]]]:
    """Return the decay of each group of an optimizer, and the parameters of this model with that decay."""
    layers = [one for one in model.parameters() if one.ndim > 1]
    others = [one for one in model.parameters() if one.ndim <= 1]
    found = [({"weight_decay": group["weight_decay"]}, group["params"]) for group in optimizer.param_groups]
    return [(options, layers if params[0].ndim > 1 else others) for options, params in found]


@pytest.mark.parametrize("settings", [LarsSettings(), LambSettings()])
def test_layerwise_optimizers_change_no_weight_where_the_device_found_an_infinite_gradient(
    settings: OptimizerKind,
) -> None:
    model, told = a_model(), a_model()
    optimizer, one_told = settings.build(model), settings.build(told)
    one_told.found_inf = torch.zeros(())
    train(model, optimizer, range(3))
    train(told, one_told, range(3))
    assert all(torch.equal(found, told.state_dict()[name]) for name, found in model.state_dict().items())
    one_told.found_inf += 1
    for parameter in told.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    one_told.step()
    assert all(torch.equal(found, told.state_dict()[name]) for name, found in model.state_dict().items())
    assert all(tensor.isfinite().all() for tensor in optimizer_tensors(one_told, told).values())


@pytest.mark.parametrize("settings", [LarsSettings(), LambSettings()])
def test_layerwise_steps_read_nothing_from_the_device(settings: OptimizerKind) -> None:
    """A device without memory has nothing to read: whoever asks for a number there fails."""
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)).to("meta")
    optimizer = settings.build(model)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert {tensor.device.type for tensor in optimizer_tensors(optimizer, model).values()} == {"meta"}


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
