"""The size of a job: its model, its data and its steps.

The model of a user's own recipe is built on torch's meta device, where weights have a shape but no memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from packtrain.data.order import draws, micro_batches
from packtrain.job.job import Job, TrainSettings
from packtrain.pack.kind import kind_of
from packtrain.pack.manifest import Manifest
from packtrain.plan.estimate import Workload
from packtrain.recipes import Recipe, built_in
from packtrain.recipes.pairs import MEASURE_TOKENS
from packtrain.recipes.recipe import ModelSize, Sized, training_order

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.utils.flop_counter import FlopCounterMode

_COUNTED_BATCHES = 3  # of which operations and activations are counted
_FLOPS_PER_WEIGHT = 6  # for each unit, forward and backward, where they cannot be counted


@dataclass(frozen=True)
class DataSize:
    """`samples_per_step` and `units_per_step` are means over the first epoch."""

    samples: int
    data_bytes: int
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
        copies=exchange.weight_copies,
        optimizer_copies=train.optimizer.state_tensors,
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
        micro_batch=None if train.micro_batch is None else train.micro_batch.value,
        family=model.family,
        evaluation_bytes=model.evaluation_bytes,
        evaluation_units=MEASURE_TOKENS,
        **asdict(data),
    )


def data_size(recipe: Recipe) -> DataSize:
    order = training_order(recipe)
    batches = order.batches(0)
    split = recipe.pack.manifest.splits["train"]
    return DataSize(
        samples=split.samples,
        data_bytes=split.shard_bytes,
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
        data_bytes=round(size),
        steps_per_epoch=steps,
        samples_per_step=sum(drawn) / steps,
        units_per_step=units / steps,
        valid_samples=round(valid),
        test_samples=round(test),
        exact=False,
    )


def known_data(job: Job, manifest: Manifest) -> DataSize:
    """Return the size of the data as far as the manifest tells; the tokens of pairs follow from the size of shards."""
    train = manifest.splits["train"]
    cost = kind_of(manifest.kind).mean_cost(train)
    valid, test = (manifest.splits[name].samples if name in manifest.splits else 0 for name in ("valid", "test"))
    return estimated_data(job, train.sources, [cost] * len(train.sources), train.shard_bytes, valid, test)


# The model: by the recipe's arithmetic, or by a count of what a user's own recipe computes.


def known_model(job: Job, manifest: Manifest) -> ModelSize | None:
    """Return the size of the job's model without torch; None for a recipe of the user's own."""
    return built_in_model(job, int(manifest.settings.get("vocabulary", 0)), len(manifest.classes))


def built_in_model(job: Job, vocabulary: int, classes: int) -> ModelSize | None:
    """Return the size of the job's model with so many pieces or classes; None for a recipe of the user's own."""
    recipe = built_in(job.recipe)
    return recipe.size(job, vocabulary, classes) if recipe is not None and issubclass(recipe, Sized) else None


def model_size(recipe: Recipe) -> ModelSize:
    return built_in_model(recipe.job, *_rows(recipe)) or counted_size(recipe)


def _rows(recipe: Recipe) -> tuple[int, int]:
    """Return the number of pieces in the vocabulary, and of classes."""
    manifest = recipe.pack.manifest
    return 0 if manifest.vocabulary is None else len(recipe.pack.vocabulary), len(manifest.classes)


def counted_size(recipe: Recipe) -> ModelSize:
    """Build the recipe's model on the meta device; count its parameters, and the work of a few batches."""
    import torch

    with torch.device("meta"):
        model = recipe.build_model()
    recipe.prepare(0, model)
    model.train()
    parameters = list(model.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    work = _work(recipe, model)
    size = ModelSize(
        sum(parameter.numel() for parameter in parameters),
        trained,
        sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        work.flops or float(_FLOPS_PER_WEIGHT * trained),
        work.activation_bytes,
        work.block_flops or float(_FLOPS_PER_WEIGHT * trained) / 3,
        work.checkpointed_bytes,
        "transformer" if recipe.unit == "tokens" else "bottleneck",
    )
    if not isinstance(recipe, Sized):
        return size
    alike = recipe.size(recipe.job, *_rows(recipe))
    return replace(size, family=alike.family, evaluation_bytes=alike.evaluation_bytes)


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
    counted, units = list[_Work](), 0
    for batch in spaced:
        micro_batch = micro_batches(batch, order.costs, None if micro is None else micro.value)[0]
        arrays = recipe.batch(micro_batch, 0)
        # Most models take everything on the meta device; one that looks at lengths needs its tokens.
        tokens = [name for name, array in arrays.items() if array.dtype == np.int64]
        for keep in ([], tokens):
            with suppress(NotImplementedError, RuntimeError):
                counted.append(_counted(recipe, model, arrays, keep))
                units += int(order.costs[micro_batch].sum())
                break
    return _Work(*(sum(values) / units for values in zip(*counted, strict=True))) if units else _Work()


class _Kept:
    """The memory that a forward pass keeps for the backward pass, outside of blocks and in each of them.

    Activation checkpointing keeps what is outside, the inputs of blocks, and at any time the inside of one block.
    """

    def __init__(self, model: nn.Module, counter: FlopCounterMode) -> None:
        self._known = {_address(tensor) for tensor in (*model.parameters(), *model.buffers())}
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
        for tensor in inputs:
            self._add(self._inputs, tensor)
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

        def size(*groups: dict[int, torch.UntypedStorage]) -> int:
            return sum(
                storage.nbytes()
                for storage in {key: storage for group in groups for key, storage in group.items()}.values()
            )

        checkpointed = size(self._outside, self._inputs)
        largest = max((size(self._outside, self._inputs, inside) - checkpointed for inside in self._inside), default=0)
        return size(self._outside, *self._inside), checkpointed + largest


def _counted(recipe: Recipe, model: nn.Module, arrays: Mapping[str, NDArray[Any]], keep: Sequence[str]) -> _Work:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    batch = {name: torch.from_numpy(array).to("cpu" if name in keep else "meta") for name, array in arrays.items()}
    with FlopCounterMode(display=False) as counter, ExitStack() as hooks:
        memory = _Kept(model, counter)
        for block in recipe.blocks(model):
            hooks.callback(block.register_forward_pre_hook(memory.enter).remove)
            hooks.callback(block.register_forward_hook(memory.leave).remove)
        with torch.autograd.graph.saved_tensors_hooks(memory.save, lambda tensor: tensor):
            loss = recipe.loss(model, batch)
        loss.backward()
    for parameter in model.parameters():
        parameter.grad = None
    total, checkpointed = memory.sizes()
    return _Work(counter.get_total_flops(), total, memory.block_flops, checkpointed)


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
