"""Blocks of a model: the layers that are compiled, and whose activations are recomputed, one by one.

A block keeps its place and its names in the model: only its `forward` is replaced, inside of the hooks of fsdp. In
training, that is the compiled one. Evaluations have many more shapes and threads of their own, and take the plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._inductor.exc import GPUTooOldForTriton, InvalidCxxCompiler, TritonMissing
from torch.utils.checkpoint import checkpoint

from packtrain.errors import Mistake
from packtrain.job.job import TrainSettings

Forward = Callable[..., Any]

# Layers of one class share a limit, and a ResNet's differ in their sizes. A network's layers times the sizes of its
# batches and images are fewer than this.
_MOST_GRAPHS = 512

_MISSING: Mapping[type[Exception], str] = {
    InvalidCxxCompiler: "there is no C++ compiler; install one (Debian: g++) or set train.compile to false",
    TritonMissing: "Triton is not installed; run pip install triton or set train.compile to false",
    GPUTooOldForTriton: "Triton does not support this GPU; set train.compile to false",
}


class CompileError(Mistake):
    """The blocks of a model cannot be compiled, or not on this machine."""


def replace_forwards(model: nn.Module, blocks: Sequence[nn.Module], settings: TrainSettings) -> None:
    """Compile the blocks and recompute their activations, as the job says."""
    if settings.compile:
        config = torch._dynamo.config
        # Beyond its limit, the compiler would otherwise leave a layer uncompiled without a word.
        config.fail_on_recompile_limit_hit = True
        config.recompile_limit, config.accumulated_recompile_limit = _MOST_GRAPHS, _MOST_GRAPHS
        # It divides whole models at the buckets of ddp. A block is smaller, and its gradients overlap as it is.
        config.optimize_ddp = False
        # Else sizes that are equal in the first batch are taken for one size: the graph of a batch would depend on
        # which was the first of the process, and so on where a run was resumed.
        torch.fx.experimental._config.use_duck_shape = False
    if settings.compile or settings.activation_checkpointing:
        for block in blocks:
            block.forward = _forward_in_training(model, block, settings)


def has_varying_sizes(block: nn.Module) -> bool:
    """True if one graph of a compiled block is for inputs of many sizes, as those of texts have."""
    return _varying_sizes(block) != ()


def _varying_sizes(block: nn.Module) -> tuple[tuple[int, ...], ...] | None:
    """Return the dimensions of each input that vary; None if nothing is known of them."""
    dimensions: tuple[tuple[int, ...], ...] | None = getattr(block, "varying_sizes", None)
    return dimensions


def _forward_in_training(model: nn.Module, block: nn.Module, settings: TrainSettings) -> Forward:
    plain: Forward = block.forward
    trained = _recomputed(block) if settings.activation_checkpointing else plain
    if settings.compile:
        # In a graph, what changes a statistic is no part of what is recomputed.
        traced = _recomputed(block, spare_buffers=False) if settings.activation_checkpointing else plain
        trained = _compiled(block, traced, trained, settings.compile_backend)

    def forward(*inputs: Any, **options: Any) -> Any:
        return (trained if model.training else plain)(*inputs, **options)

    return forward


def _recomputed(block: nn.Module, spare_buffers: bool = True) -> Forward:
    plain: Forward = block.forward
    owners = [module for module in block.modules() if module._buffers]
    contexts: dict[str, Any] = {}
    if owners and spare_buffers:
        contexts["context_fn"] = lambda: (nullcontext(), _spare_buffers(owners))

    def forward(*inputs: Any, **options: Any) -> Any:
        return checkpoint(plain, *inputs, use_reentrant=False, **contexts, **options)

    return forward


@contextmanager
def _spare_buffers(owners: Sequence[nn.Module]) -> Iterator[None]:
    """Let norms compute once more what they have computed, without counting the batch twice in their statistics."""
    originals = [(module._buffers, dict(module._buffers)) for module in owners]
    for buffers, original in originals:
        buffers.update({name: None if buffer is None else buffer.clone() for name, buffer in original.items()})
    try:
        yield
    finally:
        for buffers, original in originals:
            buffers.update(original)


def _compiled(block: nn.Module, traced: Forward, eager: Forward, backend: str) -> Forward:
    varying = _varying_sizes(block)
    # Left to itself, the compiler would make a graph of the first sizes alone, and another one of the second.
    dynamic = True if varying is None else None if varying else False
    compiled = torch.compile(traced, backend=backend, dynamic=dynamic)
    # Sizes of 0 and 1 are constants to the compiler. A rank without samples is no reason to compile again, nor is a
    # single sample where others have different numbers of them.
    least_samples = 1 if varying == () else 2

    def forward(*inputs: Any, **options: Any) -> Any:
        if inputs and isinstance(inputs[0], Tensor) and len(inputs[0]) < least_samples:
            return eager(*inputs, **options)
        for tensor, dimensions in zip(inputs, varying or (), strict=False):
            for dimension in dimensions:
                torch._dynamo.maybe_mark_dynamic(tensor, dimension)
        try:
            return compiled(*inputs, **options)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            _raise_in_one_line(error, type(block).__name__)

    return forward


def _raise_in_one_line(error: Exception, name: str) -> NoReturn:
    chain: list[BaseException] = [error]
    while (inner := getattr(chain[-1], "inner_exception", None) or chain[-1].__cause__) is not None:
        chain.append(inner)
    for link in chain:
        if isinstance(link, torch.OutOfMemoryError | MemoryError):
            raise link from error
        if isinstance(link, FailOnRecompileLimitHit):
            why = f"was compiled {_MOST_GRAPHS} times, for inputs of different sizes"
            raise CompileError(f"train.compile: {name} {why}; set train.compile to false") from error
        for kind, why in _MISSING.items():
            if isinstance(link, kind):
                raise CompileError(f"train.compile: {why}") from error
    first_line = (str(chain[-1]).strip().splitlines() or [type(chain[-1]).__name__])[0][:200]
    raise CompileError(f"train.compile: cannot compile {name}: {first_line}; set train.compile to false") from error
