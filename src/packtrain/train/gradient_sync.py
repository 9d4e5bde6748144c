"""Gradient sync: how the workers of a run keep their weights equal. Each exchange has a file: ddp, fsdp, local_steps.

A checkpoint holds tensors, or rows of them, that can be loaded into any number of workers.

Reading a job imports these files on machines without torch, so torch is imported inside functions that run in a worker.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packtrain.run.checkpoint import CorruptCheckpoint

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from packtrain.train.recorder import Clock
    from packtrain.train.world import World

    Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class SyncedModel:
    """A model whose weights all ranks keep equal; those of `followers`, such as its average, follow them.

    `dtype` is that of forward and backward passes.
    """

    model: nn.Module
    world: World
    clock: Clock
    dtype: torch.dtype
    followers: Sequence[nn.Module] = ()


class GradientSync(ABC):
    """`module` computes the losses; the weights of `model` are those that learn."""

    module: nn.Module
    span_after_backward = "backward"
    """The name of the time between the last gradient and the end of the backward pass."""
    saves_parts = False
    """True if every rank writes its part of a checkpoint; otherwise the first one writes everything."""

    def __init__(self, synced: SyncedModel) -> None:
        self._model, self._world, self._clock = synced.model, synced.world, synced.clock
        self._statistics = list(synced.model.buffers())
        self.module = synced.model

    def before_step(self) -> None:
        """Give all ranks the statistics of norms of the first one. Called before the first micro-batch of a step."""
        if self._statistics and self._world.num_ranks > 1:
            self._clock.mark("other")
            self._world.broadcast_all(self._statistics)
            self._clock.mark("communication")

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:  # noqa: ARG002
        """Wrap the forward and backward pass of a micro-batch; gradients are averaged with the last one."""
        return nullcontext()

    def loss_factor(self, cost: int, rank_cost: int) -> float:  # noqa: ARG002
        """Return the factor on the sum of losses before the backward pass."""
        return self._world.num_ranks / cost

    def is_common(self, steps: int) -> bool:  # noqa: ARG002
        """True if all ranks have weights in common after that many steps, to evaluate and to save."""
        return True

    def common_weights(self) -> Tensors:
        """Return the weights in common by name, always the same tensors, if a rank's model may have others."""
        return {}

    def steps_since_common(self, step: int) -> int:  # noqa: ARG002
        """Return how many steps a rank made, with this one, since the ranks last had weights in common."""
        return 1

    def after_update(self, steps: int, last: bool) -> None:  # noqa: B027
        """Called when a rank has updated its weights; `last` when no other step follows."""

    @property
    def message_bytes(self) -> int:
        """Bytes of what the ranks average in one sync, as it is sent."""
        return sum(
            weight.numel() * weight.element_size() for weight in self._model.parameters() if weight.requires_grad
        )

    def sent_bytes(self) -> float:
        """Return how many bytes each rank sends for gradients, or for weights, in one step on average."""
        return self._world.ring_bytes(self.message_bytes)

    def share_buffers(self, model: nn.Module) -> None:
        """Give all ranks the statistics of norms of the first one, which no gradient carries."""
        self._world.broadcast_all(list(model.buffers()))

    # For checkpoints.

    def states_of_ranks(self, tensors: Mapping[str, Tensor]) -> list[Tensors]:
        """Return the optimizer's state: one if all ranks have the same, else one for each rank. Collective."""
        return [dict(tensors)]

    def rank_state(self) -> Tensors:
        """Return what each rank has to remember for itself."""
        return {}

    def restore_rank_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back what a rank has remembered, after `restore`; the job or the ranks may be others by now."""
        for name, tensor in self.rank_state().items():
            if name in state:
                tensor.copy_(state[name])

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
