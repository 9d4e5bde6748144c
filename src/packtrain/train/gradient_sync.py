"""Gradient sync: how the workers of a run keep their weights equal, with the settings of each kind.

A checkpoint always holds whole tensors, so that it can be loaded into any number of workers.

Reading a job imports this file on machines without torch, so torch is imported inside functions that run in a worker.
"""

from __future__ import annotations

import inspect
from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

from packtrain.job.job import TrainSettings
from packtrain.job.kinds import ExchangeKind
from packtrain.job.part import Fraction, Location, Positive, Steps
from packtrain.run.checkpoint import CorruptCheckpoint

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from packtrain.train.recorder import Clock
    from packtrain.train.world import World

    Tensors = dict[str, Tensor]


class DdpSettings(ExchangeKind):
    """Gradients are averaged at every step; `compress` sends them in 16 bits."""

    compress: Literal["no", "fp16", "bf16"] = "no"

    def build(self, model: nn.Module, followers: Iterable[nn.Module], world: World, clock: Clock) -> GradientSync:  # noqa: ARG002
        return NoSync(model, world, clock) if world.num_ranks == 1 else DdpSync(self, model, world, clock)


class LocalSyncSettings(ExchangeKind):
    """Every worker steps by itself; at a fixed interval their changes are averaged and applied with momentum."""

    syncs_every_step = False

    every: Steps
    rate: Positive = 0.7
    momentum: Fraction = 0.9

    def faults_in(self, train: TrainSettings) -> Iterator[tuple[Location, str]]:
        if train.precision == "fp16":
            yield ("precision",), "fp16 scales the loss of all workers together, not of local steps; use bf16 or fp32"

    def build(self, model: nn.Module, followers: Iterable[nn.Module], world: World, clock: Clock) -> GradientSync:  # noqa: ARG002
        return LocalSync(self, model, world, clock)


class FsdpSettings(ExchangeKind):
    """Weights, gradients and the optimizer's state are sharded among the workers."""

    shards_model = True

    def build(self, model: nn.Module, followers: Iterable[nn.Module], world: World, clock: Clock) -> GradientSync:
        return NoSync(model, world, clock) if world.num_ranks == 1 else FsdpSync(model, followers, world, clock)


class GradientSync(ABC):
    """`module` computes the losses; the weights of `model` are those that learn."""

    module: nn.Module
    span_after_backward = "backward"
    """The name of the time between the last gradient and the end of the backward pass."""

    def __init__(self, model: nn.Module, world: World, clock: Clock) -> None:
        self._model, self._world, self._clock = model, world, clock
        self._statistics = _buffers([model])
        self.module = model

    def before_step(self) -> None:
        """Give all ranks the statistics of norms of the first one. Called before the first micro-batch of a step."""
        if self._statistics and self._world.num_ranks > 1:
            self._clock.mark("other")
            self._world.broadcast_all(self._statistics)
            self._clock.mark("communication")

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:  # noqa: ARG002
        """Wrap the forward and backward pass of a micro-batch; gradients are averaged with the last one."""
        return nullcontext()

    def share(self, cost: int, own_cost: int) -> float:  # noqa: ARG002
        """Return the factor on the sum of losses before the backward pass."""
        return self._world.num_ranks / cost

    def is_common(self, steps: int) -> bool:  # noqa: ARG002
        """True if all ranks have the same weights after that many steps."""
        return True

    def steps_since_common(self, step: int) -> int:  # noqa: ARG002
        """Return how many steps a rank made, with this one, since all ranks had the same weights."""
        return 1

    def after_update(self, steps: int, last: bool) -> None:  # noqa: B027
        """Called when a rank has updated its weights; `last` when no other step follows."""

    @property
    def message_bytes(self) -> int:
        """Bytes of what the ranks average in one sync, as it is sent."""
        return sum(one.numel() * one.element_size() for one in self._model.parameters() if one.requires_grad)

    def sent_bytes(self) -> float:
        """Return how many bytes each rank sends for gradients, or for weights, in one step on average."""
        return self._world.ring_bytes(self.message_bytes)

    def share_buffers(self, *models: nn.Module) -> None:
        """Give all ranks the statistics of norms of the first one, which no gradient carries."""
        self._world.broadcast_all(_buffers(models))

    # For checkpoints.

    def whole(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """Return the unsharded tensors, on the first rank. Collective."""
        return dict(tensors)

    def own_states(self, tensors: Mapping[str, Tensor]) -> list[Tensors]:
        """Return the optimizer's state: one if all ranks have the same, else one for each rank. Collective."""
        return [self.whole(tensors)]

    def state(self) -> Tensors:
        """Return what a checkpoint must remember of this sync."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        if state:
            raise CorruptCheckpoint("the checkpoint belongs to a run with another kind of exchange")

    def plain(self, model: nn.Module, build: Callable[[], nn.Module]) -> nn.Module:  # noqa: ARG002
        """Return a model that one rank can compute with by itself. Collective."""
        return model


class NoSync(GradientSync):
    """A single worker: nothing to average."""


class DdpSync(GradientSync):
    """Gradients are averaged at every step, while they are computed."""

    span_after_backward = "communication"

    def __init__(self, settings: DdpSettings, model: nn.Module, world: World, clock: Clock) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        from torch.nn.parallel import DistributedDataParallel

        super().__init__(model, world, clock)
        # PyTorch 2.13 gave the option another name and warns of the old one.
        options = inspect.signature(DistributedDataParallel).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers"
        do_not_sync: dict[str, Any] = {name: False}
        on_gpu = world.device.type == "cuda"
        device_ids = [world.device.index] if on_gpu else None
        self._parallel = DistributedDataParallel(
            model,
            device_ids=device_ids,
            gradient_as_bucket_view=True,
            find_unused_parameters=True,  # else the order of summation would change after a process's first step
            **do_not_sync,  # `before_step` does it, where it is not counted as computing
        )
        self.module = self._parallel
        send = {
            "no": default_hooks.allreduce_hook,
            "fp16": default_hooks.fp16_compress_hook,
            "bf16": default_hooks.bf16_compress_hook,
        }[settings.compress]

        def hook(state: None, bucket: Any) -> torch.futures.Future[Tensor]:
            clock.mark("backward")  # gradients were computed until here; after the last one there is only communication
            return send(state, bucket)  # type: ignore[arg-type]

        self._compresses = settings.compress != "no"
        hook.__annotations__.clear()  # torch compares them with types that it does not export
        self._parallel.register_comm_hook(None, hook)

    @property
    def message_bytes(self) -> int:
        return super().message_bytes // 2 if self._compresses else super().message_bytes  # 16 of 32 bits

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else self._parallel.no_sync()


class LocalSync(GradientSync):
    """Every rank steps by itself; at intervals the mean of their changes is applied with Nesterov's momentum.

    Between these syncs ranks have different weights: nothing is evaluated, saved or stopped there.
    """

    def __init__(self, settings: LocalSyncSettings, model: nn.Module, world: World, clock: Clock) -> None:
        import torch

        super().__init__(model, world, clock)
        self._settings = settings
        self._parameters: list[Tensor] = [one for one in model.parameters() if one.requires_grad]
        # The weights after the last sync, from which every rank measures its own change.
        self._common = [parameter.detach().clone() for parameter in self._parameters]
        self._momentum = [torch.zeros_like(parameter) for parameter in self._common]

    def before_step(self) -> None:
        """Nothing: ranks keep their own statistics until the next sync."""

    def sent_bytes(self) -> float:
        return super().sent_bytes() / self._settings.every.value

    def share(self, cost: int, own_cost: int) -> float:  # noqa: ARG002
        return 1 / max(1, own_cost)

    def is_common(self, steps: int) -> bool:
        return steps % int(self._settings.every.value) == 0

    def steps_since_common(self, step: int) -> int:
        return step % int(self._settings.every.value) + 1

    def after_update(self, steps: int, last: bool) -> None:
        if last or self.is_common(steps):
            self._clock.mark("optimizer")
            self._sync()
            self._clock.mark("communication")

    def _sync(self) -> None:
        import torch

        with torch.no_grad():
            # DiLoCo's outer step: SGD with Nesterov momentum, whose gradient is the mean of the ranks' changes.
            changes = torch._foreach_sub(self._common, self._parameters)  # subtracted, as a gradient would be
            self._world.average_all(changes)
            torch._foreach_mul_(self._momentum, self._settings.momentum)
            torch._foreach_add_(self._momentum, changes)
            torch._foreach_add_(changes, self._momentum, alpha=self._settings.momentum)
            torch._foreach_add_(self._common, changes, alpha=-self._settings.rate)
            torch._foreach_copy_(self._parameters, self._common)
            # Every rank kept its own norm statistics. Integers are only counters of batches, which have no mean.
            self._world.average_all([one for one in self._statistics if one.is_floating_point()])

    def own_states(self, tensors: Mapping[str, Tensor]) -> list[Tensors]:
        gathered = {name: self._world.gather_tensor(tensor) for name, tensor in tensors.items()}
        ranks = self._world.num_ranks if self._world.is_first else 0
        return [{name: rows[rank] for name, rows in gathered.items()} for rank in range(ranks)]

    def state(self) -> Tensors:
        names = [name for name, parameter in self._model.named_parameters() if parameter.requires_grad]
        return dict(zip(names, self._momentum, strict=True))

    def restore(self, state: Mapping[str, Tensor]) -> None:
        import torch

        if state.keys() != self.state().keys():
            raise CorruptCheckpoint("the checkpoint belongs to a run with another kind of exchange")
        for name, momentum in self.state().items():
            momentum.copy_(state[name])
        torch._foreach_copy_(self._common, [parameter.detach() for parameter in self._parameters])


class FsdpSync(GradientSync):
    """Weights, gradients and the optimizer's state are sharded among the ranks, and gathered where needed."""

    def __init__(self, model: nn.Module, followers: Iterable[nn.Module], world: World, clock: Clock) -> None:
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        super().__init__(model, world, clock)
        mesh = init_device_mesh(world.device.type, (world.num_ranks,))
        for one in (model, *followers):
            for parameter in one.parameters():  # channels last cannot be sharded
                parameter.data = parameter.data.contiguous()
            # The layers of a list are used one after the other: each is gathered only while it is used.
            for layers in [module for module in one.modules() if isinstance(module, nn.ModuleList)]:
                for layer in layers:
                    fully_shard(layer, mesh=mesh)
            fully_shard(one, mesh=mesh)

    def sent_bytes(self) -> float:
        return 1.5 * super().sent_bytes()  # weights are gathered twice, and gradients reduced to shards once

    def whole(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """Gather tensor by tensor into the first rank's main memory: no GPU has room for all of them."""
        return {name: tensor.cpu() for name, tensor in _unsharded(tensors) if self._world.is_first}

    def plain(self, model: nn.Module, build: Callable[[], nn.Module]) -> nn.Module:
        """Return a whole copy; evaluating takes a fraction of the memory that training does."""
        whole = build().to(self._world.device)
        own = whole.state_dict()
        for name, tensor in _unsharded(model.state_dict()):
            own[name].copy_(tensor)
        return whole


def _unsharded(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors one by one. Collective."""
    from torch.distributed.tensor import DTensor

    for name, tensor in tensors.items():
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _buffers(models: Iterable[nn.Module]) -> list[Tensor]:
    return [buffer for model in models for buffer in model.buffers()]
