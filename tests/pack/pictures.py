"""Pictures of every kind, made from a number."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def photo(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Soft colors with some grain, so that neither coding nor resampling is trivial."""
    rng = np.random.default_rng(seed)
    soft = Image.fromarray(rng.integers(0, 256, (5, 6, 3), np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    grain = rng.integers(-12, 13, (height, width, 3))
    return Image.fromarray(np.clip(np.asarray(soft).astype(np.int64) + grain, 0, 255).astype(np.uint8)).convert(mode)


def quarters(width: int = 64, height: int = 48) -> Image.Image:
    """Red, green, blue and white quarters: shows which way is up, and whether colors are right."""
    image = Image.new("RGB", (width, height), "white")
    image.paste((255, 0, 0), (0, 0, width // 2, height // 2))
    image.paste((0, 255, 0), (width // 2, 0, width, height // 2))
    image.paste((0, 0, 255), (0, height // 2, width // 2, height))
    return image


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def opened(jpeg: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(jpeg), formats=["JPEG"])
    image.load()
    return image


def ycck(image: Image.Image) -> bytes:
    """A JPEG in YCCK with inverted inks, as Photoshop writes it."""
    inks = Image.fromarray(255 - np.asarray(image.convert("RGB"))).convert("YCbCr")
    no_black = Image.new("L", image.size, 255)
    # Pillow inverts what it is told are inks, and here the inversion is part of the colors already.
    planes = [Image.fromarray(255 - np.asarray(plane)) for plane in (*inks.split(), no_black)]
    jpeg = bytearray(saved(Image.merge("CMYK", planes), "JPEG", quality=95))
    transform_at = jpeg.index(b"Adobe") + 11
    jpeg[transform_at] = 2
    return bytes(jpeg)


def with_size(jpeg: bytes, width: int, height: int) -> bytes:
    """The JPEG with another size in its header."""
    at = jpeg.index(b"\xff\xc0") + 5
    return jpeg[:at] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + jpeg[at + 4 :]


def difference(one: Image.Image | NDArray[Any], other: Image.Image | NDArray[Any]) -> float:
    """How far apart two pictures are, of 255, on average."""
    return float(np.abs(np.asarray(one).astype(np.float64) - np.asarray(other)).mean())
