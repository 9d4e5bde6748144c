"""The size of a job: its model on torch's meta device, where weights have a shape but no memory; its data and steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from packtrain.data.order import Ids, draws, micro_batches
from packtrain.job.job import Job, TrainSettings
from packtrain.plan.estimate import Workload
from packtrain.recipes import Recipe
from packtrain.recipes.pairs import LOGITS_HELD, MEASURE_TOKENS, PairRecipe
from packtrain.recipes.recipe import Family, training_order

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
    `activation_bytes`. `evaluation_bytes` are those of its outputs.
    """

    parameters: int
    trained: int
    buffer_bytes: int
    flops: float
    activation_bytes: float
    block_flops: float
    checkpointed_bytes: float
    family: Family = "transformer"
    evaluation_bytes: float = 0.0


@dataclass(frozen=True)
class DataSize:
    """`samples_per_step` and `units_per_step` are means over the first epoch."""

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
        family=model.family,
        evaluation_bytes=model.evaluation_bytes,
        evaluation_units=MEASURE_TOKENS,
    )


def data_size(recipe: Recipe) -> DataSize:
    """Return the size of the recipe's packed data."""
    order = training_order(recipe)
    batches = order.batches(0)
    split = recipe.pack.manifest.splits["train"]
    return DataSize(
        samples=split.samples,
        bytes=sum(shard.bytes for shard in split.shards),
        steps_per_epoch=len(batches),
        samples_per_step=float(np.mean([len(batch) for batch in batches])),
        units_per_step=float(np.mean([order.costs[batch].sum() for batch in batches])),
        valid_samples=recipe.count("valid"),
        test_samples=recipe.count("test"),
        exact=True,
    )


def estimated_data(
    job: Job, samples: Sequence[float], costs: Sequence[float], size: float, valid: float, test: float
) -> DataSize:
    """Return the size of data whose order is not known, from the samples of each source of the training data, the
    mean cost of one, and the bytes of all."""
    drawn = [draws(round(count), source.weight) for count, source in zip(samples, job.data.train, strict=True)]
    units = sum(count * cost for count, cost in zip(drawn, costs, strict=True))
    steps = max(1.0, units / job.train.in_epoch(0).batch.value)
    return DataSize(
        samples=round(sum(samples)),
        bytes=round(size),
        steps_per_epoch=steps,
        samples_per_step=sum(drawn) / steps,
        units_per_step=units / steps,
        valid_samples=round(valid),
        test_samples=round(test),
        exact=False,
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
        recipe.family,
        4.0 * LOGITS_HELD * len(recipe.pack.vocabulary) if isinstance(recipe, PairRecipe) else 0.0,
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
