"""Gradient sync: how the workers of a run keep their weights equal, with the settings of each kind.

A checkpoint holds tensors, or rows of them, that can be loaded into any number of workers.

Reading a job imports this file on machines without torch, so torch is imported inside functions that run in a worker.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, cast

from packtrain.job.job import TrainSettings
from packtrain.job.kinds import ExchangeKind
from packtrain.job.part import Fraction, Location, Positive, Steps
from packtrain.run.checkpoint import CorruptCheckpoint

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from packtrain.train.precision import Precision
    from packtrain.train.recorder import Clock
    from packtrain.train.world import World

    Tensors = dict[str, Tensor]


class DdpSettings(ExchangeKind):
    """Gradients are averaged at every step; `compress` sends them in 16 bits."""

    compress: Literal["no", "fp16", "bf16"] = "no"

    @property
    def bytes_per_weight(self) -> int:
        return 4 if self.compress == "no" else 2

    @property
    def lighter(self) -> str:
        return "train.exchange.ddp.compress=bf16" if self.compress == "no" else ""

    def build(
        self,
        model: nn.Module,
        followers: Iterable[nn.Module],  # noqa: ARG002
        world: World,
        clock: Clock,
        precision: Precision,  # noqa: ARG002
    ) -> GradientSync:
        return NoSync(model, world, clock) if world.num_ranks == 1 else DdpSync(self, model, world, clock)


class LocalSyncSettings(ExchangeKind):
    """Every worker steps by itself; at a fixed interval their changes are averaged and applied with momentum."""

    syncs_every_step = False
    copies = 2  # the common weights, and their momentum

    every: Steps
    rate: Positive = 0.7
    momentum: Fraction = 0.9

    @property
    def interval(self) -> int:
        return int(self.every.value)

    def faults_in(self, train: TrainSettings) -> Iterator[tuple[Location, str]]:
        if train.precision == "fp16":
            yield ("precision",), "fp16 scales the loss of all workers together, not of local steps; use bf16 or fp32"

    def build(
        self,
        model: nn.Module,
        followers: Iterable[nn.Module],  # noqa: ARG002
        world: World,
        clock: Clock,
        precision: Precision,  # noqa: ARG002
    ) -> GradientSync:
        return LocalSync(self, model, world, clock)


class FsdpSettings(ExchangeKind):
    """Weights, gradients and the optimizer's state are sharded among the workers.

    Over micro-batches, whole gradients are summed and sent once, or shards are summed and sent with each of them.
    """

    shards_model = True
    traffic = 3  # weights are gathered for the forward and for the backward pass, gradients are scattered

    accumulate: Literal["whole", "sharded"] = "whole"

    @property
    def whole_gradients(self) -> bool:
        return self.accumulate == "whole"

    def build(
        self, model: nn.Module, followers: Iterable[nn.Module], world: World, clock: Clock, precision: Precision
    ) -> GradientSync:
        if world.num_ranks == 1:
            return NoSync(model, world, clock)
        return FsdpSync(self, model, followers, world, clock, precision.dtype)


class GradientSync(ABC):
    """`module` computes the losses; the weights of `model` are those that learn."""

    module: nn.Module
    span_after_backward = "backward"
    """The name of the time between the last gradient and the end of the backward pass."""
    saves_parts = False
    """True if every rank writes its part of a checkpoint; otherwise the first one writes everything."""

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

    def own_states(self, tensors: Mapping[str, Tensor]) -> list[Tensors]:
        """Return the optimizer's state: one if all ranks have the same, else one for each rank. Collective."""
        return [dict(tensors)]

    def state(self) -> Tensors:
        """Return what a checkpoint must remember of this sync."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        if state:
            raise CorruptCheckpoint("the checkpoint belongs to a run with another kind of exchange")

    def plain(self, model: nn.Module) -> nn.Module:
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
        # To main memory as they arrive: the first rank's GPU has no room for the states of all ranks.
        gathered = {name: [row.cpu() for row in self._world.gather_tensor(one)] for name, one in tensors.items()}
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
    """Weights, gradients and the optimizer's state are sharded among the ranks, and gathered where needed.

    Shards are in fp32. Weights are gathered in the precision that computes, and gradients are averaged in fp32.
    Autocast finds the weights in 16 bits already: it casts and keeps none of them, but still chooses the precision of
    each operation, as it does with the other kinds of sync.
    """

    saves_parts = True

    def __init__(
        self,
        settings: FsdpSettings,
        model: nn.Module,
        followers: Iterable[nn.Module],
        world: World,
        clock: Clock,
        dtype: torch.dtype,
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        super().__init__(model, world, clock)
        self._accumulates_shards = not settings.whole_gradients
        self._weight_bytes = dtype.itemsize
        self._outline = _outline(model, dtype)
        mesh = init_device_mesh(world.device.type, (world.num_ranks,))
        for one in (model, *followers):
            _shard(one, mesh, dtype)

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        sharded = cast("FSDPModule", self._model)
        sharded.set_requires_gradient_sync(last or self._accumulates_shards)
        sharded.set_is_last_backward(last)
        return nullcontext()

    def sent_bytes(self) -> float:
        # Gradients are reduced to shards once, which is half of averaging them, and weights are gathered twice.
        return (0.5 + self._weight_bytes / 4) * super().sent_bytes()

    def plain(self, model: nn.Module) -> nn.Module:
        """Return a whole copy, gathered tensor by tensor in the precision that computes.

        With the sharded model, every forward pass would be a collective, and a search makes as many as its outputs are
        long: all ranks would take as long as the slowest, and gather all weights for each token.
        """
        import torch
        from torch import nn
        from torch.distributed.tensor import DTensor

        filled: dict[int, Any] = {}
        with torch.no_grad():
            for empty, parameter in zip(self._outline.parameters(), model.parameters(), strict=True):
                own = parameter.detach().to(empty.dtype)
                whole = own.full_tensor() if isinstance(own, DTensor) else own
                if whole.stride() != empty.stride():  # channels last, which cannot be sharded
                    whole = torch.empty_like(empty, device=whole.device).copy_(whole)
                filled[id(empty)] = nn.Parameter(whole, requires_grad=False)
            for old, buffer in zip(self._outline.buffers(), model.buffers(), strict=True):
                filled[id(old)] = buffer.clone()
        return copy.deepcopy(self._outline, filled)


def _shard(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shard a model in place; the layers of a list are used one after the other, and gathered one by one."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for parameter in model.parameters():  # channels last cannot be sharded
        parameter.data = parameter.data.contiguous()
    # Inputs are left to autocast, which keeps sums over layers in fp32.
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    norms = _norms(model)
    if norms and dtype != torch.float32:
        # Gathered together, once per step: all of them are smaller than a matrix.
        in_fp32 = MixedPrecisionPolicy(cast_forward_inputs=False)
        fully_shard(norms, mesh=mesh, mp_policy=in_fp32, reshard_after_forward=False)
    for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for layer in layers:
            if layer not in norms:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def _norms(model: nn.Module) -> list[nn.Module]:
    """Return the norm layers, whose weights stay in fp32.

    Batch norms need weights of the type of their statistics, which 16 bits would stop from moving; other norms compute
    in fp32 under autocast and need weights of that type. And weights close to 1 lose most in 16 bits.
    """
    from torch import nn

    kinds = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
    return [one for one in model.modules() if isinstance(one, kinds) and any(True for _ in one.parameters())]


def _outline(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of a model with weights that have no memory, of the types that it computes with."""
    import torch
    from torch import nn

    in_fp32 = {id(parameter) for norm in _norms(model) for parameter in norm.parameters()}
    empty: dict[int, Any] = {}
    for one in model.parameters():
        kind = one.dtype if id(one) in in_fp32 or not one.is_floating_point() else dtype
        empty[id(one)] = nn.Parameter(torch.empty_like(one, dtype=kind, device="meta"), requires_grad=False)
    return copy.deepcopy(model, empty)


def _buffers(models: Iterable[nn.Module]) -> list[Tensor]:
    return [buffer for model in models for buffer in model.buffers()]
