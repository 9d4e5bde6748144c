"""The pictures of a captioned pack, from the smallest copies that will do."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from packtrain.data.images import Crop, ImageBatches, random_crop, resize_into
from packtrain.data.order import Ids
from packtrain.data.pack import Pack
from packtrain.data.tiles import Box, Pixels, decode_crop
from packtrain.pack.tiles import Tiled

_ENLARGED = 1.14  # what is seen of a picture is at most so many times smaller than its copy: few need be made larger


class CaptionedBatches(ImageBatches):
    """What is seen of a picture must be what its captions speak of: nothing is mirrored, and nothing cut off."""

    def random(self, ids: Ids, seed: int, epoch: int, size: int, min_scale: float) -> Pixels:
        """For training: random crops the right way round."""
        return self._batch(
            ids,
            size,
            size,
            lambda row, width, height: random_crop(width, height, min_scale, seed, epoch, row)._replace(flip=False),
        )

    def whole(self, ids: Ids, size: int) -> Pixels:
        """For validation: all of each picture, whatever its shape, pressed into a square."""
        return self._batch(ids, size, size, lambda _, width, height: Crop(Box(0, 0, width, height)))


def whole_of(picture: Tiled) -> Pixels:
    box = Box(0, 0, picture.width, picture.height)
    return decode_crop(picture.jpeg, picture.segments, picture.width, picture.height, box)


def pressed(pixels: Pixels, size: int) -> Pixels:
    """What validation sees of a picture."""
    out = np.empty((size, size, 3), np.uint8)
    resize_into(out, pixels, flip=False)
    return out


class Images:
    """May be used by several threads: training's batches are made by another one than those of an evaluation."""

    def __init__(self, pack: Pack, sizes: tuple[int, ...]) -> None:
        self._pack, self._sizes = pack, sizes
        self._open: dict[str, CaptionedBatches] = {}
        self._opening = threading.Lock()
        self._coming: tuple[ExitStack, Ids] | None = None

    def random(self, ids: Ids, seed: int, epoch: int, size: int, min_scale: float) -> Pixels:
        copy = self._copy("train", size)
        self._fetch(copy)
        return self._batches(copy).random(ids, seed, epoch, size, min_scale)

    def whole(self, split: str, ids: Ids, size: int) -> Pixels:
        return self._batches(self._copy(split, size)).whole(ids, size)

    def _copy(self, split: str, size: int) -> str:
        """The smallest copy of a split that pictures of a size can be cut from without making them larger."""
        enough = [copy for copy in self._sizes if copy >= int(_ENLARGED * size)]
        name = f"{split}@{min(enough)}" if enough else split
        return name if name in self._pack.manifest.splits else split

    def _batches(self, copy: str) -> CaptionedBatches:
        with self._opening:
            if copy not in self._open:
                self._open[copy] = CaptionedBatches(self._pack.split(copy), _threads())
            return self._open[copy]

    @contextmanager
    def fetching(self, ids: Ids) -> Iterator[None]:
        with ExitStack() as stack:
            self._coming = (stack, ids)
            yield

    def _fetch(self, copy: str) -> None:
        """Begins to fetch ahead; which copy an epoch needs, its first batch tells."""
        if self._coming is not None:
            stack, ids = self._coming
            self._coming = None
            split = self._pack.split(copy)
            stack.enter_context(split.prefetched(split.order_of_use(ids)))


def _threads() -> int:
    """This worker's share of the cores: others of the same machine decode as well."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
