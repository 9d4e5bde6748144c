"""What recipes have in common that learn from pictures: every sample counts as one, and all are alike."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Any, Generic

import numpy as np
from numpy.typing import NDArray

from packtrain.data.order import Ids
from packtrain.recipes.copies import Batches, Copies
from packtrain.recipes.recipe import Recipe


class Pictured(Recipe, Generic[Batches]):
    unit = "samples"
    inputs = "images"

    @property
    @abstractmethod
    def copies(self) -> Copies[Batches]:
        """Where the pictures come from."""

    @property
    def costs(self) -> NDArray[np.int64]:
        return np.ones(self.count("train"), np.int64)

    @property
    def likeness(self) -> NDArray[np.int64]:
        return np.zeros(self.count("train"), np.int64)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.costs

    def count(self, split: str) -> int:
        splits = self.pack.manifest.splits
        return splits[split].samples if split in splits else 0

    def batch(self, ids: Ids, epoch: int) -> dict[str, NDArray[Any]]:
        return self.batch_again(ids, epoch, np.zeros(len(ids), np.int64))

    @abstractmethod
    def batch_again(self, ids: Ids, epoch: int, turns: Ids) -> dict[str, NDArray[Any]]:
        """What is seen of a picture is drawn anew in every turn."""

    def fetching(self, ids: Ids, epoch: int) -> AbstractContextManager[None]:
        return self.copies.fetching(ids, self.job.train.in_epoch(epoch).size)
