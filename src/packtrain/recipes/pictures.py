"""Pictures that a person points at, seen as those of a validation split are."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from packtrain.data.images import centre_box, resize_into
from packtrain.data.tiles import Pixels, decode_crop
from packtrain.errors import Mistake
from packtrain.pack.picture import Unusable, to_tiled
from packtrain.pack.raw import printable
from packtrain.pack.tiles import Tiled
from packtrain.units import show_bytes

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
    except Unusable as error:
        raise Mistake(f"{name}: {error.reason}; a picture is a JPEG, PNG, WebP, GIF, BMP or TIFF file") from error
    except OSError as error:
        raise Mistake(f"{name}: cannot be read: {error.strerror}") from None


def middle_of(picture: Tiled, height: int, width: int) -> Pixels:
    """What validation sees of a picture: its middle, uint8 [height, width, RGB]."""
    box = centre_box(picture.width, picture.height, width, height)
    out = np.empty((height, width, 3), np.uint8)
    resize_into(out, decode_crop(picture.jpeg, picture.segments, picture.width, picture.height, box), flip=False)
    return out
