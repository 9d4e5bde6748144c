"""Augmentation of training images beyond the crop: RandAugment, random erasing, mixup and cutmix.

What is drawn for an image is a function of the seed, the epoch, its number and how many times it came before in the
epoch, as its crop is. Mixup and cutmix mix pairs: neighbors in the global batch, which no number of workers separates
(`group` in data.order). So both images of a pair are decoded once, and every number of workers sees the same batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps

from packtrain.data.images import BOX_WORDS, ImageBatches, fractions, random_box, random_crops
from packtrain.data.order import Ids, Stream, philox_words
from packtrain.data.pack import SplitReader
from packtrain.job.job import AugmentSettings, RandAugmentSettings
from packtrain.pack.tiles import Box, Pixels

PAIR = 2
"""Images that are mixed with each other."""
_FILL = (124, 116, 104)  # the mean color of ImageNet, which normalization makes zero
_STRONGEST = 30  # the magnitude that uses the whole range of each operation
_ERASED_AREAS = 0.02, 1 / 3
_ERASED_RATIOS = 0.3, 1 / 0.3
_LEVELS = 256  # of the weight in mixup: pixels are blended in integers, and classes by exactly the same weight

Operation = Callable[[Image.Image, float], Image.Image]
"""Changes an image by a strength from -1 to 1; operations without a direction use its absolute value."""


# RandAugment.


def _affine(image: Image.Image, *matrix: float) -> Image.Image:
    # Nearest neighbor, as in torchvision: a tenth of the time of bilinear.
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST, fillcolor=_FILL)


OPERATIONS: Mapping[str, Operation] = {
    "identity": lambda image, _: image,
    "autocontrast": lambda image, _: ImageOps.autocontrast(image),
    "equalize": lambda image, _: ImageOps.equalize(image),
    "posterize": lambda image, strength: ImageOps.posterize(image, 8 - round(4 * abs(strength))),
    "solarize": lambda image, strength: ImageOps.solarize(image, round(256 * (1 - abs(strength)))),
    "color": lambda image, strength: ImageEnhance.Color(image).enhance(1 + 0.9 * strength),
    "contrast": lambda image, strength: ImageEnhance.Contrast(image).enhance(1 + 0.9 * strength),
    "brightness": lambda image, strength: ImageEnhance.Brightness(image).enhance(1 + 0.9 * strength),
    "sharpness": lambda image, strength: ImageEnhance.Sharpness(image).enhance(1 + 0.9 * strength),
    "rotate": lambda image, strength: image.rotate(30 * strength, Image.Resampling.NEAREST, fillcolor=_FILL),
    "shear_x": lambda image, strength: _affine(image, 1, 0.3 * strength, -0.3 * strength * image.height / 2, 0, 1, 0),
    "shear_y": lambda image, strength: _affine(image, 1, 0, 0, 0.3 * strength, 1, -0.3 * strength * image.width / 2),
    "translate_x": lambda image, strength: _affine(image, 1, 0, 0.45 * strength * image.width, 0, 1, 0),
    "translate_y": lambda image, strength: _affine(image, 1, 0, 0, 0, 1, 0.45 * strength * image.height),
}
"""RandAugment's operations, with the ranges of its authors."""


def randaugment(pixels: Pixels, settings: RandAugmentSettings, words: Sequence[int]) -> None:
    """Change an image by random operations, one after the other; each takes two words, the second one for its sign."""
    image, names = Image.fromarray(pixels), list(OPERATIONS)
    for choice, sign in zip(fractions(words[::2]), words[1::2], strict=True):
        strength = settings.magnitude / _STRONGEST * (1 if sign >> 63 else -1)
        image = OPERATIONS[names[int(choice * len(names))]](image, strength)
    pixels[:] = np.asarray(image)


# Random erasing.


def erase(pixels: Pixels, chance: float, seed: int, epoch: int, sample: int, turn: int = 0) -> None:
    """Replace a random box of an image by noise, with that chance: 2 to 33% of the area, a ratio of 3:10 to 10:3."""

    def drawn(count: int) -> NDArray[np.uint64]:
        return philox_words(count, seed, epoch, sample, Stream.ERASING, turn=turn)

    first, *words = drawn(1 + BOX_WORDS).tolist()
    height, width, colors = pixels.shape
    box = random_box(width, height, _ERASED_AREAS, _ERASED_RATIOS, words)
    if fractions([first])[0] >= chance or box is None:
        return
    count = box.width * box.height * colors
    noise = drawn(1 + BOX_WORDS + -(-count // 8))[1 + BOX_WORDS :].astype("<u8").view(np.uint8)[:count]
    pixels[_rows_and_columns(box)] = noise.reshape(box.height, box.width, colors)


def _rows_and_columns(box: Box) -> tuple[slice, slice]:
    return slice(box.top, box.top + box.height), slice(box.left, box.left + box.width)


# Mixup and cutmix.


class Mix(NamedTuple):
    """How an image is mixed with the other one of its pair: its own weight, and for cutmix the box that it gives up."""

    weight: float = 1.0
    box: Box | None = None


def symmetric_beta(shape: float, first: float, second: float) -> float:
    """Return a number with the distribution Beta(shape, shape), from two that are uniform from 0 to 1.

    Bailey's formula for Student's t, of which it is a function: exact, for any shape, without rejection.
    """
    power, cosine = first ** (1 / shape), math.cos(2 * math.pi * second)
    root = math.sqrt(power + cosine * cosine * (1 - power))
    return 0.5 if root == 0 else (1 + cosine * math.sqrt(1 - power) / root) / 2


def mix_of(settings: AugmentSettings, size: int, seed: int, epoch: int, sample: int, turn: int = 0) -> Mix:
    """Return how an image of that size is mixed. With both mixup and cutmix, each is used for half of the images."""
    words = philox_words(5, seed, epoch, sample, Stream.PAIRS, turn=turn).tolist()
    choice, first, second, across, down = fractions(words)
    if settings.mixup and not (settings.cutmix and choice < 0.5):
        return Mix(round(symmetric_beta(settings.mixup, first, second) * _LEVELS) / _LEVELS)
    side = size * math.sqrt(1 - symmetric_beta(settings.cutmix, first, second))
    # The center of the box is anywhere, and what is outside of the image is cut off.
    (left, right), (top, bottom) = (_span(center * size, side, size) for center in (across, down))
    box = Box(left, top, right - left, bottom - top)
    return Mix(1 - box.width * box.height / size**2, box)


def _span(center: float, side: float, size: int) -> tuple[int, int]:
    start, end = (min(size, max(0, round(center + half))) for half in (-side / 2, side / 2))
    return start, end


def mixes_of(
    settings: AugmentSettings, size: int, seed: int, epoch: int, ids: Ids, repeats: Ids | None = None
) -> list[Mix]:
    """Return how each image of a batch is mixed; the last one of an odd number has no other, and stays as it is."""
    rows = zip(ids.tolist(), (np.zeros_like(ids) if repeats is None else repeats).tolist(), strict=True)
    mixes = [mix_of(settings, size, seed, epoch, *row) for row in rows]
    return [*mixes[:-1], Mix()] if len(mixes) % PAIR else mixes


def mix_into(pixels: Pixels, partner: Pixels, mix: Mix) -> None:
    """Mix another image into `pixels`."""
    if mix.box is not None:
        place = _rows_and_columns(mix.box)
        pixels[place] = partner[place]
    elif mix.weight < 1:
        weight = round(mix.weight * _LEVELS)
        blended = pixels * np.uint16(weight)
        blended += partner * np.uint16(_LEVELS - weight)
        blended += _LEVELS // 2  # rounds: 255 x 256 + 128 still fits into 16 bits
        blended >>= 8
        pixels[:] = blended


def swapped(values: NDArray[Any]) -> NDArray[Any]:
    """Return the value of the other one of each pair; the last one of an odd number has its own."""
    partners: NDArray[Any] = values[np.minimum(np.arange(len(values)) ^ 1, max(0, len(values) - 1))]
    return partners


class AugmentedBatches(ImageBatches):
    """Batches whose training images are augmented."""

    def __init__(self, split: SplitReader, threads: int | None = None, *, settings: AugmentSettings) -> None:
        super().__init__(split, threads)
        self._settings = settings

    def random(
        self, ids: Ids, seed: int, epoch: int, size: int, min_scale: float, repeats: Ids | None = None
    ) -> Pixels:
        """Return random crops, augmented; every two images in a row are mixed if the settings say so."""
        settings = self._settings
        rows = list(zip(ids.tolist(), (np.zeros_like(ids) if repeats is None else repeats).tolist(), strict=True))

        def change(at: int, pixels: Pixels) -> None:
            sample, turn = rows[at]
            if settings.randaugment is not None:
                count = 2 * settings.randaugment.operations
                words = philox_words(count, seed, epoch, sample, Stream.OPERATIONS, turn=turn).tolist()
                randaugment(pixels, settings.randaugment, words)
            if settings.erasing:
                erase(pixels, settings.erasing, seed, epoch, sample, turn)

        batch = self._batch(ids, size, size, random_crops(ids, min_scale, seed, epoch, repeats), change)
        if settings.mixes:
            mixes = mixes_of(settings, size, seed, epoch, ids, repeats)

            def mix_pair(at: int) -> None:
                first = batch[at].copy()  # the second one is mixed with the first one as it was
                mix_into(batch[at], batch[at + 1], mixes[at])
                mix_into(batch[at + 1], first, mixes[at + 1])

            list(self._pool.map(mix_pair, range(0, len(ids) - 1, PAIR)))
        return batch
