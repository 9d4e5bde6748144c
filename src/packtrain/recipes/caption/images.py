"""The pictures of a captioned pack, from the smallest copies that will do."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from packtrain.data.images import ImageBatches, random_crop
from packtrain.data.order import Ids
from packtrain.data.pack import Pack
from packtrain.data.tiles import Pixels

_ENLARGED = 1.14  # what is seen of a picture is at most so many times smaller than its copy: none need be made larger


class _Unmirrored(ImageBatches):
    def random(self, ids: Ids, seed: int, epoch: int, size: int, min_scale: float) -> Pixels:
        """Random crops the right way round: what is on the left of a mirrored picture its caption has on the right."""
        return self._batch(
            ids,
            size,
            size,
            lambda row, width, height: random_crop(width, height, min_scale, seed, epoch, row)._replace(flip=False),
        )


class Images:
    """May be used by several threads: training's batches are made by another one than those of an evaluation."""

    def __init__(self, pack: Pack, sizes: tuple[int, ...]) -> None:
        self._pack, self._sizes = pack, sizes
        self._open: dict[str, ImageBatches] = {}
        self._opening = threading.Lock()
        self._coming: tuple[ExitStack, Ids] | None = None

    def random(self, ids: Ids, seed: int, epoch: int, size: int, min_scale: float) -> Pixels:
        copy = self._copy("train", size)
        self._fetch(copy)
        return self._batches(copy).random(ids, seed, epoch, size, min_scale)

    def centred(self, split: str, ids: Ids, size: int) -> Pixels:
        return self._batches(self._copy(split, size)).centred(ids, size, size)

    def _copy(self, split: str, size: int) -> str:
        """The smallest copy of a split that pictures of a size can be cut from without making them larger."""
        enough = [copy for copy in self._sizes if copy >= int(_ENLARGED * size)]
        name = f"{split}@{min(enough)}" if enough else split
        return name if name in self._pack.manifest.splits else split

    def _batches(self, copy: str) -> ImageBatches:
        with self._opening:
            if copy not in self._open:
                self._open[copy] = _Unmirrored(self._pack.split(copy), _threads())
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
