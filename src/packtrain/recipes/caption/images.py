"""What is seen of pictures that have captions."""

from __future__ import annotations

import numpy as np

from packtrain.data.images import Crop, ImageBatches, random_crops, resize_into
from packtrain.data.order import Ids
from packtrain.pack.tiles import Box, Pixels, Tiled, decode_crop


class CaptionedBatches(ImageBatches):
    """What is seen of a picture must be what its captions speak of: nothing is mirrored, and nothing cut off."""

    def random(self, ids: Ids, seed: int, epoch: int, size: int, min_scale: float, turns: Ids | None = None) -> Pixels:
        """For training: random crops the right way round."""
        crop_of = random_crops(ids, min_scale, seed, epoch, turns)
        return self._batch(ids, size, size, lambda *place: crop_of(*place)._replace(flip=False))

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
