"""Optimizers that torch does not have: LARS and LAMB for large batches, and SGD for sharded weights.

LARS and LAMB scale the update of each layer by the norm of its weights.

Each tensor with two or more dimensions is a layer. Norms and biases are updated as by plain SGD and Adam: many start at
zero, and a ratio of their norms would hold them back.

Nothing here waits for a GPU: counters and norms stay on the device. A sharded weight is updated shard by shard, and the
norms of all weights of a group are summed over the ranks by one collective.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

Groups = Iterable[dict[str, Any]]


class _ShardOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer whose groups have the parameters (`params`), their decay, and whether updates are `scaled`.

    As torch's fused optimizers, it can be told on the device that gradients are not finite: where `found_inf` is 1, no
    weight changes.
    """

    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None

    def __init__(self, groups: Groups, **defaults: float) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "scaled": True, **defaults})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            learning = [parameter for parameter in group["params"] if parameter.grad is not None]
            if learning:
                self._update(learning, group)
        return loss

    @abstractmethod
    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Update parameters of a group that have gradients."""

    def _gradients(self, parameters: list[Tensor]) -> list[Tensor]:
        gradients = _shards([cast(Tensor, parameter.grad) for parameter in parameters])
        if self.found_inf is None:
            return gradients
        # Zeros, so that the state stays finite as well.
        return [torch.where(self.found_inf.bool(), 0.0, gradient) for gradient in gradients]

    def _move(self, weights: list[Tensor], changes: list[Tensor], rate: float) -> None:
        if self.found_inf is not None:
            changes = list(torch._foreach_mul(changes, 1 - self.found_inf))
        torch._foreach_add_(weights, changes, alpha=-rate)

    def _with_momentum(self, parameters: list[Tensor], changes: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        if not group["momentum"]:
            return changes
        velocities = _shards(self._states(parameters, "momentum_buffer"))
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, changes)
        if not group["nesterov"]:
            return velocities
        return list(torch._foreach_add(changes, velocities, alpha=group["momentum"]))

    def _states(self, parameters: list[Tensor], entry: str) -> list[Tensor]:
        """Return an entry of the state of each parameter, of its shape and sharding; zeros at first."""
        for parameter in parameters:
            if entry not in self.state[parameter]:
                self.state[parameter][entry] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return [self.state[parameter][entry] for parameter in parameters]


class ShardedSgd(_ShardOptimizer):
    """torch's SGD, with the same state."""

    def __init__(self, groups: Groups, momentum: float, nesterov: bool) -> None:
        super().__init__(groups, momentum=momentum, nesterov=nesterov)

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        weights = _shards(parameters)
        changes = list(torch._foreach_add(self._gradients(parameters), weights, alpha=group["weight_decay"]))
        self._move(weights, self._with_momentum(parameters, changes, group), group["lr"])


class Lars(_ShardOptimizer):
    """SGD with momentum whose gradients are scaled by trust x |weights| / (|gradient| + decay x |weights|).

    As in torch's SGD, the rate is not part of the momentum, so that a change of the rate acts at once.
    """

    def __init__(self, groups: Groups, momentum: float, trust: float) -> None:
        super().__init__(groups, momentum=momentum, nesterov=False, trust=trust)

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        decay = group["weight_decay"]
        weights, gradients = _shards(parameters), self._gradients(parameters)
        changes = list(torch._foreach_add(gradients, weights, alpha=decay))
        if group["scaled"]:
            of_weights, of_gradients = _norms(parameters, weights, gradients)
            ratios = group["trust"] * of_weights / (of_gradients + decay * of_weights)
            torch._foreach_mul_(changes, _scales(ratios, of_weights, of_gradients))
        self._move(weights, self._with_momentum(parameters, changes, group), group["lr"])


class Lamb(_ShardOptimizer):
    """AdamW whose update, with the decay in it, is scaled by |weights| / |update|."""

    def __init__(self, groups: Groups, betas: tuple[float, float], epsilon: float) -> None:
        super().__init__(groups, beta1=betas[0], beta2=betas[1], epsilon=epsilon)

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        weights = _shards(parameters)
        updates = self._adam_updates(parameters, group)
        if group["weight_decay"]:
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        if group["scaled"]:
            of_weights, of_updates = _norms(parameters, weights, updates)
            torch._foreach_mul_(updates, _scales(of_weights / of_updates, of_weights, of_updates))
        self._move(weights, updates, group["lr"])

    def _adam_updates(self, parameters: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        first, second = group["beta1"], group["beta2"]
        gradients = self._gradients(parameters)
        means, squares = (_shards(self._states(parameters, entry)) for entry in ("exp_avg", "exp_avg_sq"))
        for parameter in parameters:
            if "step" not in self.state[parameter]:
                self.state[parameter]["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        steps = [self.state[parameter]["step"] for parameter in parameters]
        torch._foreach_add_(steps, 1.0)
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        # Both means start at zero, and these undo it. A tensor each: reading the counters would wait for the device.
        steps_made = torch.stack(steps)
        means_are, squares_are = 1 - first**steps_made, 1 - second**steps_made
        denominators = torch._foreach_div(squares, list(squares_are.unbind()))
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, group["epsilon"])
        updates = torch._foreach_div(means, list(means_are.unbind()))
        torch._foreach_div_(updates, denominators)
        return list(updates)


def _norms(parameters: list[Tensor], *lists: list[Tensor]) -> list[Tensor]:
    """Return the norms of each list of tensors as a vector; of shards those of the whole, which is one collective."""
    norms = torch.stack([torch.stack(torch._foreach_norm(tensors)) for tensors in lists])
    if isinstance(parameters[0], DTensor):
        norms.square_()
        dist.all_reduce(norms, group=parameters[0].device_mesh.get_group())
        norms.sqrt_()
    return list(norms.unbind())


def _shards(tensors: list[Tensor]) -> list[Tensor]:
    """Return this rank's part of each tensor, in the same memory."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def _scales(ratios: Tensor, *of: Tensor) -> list[Tensor]:
    """Return the ratio of each tensor, but 1 where a norm is zero: a layer of zeros could not begin to learn."""
    usable = torch.stack(of).gt(0).all(dim=0)
    return list(torch.where(usable, ratios, 1.0).unbind())
