"""Optimizers: the settings of each kind, and their state as plain named tensors.

Reading a job imports this file on machines without torch, so torch is imported inside functions that run in a worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from packtrain.job.kinds import OptimizerKind
from packtrain.job.part import Boolean, Fraction, Location, NotNegative, Positive, is_true, rules_in_schema
from packtrain.run.checkpoint import CorruptCheckpoint

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from packtrain.train.tensors import StoredTensor

_COUNTER = "step"  # the entry of an optimizer's state that is a number and not shaped like the weight

# The learning rate is 0 here: the schedule sets it before every step.


class _MomentumKind(OptimizerKind):
    """One tensor of state for each weight, with a momentum."""

    harmless = frozenset({"momentum"})

    momentum: Fraction = 0.9

    @property
    def state_tensors(self) -> int:
        return 1 if self.momentum else 0


class SgdSettings(_MomentumKind):
    harmless = frozenset({"nesterov"})
    model_config = rules_in_schema(
        {"if": is_true("nesterov"), "then": {"properties": {"momentum": {"exclusiveMinimum": 0}}}}
    )

    nesterov: Boolean = False

    def faults(self) -> Iterator[tuple[Location, str]]:
        if self.nesterov and not self.momentum:
            yield ("nesterov",), "requires a momentum"

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        import torch
        from torch.distributed.tensor import DTensor

        from packtrain.train.shard_optimizers import ShardedSgd

        groups = _groups(model, self.decay)
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            return ShardedSgd(groups, self.momentum, self.nesterov)  # torch has no fused SGD for these
        return torch.optim.SGD(groups, lr=0.0, momentum=self.momentum, nesterov=self.nesterov, fused=True)


class LarsSettings(_MomentumKind):
    """SGD for large batches of images: each layer steps in proportion to the norm of its weights."""

    harmless = frozenset({"trust"})

    trust: Positive = 0.001

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        from packtrain.train.shard_optimizers import Lars

        return Lars(_groups(model, self.decay, scaled=True), self.momentum, self.trust)


class _MeansKind(OptimizerKind):
    """Running means of gradients and of their squares: two tensors of state for each weight."""

    harmless = frozenset({"betas", "epsilon"})

    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    epsilon: Positive = 1e-8

    @property
    def state_tensors(self) -> int:
        return 2


class AdamSettings(_MeansKind):
    """Adam, which adds the decay to the gradient."""

    betas: tuple[Fraction, Fraction] = (0.9, 0.997)
    epsilon: Positive = 1e-9

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        import torch

        return torch.optim.Adam(_groups(model, self.decay), lr=0.0, betas=self.betas, eps=self.epsilon, fused=True)


class AdamWSettings(_MeansKind):
    """AdamW, which subtracts the decay from the weights."""

    decay: NotNegative = 0.01

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        import torch

        return torch.optim.AdamW(_groups(model, self.decay), lr=0.0, betas=self.betas, eps=self.epsilon, fused=True)


class LambSettings(_MeansKind):
    """AdamW for large batches: each layer steps in proportion to the norm of its weights."""

    epsilon: Positive = 1e-6
    decay: NotNegative = 0.01

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        from packtrain.train.shard_optimizers import Lamb

        return Lamb(_groups(model, self.decay, scaled=True), self.betas, self.epsilon)


def _groups(model: nn.Module, decay: float, scaled: bool = False) -> list[dict[str, Any]]:
    """Return the parameters that decay, and are `scaled` by their norms, and those that do not: norms and biases."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not decay and not scaled:
        return [{"params": parameters, "weight_decay": 0.0}]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1], "weight_decay": decay},
        {"params": [parameter for parameter in parameters if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    if scaled:
        groups = [{**group, "scaled": number == 0} for number, group in enumerate(groups)]
    return [group for group in groups if group["params"]]


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the state by `parameter/entry`. Every entry of the optimizers above is a tensor, or not there yet."""
    return {
        f"{name}/{entry}": value
        for name, parameter in model.named_parameters()
        for entry, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }


def load_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor | StoredTensor]
) -> None:
    from torch.distributed.tensor import DTensor

    from packtrain.train.tensors import placed

    refuse_unknown(model, tensors)
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for key, value in tensors.items():
        name, _, entry = key.rpartition("/")
        parameter = parameters[name]
        # Everything is on the device of the weights: a fused optimizer expects its counter there too.
        beside = parameter.to_local() if entry == _COUNTER and isinstance(parameter, DTensor) else parameter
        optimizer.state[parameter][entry] = placed(value, beside)


def refuse_unknown(model: nn.Module, names: Iterable[str]) -> None:
    """Refuse state of weights that do not learn. A weight that never had a gradient may have none."""
    learned = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name in sorted({name.rpartition("/")[0] for name in names} - learned):
        raise CorruptCheckpoint(f"the optimizer's state does not fit the model: {name}")
