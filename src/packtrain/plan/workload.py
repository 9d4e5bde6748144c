"""The size of a job: its model on torch's meta device, where weights have a shape but no memory; its data and steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from packtrain.data.order import Ids, micro_batches
from packtrain.job.job import TrainSettings
from packtrain.plan.estimate import Workload
from packtrain.recipes import Recipe
from packtrain.recipes.recipe import training_order

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.utils.flop_counter import FlopCounterMode

_COUNTED_BATCHES = 3  # of which operations and activations are counted
_FLOPS_PER_WEIGHT = 6  # for each unit, forward and backward, where they cannot be counted


@dataclass(frozen=True)
class ModelSize:
    """`trained` are the parameters that learn; operations and activations are for one unit of a batch.

    With activation checkpointing, `block_flops` are computed once more, and `checkpointed_bytes` are kept instead of
    `activation_bytes`.
    """

    parameters: int
    trained: int
    buffer_bytes: int
    flops: float
    activation_bytes: float
    block_flops: float
    checkpointed_bytes: float


@dataclass(frozen=True)
class DataSize:
    """`samples_per_step` and `units_per_step` are means over an epoch."""

    samples: int
    bytes: int
    steps_per_epoch: float
    samples_per_step: float
    units_per_step: float
    valid_samples: int
    test_samples: int
    exact: bool


def workload_of(train: TrainSettings, unit: str, model: ModelSize, data: DataSize, on_gpu: bool) -> Workload:
    """Put a job's sizes together; `on_gpu` decides about the precision that a job leaves open."""
    exchange = train.exchange
    return Workload(
        unit=unit,
        parameters=model.parameters,
        trained=model.trained,
        buffer_bytes=model.buffer_bytes,
        copies=exchange.copies,
        optimizer_copies=train.optimizer.copies,
        averaged=train.ema is not None,
        activation_bytes=model.checkpointed_bytes if train.activation_checkpointing else model.activation_bytes,
        flops=model.flops + (model.block_flops if train.activation_checkpointing else 0.0),
        half=train.precision in ("bf16", "fp16") or (train.precision == "auto" and on_gpu),
        exchange_bytes=math.ceil(exchange.bytes_per_weight * model.trained),
        exchange_every=exchange.interval,
        exchange_background=exchange.background,
        traffic=exchange.traffic,
        sharded=exchange.shards_model,
        whole_gradients=exchange.whole_gradients,
        units_per_step=data.units_per_step,
        samples_per_step=data.samples_per_step,
        steps_per_epoch=data.steps_per_epoch,
        micro_batch=None if train.micro_batch is None else train.micro_batch.value,
        samples=data.samples,
        data_bytes=data.bytes,
        valid_samples=data.valid_samples,
        test_samples=data.test_samples,
        exact=data.exact,
    )


def data_size(recipe: Recipe, scale: Mapping[str, float] | None = None) -> DataSize:
    """Return the size of the recipe's data. `scale` says how many times larger each split of the real data is."""
    order = training_order(recipe)
    batches = order.batches(0)
    split = recipe.pack.manifest.splits["train"]
    times = (scale or {}).get
    larger = times("train", 1.0)
    return DataSize(
        samples=round(split.samples * larger),
        bytes=round(sum(shard.bytes for shard in split.shards) * larger),
        steps_per_epoch=len(batches) * larger,
        samples_per_step=float(np.mean([len(batch) for batch in batches])),
        units_per_step=float(np.mean([order.costs[batch].sum() for batch in batches])),
        valid_samples=round(recipe.count("valid") * times("valid", 1.0)),
        test_samples=round(recipe.count("test") * times("test", 1.0)),
        exact=scale is None,
    )


def model_size(recipe: Recipe) -> ModelSize:
    """Build the recipe's model on the meta device; count its parameters, and the work of a few batches."""
    import torch

    with torch.device("meta"):
        model = recipe.build_model()
    recipe.prepare(0, model)
    model.train()
    parameters = list(model.parameters())
    trained = sum(one.numel() for one in parameters if one.requires_grad)
    work = _work(recipe, model)
    return ModelSize(
        sum(one.numel() for one in parameters),
        trained,
        sum(one.numel() * one.element_size() for one in model.buffers()),
        work.flops or float(_FLOPS_PER_WEIGHT * trained),
        work.activation_bytes,
        work.block_flops or float(_FLOPS_PER_WEIGHT * trained) / 3,
        work.checkpointed_bytes,
    )


class _Work(NamedTuple):
    """Operations of a forward and a backward pass, and of the forward pass of blocks; bytes as in `ModelSize`."""

    flops: float = 0.0
    activation_bytes: float = 0.0
    block_flops: float = 0.0
    checkpointed_bytes: float = 0.0


def _work(recipe: Recipe, model: nn.Module) -> _Work:
    """Return the work for one unit; zeros if the model needs real numbers."""
    order = training_order(recipe)
    batches = order.batches(0)
    micro = recipe.job.train.micro_batch
    spaced = batches[:: max(1, len(batches) // _COUNTED_BATCHES)][:_COUNTED_BATCHES]
    found, units = list[_Work](), 0
    for batch in spaced:
        part = micro_batches(batch, order.costs, None if micro is None else micro.value)[0]
        arrays = recipe.batch(part, 0)
        # Most models take everything on the meta device; one that looks at lengths needs its tokens.
        for keep in ((), _tokens(arrays)):
            with suppress(NotImplementedError, RuntimeError):
                found.append(_counted(recipe, model, arrays, keep))
                units += _cost(order.costs, part)
                break
    return _Work(*(sum(values) / units for values in zip(*found, strict=True))) if units else _Work()


def _cost(costs: NDArray[Any], ids: Ids) -> int:
    return int(costs[ids].sum())


def _tokens(arrays: Mapping[str, NDArray[Any]]) -> tuple[str, ...]:
    return tuple(name for name, array in arrays.items() if array.dtype == np.int64)


class _Kept:
    """The memory that a forward pass keeps for the backward pass, outside of blocks and in each of them.

    Activation checkpointing keeps what is outside, the inputs of blocks, and at any time the inside of one block.
    """

    def __init__(self, model: nn.Module, counter: FlopCounterMode) -> None:
        self._known = {_address(one) for one in (*model.parameters(), *model.buffers())}
        self._counter, self.block_flops, self._before = counter, 0.0, 0
        # Kept alive, so that no two of them have the same address.
        self._outside: dict[int, torch.UntypedStorage] = {}
        self._inputs: dict[int, torch.UntypedStorage] = {}
        self._inside: list[dict[int, torch.UntypedStorage]] = []
        self._now = self._outside

    def save(self, tensor: Tensor) -> Tensor:
        self._add(self._now, tensor)
        return tensor

    def enter(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        for one in inputs:
            self._add(self._inputs, one)
        self._now = {}
        self._inside.append(self._now)
        self._before = self._counter.get_total_flops()

    def leave(self, *_: Any) -> None:
        self._now = self._outside
        self.block_flops += self._counter.get_total_flops() - self._before

    def _add(self, storages: dict[int, torch.UntypedStorage], tensor: Any) -> None:
        if getattr(tensor, "is_meta", False) and _address(tensor) not in self._known:
            storages[_address(tensor)] = tensor.untyped_storage()

    def sizes(self) -> tuple[int, int]:
        """Return the bytes without and with activation checkpointing."""

        def size(*parts: dict[int, torch.UntypedStorage]) -> int:
            return sum(one.nbytes() for one in {key: one for part in parts for key, one in part.items()}.values())

        kept = size(self._outside, self._inputs)
        most = max((size(self._outside, self._inputs, part) - kept for part in self._inside), default=0)
        return size(self._outside, *self._inside), kept + most


def _counted(recipe: Recipe, model: nn.Module, arrays: Mapping[str, NDArray[Any]], keep: tuple[str, ...]) -> _Work:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    batch = {name: torch.from_numpy(array).to("cpu" if name in keep else "meta") for name, array in arrays.items()}
    with FlopCounterMode(display=False) as counter, ExitStack() as hooks:
        kept = _Kept(model, counter)
        for block in recipe.blocks(model):
            hooks.callback(block.register_forward_pre_hook(kept.enter).remove)
            hooks.callback(block.register_forward_hook(kept.leave).remove)
        with torch.autograd.graph.saved_tensors_hooks(kept.save, lambda tensor: tensor):
            loss = recipe.loss(model, batch)
        loss.backward()
    for parameter in model.parameters():
        parameter.grad = None
    total, checkpointed = kept.sizes()
    return _Work(counter.get_total_flops(), total, kept.block_flops, checkpointed)


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
