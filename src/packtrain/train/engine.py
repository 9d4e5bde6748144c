"""The training step: forward, backward with gradient sync, update. Knows nothing of stores or runs."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from packtrain.data.loader import LoadedBatch
from packtrain.data.order import Stream, micro_batches, philox_words, share
from packtrain.errors import PacktrainError
from packtrain.job.job import TrainSettings
from packtrain.job.kinds import ExchangeKind
from packtrain.recipes import Batch, Recipe
from packtrain.recipes.recipe import training_order
from packtrain.train.gradient_sync import GradientSync, SyncedModel
from packtrain.train.model_blocks import has_varying_sizes, replace_forwards
from packtrain.train.numerics import Precision
from packtrain.train.progress import Progress
from packtrain.train.recorder import Clock, clock_of
from packtrain.train.schedule import rate_of
from packtrain.train.tensors import StoredTensor, placed
from packtrain.train.transfer import Reading, is_queued, on_device
from packtrain.train.world import World

_EPSILON = 1e-6  # as in torch's clip_grad_norm_: a gradient of zero is not divided by


class NonFinite(PacktrainError):
    """A loss or gradient is NaN or infinite; the weights have not been updated."""


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step. The loss is the sum over this rank's part, still on the device: reading it would wait.

    A skipped step changed no weights.
    """

    loss: Tensor
    rate: float
    norm: Reading | float
    skipped: bool

    @property
    def gradient_norm(self) -> float:
        """The norm before clipping; reading it waits for this step, and not for those queued after it."""
        return self.norm if isinstance(self.norm, float) else self.norm.read()[0]


class Engine:
    def __init__(self, recipe: Recipe, settings: TrainSettings, world: World, clock: Clock | None = None) -> None:
        self._recipe, self._settings, self._world = recipe, settings, world
        self.clock = clock or clock_of(world.device)
        torch.manual_seed(settings.seed)  # the same initial weights on every rank, without sending them
        sharded = settings.exchange.shards_model and world.num_ranks > 1
        # Of a sharded model, the other ranks get only their parts: each machine would need memory for several wholes.
        with torch.device("meta") if sharded and not world.is_first else nullcontext():
            self.model = recipe.build_model()
        if not sharded:  # fsdp moves it layer by layer
            self.model.to(world.device)
        self.ema = None if settings.ema is None else Ema(self.model, settings.ema)
        self.precision = Precision(settings, world.device, world.has_bf16)
        followers = [] if self.ema is None else [self.ema.model]
        synced = SyncedModel(self.model, world, self.clock, self.precision.dtype, followers)
        self.gradient_sync: GradientSync = settings.exchange.build(synced)
        self.optimizer = settings.optimizer.build(self.model)
        # The loss scale of fp16 has to be known before the next step.
        can_skip = getattr(self.optimizer, "_step_supports_amp_scaling", False) and not self.precision.scale.enabled
        self._spoilt = torch.zeros((), device=world.device) if is_queued(world.device) and can_skip else None
        self._rate = rate_of(settings, recipe.width)
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.before_update: Callable[[], None] = lambda: None
        """Called when the gradients are computed and nothing has been updated yet."""
        blocks = recipe.blocks(self.model)
        replace_forwards(self.model, blocks, settings)
        self._compiles_first = settings.compile and any(map(has_varying_sizes, blocks))

    def load_initial_weights(self) -> Collection[str]:
        """Load the weights that a run starts from where they are not random, and return their names.

        The same on every rank.
        """
        first = self._recipe.initial_weights(self.model)
        self.begin_with(first)
        return first.keys()

    @torch.no_grad()
    def begin_with(self, first: Mapping[str, Tensor | StoredTensor]) -> None:
        """Put whole tensors into the model and its average, before the first step; the same on every rank."""
        for model in [self.model] if self.ema is None else [self.model, self.ema.model]:
            state = model.state_dict()
            for name, tensor in first.items():
                state[name].copy_(placed(tensor, state[name]))
        self.gradient_sync.restore(self.gradient_sync.state())  # ranks that update locally start from these weights too

    def evaluation_model(self) -> nn.Module:
        """Return the model that is evaluated and exported: the EMA if there is one. Collective."""
        chosen = self.model if self.ema is None else self.ema.model
        self.gradient_sync.share_buffers(chosen)
        return self.gradient_sync.plain(chosen).eval()

    def step(
        self, progress: Progress, micro_batches: Sequence[Batch], cost: int, rank_cost: int, last: bool = False
    ) -> StepResult:
        """Make the step after `progress` on this rank's part of a global batch.

        `cost` is that of the global batch, `rank_cost` that of this rank's part; `last` if no other step follows.
        A loss or gradient that is not finite raises NonFinite here, or in `confirm` if the device runs behind.
        """
        if self._compiles_first:
            self._compile()
        seed_randomness(self._settings.seed, progress.step, self._world.rank, self._world.device)
        rate = self._rate(progress)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if not self.model.training:
            self.model.train()
        self.gradient_sync.before_step()
        factor = self.gradient_sync.loss_factor(cost, rank_cost) * self.precision.scale.value
        total = torch.zeros((), device=self._world.device)
        for number, micro_batch in enumerate(micro_batches, 1):
            is_last = number == len(micro_batches)
            with self.gradient_sync.micro_batch(last=is_last):
                with self.precision.compute():
                    loss = self._recipe.loss(self.gradient_sync.module, micro_batch)
                self.clock.mark("forward")
                # 0 * NaN is NaN: a loss that is not finite on one rank reaches every rank through the gradient sync,
                # so all of them notice in the same step.
                (loss * (factor + 0.0 * loss.detach())).backward()
                self.clock.mark(self.gradient_sync.span_after_backward if is_last else "backward")
            total += loss.detach()
        self.before_update()  # waits until the last snapshot is copied: the weights change next
        norm, skipped = self._update(progress, total)
        self.gradient_sync.after_update(progress.step + 1, last)
        sync = self.gradient_sync
        if self.ema is not None and (sync.is_common(progress.step + 1) or last):  # else there are no weights to average
            self.ema.update(progress.step, sync.steps_since_common(progress.step), sync.common_weights)
        self.clock.mark("optimizer")
        return StepResult(total, rate, norm, skipped)

    def _compile(self) -> None:
        """Compute gradients of the first batch of the first epoch, and forget them.

        What a compiler makes for all sizes depends on the first that it sees: a resumed run, which begins with another
        batch, would differ in the last bits.
        """
        order, micro, buffers = training_order(self._recipe), self._settings.micro_batch, list(self.model.buffers())
        ids = share(order.batches(0)[0], 0, self._world.num_ranks)
        ids = micro_batches(ids, order.costs, None if micro is None else micro.value)[0]
        statistics = [buffer.clone() for buffer in buffers]
        self.model.train()
        with self.gradient_sync.micro_batch(last=True):
            with self.precision.compute():
                batch = on_device(self._recipe.batch(ids, 0), self._world.device, self._recipe.on_host)
                loss = self._recipe.loss(self.gradient_sync.module, batch)
            loss.backward()
        self.optimizer.zero_grad(set_to_none=True)
        for buffer, statistic in zip(buffers, statistics, strict=True):
            buffer.copy_(statistic)
        self._compiles_first = False

    def _update(self, progress: Progress, loss: Tensor) -> tuple[Reading | float, bool]:
        """Clip and update; return the gradient norm, and True if fp16 overflowed and the step was skipped."""
        scale = self.precision.scale
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        total_norm = nn.utils.get_total_norm(gradients, foreach=True)
        total_norm = total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm
        if self._spoilt is not None:
            return self._update_unread(gradients, total_norm, self._spoilt), False
        norm = float(total_norm) / scale.value
        skipped = not math.isfinite(norm)
        if skipped:
            self._skip_or_raise(progress.step + 1, loss)
        else:
            limit = math.inf if self._settings.clip is None else self._settings.clip
            # Clipping and removing the loss scale are one multiplication.
            factor = min(1.0, limit / (norm + _EPSILON)) / scale.value
            if factor != 1.0:
                torch._foreach_mul_(gradients, factor)
            self.optimizer.step()
            scale.fitted()
        self.optimizer.zero_grad(set_to_none=True)
        return norm, skipped

    def _update_unread(self, gradients: list[Tensor], total_norm: Tensor, spoilt: Tensor) -> Reading:
        """Clip and update without reading the norm: the host would wait for it, and the device then for the host.

        `spoilt` becomes 1 when a norm is not finite, and stays: neither that step nor those queued by the time the host
        knows change a weight. The average of the weights may move, but is neither evaluated nor saved before `confirm`.
        """
        norm = total_norm.to(spoilt.device, torch.float64)  # as precise as on the host
        torch.maximum(spoilt, (~norm.isfinite()).to(spoilt.dtype), out=spoilt)
        if self._settings.clip is not None and gradients:
            factor = (self._settings.clip / (norm + _EPSILON)).clamp(max=1.0)
            torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
        self.optimizer.found_inf = spoilt  # as torch's GradScaler tells fused optimizers
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return Reading(norm)

    def confirm(self, step: int, result: StepResult) -> None:
        """Raise NonFinite if step number `step` was not finite: neither it nor any later one has changed the weights.

        Call it before a result is recorded, and before the weights are evaluated or saved.
        """
        if not result.skipped and not math.isfinite(result.gradient_norm):
            self._skip_or_raise(step, result.loss)

    def _skip_or_raise(self, step: int, loss: Tensor) -> None:
        scale = self.precision.scale
        scale.overflowed()
        # Ranks that sync every step come here together; one that updates locally decides alone.
        infinite, wrong = int(torch.isinf(loss)), int(torch.isnan(loss))
        if self._settings.exchange.syncs_every_step:
            infinite, wrong = self._world.count(infinite > 0, wrong > 0)
        # A loss may overflow fp16 as a gradient does, and is infinite then; one that is NaN is wrong.
        if wrong or scale.exhausted:
            raise NonFinite(f"the {'loss' if infinite or wrong else 'gradient'} of step {step} is not finite")

    def loss_of(self, model: nn.Module, batch: Batch) -> float:
        """Return the loss of a batch, to find out what is wrong with it. Nothing is communicated or changed."""
        # Not compiled: that would take minutes for the size of a single sample.
        with torch.no_grad(), self.precision.compute(), torch.compiler.set_stance("force_eager"):
            return float(self._recipe.loss(model, batch))


def seed_randomness(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Make all random numbers of a step a function of its number, so that a checkpoint needs no random states."""
    word = int(philox_words(1, seed, step, rank, Stream.TRAINING)[0])
    # torch.manual_seed also records a stack for every absent kind of device, which takes a millisecond.
    torch.default_generator.manual_seed(word)
    if device.type == "cuda":
        torch.cuda.manual_seed(word)
    np.random.seed(word % 2**32)
    random.seed(word)


class Ema:
    """The exponential moving average of the weights, as a second model.

    The decay starts small, so that the random initial weights do not linger in the average.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self._decay = decay
        self._source = model
        self._pairs: tuple[list[Tensor], list[Tensor]] | None = None
        self._statistics: list[tuple[list[Tensor], list[Tensor]]] = []

    def update(self, step: int, steps: int = 1, common: Callable[[], Mapping[str, Tensor]] = dict) -> None:
        """Add the weights as they are after step number `step`; `steps` were made since the last update.

        `common` returns those that are added instead of the model's own.
        """
        # With local steps, one update stands for several.
        decay = min(self._decay, (step + 1) / (step + 10)) ** steps
        # Collected once, which takes a while, and not before the first step: by then fsdp has sharded the weights.
        if self._pairs is None:
            shared = common()
            weights = [shared.get(name, parameter) for name, parameter in self._source.named_parameters()]
            self._pairs = list(self.model.parameters()), weights
            # By dtype: a GPU copies tensors of one dtype in a few kernels.
            groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
            for average, source in zip(self.model.buffers(), self._source.buffers(), strict=True):
                group = groups.setdefault(source.dtype, ([], []))
                group[0].append(average)
                group[1].append(source)
            self._statistics = list(groups.values())
        averages, weights = self._pairs
        with torch.no_grad():
            torch._foreach_lerp_(averages, weights, 1 - decay)
            for buffers, sources in self._statistics:
                torch._foreach_copy_(buffers, sources)  # statistics of norm layers are averages already


_TRIED_SAMPLES, _NAMED_SAMPLES = 256, 5


def name_bad_samples(engine: Engine, recipe: Recipe, world: World, exchange: ExchangeKind, loaded: LoadedBatch) -> str:
    """Describe which samples of a batch have a loss that is not finite, by trying each alone on unchanged weights.

    Collective where the ranks sync every step; then the samples of every rank are named.
    """
    alone = not exchange.syncs_every_step
    model = engine.model if alone else engine.gradient_sync.plain(engine.model)
    bad: dict[int, None] = {}  # in order, each once
    for at, sample in enumerate(loaded.ids[:_TRIED_SAMPLES].tolist()):
        arrays = recipe.batch(loaded.ids[at : at + 1], loaded.at.epoch, loaded.repeats[at : at + 1])
        if not math.isfinite(engine.loss_of(model, on_device(arrays, world.device, recipe.on_host))):
            bad[sample] = None
    samples = list(bad)
    if not alone:
        gathered = b" ".join(world.gather(" ".join(map(str, samples)).encode()))
        samples = [int(word) for word in gathered.split()]
    sources = recipe.pack.manifest.splits["train"].sources
    if samples:
        return f"bad samples: {_names(sources, samples)}"
    return f"no single sample causes it; the batch begins with {_names(sources, loaded.ids.tolist())}"


def _names(sources: tuple[int, ...], samples: list[int]) -> str:
    """Name samples by their source and their place in it, as a person would look for them."""
    names = []
    for sample in samples[:_NAMED_SAMPLES]:
        number, at = 0, sample
        while number < len(sources) - 1 and at >= sources[number]:
            at -= sources[number]
            number += 1
        names.append(f"{at} of data.train.{number}" if sources else str(at))
    ending = f" and {len(samples) - _NAMED_SAMPLES} more" if len(samples) > _NAMED_SAMPLES else ""
    return ", ".join(names) + ending
