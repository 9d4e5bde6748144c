"""The exchange `local`: every worker steps by itself, and at intervals the workers average what they have learned."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from packtrain.job.job import TrainSettings
from packtrain.job.kinds import ExchangeKind
from packtrain.job.part import Fraction, Location, Ordinal, Positive, Steps
from packtrain.run.checkpoint import CorruptCheckpoint
from packtrain.train.gradient_sync import GradientSync, SyncedModel

if TYPE_CHECKING:
    from torch import Tensor, nn

    from packtrain.train.averaging import Averaging
    from packtrain.train.gradient_sync import Tensors

INT8_BLOCK = 256  # numbers that share a scale of 32 bits


class LocalStepsSettings(ExchangeKind):
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
    def weight_copies(self) -> int:
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

    def build(self, synced: SyncedModel) -> GradientSync:
        return LocalStepsSync(self, synced)


@dataclass(frozen=True)
class PendingExchange:
    """The exchange of some weights, by their numbers; `start` are the rank's own ones if it steps on meanwhile."""

    begun: int
    chosen: tuple[int, ...]
    averaging: Averaging
    start: list[Tensor] | None


class LocalStepsSync(GradientSync):
    """Every rank steps by itself; at intervals the mean of their changes is applied with Nesterov's momentum.

    With an overlap, the changes until step t are averaged during the next steps. What a rank has learned in these is
    then added to the new common weights, and belongs to its next changes: no change is lost, or counted twice. So
    the ranks' own weights are never equal, but the common ones always are: these are evaluated and saved, when no
    exchange is in progress, and each rank's own ones are saved beside them.
    """

    def __init__(self, settings: LocalStepsSettings, synced: SyncedModel) -> None:
        import torch

        from packtrain.train.averaging import ENCODINGS

        super().__init__(synced)
        self._settings, self._encoding = settings, ENCODINGS[settings.compress]
        self._channel = synced.world.new_channel()
        learned = {name: weight for name, weight in synced.model.named_parameters() if weight.requires_grad}
        self._names: list[str] = list(learned)
        self._parameters: list[Tensor] = list(learned.values())
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
            weights = {id(weight): weight for weight in synced.model.parameters()}
            for weight, common in zip(self._parameters, self._common, strict=True):
                weights[id(weight)] = torch.nn.Parameter(common, requires_grad=False)
            self._common_model: nn.Module = copy.deepcopy(synced.model, weights)

    def before_step(self) -> None:
        """Nothing: ranks keep their own statistics until the next sync."""

    @property
    def message_bytes(self) -> int:
        return math.ceil(sum(weight.numel() for weight in self._parameters) * self._settings.bytes_per_weight)

    def sent_bytes(self) -> float:
        return super().sent_bytes() / self._settings.interval

    def loss_factor(self, cost: int, rank_cost: int) -> float:  # noqa: ARG002
        return 1 / max(1, rank_cost)

    def is_common(self, steps: int) -> bool:
        """True at the start, and when the last fragment of a round has arrived: then nothing is on its way."""
        every, delay = self._settings.interval, self._settings.delay
        return steps == 0 or (steps >= every and steps % every == delay)

    def steps_since_common(self, step: int) -> int:
        every, delay = self._settings.interval, self._settings.delay
        return step + 1 if step < every + delay else (step - delay) % every + 1

    def common_weights(self) -> Tensors:
        common_of = {id(parameter): common for parameter, common in zip(self._parameters, self._common, strict=True)}
        named = self._model.named_parameters(remove_duplicate=False)  # a state has tied weights under both names
        return {name: common_of[id(parameter)] for name, parameter in named if parameter.requires_grad}

    def plain(self, model: nn.Module) -> nn.Module:
        """Return a model with the common weights, not copied, if this rank's own ones are others."""
        if model is not self._model or not self._settings.delay:
            return model
        for common_buffer, buffer in zip(self._common_model.buffers(), model.buffers(), strict=True):
            common_buffer.copy_(buffer)
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
                if number != on_turn and (exchange := self._begin(steps, number, at_once=True)) is not None:
                    self._apply(exchange, 0.0, 1.0)
        if last or self.is_common(steps):
            # Every rank kept its own norm statistics. Integers are only counters of batches, which have no mean.
            self._world.average_all([buffer for buffer in self._statistics if buffer.is_floating_point()])
        self._clock.mark("communication")

    def _begin(self, steps: int, number: int, at_once: bool) -> PendingExchange | None:
        """Start to average the changes of a fragment; None if there are fewer weights than fragments."""
        import torch

        from packtrain.train.averaging import Averaging

        if not (chosen := self._fragments[number]):
            return None
        with torch.no_grad():
            weights = [self._parameters[at].detach() for at in chosen]
            changes = torch._foreach_sub(
                [self._common[at] for at in chosen], weights
            )  # negative, as a gradient would be
            if self._rounded:
                torch._foreach_add_(changes, [self._rounded[at] for at in chosen])
            values = torch.cat([change.flatten() for change in changes])
            start = None if at_once else [weight.clone() for weight in weights]
            return PendingExchange(steps, chosen, Averaging(values, self._encoding, self._world, self._channel), start)

    def _apply(self, pending: PendingExchange, momentum: float, rate: float) -> None:
        import torch

        self._pending = None
        common, weights, velocities = (
            [tensors[at] for at in pending.chosen] for tensors in (self._common, self._parameters, self._momentum)
        )
        with torch.no_grad():
            mean, rounded = pending.averaging.finish()
            if rounded is not None:
                torch._foreach_copy_([self._rounded[at] for at in pending.chosen], _split_like(rounded, common))
            changes = _split_like(mean, common)
            if momentum:
                # DiLoCo's outer step: SGD with Nesterov momentum, whose gradient is the mean of the ranks' changes.
                torch._foreach_mul_(velocities, momentum)
                torch._foreach_add_(velocities, changes)
                torch._foreach_add_(changes, velocities, alpha=momentum)
            torch._foreach_add_(common, changes, alpha=-rate)
            if pending.start is None:
                torch._foreach_copy_(weights, common)
            else:
                torch._foreach_add_(weights, torch._foreach_sub(common, pending.start))

    def states_of_ranks(self, tensors: Mapping[str, Tensor]) -> list[Tensors]:
        # To main memory as they arrive: the first rank's GPU has no room for the states of all ranks.
        gathered = {name: [row.cpu() for row in self._world.gather_tensor(tensor)] for name, tensor in tensors.items()}
        ranks = self._world.num_ranks if self._world.is_first else 0
        return [{name: rows[rank] for name, rows in gathered.items()} for rank in range(ranks)]

    def rank_state(self) -> Tensors:
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

    vectors = torch.split(values, [tensor.numel() for tensor in tensors])
    return [vector.view_as(tensor) for vector, tensor in zip(vectors, tensors, strict=True)]
