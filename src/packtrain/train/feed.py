"""What a rank is fed: its part of every global batch, in the order of the run."""

from __future__ import annotations

import torch

from packtrain.data.loader import Arrays, Loader, Order, Position, parts
from packtrain.job import Job
from packtrain.learning import Fsdp
from packtrain.recipes import Batch, Recipe
from packtrain.train.world import World


class Feed:
    def __init__(self, recipe: Recipe, job: Job, world: World) -> None:
        self._recipe, self._settings, self._world = recipe, job.train, world
        self._order = Order(
            recipe.costs,
            recipe.likeness,
            lambda epoch: job.train.in_epoch(epoch).batch.value,
            job.train.seed,
            recipe.lengths,
            recipe.pack.manifest.splits["train"].sources,
            tuple(source.weight for source in job.data.train),
        )

    def epochs_at(self, position: Position) -> float:
        if not position.batch:
            return position.epoch
        return position.epoch + position.batch / len(self._order.batches(position.epoch))

    def from_position(self, start: Position) -> Loader:
        piece = self._settings.micro_batch
        return Loader(
            parts(
                self._order,
                self._recipe.batch,
                start,
                self._world.rank,
                self._world.num_ranks,
                None if piece is None else piece.value,
                self._recipe.fetching,
                alike=isinstance(self._settings.exchange, Fsdp),  # every pass through the model is a meeting there
                again=self._recipe.batch_again,
            )
        )


def on_device(arrays: Arrays, device: torch.device) -> Batch:
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if device.type == "cuda":  # from pinned memory it is copied while the program goes on
        tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
    return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
