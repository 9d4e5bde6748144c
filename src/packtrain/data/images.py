"""Batches of images: the crop of each, and its pixels.

A crop is a function of the seed, the epoch, the number of the image and how many times it came before in the epoch; the
numbers of threads and ranks change nothing. Batches are uint8 [N, height, width, RGB]: they are normalized on the
device, where a view with the channels in front (permute, no copy) is the input of a model in channels-last format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from packtrain.data.order import Ids, Stream, philox_rows
from packtrain.data.pack import SplitReader
from packtrain.data.threads import has_torch, single_threaded_pool
from packtrain.errors import PacktrainError
from packtrain.pack.tiles import Box, Pixels, decode_crop
from packtrain.system import usable_cores

if TYPE_CHECKING:
    from torch import Tensor

# Per thread, twice: enough for two megapixels. Memory for larger images is allocated each time.
_SCRATCH_BYTES = 6 << 20
_TRIES = 10
_WORDS_PER_TRY = 4  # random words: area, aspect ratio, left, top
BOX_WORDS = _TRIES * _WORDS_PER_TRY
"""Random words that a random box takes."""
_NARROWEST, _WIDEST = 3 / 4, 4 / 3
_ZOOM = 1.14  # validation crops the center, as if the image were resized to 1.14 x the size before
_ROUND = 8  # pixels: sides of rectangular batches are multiples of it
_LONGEST = 3  # x the short side, so that one panorama does not make a batch of thousands of pixels


class Crop(NamedTuple):
    """The part of an image that is used, perhaps mirrored."""

    box: Box
    flip: bool = False


CropOf = Callable[[int, int, int], Crop]  # given the place in the batch, width and height of an image
Change = Callable[[int, Pixels], None]  # given the place in the batch, changes the pixels of an image that is cropped


@dataclass(frozen=True, eq=False)
class RectangularBatch:
    """Images of similar shape, and the size in pixels to which all are resized."""

    ids: Ids
    height: int
    width: int


def fractions(words: Sequence[int]) -> list[float]:
    """Return random words as numbers from 0 to less than 1."""
    return [(word >> 11) * 2.0**-53 for word in words]


def random_box(
    width: int, height: int, areas: tuple[float, float], ratios: tuple[float, float], words: Sequence[int]
) -> Box | None:
    """Return a box with a share of the area and a ratio of its sides within limits; None if ten tries do not fit."""
    for at in range(0, BOX_WORDS, _WORDS_PER_TRY):
        scale, shape, across, down = fractions(words[at : at + _WORDS_PER_TRY])
        area = width * height * (areas[0] + (areas[1] - areas[0]) * scale)
        ratio = ratios[0] * (ratios[1] / ratios[0]) ** shape
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            left, top = int(across * (width - box_width + 1)), int(down * (height - box_height + 1))
            return Box(left, top, box_width, box_height)
    return None


def random_crop_box(width: int, height: int, min_scale: float, words: Sequence[int]) -> Box:
    """Return a box of `min_scale` to all of the area and a ratio of 3/4 to 4/3; the center if ten tries do not fit.

    This is torchvision's random resized crop, from 40 random words of 64 bits.
    """
    if box := random_box(width, height, (min_scale, 1), (_NARROWEST, _WIDEST), words):
        return box
    box_width = min(width, max(1, round(height * _WIDEST)))
    box_height = min(height, max(1, round(width / _NARROWEST)))
    return _centered(width, height, box_width, box_height)


def random_crops(ids: Ids, min_scale: float, seed: int, epoch: int, repeats: Ids | None) -> CropOf:
    """Return the crops of a batch in an epoch of training; without `repeats`, all samples are at their first turn."""
    turns = np.zeros_like(ids) if repeats is None else repeats
    rows = philox_rows(1 + BOX_WORDS, seed, turns, epoch, ids, Stream.AUGMENTATION)

    def crop_of(at: int, width: int, height: int) -> Crop:
        flip, *words = rows[at].tolist()
        return Crop(random_crop_box(width, height, min_scale, words), flip=bool(flip >> 63))

    return crop_of


def center_box(width: int, height: int, out_width: int, out_height: int) -> Box:
    """Return the box that remains of an image resized to 1.14 x the short side of the output, then cropped."""
    scale = min(
        min(width, height) / int(_ZOOM * min(out_width, out_height)),
        width / out_width,  # if the output is longer than the image: the full length, and less of the other side
        height / out_height,
    )
    box_width, box_height = (max(1, round(side * scale)) for side in (out_width, out_height))
    return _centered(width, height, min(width, box_width), min(height, box_height))


def _centered(width: int, height: int, box_width: int, box_height: int) -> Box:
    return Box((width - box_width) // 2, (height - box_height) // 2, box_width, box_height)


def rectangular_plan(widths: NDArray[Any], heights: NDArray[Any], size: int, batch: int) -> list[RectangularBatch]:
    """Return batches of images sorted by shape, each with the mean ratio of its images and a short side of `size`.

    Sides are rounded down to multiples of 8, and the long one is at most three times the short one.
    """
    ratios = np.clip(np.asarray(widths, np.float64) / heights, 1 / _LONGEST, _LONGEST)
    by_shape = np.argsort(ratios, kind="stable")
    batches = []
    for start in range(0, len(by_shape), batch):
        ids = by_shape[start : start + batch]
        ratio = float(ratios[ids].mean())
        stretches = max(1.0, ratio), max(1.0, 1 / ratio)  # width and height as multiples of the short side
        width, height = (max(_ROUND, int(size * stretch + 1e-6) // _ROUND * _ROUND) for stretch in stretches)
        batches.append(RectangularBatch(ids, height, width))
    return batches


def resize_into(out: Pixels, pixels: Pixels, flip: bool, scratch: Pixels | None = None) -> None:
    """Resize `pixels` into `out`, which is contiguous, bilinear and antialiased. Both are [height, width, RGB].

    With torch where it is loaded, which it is wherever a model trains; else with Pillow, whose result differs by at
    most 1 of 255 and takes up to seven times as long.
    """
    if not has_torch():
        resized = resize(pixels, *out.shape[:2])
        out[:] = resized[:, ::-1] if flip else resized
        return
    import torch
    from torch.nn.functional import interpolate

    # A crop is a view with gaps between rows. Copying it into reused memory is faster than letting torch allocate.
    if scratch is None or len(scratch) < pixels.size:
        scratch = np.empty(pixels.size, np.uint8)
    scratch[: pixels.size].reshape(pixels.shape)[:] = pixels
    source = _channels_first(torch.from_numpy(scratch), *pixels.shape[:2])
    resized_tensor = interpolate(source, size=out.shape[:2], mode="bilinear", antialias=True)
    _channels_first(torch.from_numpy(out), *out.shape[:2]).copy_(resized_tensor.flip(3) if flip else resized_tensor)


def _channels_first(memory: Tensor, height: int, width: int) -> Tensor:
    """Return the start of `memory`, which has [height, width, RGB], as one image in channels-last format."""
    return memory.as_strided((1, 3, height, width), (3 * height * width, 1, 3 * width, 3))


def resize(pixels: Pixels, height: int, width: int) -> Pixels:
    """Return `pixels` resized by Pillow: the same with and without torch."""
    if pixels.shape[:2] == (height, width):
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR))


class ImageBatches:
    """Makes batches in its own threads, which run in parallel: decoding and resizing release the GIL."""

    def __init__(self, split: SplitReader, threads: int | None = None) -> None:
        self._split = split
        self._threads = threads or usable_cores()
        self._pool = single_threaded_pool(self._threads)

    def random(
        self, ids: Ids, seed: int, epoch: int, size: int, min_scale: float, repeats: Ids | None = None
    ) -> Pixels:
        """Return random resized crops of size x size, half of them mirrored, for training."""
        return self._batch(ids, size, size, random_crops(ids, min_scale, seed, epoch, repeats))

    def centered(self, ids: Ids, height: int, width: int) -> Pixels:
        """Return the center of each image, for validation. The size is square, or that of a RectangularBatch."""
        return self._batch(
            ids, height, width, lambda _, own_width, own_height: Crop(center_box(own_width, own_height, width, height))
        )

    def full(self, row: int) -> Pixels:
        """Return a whole image in its own size, to be shown."""
        return self._read(0, row, lambda _, width, height: Crop(Box(0, 0, width, height)))[1]

    def _batch(self, ids: Ids, height: int, width: int, crop_of: CropOf, change: Change | None = None) -> Pixels:
        out = np.empty((len(ids), height, width, 3), np.uint8)
        # Shared by all threads: each takes the next image, so that none waits for a slow one.
        queue = iter(enumerate(ids.tolist()))
        for filled in [self._pool.submit(self._fill, out, queue, crop_of, change) for _ in range(self._threads)]:
            filled.result()
        return out

    def _fill(self, out: Pixels, queue: Iterator[tuple[int, int]], crop_of: CropOf, change: Change | None) -> None:
        decoded, closed = np.empty(_SCRATCH_BYTES, np.uint8), np.empty(_SCRATCH_BYTES, np.uint8)
        for at, row in queue:
            crop, pixels = self._read(at, row, crop_of, decoded)
            resize_into(out[at], pixels, crop.flip, closed)
            if change is not None:
                change(at, out[at])

    def _read(self, at: int, row: int, crop_of: CropOf, scratch: Pixels | None = None) -> tuple[Crop, Pixels]:
        """Return the crop of an image; a shard that is damaged on this machine is fetched again."""
        try:
            return self._decoded(at, row, crop_of, scratch)
        except (PacktrainError, ValueError):
            self._split.reopen(row)
        try:
            return self._decoded(at, row, crop_of, scratch)
        except (PacktrainError, ValueError) as error:
            raise PacktrainError(f"image {row} of the pack is damaged ({error}); pack the data again") from error

    def _decoded(self, at: int, row: int, crop_of: CropOf, scratch: Pixels | None) -> tuple[Crop, Pixels]:
        shard, place = self._split.at(row)
        width, height = int(shard.plain["width"][place]), int(shard.plain["height"][place])
        crop = crop_of(at, width, height)
        jpeg, segments = shard.ragged["jpeg"][place], shard.ragged["segments"][place]
        return crop, decode_crop(jpeg, segments, width, height, crop.box, scratch)

    def close(self) -> None:
        self._pool.shutdown()

    def __enter__(self) -> ImageBatches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
