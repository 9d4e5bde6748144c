"""The exchange `fsdp`: weights, gradients and the optimizer's state are sharded among the ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, cast

from packtrain.job.kinds import ExchangeKind
from packtrain.train.gradient_sync import GradientSync, NoSync, SyncedModel

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from packtrain.train.world import World


class FsdpSettings(ExchangeKind):
    """Weights, gradients and the optimizer's state are sharded among the workers.

    Over micro-batches, whole gradients are summed and sent once, or shards are summed and sent with each of them.
    """

    shards_model = True
    harmless = frozenset({"accumulate"})
    traffic = 3  # weights are gathered for the forward and for the backward pass, gradients are scattered

    accumulate: Literal["whole", "sharded"] = "whole"

    @property
    def whole_gradients(self) -> bool:
        return self.accumulate == "whole"

    def build(self, synced: SyncedModel) -> GradientSync:
        return NoSync(synced) if synced.world.num_ranks == 1 else FsdpSync(self, synced)


class FsdpSync(GradientSync):
    """torch's `fully_shard`: weights are gathered layer by layer where they are needed.

    Only the first rank's model has weights before; those of the others have no memory. Shards are in fp32. Weights are
    gathered in the precision that computes, and gradients are averaged in fp32. Autocast finds the weights in 16 bits
    already: it casts and keeps none of them, but still chooses the precision of each operation, as it does with the
    other kinds of sync.
    """

    saves_parts = True

    def __init__(self, settings: FsdpSettings, synced: SyncedModel) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh

        world, dtype = synced.world, synced.dtype
        models = (synced.model, *synced.followers)
        for model in models:
            # Give all ranks the first one's buffers, on their devices.
            for module in model.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    module._buffers[name] = (
                        torch.empty_like(buffer, device=world.device) if buffer.is_meta else buffer.to(world.device)
                    )
            world.broadcast_all(list(model.buffers()))
        super().__init__(synced)
        self._accumulates_shards = not settings.whole_gradients
        self._weight_bytes = dtype.itemsize
        self._outline = _outline(synced.model, dtype)
        mesh = init_device_mesh(world.device.type, (world.num_ranks,))
        for model in models:
            _shard(model, world, mesh, dtype)

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
                weight = parameter.detach().to(empty.dtype)
                gathered = weight.full_tensor() if isinstance(weight, DTensor) else weight
                if gathered.stride() != empty.stride():  # channels last, which cannot be sharded
                    gathered = torch.empty_like(empty, device=gathered.device).copy_(gathered)
                filled[id(empty)] = nn.Parameter(gathered, requires_grad=False)
            for outline_buffer, buffer in zip(self._outline.buffers(), model.buffers(), strict=True):
                filled[id(outline_buffer)] = buffer.clone()
        return copy.deepcopy(self._outline, filled)


def _shard(model: nn.Module, world: World, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shard a model in place; the layers of a list are used one after the other, and gathered one by one.

    Each layer is sent and sharded before the next, so that a device never holds more than one whole.
    """
    import torch
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # Inputs are left to autocast, which keeps sums over layers in fp32.
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    norms = _norms(model)
    if norms and dtype != torch.float32:
        _send_weights(norms, world)
        # Gathered together, once per step: all of them are smaller than a matrix.
        in_fp32 = MixedPrecisionPolicy(cast_forward_inputs=False)
        fully_shard(norms, mesh=mesh, mp_policy=in_fp32, reshard_after_forward=False)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    layers = [layer for modules in lists for layer in modules if layer not in norms]
    for module in (*layers, model):
        _send_weights([module], world)
        fully_shard(module, mesh=mesh, mp_policy=policy)


def _send_weights(modules: Iterable[nn.Module], world: World) -> None:
    """Give all ranks the first one's weights of these modules, where they are not sharded yet, on their devices."""
    import torch
    from torch import nn
    from torch.distributed.tensor import DTensor

    parameters = {parameter: None for module in modules for parameter in module.parameters()}
    unsent = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
    for parameter in unsent:
        if parameter.is_meta:
            with_memory = nn.Parameter(torch.empty_like(parameter, device=world.device), parameter.requires_grad)
            # In place: a weight may be that of several modules.
            torch.utils.swap_tensors(parameter, with_memory)
        # Channels last cannot be sharded.
        parameter.data = parameter.data.to(world.device).contiguous()
    world.broadcast_all([parameter.data for parameter in unsent])


def _norms(model: nn.Module) -> list[nn.Module]:
    """Return the norm layers, whose weights stay in fp32.

    Batch norms need weights of the type of their statistics, which 16 bits would stop from moving; other norms compute
    in fp32 under autocast and need weights of that type. And weights close to 1 lose most in 16 bits.
    """
    from torch import nn

    kinds = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
    return [
        module for module in model.modules() if isinstance(module, kinds) and any(True for _ in module.parameters())
    ]


def _outline(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of a model with weights that have no memory, of the types that it computes with."""
    import torch
    from torch import nn

    in_fp32 = {id(parameter) for norm in _norms(model) for parameter in norm.parameters()}
    empty: dict[int, Any] = {}
    for weight in model.parameters():
        weight_dtype = weight.dtype if id(weight) in in_fp32 or not weight.is_floating_point() else dtype
        empty[id(weight)] = nn.Parameter(
            torch.empty_like(weight, dtype=weight_dtype, device="meta"), requires_grad=False
        )
    return copy.deepcopy(model, empty)
