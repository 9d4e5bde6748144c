"""Tiles: JPEGs that can be decoded in part.

A JPEG with restart markers is a header followed by segments that decode independently. `encode` sets the markers so
that they divide each row of blocks evenly; the segments are then tiles in a grid, and their offsets are stored beside
the JPEG. `decode_crop` joins the header and the tiles under a crop to a smaller JPEG and decodes that. Its pixels are
those of a full decode, bit for bit.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from packtrain.errors import PacktrainError

Pixels = NDArray[np.uint8]

QUALITY = 92
MAX_SIDE = 65_500  # libjpeg's limit

# Narrow tiles fit a crop more closely, but each costs a marker and resets the coder. Measured on random crops of the
# synthetic photographs of benchmarks/input.py, 32 pixels against 64: 12 % less time to decode, 1.7 % more bytes.
_NARROWEST_TILE = 32  # pixels
_FIRST_RESTART, _EOI, _SOS, _DRI, _TEMPORARY = 0xD0, 0xD9, 0xDA, 0xDD, 0x01
_METADATA = {*range(0xE0, 0xF0), 0xFE}
_COLORS_ARE_RGB = b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0\0"
_START_OF_SCAN = bytes([0xFF, _SOS])
_COEFFICIENTS = 64  # of a block
_SEQUENTIAL = (0xC0, 0xC1)
_STARTS_OF_FRAME = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_STAND_ALONE = {*range(0xD0, 0xDA), _TEMPORARY}
MARGIN_PIXELS = 2  # color is stored at half the resolution, and each value is blended with its neighbors


class BadTiles(PacktrainError):
    """A JPEG that does not consist of tiles, or not of the tiles that its offsets claim."""


@dataclass(frozen=True, eq=False)
class Tiled:
    """A JPEG with the offset of the first byte of each restart segment, and the offset after the end marker."""

    jpeg: bytes
    segments: NDArray[np.uint32]
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Frame:
    """The header of a JPEG. An MCU is the smallest block of pixels that is coded together."""

    width: int
    height: int
    mcu_width: int
    mcu_height: int
    size_at: int  # the place of height and width, two bytes each
    scan_at: int  # the first byte of coded pixels
    interval: int  # MCUs from one restart marker to the next; 0 without markers

    @property
    def mcus_per_row(self) -> int:
        return -(-self.width // self.mcu_width)

    @property
    def mcu_rows(self) -> int:
        return -(-self.height // self.mcu_height)


@dataclass(frozen=True)
class Coding:
    """JPEG settings: a quality, or the quantization tables of another JPEG, one for each component."""

    subsampling: str = "4:2:0"
    quality: int = QUALITY
    tables: tuple[tuple[int, ...], ...] | None = None
    is_rgb: bool = False  # without the conversion to brightness and color


def tile_mcus(mcus_per_row: int, mcu_width: int) -> int:
    """Return the width of a tile in MCUs: the fewest that make 32 pixels and divide the row, or the whole row."""
    fewest = _NARROWEST_TILE // mcu_width
    return next((n for n in range(fewest, mcus_per_row) if mcus_per_row % n == 0), mcus_per_row)


def encode(image: Image.Image, coding: Coding, size: tuple[int, int] | None = None) -> Tiled:
    """Encode an image of mode L, RGB or YCbCr as tiles, without metadata.

    `size` is its width and height without the pixels that complete its last MCUs.
    """
    assert image.mode in ("L", "RGB", "YCbCr"), image.mode
    mcu_width = 16 if image.mode != "L" and coding.subsampling != "4:4:4" else 8
    blocks = tile_mcus(-(-image.width // mcu_width), mcu_width)
    options: dict[str, Any] = {"subsampling": coding.subsampling, "restart_marker_blocks": blocks}
    options["keep_rgb"] = coding.is_rgb
    options["comment"] = None  # Pillow would copy it from the source
    if coding.tables is None:
        options["quality"] = coding.quality
    else:
        options["qtables"] = [list(table) for table in coding.tables]
    out = io.BytesIO()
    image.save(out, "JPEG", **options)
    width, height = image.size if size is None else size
    jpeg = with_size(out.getvalue(), width, height)
    return Tiled(jpeg, find_segments(jpeg), width, height)


def with_size(jpeg: bytes, width: int, height: int) -> bytes:
    at = next((at + 5 for kind, at, _ in _header(jpeg) if kind in _STARTS_OF_FRAME), None)
    if at is None:
        raise BadTiles("the JPEG has no size")
    return b"".join([jpeg[:at], _size_bytes(width, height), jpeg[at + 4 :]])


def called_rgb(jpeg: bytes) -> bytes:
    """Return the JPEG with a header that calls its colors RGB: a decoder leaves them as they are stored."""
    header = list(_header(jpeg))
    without_metadata = [jpeg[at:end] for kind, at, end in header if kind not in _METADATA]
    return b"".join([jpeg[:2], _COLORS_ARE_RGB, *without_metadata, jpeg[header[-1][2] :]])


def _size_bytes(width: int, height: int) -> bytes:
    return height.to_bytes(2, "big") + width.to_bytes(2, "big")


def read_frame(jpeg: bytes | bytearray | memoryview) -> Frame:
    """Read the header of a sequential JPEG with a single scan; refuse everything else."""
    size = mcu = None
    interval = components = at = end = 0
    for kind, at, end in _header(jpeg):
        if kind in _STARTS_OF_FRAME:
            if kind not in _SEQUENTIAL or size is not None:
                raise BadTiles("the JPEG is progressive or of another kind without tiles")
            size, components, mcu = at + 5, *_sampling(jpeg, at, end)
        elif kind == _DRI:
            if end != at + 6:
                raise BadTiles(f"the JPEG's header is damaged at byte {at}")
            interval = jpeg[at + 4] << 8 | jpeg[at + 5]
    if size is None or mcu is None or end == at + 4 or jpeg[at + 4] != components:
        raise BadTiles("the JPEG's pixels are not in one scan")
    height, width = jpeg[size] << 8 | jpeg[size + 1], jpeg[size + 2] << 8 | jpeg[size + 3]
    if not (height and width):
        raise BadTiles("the JPEG has no pixels")
    return Frame(width, height, *mcu, size, end, interval)


def scan_end(jpeg: bytes) -> int:
    """Return where coded pixels begin; from there on, the bytes of a marker cannot be anything else."""
    return list(_header(jpeg))[-1][2]


def has_all_scans(jpeg: bytes) -> bool:
    """True unless coefficients are missing, or their last bits: a decoder shows such a JPEG, but less sharp."""
    header = list(_header(jpeg))
    components = next((jpeg[at + 9] for kind, at, _ in header if kind in _STARTS_OF_FRAME), 0)
    complete: set[tuple[int, int]] = set()
    at = header[-1][1]
    while at >= 0:
        end = at + 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")
        scan = jpeg[at + 4 : end]  # number of components, each with its tables, first and last coefficient, bits
        if len(scan) >= 4 and not scan[-1] & 15:
            complete |= {(component, number) for component in scan[1:-3:2] for number in range(scan[-3], scan[-2] + 1)}
        at = jpeg.find(_START_OF_SCAN, end)
    return len(complete) == components * _COEFFICIENTS


# Headers of the same size and quality are the same bytes, and reading one takes as long as splicing.
_known_frame = lru_cache(maxsize=4096)(read_frame)


def _header(jpeg: bytes | bytearray | memoryview) -> Iterator[tuple[int, int, int]]:
    """Yield the kind of each part of the header, and where it starts and ends; the last precedes coded pixels."""
    at, kind, last = 2, 0, len(jpeg) - 4
    if bytes(jpeg[:2]) != b"\xff\xd8":
        raise BadTiles("not a JPEG")
    while kind != _SOS:
        while at <= last and jpeg[at] == jpeg[at + 1] == 0xFF:  # any number of them may precede a marker as padding
            at += 1
        if at > last or jpeg[at] != 0xFF:
            raise BadTiles(f"the JPEG's header is damaged at byte {at}")
        kind = jpeg[at + 1]
        end = at + 2 + (jpeg[at + 2] << 8 | jpeg[at + 3])
        if kind in _STAND_ALONE or end < at + 4 or end > len(jpeg):
            raise BadTiles(f"the JPEG's header is damaged at byte {at}")
        yield kind, at, end
        at = end


def _sampling(jpeg: bytes | bytearray | memoryview, at: int, end: int) -> tuple[int, tuple[int, int]]:
    """Return the number of components, and the width and height of an MCU."""
    if end < at + 10 or end != at + 10 + 3 * jpeg[at + 9] or jpeg[at + 4] != 8:
        raise BadTiles(f"the JPEG's header is damaged at byte {at}")
    factors = [jpeg[component] for component in range(at + 11, end, 3)]
    if not all(1 <= factor >> 4 <= 4 and 1 <= factor & 15 <= 4 for factor in factors) or not factors:
        raise BadTiles(f"the JPEG's header is damaged at byte {at}")
    if len(factors) == 1:  # a single component is never interleaved, whatever its factors say
        return 1, (8, 8)
    return len(factors), (8 * max(factor >> 4 for factor in factors), 8 * max(factor & 15 for factor in factors))


def find_segments(jpeg: bytes) -> NDArray[np.uint32]:
    """Return the offsets of a JPEG's tiles, as in Tiled; refuse a JPEG whose markers do not make tiles."""
    frame = read_frame(jpeg)
    data = np.frombuffer(jpeg, np.uint8)[frame.scan_at :]
    # In coded data 0xFF is followed by 0 if it is data, and by something else if it is a marker.
    escapes = np.flatnonzero(data[:-1] == 0xFF)
    kinds = data[escapes + 1]
    real = (kinds != 0) & (kinds != 0xFF)
    marks, kinds = escapes[real], kinds[real]
    per_row = frame.mcus_per_row
    count = frame.mcu_rows * (per_row // frame.interval if frame.interval else 0)
    expected = _restart_markers(count)
    expected[-1:] = _EOI  # the last segment ends with the image
    if not frame.interval or per_row % frame.interval or not np.array_equal(kinds[:count], expected):
        raise BadTiles("the JPEG's restart markers do not divide its rows into tiles")
    return np.concatenate([[frame.scan_at], marks[:count] + (frame.scan_at + 2)]).astype(np.uint32)


def _restart_markers(count: int) -> NDArray[np.int64]:
    return _FIRST_RESTART + (np.arange(count) & 7)  # they count from 0 to 7, again and again


class Box(NamedTuple):
    """A part of an image, in pixels."""

    left: int
    top: int
    width: int
    height: int


def decode_crop(
    jpeg: Any,
    segments: NDArray[np.uint32],
    width: int,
    height: int,
    box: Box,
    scratch: Pixels | None = None,
) -> Pixels:
    """Return the pixels in `box` as a view [height, width, RGB].

    `jpeg` is any buffer of bytes. Pixels are decoded into `scratch`, a flat array, if it is large enough for the
    whole image: allocating memory for each image would take time.
    """
    small, left, top = splice(memoryview(jpeg), segments, width, height, box)
    if scratch is not None and len(scratch) < 3 * width * height:  # too small: the decoder allocates its own
        scratch = None
    pixels: Pixels = simplejpeg.decode_jpeg(small, buffer=scratch)
    return pixels[top : top + box.height, left : left + box.width]


def splice(
    jpeg: memoryview, segments: NDArray[np.uint32], width: int, height: int, box: Box
) -> tuple[memoryview | bytearray, int, int]:
    """Return a JPEG of the tiles under the box, or the original if that is all, and the box's left and top in it."""
    left, top, box_width, box_height = box
    if not (0 <= left < left + box_width <= width and 0 <= top < top + box_height <= height):
        raise ValueError(f"{box} is not within {width} x {height} pixels")
    offsets = segments.astype(np.int64)
    head_bytes = int(offsets[0])
    head = bytearray(jpeg[:head_bytes])
    frame = _known_frame(bytes(head))
    tile_height, rows = frame.mcu_height, frame.mcu_rows
    columns = (len(offsets) - 1) // rows
    if (
        not columns
        or len(offsets) != rows * columns + 1
        or (frame.width, frame.height, frame.scan_at, len(jpeg)) != (width, height, head_bytes, offsets[-1])
    ):
        raise BadTiles(
            f"{len(offsets) - 1} tiles do not make an image of {width} x {height} pixels; pack the data again"
        )
    tile_width = frame.mcus_per_row // columns * frame.mcu_width

    first_column, first_row = max(0, left - MARGIN_PIXELS) // tile_width, max(0, top - MARGIN_PIXELS) // tile_height
    end_column = min(columns, -(-(left + box_width + MARGIN_PIXELS) // tile_width))
    end_row = min(rows, -(-(top + box_height + MARGIN_PIXELS) // tile_height))
    if end_column - first_column == columns and end_row - first_row == rows:
        return jpeg, left, top

    new_left, new_top = first_column * tile_width, first_row * tile_height
    new_width = min(width, end_column * tile_width) - new_left
    new_height = min(height, end_row * tile_height) - new_top
    at = frame.size_at
    head[at : at + 4] = _size_bytes(new_width, new_height)

    # The wanted tiles of a row are adjacent in the file: one slice for each row. Their restart markers count from 0
    # to 7 through the file, so they are numbered again for the new one.
    ends = offsets[1:].reshape(rows, columns)[first_row:end_row, first_column:end_column]
    row_starts = offsets[:-1].reshape(rows, columns)[first_row:end_row, first_column]
    row_ends = ends[:, -1]
    out = bytearray().join(
        [head, *(jpeg[start:end] for start, end in zip(row_starts.tolist(), row_ends.tolist(), strict=True))]
    )
    row_bytes = row_ends - row_starts
    shift = row_bytes.cumsum() - row_bytes - row_starts + (head_bytes - 1)
    marks = (ends + shift[:, None]).ravel()
    written = np.frombuffer(out, np.uint8)
    written[marks] = _restart_markers(len(marks))
    written[-1] = _EOI
    return out, left - new_left, top - new_top
