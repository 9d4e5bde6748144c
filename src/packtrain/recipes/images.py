"""The pictures of a pack, taken from the smallest copies that will do."""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from packtrain.data.images import ImageBatches, center_box, resize_into
from packtrain.data.order import Ids
from packtrain.data.pack import Pack, SplitReader
from packtrain.errors import Mistake, printable
from packtrain.pack.picture import UnusableImage, to_tiled
from packtrain.pack.tiles import Pixels, Tiled, decode_crop
from packtrain.recipes.recipe import Recipe
from packtrain.units import show_bytes

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


# Pictures that a person points at, seen as those of a validation split are.


MOST_BYTES = 500_000_000


def read_picture(path: str, short_side: int | None = None) -> Tiled:
    """The picture in a file as packing would make it ready, or one line that says why not."""
    name = printable(path)
    try:
        file = Path(path)
        if not file.is_file():
            raise Mistake(f"{name}: {'is not a file' if file.exists() else 'no such file'}")
        size = file.stat().st_size
        if size > MOST_BYTES:
            raise Mistake(f"{name}: {show_bytes(size)} are more than the {show_bytes(MOST_BYTES)} of any picture")
        return to_tiled(file.read_bytes(), short_side)
    except UnusableImage as error:
        raise Mistake(f"{name}: {error.reason}; a picture is a JPEG, PNG, WebP, GIF, BMP or TIFF file") from error
    except OSError as error:
        raise Mistake(f"{name}: cannot be read: {error.strerror}") from None


def middle_of(picture: Tiled, height: int, width: int) -> Pixels:
    """What validation sees of a picture: its middle, uint8 [height, width, RGB]."""
    box = center_box(picture.width, picture.height, width, height)
    out = np.empty((height, width, 3), np.uint8)
    resize_into(out, decode_crop(picture.jpeg, picture.segments, picture.width, picture.height, box), flip=False)
    return out


# What recipes have in common that learn from pictures: every sample counts as one, and all are alike.


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

    def fetching(self, ids: Ids, epoch: int) -> AbstractContextManager[None]:
        return self.copies.fetching(ids, self.job.train.in_epoch(epoch).size)
