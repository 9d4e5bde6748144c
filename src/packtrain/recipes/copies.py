"""The pictures of a pack, taken from the smallest copies that will do."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

from packtrain.data.images import ImageBatches
from packtrain.data.order import Ids
from packtrain.data.pack import Pack
from packtrain.data.split import SplitReader

_ZOOM = 1.14  # as in data.images: a copy that has so many times the size is seen without being made larger

Batches = TypeVar("Batches", bound=ImageBatches)


class Copies(Generic[Batches]):
    """May be used by several threads: training's batches are made by another one than those of an evaluation."""

    def __init__(self, pack: Pack, sizes: Sequence[int], make: Callable[[SplitReader, int], Batches]) -> None:
        self._pack, self._sizes, self._make = pack, sizes, make
        self._open: dict[str, Batches] = {}
        self._opening = threading.Lock()

    def short_side(self, size: int) -> int | None:
        """Of the copies that pictures of a size are taken from; None: of the originals."""
        return min((copy for copy in self._sizes if copy >= int(_ZOOM * size)), default=None)

    def reader(self, split: str, size: int) -> SplitReader:
        return self._pack.split(self._name(split, size))

    def batches(self, split: str, size: int) -> Batches:
        name = self._name(split, size)
        with self._opening:
            if name not in self._open:
                self._open[name] = self._make(self._pack.split(name), _threads())
            return self._open[name]

    def fetching(self, ids: Ids, size: int) -> AbstractContextManager[None]:
        """Inside, training samples are used in this order at this size."""
        reader = self.reader("train", size)
        return reader.prefetched(reader.order_of_use(ids))

    def _name(self, split: str, size: int) -> str:
        short_side = self.short_side(size)
        name = split if short_side is None else f"{split}@{short_side}"
        return name if name in self._pack.manifest.splits else split


def _threads() -> int:
    """Workers of one machine share its cores: each is told how many are its own."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, int(told)) if told.isdecimal() else len(os.sched_getaffinity(0))
