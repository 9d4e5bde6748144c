"""How the workers of a run keep their weights the same: one class for each kind of exchange.

A checkpoint always holds whole tensors, so that it can be loaded into any number of workers.
"""

from __future__ import annotations

import inspect
from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from packtrain.job.train import Ddp, Fsdp, LocalSteps
from packtrain.job.train import Exchange as Settings
from packtrain.run.checkpoint import CorruptCheckpoint
from packtrain.train.recorder import Clock
from packtrain.train.world import World

Tensors = dict[str, Tensor]

# PyTorch 2.13 gave the option another name and warns of the old one.
_OPTIONS = inspect.signature(DistributedDataParallel).parameters
_DO_NOT_SYNC: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers": False
}


class Exchange(ABC):
    """`module` is what losses are computed with; the weights of `model` are those that learn."""

    module: nn.Module
    span_after_backward = "backward"
    """What the time between the last gradient and the end of the backward pass was spent on."""

    def __init__(self, model: nn.Module, world: World, clock: Clock) -> None:
        self._model, self._world, self._clock = model, world, clock
        self._statistics = _buffers([model])
        self.module = model

    def before_step(self) -> None:
        """Called before the first piece of every step: gives all ranks the first one's statistics of norms."""
        if self._statistics and self._world.num_ranks > 1:
            self._clock.mark("other")
            self._world.broadcast_all(self._statistics)
            self._clock.mark("communication")

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:  # noqa: ARG002
        """Around the forward and backward pass of a piece of the batch; gradients are exchanged with the last."""
        return nullcontext()

    def share(self, cost: int, own_cost: int) -> float:  # noqa: ARG002
        """What the sum of losses is multiplied by before the backward pass."""
        return self._world.num_ranks / cost

    def is_common(self, steps: int) -> bool:  # noqa: ARG002
        """Whether the weights are the same on all ranks after so many steps."""
        return True

    def after_update(self, steps: int, last: bool) -> None:  # noqa: B027
        """Called when a rank has updated its weights; `last` when no other step follows."""

    def share_buffers(self, *models: nn.Module) -> None:
        """Gives all ranks the first one's statistics of norms, which no gradient carries."""
        self._world.broadcast_all(_buffers(models))

    # What a checkpoint needs to know.

    def whole(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """The tensors undivided, on the first rank. All of them take part."""
        return dict(tensors)

    def own_states(self, tensors: Mapping[str, Tensor]) -> list[Tensors]:
        """The optimiser's state: one where all ranks have the same, else one for each rank. All ranks take part."""
        return [self.whole(tensors)]

    def state(self) -> Tensors:
        """What this exchange has to remember."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        if state:
            raise CorruptCheckpoint("the checkpoint is of a run that exchanged gradients in another way")

    def plain(self, model: nn.Module, build: Callable[[], nn.Module]) -> nn.Module:  # noqa: ARG002
        """A model that one rank can compute with by itself. All ranks take part."""
        return model


class Alone(Exchange):
    """One worker, nothing to exchange."""


class Averaged(Exchange):
    """Gradients are averaged at every step, while they are computed."""

    span_after_backward = "communication"

    def __init__(self, settings: Ddp, model: nn.Module, _: Iterable[nn.Module], world: World, clock: Clock) -> None:
        super().__init__(model, world, clock)
        on_gpu = world.device.type == "cuda"
        device_ids = [world.device.index] if on_gpu else None
        self._parallel = DistributedDataParallel(
            model,
            device_ids=device_ids,
            gradient_as_bucket_view=True,
            find_unused_parameters=True,  # else the order of adding up would change after a process's first step
            **_DO_NOT_SYNC,  # it is done before the step, where it does not pass for computing
        )
        self.module = self._parallel
        send = {
            "no": default_hooks.allreduce_hook,
            "fp16": default_hooks.fp16_compress_hook,
            "bf16": default_hooks.bf16_compress_hook,
        }[settings.compress]

        def hook(state: None, bucket: Any) -> torch.futures.Future[Tensor]:
            clock.mark("backward")  # up to here gradients were computed; what comes after the last is exchange alone
            return send(state, bucket)  # type: ignore[arg-type]

        hook.__annotations__.clear()  # torch compares them with types that it does not let others name
        self._parallel.register_comm_hook(None, hook)

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else self._parallel.no_sync()


class Local(Exchange):
    """Every rank steps by itself; every so often the mean of their changes is applied with Nesterov's momentum.

    Between these meetings ranks have different weights: nothing is measured, saved or stopped there.
    """

    def __init__(
        self, settings: LocalSteps, model: nn.Module, _: Iterable[nn.Module], world: World, clock: Clock
    ) -> None:
        super().__init__(model, world, clock)
        self._settings = settings
        self._parameters: list[Tensor] = [one for one in model.parameters() if one.requires_grad]
        self._common = [parameter.detach().clone() for parameter in self._parameters]
        self._momentum = [torch.zeros_like(parameter) for parameter in self._common]

    def before_step(self) -> None:
        """Ranks have statistics of their own until they meet."""

    def share(self, cost: int, own_cost: int) -> float:  # noqa: ARG002
        return 1 / max(1, own_cost)

    def is_common(self, steps: int) -> bool:
        return steps % int(self._settings.every.value) == 0

    def after_update(self, steps: int, last: bool) -> None:
        if last or self.is_common(steps):
            self._clock.mark("optimizer")
            self._meet()
            self._clock.mark("communication")

    @torch.no_grad()
    def _meet(self) -> None:
        changes = torch._foreach_sub(self._common, self._parameters)  # downhill, as a gradient is taken off
        self._world.average_all(changes)
        torch._foreach_mul_(self._momentum, self._settings.momentum)
        torch._foreach_add_(self._momentum, changes)
        torch._foreach_add_(changes, self._momentum, alpha=self._settings.momentum)
        torch._foreach_add_(self._common, changes, alpha=-self._settings.rate)
        torch._foreach_copy_(self._parameters, self._common)
        self._world.average_all([one for one in self._statistics if one.is_floating_point()])

    def own_states(self, tensors: Mapping[str, Tensor]) -> list[Tensors]:
        gathered = {name: self._world.gather_tensor(tensor) for name, tensor in tensors.items()}
        ranks = self._world.num_ranks if self._world.is_first else 0
        return [{name: rows[rank] for name, rows in gathered.items()} for rank in range(ranks)]

    def state(self) -> Tensors:
        names = [name for name, parameter in self._model.named_parameters() if parameter.requires_grad]
        return dict(zip(names, self._momentum, strict=True))

    def restore(self, state: Mapping[str, Tensor]) -> None:
        if state.keys() != self.state().keys():
            raise CorruptCheckpoint("the checkpoint is of a run that exchanged gradients in another way")
        for name, momentum in self.state().items():
            momentum.copy_(state[name])
        torch._foreach_copy_(self._common, [parameter.detach() for parameter in self._parameters])


class Divided(Exchange):
    """Weights, gradients and the optimiser's state are divided among the ranks, and brought together where needed."""

    def __init__(self, _: Fsdp, model: nn.Module, followers: Iterable[nn.Module], world: World, clock: Clock) -> None:
        super().__init__(model, world, clock)
        mesh = init_device_mesh(world.device.type, (world.num_ranks,))
        for one in (model, *followers):
            for parameter in one.parameters():  # channels last, which cannot be divided
                parameter.data = parameter.data.contiguous()
            # Layers that stand in a list are used one after the other: each is whole only while it is used.
            for layers in [module for module in one.modules() if isinstance(module, nn.ModuleList)]:
                for layer in layers:
                    fully_shard(layer, mesh=mesh)
            fully_shard(one, mesh=mesh)

    def whole(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """One after the other, and kept in the first rank's main memory: no worker has room for all of them."""
        return {name: tensor.cpu() for name, tensor in _undivided(tensors) if self._world.is_first}

    def plain(self, model: nn.Module, build: Callable[[], nn.Module]) -> nn.Module:
        """A whole copy for as long as it is used: to measure takes a fraction of the memory that training does."""
        whole = build().to(self._world.device)
        own = whole.state_dict()
        for name, tensor in _undivided(model.state_dict()):
            own[name].copy_(tensor)
        return whole


def _undivided(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """All ranks take part."""
    for name, tensor in tensors.items():
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _buffers(models: Iterable[nn.Module]) -> list[Tensor]:
    return [buffer for model in models for buffer in model.buffers()]


EXCHANGES: Mapping[type[Settings], Callable[[Any, nn.Module, Iterable[nn.Module], World, Clock], Exchange]] = {
    Ddp: Averaged,
    LocalSteps: Local,
    Fsdp: Divided,
}


def exchange_of(
    settings: Settings, model: nn.Module, followers: Iterable[nn.Module], world: World, clock: Clock
) -> Exchange:
    """The exchange of a run; `followers` are models whose weights follow those that learn."""
    if world.num_ranks == 1 and not isinstance(settings, LocalSteps):
        return Alone(model, world, clock)
    return EXCHANGES[type(settings)](settings, model, followers, world, clock)
