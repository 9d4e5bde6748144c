"""Any image file as tiles, or a reason why not: the one place where pictures of unknown origin are opened.

What becomes of each kind of file:

- JPEG, sequential, upright, grey or 4:4:4, 4:2:2 or 4:2:0: kept at its size with its own quantisation tables and
  subsampling; only restart markers are added. Pixels differ by the rounding of decoding and encoding once more: on
  average by 0.08 of 255 in photographs, by 0.5 in the noise of benchmarks/input.py.
- JPEG, progressive or arithmetic: the same, and sequential from then on. Other subsamplings become 4:4:4.
- JPEG in CMYK or YCCK, which are taken to be inverted as Adobe writes them: converted to RGB.
- PNG, WebP, GIF, BMP and TIFF: converted, 4:2:0 at quality 92. 16 bits become 8 by leaving out the lower ones.
  Palettes become RGB, black and white becomes grey, what is transparent lies on white, and of animations and
  pages the first is taken.
- Turned by EXIF: turned upright. All metadata is left out, colour profiles too: pixels are taken to be sRGB.
- What a file holds decides, never its name. Formats other than these are not opened.
- Dropped, as UnusableImage, with the reason: "empty", "not an image", "damaged", "cut off", "too many pixels" (over 89
  million, seen in the header before anything is decoded), "too long" (a side over 65,500 pixels), "unknown depth"
  (integers of 32 bits, and floats, whose black and white only the maker knows).

Damage that still decodes cannot be told from a picture, and is kept.
"""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile, get_sampling

from packtrain.pack.tiles import LONGEST_SIDE, Coding, Tiled, encode

MOST_PIXELS = 89_000_000

_FORMATS = ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"]
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"RIFF", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_MOST_SCANS = 500  # of a progressive JPEG; each costs a pass over all pixels, however few bytes it has
_SUBSAMPLINGS = {0: "4:4:4", 1: "4:2:2", 2: "4:2:0"}
_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class UnusableImage(Exception):
    """Why a file is left out, in a few words that are the same for all such files, so that they can be counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def to_tiled(data: bytes, short_side: int | None = None) -> Tiled:
    """The picture in a file's bytes; with its short side made that many pixels if it has more."""
    with _quiet():
        image = _open(data)
        try:
            coding = _coding(image)
            pixels = _decoded_jpeg(data, image) or _flat(image)
            upright = _orientation(image)
        except UnusableImage:
            raise
        except Exception as error:  # Pillow's decoders raise whatever hostile bytes lead them to
            raise UnusableImage(_fault(error)) from error
    if short_side is not None and min(pixels.size) > short_side:
        coding = Coding()
        pixels = pixels.resize(_shrunk(*pixels.size, short_side), Image.Resampling.LANCZOS)
    if upright in _UPRIGHT:
        pixels = pixels.transpose(_UPRIGHT[upright])
    if max(pixels.size) > LONGEST_SIDE:
        raise UnusableImage("too long")
    return encode(pixels, coding)


def _open(data: bytes) -> Image.Image:
    """The image with only its header read."""
    if not data:
        raise UnusableImage("empty")
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except Image.DecompressionBombError as error:
        raise UnusableImage("too many pixels") from error
    except UnidentifiedImageError as error:
        raise UnusableImage("damaged" if data.startswith(_MAGIC) else "not an image") from error
    except Exception as error:  # as above
        raise UnusableImage(_fault(error)) from error
    if image.width * image.height > MOST_PIXELS:
        raise UnusableImage("too many pixels")
    if image.info.get("progressive") and data.count(b"\xff\xda") > _MOST_SCANS:
        raise UnusableImage("damaged")
    return image


def _fault(error: Exception) -> str:
    return "cut off" if "truncated" in str(error).lower() else "damaged"


def _orientation(image: Image.Image) -> int:
    """How the camera was held. EXIF that cannot be read says nothing about the pixels, which are kept."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # as above
        return 1


def _coding(image: Image.Image) -> Coding:
    """That of the file itself if it is a JPEG whose components go into ours as they are."""
    if not isinstance(image, JpegImageFile) or image.mode not in ("L", "RGB"):
        return Coding()
    if any(component[3] not in image.quantization for component in image.layer):
        return Coding()
    tables = tuple(tuple(image.quantization[component[3]]) for component in image.layer)
    subsampling = "4:2:0" if image.mode == "L" else _SUBSAMPLINGS.get(get_sampling(image), "4:4:4")
    return Coding(subsampling, tables=tables[:2] if tables[1:2] == tables[2:3] else tables)


def _decoded_jpeg(data: bytes, image: Image.Image) -> Image.Image | None:
    """The pixels of a grey or coloured JPEG, unless only Pillow can decode it.

    Pillow fills up with grey what is missing before the end marker, and tells nobody.
    """
    if not isinstance(image, JpegImageFile) or image.mode not in ("L", "RGB"):
        return None
    try:
        if image.mode == "L":
            return Image.fromarray(simplejpeg.decode_jpeg(data, "GRAY")[:, :, 0])
        return Image.fromarray(simplejpeg.decode_jpeg(data))
    except ValueError as error:
        fault = str(error)
    if "premature end" in fault.lower():
        raise UnusableImage("cut off")
    if "Corrupt" in fault and "extraneous" not in fault:  # bytes too many do no harm, and are common
        raise UnusableImage("damaged")
    return None


def _flat(image: Image.Image) -> Image.Image:
    """The image as L or RGB of 8 bits."""
    image.load()
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise UnusableImage("unknown depth")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(layer, mask=layer.getchannel("A"))
        return white
    return image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")


def _shrunk(width: int, height: int, short_side: int) -> tuple[int, int]:
    short = min(width, height)
    return round(width * short_side / short), round(height * short_side / short)


_silenced = threading.Lock()
_inside = 0
_silence = warnings.catch_warnings()


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings of Pillow's while any thread is inside: `catch_warnings` alone does not hold with several."""
    global _inside, _silence  # noqa: PLW0603
    with _silenced:
        if not _inside:
            _silence = warnings.catch_warnings()
            _silence.__enter__()
            warnings.filterwarnings("ignore", module=r"PIL\b")
        _inside += 1
    try:
        yield
    finally:
        with _silenced:
            _inside -= 1
            if not _inside:
                _silence.__exit__(None, None, None)
