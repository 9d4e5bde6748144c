"""What a recipe is: data, model, loss, measures and predictions of one kind of learning.

Importing a recipe does not import torch, so that the client can check a job; the methods that train do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from packtrain.data.order import Ids
from packtrain.data.pack import Pack
from packtrain.job import Job
from packtrain.pack.manifest import Kind
from packtrain.runs import Sample

if TYPE_CHECKING:
    from torch import Tensor, nn

Batch = dict[str, "Tensor"]


@dataclass(frozen=True)
class Measured:
    """What one worker found on its part of a split: sums to be added up, and the outputs it decoded."""

    sums: dict[str, float]
    outputs: list[str]


@dataclass(frozen=True)
class Scores:
    """A split's scores; `signatures` say how those were computed that can be computed in many ways."""

    values: dict[str, float]
    signatures: dict[str, str] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()


class Recipe(ABC):
    """One kind of learning, built for a job and its pack.

    A sample's cost is what it takes of the batch (its target tokens, or 1 for an image); the loss is a
    sum over exactly that many things, so that its mean does not depend on how a batch is divided.
    """

    defaults: ClassVar[Mapping[str, object]]
    """A fragment of a job file that lies under the person's own."""
    unit: ClassVar[str]
    """What batches are counted in: tokens or samples."""
    sources: ClassVar[frozenset[str]]
    """The raw formats it can learn from."""
    kind: ClassVar[Kind]
    """The kind of pack it learns from."""
    measure_of_best: ClassVar[str]
    """The score that decides which checkpoint is the best: more is better."""

    def __init__(self, job: Job, pack: Pack) -> None:
        self.job, self.pack = job, pack

    @classmethod
    @abstractmethod
    def check(cls, job: Job) -> None:
        """Raises Mistake for what this recipe cannot do."""

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
    def batch(self, ids: Ids) -> dict[str, NDArray[Any]]:
        """The training samples `ids` side by side."""

    @abstractmethod
    def build_model(self) -> nn.Module: ...

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss summed over the batch."""

    @abstractmethod
    def count(self, split: str) -> int:
        """How many samples a split has."""

    @abstractmethod
    def measure(self, model: nn.Module, split: str, ids: Ids, decoded: Ids, beam: int) -> Measured:
        """The loss on `ids` and free outputs for `decoded`: one worker's part of an evaluation."""

    @abstractmethod
    def score(self, split: str, decoded: Ids, parts: Sequence[Measured]) -> Scores:
        """All parts together; their outputs, in order, are those of `decoded`."""

    @abstractmethod
    def predict(self, model: nn.Module, inputs: Sequence[str], beam: int) -> list[str]: ...
