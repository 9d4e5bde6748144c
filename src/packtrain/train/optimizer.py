"""Optimisers from their settings, and their state as plain named tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from packtrain.job.train import Adam, AdamW, Optimizer, Sgd
from packtrain.run.checkpoint import CorruptCheckpoint

# Rates are set before every step by the schedule.

_COUNTER = "step"


def sgd(settings: Sgd, model: nn.Module) -> torch.optim.Optimizer:
    groups = _groups(model, settings.decay)
    fused = not any(isinstance(parameter, DTensor) for parameter in model.parameters())  # PyTorch has none for them
    return torch.optim.SGD(groups, lr=0.0, momentum=settings.momentum, nesterov=settings.nesterov, fused=fused)


def adam(settings: Adam, model: nn.Module) -> torch.optim.Optimizer:
    groups = _groups(model, settings.decay)
    return torch.optim.Adam(groups, lr=0.0, betas=settings.betas, eps=settings.epsilon, fused=True)


def adamw(settings: AdamW, model: nn.Module) -> torch.optim.Optimizer:
    groups = _groups(model, settings.decay)
    return torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.epsilon, fused=True)


def _groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """What decays and what does not: norms and biases are spared."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not decay:
        return [{"params": parameters, "weight_decay": 0.0}]
    groups: list[dict[str, Any]] = [
        {"params": [one for one in parameters if one.ndim > 1], "weight_decay": decay},
        {"params": [one for one in parameters if one.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


OPTIMIZERS: Mapping[type[Optimizer], Callable[[Any, nn.Module], torch.optim.Optimizer]] = {
    Sgd: sgd,
    Adam: adam,
    AdamW: adamw,
}


def optimizer_of(settings: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS[type(settings)](settings, model)


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The state by `parameter/entry`. Every entry of the optimisers above is a tensor, or not there yet."""
    return {
        f"{name}/{entry}": value
        for name, parameter in model.named_parameters()
        for entry, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    refuse_unknown(model, tensors)
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for key, value in tensors.items():
        name, _, entry = key.rpartition("/")
        parameter = parameters[name]
        # Everything is beside the weights: a fused optimiser looks for its counter there too.
        beside = parameter.to_local() if entry == _COUNTER and isinstance(parameter, DTensor) else parameter
        optimizer.state[parameter][entry] = placed(value, beside)


def refuse_unknown(model: nn.Module, names: Iterable[str]) -> None:
    """A weight that never had a gradient has no state; but there is no state of a weight that does not learn."""
    learned = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name in sorted({name.rpartition("/")[0] for name in names} - learned):
        raise CorruptCheckpoint(f"the optimiser's state does not fit the model: {name}")


def placed(value: Tensor, beside: Tensor) -> Tensor:
    """A copy of a whole tensor where another one is: on its device, divided as it is, and in memory as it is.

    Fused optimisers go through the memory of a weight and of its state side by side, whatever order their numbers have.
    """
    if isinstance(beside, DTensor):
        whole = value.to(beside.device)
        return distribute_tensor(whole, beside.device_mesh, beside.placements, src_data_rank=None)
    if value.shape != beside.shape:
        return value.to(beside.device, copy=True)
    return torch.empty_like(beside, dtype=value.dtype, requires_grad=False).copy_(value)
