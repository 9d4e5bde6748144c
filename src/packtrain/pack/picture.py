"""Turn any image file into tiles, or say why not. Only this module opens image files of unknown origin.

By kind of file:

- JPEG, sequential, upright, gray or 4:4:4, 4:2:2 or 4:2:0: keeps its size, quantization tables and subsampling, and
  gets restart markers. It is decoded and encoded again, with colors as they are stored and in whole blocks, so that
  nearly all coefficients stay. Those of values outside of 0 to 255 change, those of files of very high quality, and
  those at the edges of some progressive files. Pixels of photographs change by 0.003 to 0.05 of 255 on average.
- JPEG, progressive or arithmetic: the same, and becomes sequential. Other subsamplings become 4:4:4.
- JPEG in CMYK or YCCK: converted to RGB, assuming that it is inverted, as Adobe writes it.
- PNG, WebP, GIF, BMP and TIFF: converted, 4:2:0 at quality 92. 16 bits become the upper 8. Palettes become RGB,
  black and white becomes gray, transparency becomes white, and of animations and pages the first is used.
- Rotated by EXIF: turned upright. All metadata is removed, color profiles too: pixels are assumed to be sRGB.
- The content decides, never the name. Other formats are not opened.
- Dropped, as UnusableImage, with the reason: "empty", "not an image", "damaged", "cut off", "too many pixels" (over 89
  million, by the header, before anything is decoded), "too long" (a side over 65,500 pixels), "unknown depth" (32-bit
  integers and floats, whose range is unknown), "unsupported TIFF" (such as 16-bit gray with transparency).

Damage that still decodes cannot be detected, and is kept.
"""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError, _imaging
from PIL.JpegImagePlugin import JpegImageFile, get_sampling
from PIL.PngImagePlugin import MAX_TEXT_CHUNK, MAX_TEXT_MEMORY, PngImageFile
from PIL.TiffImagePlugin import TiffImageFile

from packtrain.pack.tiles import (
    MAX_SIDE,
    BadTiles,
    Coding,
    Tiled,
    called_rgb,
    encode,
    has_all_scans,
    read_frame,
    scan_end,
    with_size,
)

# Pillow's memory for pixels is kept from image to image: to get new memory of the system for each takes a quarter of
# the time that a photograph takes.
_imaging.set_blocks_max(2)

MAX_PIXELS = 89_000_000
MAX_BYTES = 300_000_000  # of a file: 89 million pixels with 8 bits for each color, uncompressed, have fewer

_FORMATS = ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"]
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"RIFF", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_BLOCK = 8  # pixels
_END = b"\xff\xd9"  # of a JPEG
_MAX_SCANS = 500  # of a JPEG; each costs a pass over all pixels, however small it is
_SCANS_AS_LONG = 20  # that take as long as the rest of decoding
_SCAN = b"\xff\xda"
_TEXTS = (b"zTXt", b"iTXt")
_EXIF = b"Exif\0\0"
_MAX_EXIF = 1000  # parts in one file, which Pillow adds to each other; one of 65 kB is the rule
_PNG_START, _PROFILE = b"\x89PNG", b"iCCP"
_MAX_PROFILES = 10  # in a PNG, which may have one; a kilobyte of each further one is expanded to a megabyte, too
_MAX_READS = 400_000  # of a file: three for a chunk of a PNG, and libpng divides 300 MB into 36,000
_SUBSAMPLINGS = {0: "4:4:4", 1: "4:2:2", 2: "4:2:0"}
_STEPS = {"L;2": 85, "L;4": 17}  # from value to value of gray PNGs with 2 and 4 bits
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
    """The reason to leave a file out, in the same few words for all such files, so that they can be counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def to_tiled(data: bytes, short_side: int | None = None) -> Tiled:
    """Convert the bytes of an image file; a longer short side is reduced to `short_side` pixels."""
    return to_copies(data, (short_side,))[0]


def to_copies(data: bytes, short_sides: Sequence[int | None]) -> list[Tiled]:
    """Convert the bytes of an image file to several sizes; an image that is unusable in one is unusable in all."""
    with _quiet():
        image = _open(data)
        # Everything that decodes is inside, because Pillow decodes lazily and damage shows only then.
        try:
            coding = _coding(image)
            lacks_end = isinstance(image, JpegImageFile) and _lacks_end(data)
            data += _END if lacks_end else b""
            stored = _in_whole_blocks(data, image, coding)
            is_reduced = [side is not None and side < min(image.size) for side in short_sides]
            pixels = stored if stored and not any(is_reduced) else _decoded_jpeg(data, image, lacks_end) or _flat(image)
            turn = _UPRIGHT.get(_orientation(image))
        except UnusableImage:
            raise
        except Exception as error:  # Pillow's decoders raise anything on hostile bytes
            raise UnusableImage(_fault(error)) from error
    return [
        encode(stored, coding, image.size) if stored and not reduce else _tiled(pixels, coding, turn, short_side)
        for short_side, reduce in zip(short_sides, is_reduced, strict=True)
    ]


def pixels_to_decode(data: bytes) -> int:
    """Return the cost of decoding an image file, in pixels, by its header alone; 0 if it is unusable."""
    with _quiet():
        try:
            image = _open(data)
        except UnusableImage:
            return 0
    scans = _num_scans(data) if isinstance(image, JpegImageFile) else 0
    # Texts of a PNG may be compressed, and expanding a letter takes as long as decoding a pixel.
    texts = sum(map(data.count, _TEXTS)) if isinstance(image, PngImageFile) else 0
    letters = min(texts * MAX_TEXT_CHUNK, MAX_TEXT_MEMORY)
    return image.width * image.height * max(1, scans // _SCANS_AS_LONG) + letters


def _tiled(pixels: Image.Image, coding: Coding, turn: Image.Transpose | None, short_side: int | None) -> Tiled:
    if short_side is not None and min(pixels.size) > short_side:
        coding = Coding()
        width, height = (round(side * short_side / min(pixels.size)) for side in pixels.size)
        pixels = pixels.resize((width, height), Image.Resampling.LANCZOS)
    if turn is not None:
        pixels = pixels.transpose(turn)
    if max(pixels.size) > MAX_SIDE:
        raise UnusableImage("too long")
    return encode(pixels, coding)


def _open(data: bytes) -> Image.Image:
    """Open the image, reading only its header."""
    if not data:
        raise UnusableImage("empty")
    has_profiles = data.startswith(_PNG_START) and data.count(_PROFILE) > _MAX_PROFILES
    if has_profiles or data.count(_EXIF) > _MAX_EXIF:
        raise UnusableImage("damaged")
    try:
        image = Image.open(_File(data), formats=_FORMATS)
    except Image.DecompressionBombError as error:
        raise UnusableImage("too many pixels") from error
    except UnidentifiedImageError as error:
        raise UnusableImage(_unidentified(data)) from error
    except Exception as error:  # as above
        raise UnusableImage(_fault(error)) from error
    if image.width * image.height > MAX_PIXELS:
        raise UnusableImage("too many pixels")
    if isinstance(image, JpegImageFile) and _num_scans(data) > _MAX_SCANS:
        raise UnusableImage("damaged")
    return image


class _File(io.BytesIO):
    """The bytes of an image file, which Pillow reads part by part, and where they are damaged, byte by byte."""

    num_reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.num_reads += 1
        if self.num_reads > _MAX_READS:
            raise OSError("too many parts")
        return super().read(size)


def _num_scans(data: bytes) -> int:
    """Return the number of scans of a JPEG; to count them takes a twentieth of the time to decode them."""
    try:
        read_frame(data)
    except BadTiles:
        return data.count(_SCAN)
    return 1  # it has all components, so that a decoder reads no other


def _unidentified(data: bytes) -> str:
    """Return why Pillow does not know a file."""
    try:
        TiffImageFile(io.BytesIO(data))
    except SyntaxError as error:
        if str(error).startswith("unknown"):  # pixel mode, data organization
            return "unsupported TIFF"
    except Exception:  # as above
        return "damaged"
    return "damaged" if data.startswith(_MAGIC) else "not an image"


def _fault(error: Exception) -> str:
    return "cut off" if "truncated" in str(error).lower() else "damaged"


def _orientation(image: Image.Image) -> int:
    """Return the orientation of the camera; unreadable EXIF is ignored."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # as above
        return 1


def _coding(image: Image.Image) -> Coding:
    """Return the settings of the file itself if it is a JPEG whose components can be kept, else the default."""
    if not isinstance(image, JpegImageFile) or image.mode not in ("L", "RGB"):
        return Coding()
    if any(component[3] not in image.quantization for component in image.layer):
        return Coding()
    tables = tuple(tuple(image.quantization[component[3]]) for component in image.layer)
    # As decoders take the colors.
    is_rgb = image.mode == "RGB" and "jfif" not in image.info
    if is_rgb and "adobe_transform" in image.info:
        is_rgb = bool(image.info["adobe_transform"] == 0)
    elif is_rgb:
        is_rgb = bytes(component[0] for component in image.layer) == b"RGB"
    subsampling = "4:2:0" if image.mode == "L" else _SUBSAMPLINGS.get(get_sampling(image), "4:4:4")
    tables = tables[:2] if tables[1:2] == tables[2:3] else tables
    return Coding("4:4:4" if is_rgb else subsampling, tables=tables, is_rgb=is_rgb)


def _in_whole_blocks(data: bytes, image: Image.Image, coding: Coding) -> Image.Image | None:
    """Return the pixels of an upright JPEG as they are stored, up to the ends of its last blocks; else None.

    Coded with the same tables, they become nearly the same coefficients. RGB cannot hold all colors, blended ones would
    be averaged again, and a block that is cut would be completed with other pixels.
    """
    if not isinstance(image, JpegImageFile) or coding.tables is None or _orientation(image) in _UPRIGHT:
        return None
    if image.mode == "RGB" and _SUBSAMPLINGS.get(get_sampling(image)) != coding.subsampling:
        return None
    try:
        frame = read_frame(data)
        block_width, block_height = frame.mcu_width, frame.mcu_height
    except BadTiles:  # several scans have only the blocks that show something
        block_width = block_height = _BLOCK
    width, height = -(-image.width // block_width) * block_width, -(-image.height // block_height) * block_height
    if max(width, height) > MAX_SIDE:
        return None
    try:
        completed = with_size(data, width, height)
        if image.mode == "L" or coding.is_rgb:
            return _pixels(completed, image.mode)
        colors = simplejpeg.decode_jpeg(called_rgb(completed), fastupsample=True)  # repeats colors
        return Image.frombuffer("YCbCr", (width, height), colors, "raw", "YCbCr", 0, 1)
    except (BadTiles, ValueError):  # `_decoded_jpeg` says why
        return None


def _pixels(jpeg: bytes, mode: str) -> Image.Image:
    if mode == "L":
        return Image.fromarray(simplejpeg.decode_jpeg(jpeg, "GRAY")[:, :, 0])
    if mode == "CMYK":
        inks = simplejpeg.decode_jpeg(jpeg, "CMYK")
        return Image.frombytes("CMYK", inks.shape[1::-1], inks.tobytes(), "raw", "CMYK;I").convert("RGB")
    return Image.fromarray(simplejpeg.decode_jpeg(jpeg))


def _lacks_end(jpeg: bytes) -> bool:
    """True if a JPEG lacks only its end marker, as some cameras write it; raise UnusableImage if it lacks more."""
    try:
        if jpeg.endswith(_END) or jpeg.find(_END, scan_end(jpeg)) >= 0:
            return False
        # A decoder takes zeros, with which a download that stopped may be filled up, for pixels.
        if jpeg.endswith(b"\0\0") or not has_all_scans(jpeg):
            raise UnusableImage("cut off")
    except BadTiles:  # the decoder says whether the end is missing
        return False
    return True


def _decoded_jpeg(data: bytes, image: Image.Image, lacked_end: bool) -> Image.Image | None:
    """Return the pixels of a JPEG, or None if only Pillow can decode it.

    Pillow is the second choice: it silently fills a truncated image with gray.
    """
    if not isinstance(image, JpegImageFile):
        return None
    try:
        return _pixels(data, image.mode)
    except ValueError as error:
        fault = str(error)
    is_longer = lacked_end and "extraneous" in fault  # bytes where pixels are missing
    if "premature end" in fault.lower() or is_longer:
        raise UnusableImage("cut off")
    if "Corrupt" in fault and "extraneous" not in fault:  # extra bytes are harmless and common
        raise UnusableImage("damaged")
    return None


def _flat(image: Image.Image) -> Image.Image:
    """Return the image as 8-bit L or RGB."""
    stored_as = image.tile[0][3] if isinstance(image, PngImageFile) and image.tile else None
    image.load()
    if "transparency" in image.info:  # one color of a PNG: Pillow brings pixels to 8 bits, but not this
        if stored_as == "RGB;16B":
            image.info["transparency"] = tuple(value >> 8 for value in image.info["transparency"])
        elif stored_as in _STEPS:
            image.info["transparency"] *= _STEPS[stored_as]
    if image.mode.startswith("I;16"):
        values = np.asarray(image)
        gray = (values >> 8).astype(np.uint8)
        gray[values == image.info.get("transparency")] = 255  # one value of a PNG
        return Image.fromarray(gray)
    if image.mode in ("I", "F"):
        raise UnusableImage("unknown depth")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(layer, mask=layer.getchannel("A"))
        return white
    return image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")


_silenced = threading.Lock()
_inside = 0
_silence = warnings.catch_warnings()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Pillow's warnings while any thread is inside; `catch_warnings` alone is not safe with threads."""
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
