"""One training step: forward, backward with the exchange of gradients, update. Knows nothing of stores or runs."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from packtrain.data.order import philox_words
from packtrain.errors import PacktrainError
from packtrain.job import Train
from packtrain.recipes import Recipe
from packtrain.train.average import Average
from packtrain.train.optimizer import optimizer_of
from packtrain.train.precision import Precision
from packtrain.train.schedule import rate_of
from packtrain.train.world import World

_RANDOMNESS = 4  # the counter that keeps these numbers apart from those of data.order


class NotANumber(PacktrainError):
    """A loss or gradient that is not finite; the weights have not been touched."""


@dataclass(frozen=True)
class Stepped:
    """A step's loss, summed over this rank's part and not yet read, and where its time went."""

    loss: Tensor
    rate: float
    gradient_norm: float
    seconds: Mapping[str, float]


class Engine:
    def __init__(self, recipe: Recipe, settings: Train, world: World) -> None:
        self._recipe, self._settings, self._world = recipe, settings, world
        torch.manual_seed(settings.seed)  # the same start on every rank
        self.model = recipe.build_model().to(world.device)
        self.average = None if settings.ema is None else Average(self.model, settings.ema)
        self.optimizer = optimizer_of(settings.optimizer, self.model)
        self.precision = Precision(settings.precision, world.device)
        self._rate = rate_of(settings.schedule, recipe.width)
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._parallel = self._distributed()

    def _distributed(self) -> nn.Module:
        if self._world.num_ranks == 1:
            return self.model
        on_gpu = self._world.device.type == "cuda"
        return DistributedDataParallel(
            self.model,
            device_ids=[self._world.device.index] if on_gpu else None,
            gradient_as_bucket_view=True,
        )

    @property
    def evaluated(self) -> nn.Module:
        """The weights that are measured and go home: the average, where there is one."""
        return self.model if self.average is None else self.average.model

    def step(self, number: int, batch: dict[str, Tensor], cost: int) -> Stepped:
        """Step `number`, counted from 0, on this rank's part of a global batch of that cost."""
        started = time.perf_counter()
        seed_randomness(self._settings.seed, number, self._world.rank)
        rate = self._rate(number)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.model.train()
        with self.precision.compute():
            loss = self._recipe.loss(self._parallel, batch)
        forwarded = time.perf_counter()
        # The exchange takes the mean over ranks; the gradient wanted is that of the mean over the batch.
        self.precision.scaler.scale(loss * (self._world.num_ranks / cost)).backward()  # type: ignore[no-untyped-call]
        backed = time.perf_counter()
        norm = self._update(number)
        done = time.perf_counter()
        spans = {"forward": forwarded - started, "backward": backed - forwarded, "optimizer": done - backed}
        return Stepped(loss.detach(), rate, norm, spans)

    def _update(self, number: int) -> float:
        scaler = self.precision.scaler
        scaler.unscale_(self.optimizer)
        limit = math.inf if self._settings.clip is None else self._settings.clip
        norm = float(nn.utils.clip_grad_norm_(self._parameters, limit, foreach=True))
        if not math.isfinite(norm) and not scaler.is_enabled():
            raise NotANumber(f"the gradient of step {number + 1} is not finite; nothing was updated")
        scaler.step(self.optimizer)  # with a loss scale, leaves out a step whose gradients overflowed
        scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update(number)
        return norm


def seed_randomness(seed: int, step: int, rank: int) -> None:
    """All random numbers of a step are a function of its number: there is no state to save or restore."""
    word = int(philox_words(1, seed, step, rank, _RANDOMNESS)[0])
    torch.manual_seed(word)
    np.random.seed(word % 2**32)
    random.seed(word)
