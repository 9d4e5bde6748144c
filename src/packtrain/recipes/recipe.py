"""What a recipe is: data, model, loss, measures and predictions of one kind of learning.

Importing a recipe does not import torch, so that the client can check a job; the methods that train do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from packtrain.data.order import Ids, block
from packtrain.data.pack import Pack
from packtrain.job.job import Job
from packtrain.pack.manifest import Kind
from packtrain.run.records import Sample

if TYPE_CHECKING:
    from torch import Tensor, nn

Batch = dict[str, "Tensor"]


@dataclass(frozen=True, eq=False)
class EvaluationRequest:
    """One worker's part of an evaluation; both lists of ids may be empty.

    `ids` are the samples whose loss counts, `decode_ids` those that need a free output. `epoch` is the epoch training
    is in, for settings that change with it. Call `on_batch` before every batch: it may raise to end the evaluation.
    """

    split: str
    ids: Ids
    decode_ids: Ids
    beam: int = 1
    epoch: int = 0
    on_batch: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Measurement:
    """One worker's result of an evaluation: sums that add up over workers, and the outputs it decoded."""

    sums: dict[str, float]
    outputs: list[str]


@dataclass(frozen=True)
class Scores:
    """A split's scores; `signatures` say how those were computed that can be computed in many ways."""

    values: dict[str, float]
    signatures: dict[str, str] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()


@dataclass(frozen=True)
class Decoding:
    """How outputs are searched for. With `nucleus` they are drawn from the likeliest that make up that share.

    `repetition` above 1 makes what was written before less likely; no row of `no_repeat` tokens is written twice.
    """

    beam: int = 4
    nucleus: float | None = None
    temperature: float = 1.0
    repetition: float = 1.0
    no_repeat: int = 0
    seed: int = 1


@dataclass(frozen=True)
class Prediction:
    """What the model says to one input: in words, as values for scripts, and perhaps as a picture (PNG).

    `note` is what a person should know of it, such as that a part of the input was not read.
    """

    text: str
    details: dict[str, Any] = field(default_factory=dict)
    picture: bytes | None = None
    note: str = ""


class Recipe(ABC):
    """One kind of learning, built for a job and its pack.

    A sample's cost is what it takes of the batch (its target tokens, or 1 for an image); the loss is a
    sum over exactly that many things, so that its mean does not depend on how a batch is divided.
    """

    defaults: ClassVar[Mapping[str, object]]
    """A fragment of a job file that lies under the person's own."""
    unit: ClassVar[str]
    """What batches are counted in: tokens or samples."""
    contents: ClassVar[frozenset[str]]
    """The contents of raw data that it can learn from: pairs, turns, labels or captions."""
    kind: ClassVar[Kind]
    """The kind of pack it learns from."""
    measure_of_best: ClassVar[str]
    """The score that decides which checkpoint is the best."""
    lower_is_better: ClassVar[frozenset[str]] = frozenset({"loss", "perplexity"})
    """The scores of which less is better; of all others, more."""

    inputs: ClassVar[Literal["texts", "images"]] = "texts"
    """What predictions are made of: texts, or the paths of images."""
    files: ClassVar[Sequence[str]] = ()
    """Options of the model that name files; a run takes them along, and `pack.given_file` has them then."""
    decoding: ClassVar[Decoding] = Decoding()
    """How predictions are searched for where the person does not say."""
    heeds: ClassVar[frozenset[str]] = frozenset({"beam", "nucleus", "temperature", "repetition", "seed"})
    """What of a person's wishes for the search it goes by; others are refused."""
    converses: ClassVar[bool] = False
    """Whether it can answer in a conversation."""

    def __init__(self, job: Job, pack: Pack) -> None:
        self.job, self.pack = job, pack

    @classmethod
    @abstractmethod
    def check(cls, job: Job) -> None:
        """Raises Mistake for what this recipe cannot do."""

    @property
    def notes(self) -> Sequence[str]:
        """What a person should know of how the data is used, such as how much of it the model does not see."""
        return ()

    @property
    @abstractmethod
    def costs(self) -> NDArray[np.int64]:
        """What each training sample takes of the batch."""

    @property
    @abstractmethod
    def likeness(self) -> NDArray[np.int64]:
        """Samples that stand together when sorted by this fit into one batch with little padding."""

    @property
    @abstractmethod
    def lengths(self) -> NDArray[np.int64]:
        """The positions that each training sample takes when it is padded: what bounds the memory of a batch."""

    @property
    @abstractmethod
    def width(self) -> int:
        """The model's width, which some schedules go by."""

    @abstractmethod
    def batch(self, ids: Ids, epoch: int, repeats: Ids | None = None) -> dict[str, NDArray[Any]]:
        """Return the training samples `ids`, stacked, as this epoch shows them.

        `repeats` says how often each sample came before in the epoch, which happens when its source has a weight above
        1; None means never. Random draws should depend on (seed, epoch, sample, repeat) alone.
        """

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model with random weights: also where those of a checkpoint take their place."""

    def first_weights(self, model: nn.Module) -> Mapping[str, Tensor]:  # noqa: ARG002
        """Tensors of the model's state that are not random when a run begins, the same on every rank.

        Asked for only where there is no checkpoint to go on from: what they are read from may be gone by then.
        """
        return {}

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss summed over the batch."""

    @abstractmethod
    def count(self, split: str) -> int:
        """How many samples a split has."""

    def divide(self, split: str, num_ranks: int) -> list[Ids]:
        """The samples of a split that each worker measures: all of them, none twice."""
        ids = np.arange(self.count(split))
        return [ids[list(block(len(ids), rank, num_ranks))] for rank in range(num_ranks)]

    @abstractmethod
    def measure(self, model: nn.Module, request: EvaluationRequest) -> Measurement:
        """Compute one worker's part of an evaluation: the loss on some samples, free outputs for others."""

    @abstractmethod
    def score(self, split: str, decode_ids: Ids, parts: Sequence[Measurement]) -> Scores:
        """Combine the parts of all workers; their outputs, in order, belong to `decode_ids`. Runs on rank 0."""

    def prepare(self, epoch: int, model: nn.Module) -> None:  # noqa: B027 - most recipes have nothing to do
        """Called before the first step of every epoch, and when a run goes on within one: to freeze parts, say."""

    def fetching(self, ids: Ids, epoch: int) -> AbstractContextManager[None]:  # noqa: ARG002
        """Inside, an epoch's training samples are used in this order: what holds them may be fetched ahead."""
        return nullcontext()

    @abstractmethod
    def predict(self, model: nn.Module, inputs: Sequence[str], decoding: Decoding) -> list[Prediction]: ...

    def converse(self, model: nn.Module, turns: Sequence[str], decoding: Decoding) -> Prediction:
        """What the model says after the turns of a conversation, the last of which is the person's."""
        raise NotImplementedError(f"{type(self).__name__} does not converse")
