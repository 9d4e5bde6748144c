"""Gradient sync: how the workers of a run keep their weights equal, with the settings of each kind.

A checkpoint holds tensors, or rows of them, that can be loaded into any number of workers.

Reading a job imports this file on machines without torch, so torch is imported inside functions that run in a worker.
"""

from __future__ import annotations

import copy
import inspect
import math
from abc import ABC
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from packtrain.job.job import TrainSettings
from packtrain.job.kinds import ExchangeKind
from packtrain.job.part import Fraction, Location, Ordinal, Positive, Steps
from packtrain.run.checkpoint import CorruptCheckpoint

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from packtrain.train.averaging import Averaging
    from packtrain.train.precision import Precision
    from packtrain.train.recorder import Clock
    from packtrain.train.world import World

    Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class SyncedModel:
    """A model whose weights all ranks keep equal; those of `followers`, such as its average, follow them."""

    model: nn.Module
    followers: Sequence[nn.Module]
    world: World
    clock: Clock
    precision: Precision


class DdpSettings(ExchangeKind):
    """Gradients are averaged at every step; `compress` sends them in 16 bits."""

    harmless = frozenset({"compress"})

    compress: Literal["no", "fp16", "bf16"] = "no"

    @property
    def bytes_per_weight(self) -> float:
        return 4.0 if self.compress == "no" else 2.0

    @property
    def lighter(self) -> str:
        return "train.exchange.ddp.compress=bf16" if self.compress == "no" else ""

    def build(self, of: SyncedModel) -> GradientSync:
        if of.world.num_ranks == 1:
            return NoSync(of.model, of.world, of.clock)
        return DdpSync(self, of.model, of.world, of.clock)


INT8_BLOCK = 256  # numbers that share a scale of 32 bits


class LocalSyncSettings(ExchangeKind):
    """Every worker steps by itself; at a fixed interval their changes are averaged and applied with momentum.

    `fragments` of the weights take turns; each is exchanged while `overlap` further steps are made.
    """

    syncs_every_step = False
    harmless = frozenset({"every", "rate", "momentum", "overlap", "compress", "fragments"})

    every: Steps
    rate: Positive = 0.7
    momentum: Fraction = 0.9
    overlap: Steps | None = None
    compress: Literal["no", "bf16", "int8"] = "no"
    fragments: Ordinal = 1

    @property
    def copies(self) -> int:
        # The common weights and their momentum, the weights before the overlap, what rounding took.
        return 2 + (self.overlap is not None) + (self.compress != "no")

    @property
    def bytes_per_weight(self) -> float:
        return {"no": 4.0, "bf16": 2.0, "int8": 1 + 4 / INT8_BLOCK}[self.compress]

    @property
    def interval(self) -> int:
        return int(self.every.value)

    @property
    def pace(self) -> int:
        """The number of steps from the turn of one fragment to that of the next."""
        return self.interval // self.fragments

    @property
    def delay(self) -> int:
        """The number of steps from the start of an exchange to its use."""
        return 0 if self.overlap is None else int(self.overlap.value)

    @property
    def background(self) -> float:
        return self.delay / self.pace

    @property
    def lighter(self) -> str:
        return "train.exchange.local.compress=int8" if self.compress == "no" else ""

    def faults(self) -> Iterator[tuple[Location, str]]:
        if self.interval % self.fragments:
            yield ("fragments",), f"must divide the {self.every} of every"
        elif self.delay >= self.pace:
            steps = "step" if self.pace == 1 else "steps"
            yield ("overlap",), f"must be shorter than the {self.pace} {steps} from one exchange to the next"

    def faults_in(self, train: TrainSettings) -> Iterator[tuple[Location, str]]:
        if train.precision == "fp16":
            yield ("precision",), "fp16 scales the loss of all workers together, not of local steps; use bf16 or fp32"

    def build(self, of: SyncedModel) -> GradientSync:
        return LocalSync(self, of.model, of.world, of.clock)


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

    def build(self, of: SyncedModel) -> GradientSync:
        if of.world.num_ranks == 1:
            return NoSync(of.model, of.world, of.clock)
        return FsdpSync(self, of.model, of.followers, of.world, of.clock, of.precision.dtype)


class GradientSync(ABC):
    """`module` computes the losses; the weights of `model` are those that learn."""

    module: nn.Module
    span_after_backward = "backward"
    """The name of the time between the last gradient and the end of the backward pass."""
    saves_parts = False
    """True if every rank writes its part of a checkpoint; otherwise the first one writes everything."""

    def __init__(self, model: nn.Module, world: World, clock: Clock) -> None:
        self._model, self._world, self._clock = model, world, clock
        self._statistics = _buffers([model])
        self.module = model

    def before_step(self) -> None:
        """Give all ranks the statistics of norms of the first one. Called before the first micro-batch of a step."""
        if self._statistics and self._world.num_ranks > 1:
            self._clock.mark("other")
            self._world.broadcast_all(self._statistics)
            self._clock.mark("communication")

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:  # noqa: ARG002
        """Wrap the forward and backward pass of a micro-batch; gradients are averaged with the last one."""
        return nullcontext()

    def share(self, cost: int, own_cost: int) -> float:  # noqa: ARG002
        """Return the factor on the sum of losses before the backward pass."""
        return self._world.num_ranks / cost

    def is_common(self, steps: int) -> bool:  # noqa: ARG002
        """True if all ranks have weights in common after that many steps, to evaluate and to save."""
        return True

    def common(self) -> Tensors:
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
        return sum(one.numel() * one.element_size() for one in self._model.parameters() if one.requires_grad)

    def sent_bytes(self) -> float:
        """Return how many bytes each rank sends for gradients, or for weights, in one step on average."""
        return self._world.ring_bytes(self.message_bytes)

    def share_buffers(self, *models: nn.Module) -> None:
        """Give all ranks the statistics of norms of the first one, which no gradient carries."""
        self._world.broadcast_all(_buffers(models))

    # For checkpoints.

    def own_states(self, tensors: Mapping[str, Tensor]) -> list[Tensors]:
        """Return the optimizer's state: one if all ranks have the same, else one for each rank. Collective."""
        return [dict(tensors)]

    def own(self) -> Tensors:
        """Return what each rank has to remember for itself."""
        return {}

    def restore_own(self, state: Mapping[str, Tensor]) -> None:
        """Take back what a rank has remembered, after `restore`; the job or the ranks may be others by now."""
        for name, tensor in self.own().items():
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


class DdpSync(GradientSync):
    """Gradients are averaged at every step, while they are computed."""

    span_after_backward = "communication"

    def __init__(self, settings: DdpSettings, model: nn.Module, world: World, clock: Clock) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        from torch.nn.parallel import DistributedDataParallel

        super().__init__(model, world, clock)
        # PyTorch 2.13 gave the option another name and warns of the old one.
        options = inspect.signature(DistributedDataParallel).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers"
        do_not_sync: dict[str, Any] = {name: False}
        on_gpu = world.device.type == "cuda"
        device_ids = [world.device.index] if on_gpu else None
        self._parallel = DistributedDataParallel(
            model,
            device_ids=device_ids,
            gradient_as_bucket_view=True,
            find_unused_parameters=True,  # else the order of summation would change after a process's first step
            **do_not_sync,  # `before_step` does it, where it is not counted as computing
        )
        self.module = self._parallel
        send = {
            "no": default_hooks.allreduce_hook,
            "fp16": default_hooks.fp16_compress_hook,
            "bf16": default_hooks.bf16_compress_hook,
        }[settings.compress]

        def hook(state: None, bucket: Any) -> torch.futures.Future[Tensor]:
            clock.mark("backward")  # gradients were computed until here; after the last one there is only communication
            return send(state, bucket)  # type: ignore[arg-type]

        # To log times, the host would wait for the GPU at every hundredth step.
        self._parallel._set_ddp_runtime_logging_sample_rate(2**31 - 1)
        self._compresses = settings.compress != "no"
        hook.__annotations__.clear()  # torch compares them with types that it does not export
        self._parallel.register_comm_hook(None, hook)

    @property
    def message_bytes(self) -> int:
        return super().message_bytes // 2 if self._compresses else super().message_bytes  # 16 of 32 bits

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else self._parallel.no_sync()


@dataclass(frozen=True)
class PendingExchange:
    """The exchange of some weights, by their numbers; `start` are the rank's own ones if it steps on meanwhile."""

    begun: int
    chosen: tuple[int, ...]
    averaging: Averaging
    start: list[Tensor] | None


class LocalSync(GradientSync):
    """Every rank steps by itself; at intervals the mean of their changes is applied with Nesterov's momentum.

    With an overlap, the changes until step t are averaged during the next steps. What a rank has learned in these is
    then added to the new common weights, and belongs to its next changes: no change is lost, or counted twice. So
    the ranks' own weights are never equal, but the common ones always are: these are evaluated and saved, when no
    exchange is in progress, and each rank's own ones are saved beside them.
    """

    def __init__(self, settings: LocalSyncSettings, model: nn.Module, world: World, clock: Clock) -> None:
        import torch

        from packtrain.train.averaging import ENCODINGS

        super().__init__(model, world, clock)
        self._settings, self._encoding, self._channel = settings, ENCODINGS[settings.compress], world.new_channel()
        learned = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        self._names: list[str] = [name for name, _ in learned]
        self._parameters: list[Tensor] = [parameter for _, parameter in learned]
        # From these every rank measures its own change.
        self._common = [parameter.detach().clone() for parameter in self._parameters]
        self._momentum = [torch.zeros_like(parameter) for parameter in self._common]
        # What rounding took from the messages so far: it is added to the next one.
        self._rounded = [] if self._encoding.exact else [torch.zeros_like(parameter) for parameter in self._common]
        self._fragments = fragments_of([parameter.numel() for parameter in self._parameters], settings.fragments)
        self._pending: PendingExchange | None = None
        if settings.delay:
            # Shares the common weights, and those that do not learn. Not made when it is needed: by then the blocks of
            # the model may be compiled or recomputed, and those of a copy would compute with the original's weights.
            weights = {id(own): own for own in model.parameters()}
            for own, common in zip(self._parameters, self._common, strict=True):
                weights[id(own)] = torch.nn.Parameter(common, requires_grad=False)
            self._common_model: nn.Module = copy.deepcopy(model, weights)

    def before_step(self) -> None:
        """Nothing: ranks keep their own statistics until the next sync."""

    @property
    def message_bytes(self) -> int:
        return math.ceil(sum(one.numel() for one in self._parameters) * self._settings.bytes_per_weight)

    def sent_bytes(self) -> float:
        return super().sent_bytes() / self._settings.interval

    def share(self, cost: int, own_cost: int) -> float:  # noqa: ARG002
        return 1 / max(1, own_cost)

    def is_common(self, steps: int) -> bool:
        """True at the start, and when the last fragment of a round has arrived: then nothing is on its way."""
        every, delay = self._settings.interval, self._settings.delay
        return steps == 0 or (steps >= every and steps % every == delay)

    def steps_since_common(self, step: int) -> int:
        every, delay = self._settings.interval, self._settings.delay
        return step + 1 if step < every + delay else (step - delay) % every + 1

    def common(self) -> Tensors:
        found = {id(parameter): common for parameter, common in zip(self._parameters, self._common, strict=True)}
        named = self._model.named_parameters(remove_duplicate=False)  # a state has tied weights under both names
        return {name: found[id(parameter)] for name, parameter in named if parameter.requires_grad}

    def plain(self, model: nn.Module) -> nn.Module:
        """Return a model with the common weights, not copied, if this rank's own ones are others."""
        if model is not self._model or not self._settings.delay:
            return model
        for own, buffer in zip(self._common_model.buffers(), model.buffers(), strict=True):
            own.copy_(buffer)
        return self._common_model

    def after_update(self, steps: int, last: bool) -> None:
        settings, pending = self._settings, self._pending
        on_turn = (steps // settings.pace - 1) % settings.fragments if steps % settings.pace == 0 else None
        if not last and pending is None and on_turn is None:
            return
        self._clock.mark("optimizer")
        if pending is not None and (last or steps == pending.begun + settings.delay):
            self._apply(pending, settings.momentum, settings.rate)
        elif pending is not None and steps == pending.begun + (settings.delay + 1) // 2:
            pending.averaging.turn()  # as much is sent before as after
        if on_turn is not None:
            self._pending = self._begin(steps, on_turn, at_once=last or not settings.delay)
            if self._pending is not None and self._pending.start is None:
                self._apply(self._pending, settings.momentum, settings.rate)
        if last:
            # Of weights whose turn it is not, the mean is taken as it is: momentum would repeat a step just made.
            for number in range(settings.fragments):
                if number != on_turn and (rest := self._begin(steps, number, at_once=True)) is not None:
                    self._apply(rest, 0.0, 1.0)
        if last or self.is_common(steps):
            # Every rank kept its own norm statistics. Integers are only counters of batches, which have no mean.
            self._world.average_all([one for one in self._statistics if one.is_floating_point()])
        self._clock.mark("communication")

    def _begin(self, steps: int, number: int, at_once: bool) -> PendingExchange | None:
        """Start to average the changes of a fragment; None if there are fewer weights than fragments."""
        import torch

        from packtrain.train.averaging import Averaging

        if not (chosen := self._fragments[number]):
            return None
        with torch.no_grad():
            own = [self._parameters[at].detach() for at in chosen]
            changes = torch._foreach_sub([self._common[at] for at in chosen], own)  # negative, as a gradient would be
            if self._rounded:
                torch._foreach_add_(changes, [self._rounded[at] for at in chosen])
            values = torch.cat([change.flatten() for change in changes])
            start = None if at_once else [one.clone() for one in own]
            return PendingExchange(steps, chosen, Averaging(values, self._encoding, self._world, self._channel), start)

    def _apply(self, pending: PendingExchange, momentum: float, rate: float) -> None:
        import torch

        self._pending = None
        common, own, moving = (
            [tensors[at] for at in pending.chosen] for tensors in (self._common, self._parameters, self._momentum)
        )
        with torch.no_grad():
            mean, rounded = pending.averaging.finish()
            if rounded is not None:
                torch._foreach_copy_([self._rounded[at] for at in pending.chosen], _split_like(rounded, common))
            changes = _split_like(mean, common)
            if momentum:
                # DiLoCo's outer step: SGD with Nesterov momentum, whose gradient is the mean of the ranks' changes.
                torch._foreach_mul_(moving, momentum)
                torch._foreach_add_(moving, changes)
                torch._foreach_add_(changes, moving, alpha=momentum)
            torch._foreach_add_(common, changes, alpha=-rate)
            if pending.start is None:
                torch._foreach_copy_(own, common)
            else:
                torch._foreach_add_(own, torch._foreach_sub(common, pending.start))

    def own_states(self, tensors: Mapping[str, Tensor]) -> list[Tensors]:
        # To main memory as they arrive: the first rank's GPU has no room for the states of all ranks.
        gathered = {name: [row.cpu() for row in self._world.gather_tensor(one)] for name, one in tensors.items()}
        ranks = self._world.num_ranks if self._world.is_first else 0
        return [{name: rows[rank] for name, rows in gathered.items()} for rank in range(ranks)]

    def own(self) -> Tensors:
        weights = self._parameters if self._settings.delay else []
        return {
            f"{kind}/{name}": tensor.detach()
            for kind, tensors in (("weights", weights), ("rounded", self._rounded))
            for name, tensor in zip(self._names, tensors, strict=bool(tensors))
        }

    def state(self) -> Tensors:
        return dict(zip(self._names, self._momentum, strict=True))

    def restore(self, state: Mapping[str, Tensor]) -> None:
        import torch

        if state.keys() != self.state().keys():
            raise CorruptCheckpoint("the checkpoint belongs to a run with another kind of exchange")
        for name, momentum in self.state().items():
            momentum.copy_(state[name])
        torch._foreach_copy_(self._common, [parameter.detach() for parameter in self._parameters])


def fragments_of(sizes: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Divide tensors of these sizes into fragments as equal as they can be: the largest first, each to the smallest."""
    fragments: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for at in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        smallest = filled.index(min(filled))
        fragments[smallest].append(at)
        filled[smallest] += sizes[at]
    return [tuple(sorted(fragment)) for fragment in fragments]


def _split_like(values: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    import torch

    parts = torch.split(values, [one.numel() for one in tensors])
    return [part.view_as(one) for part, one in zip(parts, tensors, strict=True)]


class FsdpSync(GradientSync):
    """Weights, gradients and the optimizer's state are sharded among the ranks, and gathered where needed.

    Only the first rank's model has weights before; those of the others have no memory. Shards are in fp32. Weights are
    gathered in the precision that computes, and gradients are averaged in fp32. Autocast finds the weights in 16 bits
    already: it casts and keeps none of them, but still chooses the precision of each operation, as it does with the
    other kinds of sync.
    """

    saves_parts = True

    def __init__(
        self,
        settings: FsdpSettings,
        model: nn.Module,
        followers: Iterable[nn.Module],
        world: World,
        clock: Clock,
        dtype: torch.dtype,
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        for one in (model, *followers):
            _send_buffers(one, world)
        super().__init__(model, world, clock)
        self._accumulates_shards = not settings.whole_gradients
        self._weight_bytes = dtype.itemsize
        self._outline = _outline(model, dtype)
        mesh = init_device_mesh(world.device.type, (world.num_ranks,))
        for one in (model, *followers):
            _shard(one, world, mesh, dtype)

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
                own = parameter.detach().to(empty.dtype)
                whole = own.full_tensor() if isinstance(own, DTensor) else own
                if whole.stride() != empty.stride():  # channels last, which cannot be sharded
                    whole = torch.empty_like(empty, device=whole.device).copy_(whole)
                filled[id(empty)] = nn.Parameter(whole, requires_grad=False)
            for old, buffer in zip(self._outline.buffers(), model.buffers(), strict=True):
                filled[id(old)] = buffer.clone()
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
    layers = [layer for one in lists for layer in one if layer not in norms]
    for part in (*layers, model):
        _send_weights([part], world)
        fully_shard(part, mesh=mesh, mp_policy=policy)


def _send_weights(modules: Iterable[nn.Module], world: World) -> None:
    """Give all ranks the first one's weights of these modules, where they are not sharded yet, on their devices."""
    import torch
    from torch import nn
    from torch.distributed.tensor import DTensor

    unsent = {one: None for module in modules for one in module.parameters() if not isinstance(one, DTensor)}
    for parameter in unsent:
        if parameter.is_meta:
            whole = nn.Parameter(torch.empty_like(parameter, device=world.device), parameter.requires_grad)
            # In place: a weight may be that of several modules.
            torch.utils.swap_tensors(parameter, whole)
        # Channels last cannot be sharded.
        parameter.data = parameter.data.to(world.device).contiguous()
    world.broadcast_all([parameter.data for parameter in unsent])


def _send_buffers(model: nn.Module, world: World) -> None:
    """Give all ranks the first one's buffers, on their devices."""
    import torch

    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            there = torch.empty_like(buffer, device=world.device) if buffer.is_meta else buffer.to(world.device)
            module._buffers[name] = there
    world.broadcast_all(_buffers([model]))


def _norms(model: nn.Module) -> list[nn.Module]:
    """Return the norm layers, whose weights stay in fp32.

    Batch norms need weights of the type of their statistics, which 16 bits would stop from moving; other norms compute
    in fp32 under autocast and need weights of that type. And weights close to 1 lose most in 16 bits.
    """
    from torch import nn

    kinds = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
    return [one for one in model.modules() if isinstance(one, kinds) and any(True for _ in one.parameters())]


def _outline(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of a model with weights that have no memory, of the types that it computes with."""
    import torch
    from torch import nn

    in_fp32 = {id(parameter) for norm in _norms(model) for parameter in norm.parameters()}
    empty: dict[int, Any] = {}
    for one in model.parameters():
        kind = one.dtype if id(one) in in_fp32 or not one.is_floating_point() else dtype
        empty[id(one)] = nn.Parameter(torch.empty_like(one, dtype=kind, device="meta"), requires_grad=False)
    return copy.deepcopy(model, empty)


def _buffers(models: Iterable[nn.Module]) -> list[Tensor]:
    return [buffer for model in models for buffer in model.buffers()]
