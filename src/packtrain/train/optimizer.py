"""Optimisers from their settings, and their state as plain named tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from packtrain.checkpoint import CorruptCheckpoint
from packtrain.job import Adam, Optimizer


def adam(settings: Adam, model: nn.Module) -> torch.optim.Optimizer:
    """Adam; with decay it is decoupled (AdamW), and spares norms and biases."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [one for one in parameters if one.ndim > 1], "weight_decay": settings.decay},
        {"params": [one for one in parameters if one.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    # The rate is set before every step by the schedule.
    return torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.epsilon, fused=True)


OPTIMIZERS: Mapping[type[Optimizer], Callable[[Any, nn.Module], torch.optim.Optimizer]] = {Adam: adam}


def optimizer_of(settings: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS[type(settings)](settings, model)


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The state by `parameter/entry`. Every entry of the optimisers above is a tensor."""
    return {
        f"{name}/{entry}": value
        for name, parameter in model.named_parameters()
        for entry, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    unknown = {key.rpartition("/")[0] for key in tensors} ^ parameters.keys()
    if tensors and unknown:
        raise CorruptCheckpoint(f"the optimiser's state does not fit the model: {sorted(unknown)[0]}")
    for key, value in tensors.items():
        name, _, entry = key.rpartition("/")
        parameter = parameters[name]
        # Counters stay where the optimiser keeps them; what is shaped like the weights goes beside them.
        placed = value.clone() if value.ndim == 0 else value.to(parameter.device, copy=True)
        optimizer.state[parameter][entry] = placed
