"""One training step: forward, backward with the exchange of gradients, update. Knows nothing of stores or runs."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from packtrain.data.loader import Arrays, Loaded
from packtrain.data.order import Stream, philox_words
from packtrain.errors import PacktrainError
from packtrain.job.train import Exchange, Fsdp, LocalSteps, Train
from packtrain.recipes import Batch, Recipe
from packtrain.train.gradient_sync import exchange_of
from packtrain.train.optimizer import placed
from packtrain.train.precision import Precision
from packtrain.train.recorder import Clock, clock_of
from packtrain.train.schedule import Moment, rate_of
from packtrain.train.world import World

_TINY = 1e-6  # as torch has it, so that a gradient of nothing is not divided by


class NotANumber(PacktrainError):
    """A loss or gradient that is not finite; the weights have not been touched."""


@dataclass(frozen=True)
class Stepped:
    """A step's loss, summed over this rank's part and not yet read. One that was left out changed no weights."""

    loss: Tensor
    rate: float
    gradient_norm: float
    left_out: bool


class Engine:
    def __init__(self, recipe: Recipe, settings: Train, world: World, clock: Clock | None = None) -> None:
        self._recipe, self._settings, self._world = recipe, settings, world
        self.clock = clock or clock_of(world.device)
        torch.manual_seed(settings.seed)  # the same start on every rank
        self.model = recipe.build_model()
        if not (isinstance(settings.exchange, Fsdp) and world.num_ranks > 1):  # else it is moved as it is divided
            self.model.to(world.device)
        self.average = None if settings.ema is None else Average(self.model, settings.ema)
        self.precision = Precision(settings, world.device)
        followers = [] if self.average is None else [self.average.model]
        self.exchange = exchange_of(settings.exchange, self.model, followers, world, self.clock)
        self.optimizer = settings.optimizer.build(self.model)
        self._rate = rate_of(settings, recipe.width)
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.before_update: Callable[[], None] = lambda: None
        """Called when gradients are computed and nothing has been changed by them."""
        if settings.compile:
            self.model.compile(dynamic=True)

    @torch.no_grad()
    def begin(self) -> None:
        """Puts in the weights that a run begins with where they are not random: the same on every rank."""
        first = self._recipe.first_weights(self.model)
        for model in [self.model] if self.average is None else [self.model, self.average.model]:
            own = model.state_dict()
            for name, tensor in first.items():
                own[name].copy_(placed(tensor, own[name]))
        self.exchange.restore(self.exchange.state())  # where ranks step by themselves, they start from these

    def evaluated(self) -> nn.Module:
        """The weights that are measured and go home: the average, where there is one. All ranks take part."""
        chosen = self.model if self.average is None else self.average.model
        self.exchange.share_buffers(chosen)
        return self.exchange.plain(chosen, self._recipe.build_model).eval()

    def step(self, now: Moment, pieces: Sequence[Batch], cost: int, own_cost: int, last: bool = False) -> Stepped:
        """The step after `now` on this rank's part of a global batch; `cost` is of the whole, `own_cost` its own."""
        seed_randomness(self._settings.seed, now.step, self._world.rank, self._world.device)
        rate = self._rate(now)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if not self.model.training:
            self.model.train()
        self.exchange.before_step()
        share = self.exchange.share(cost, own_cost) * self.precision.scale.value
        total = torch.zeros((), device=self._world.device)
        for number, piece in enumerate(pieces, 1):
            with self.exchange.piece(last=number == len(pieces)):
                with self.precision.compute():
                    loss = self._recipe.loss(self.exchange.module, piece)
                self.clock.mark("forward")
                # A loss that is not finite makes every gradient so, on all ranks: each of them sees it at once.
                (loss * (share + 0.0 * loss.detach())).backward()  # type: ignore[no-untyped-call]
                self.clock.mark(self.exchange.span_after_backward if number == len(pieces) else "backward")
            total += loss.detach()
        self.before_update()
        norm, left_out = self._update(now, total)
        self.exchange.after_update(now.step + 1, last)
        self._follow(now.step, last)
        self.clock.mark("optimizer")
        return Stepped(total, rate, norm, left_out)

    def _update(self, now: Moment, loss: Tensor) -> tuple[float, bool]:
        """The gradient's norm, and whether the step was left out because fp16 could not hold it."""
        scale = self.precision.scale
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        found = nn.utils.get_total_norm(gradients, foreach=True)
        norm = float(found.full_tensor() if isinstance(found, DTensor) else found) / scale.value
        left_out = not math.isfinite(norm)
        if left_out:
            self._refuse_or_leave_out(now, loss)
        else:
            limit = math.inf if self._settings.clip is None else self._settings.clip
            factor = min(1.0, limit / (norm + _TINY)) / scale.value
            if factor != 1.0:
                torch._foreach_mul_(gradients, factor)
            self.optimizer.step()
            scale.held()
        self.optimizer.zero_grad(set_to_none=True)
        return norm, left_out

    def _refuse_or_leave_out(self, now: Moment, loss: Tensor) -> None:
        scale = self.precision.scale
        scale.overflowed()
        # Ranks that exchange at every step come here together; one that steps by itself decides by itself.
        wrong = not bool(torch.isfinite(loss))
        if not isinstance(self._settings.exchange, LocalSteps):
            wrong = self._world.any(wrong)
        if wrong or scale.hopeless:
            raise NotANumber(f"the {'loss' if wrong else 'gradient'} of step {now.step + 1} is not finite")

    def _follow(self, step: int, last: bool) -> None:
        """The average follows weights that all ranks share."""
        if self.average is None:
            return
        if not isinstance(self._settings.exchange, LocalSteps):
            self.average.update(step)
        elif self.exchange.is_common(step + 1) or last:
            every = int(self._settings.exchange.every.value)
            self.average.update(step, (step % every) + 1)

    def loss_of(self, model: nn.Module, batch: Batch) -> float:
        """The loss of a batch as it is, to find out what is wrong with it. Nothing is exchanged or changed."""
        with torch.no_grad(), self.precision.compute():
            return float(self._recipe.loss(model, batch))


def seed_randomness(seed: int, step: int, rank: int, device: torch.device) -> None:
    """All random numbers of a step are a function of its number: there is no state to save or restore."""
    word = int(philox_words(1, seed, step, rank, Stream.TRAINING)[0])
    # torch.manual_seed would note a stack for every kind of device that is not there, which takes a millisecond.
    torch.default_generator.manual_seed(word)
    if device.type == "cuda":
        torch.cuda.manual_seed(word)
    np.random.seed(word % 2**32)
    random.seed(word)


# The exponential moving average of the weights: a second model that follows the first.


class Average:
    """Early on the average forgets faster, so that the random start does not linger in it."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self._decay = decay
        self._followed = model
        self._pairs: tuple[list[Tensor], list[Tensor], list[tuple[Tensor, Tensor]]] | None = None

    def update(self, step: int, steps: int = 1) -> None:
        """Follows the weights as they are after step number `step`; `steps` were made since the last time."""
        decay = min(self._decay, (step + 1) / (step + 10)) ** steps
        # Found at the first step, when weights have been divided among ranks or not: to find them takes a while.
        self._pairs = averages, followed, buffers = self._pairs or (
            list(self.model.parameters()),
            list(self._followed.parameters()),
            list(zip(self.model.buffers(), self._followed.buffers(), strict=True)),
        )
        with torch.no_grad():
            torch._foreach_lerp_(averages, followed, 1 - decay)
            for buffer, source in buffers:
                buffer.copy_(source)  # statistics of norms are averages already


# Which samples made a loss that is not finite: each is tried by itself, on weights that have not changed.


_TRIED, _NAMED = 256, 5


def suspects(engine: Engine, recipe: Recipe, world: World, exchange: Exchange, loaded: Loaded) -> str:
    """A few words that name them; where all ranks come here together, those of every rank."""
    alone = isinstance(exchange, LocalSteps)
    model = engine.model if alone else engine.exchange.plain(engine.model, recipe.build_model)
    guilty = _guilty(engine, model, recipe, world, loaded)
    if not alone:
        told = b" ".join(part for part in world.gather(" ".join(map(str, guilty)).encode()) if part)
        guilty = [int(word) for word in told.split()]
    if guilty:
        return f"its samples {_named(recipe, guilty)} make a loss that is not finite"
    return f"none of its samples alone does it; the batch begins with {_named(recipe, loaded.ids.tolist())}"


def _guilty(engine: Engine, model: nn.Module, recipe: Recipe, world: World, loaded: Loaded) -> list[int]:
    found: dict[int, None] = {}  # in their order, each once
    for at, sample in enumerate(loaded.ids[:_TRIED].tolist()):
        arrays = recipe.batch(loaded.ids[at : at + 1], loaded.at.epoch, loaded.turns[at : at + 1])
        if not math.isfinite(engine.loss_of(model, on_device(arrays, world.device))):
            found[sample] = None
    return list(found)


def _named(recipe: Recipe, samples: list[int]) -> str:
    """Samples by their source and their place in it, as a person would look for them."""
    names = [_place(recipe.pack.manifest.splits["train"].sources, sample) for sample in samples[:_NAMED]]
    more = f" and {len(samples) - _NAMED} more" if len(samples) > _NAMED else ""
    return ", ".join(names) + more


def _place(sources: tuple[int, ...], sample: int) -> str:
    for number, count in enumerate(sources):
        if sample < count:
            return f"{sample} of data.train.{number}"
        sample -= count
    return str(sample)


def on_device(arrays: Arrays, device: torch.device) -> Batch:
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if device.type == "cuda":  # from pinned memory it is copied while the program goes on
        tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
    return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
