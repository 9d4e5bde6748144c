"""Tiles, the write side: JPEGs from which a reader can take any part without decoding the rest.

A JPEG with restart markers is a header followed by segments that decode on their own. The markers are
set so that they divide each row of blocks evenly; the segments are then tiles in a grid, and their
offsets are stored beside the JPEG. packtrain.data.tiles puts the tiles under a crop together again.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from packtrain.errors import PacktrainError

QUALITY = 92
LONGEST_SIDE = 65_500  # of any JPEG, says libjpeg

# Narrow tiles fit a crop more closely, but each costs a marker and a fresh start. Measured once on
# random crops of the made-up photographs of benchmarks/input.py, 32 pixels against 64: 12 % less time to decode,
# for 1.7 % more bytes.
_NARROWEST_TILE = 32  # pixels
_EOI, _SOS, _DRI, _TEMPORARY = 0xD9, 0xDA, 0xDD, 0x01
_SEQUENTIAL = (0xC0, 0xC1)
_STARTS_OF_FRAME = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_STAND_ALONE = {*range(0xD0, 0xDA), _TEMPORARY}


class BadTiles(PacktrainError):
    """A JPEG that is not made of tiles, or not of those it says."""


@dataclass(frozen=True, eq=False)
class Tiled:
    """A JPEG and the offset of each restart segment's first byte, and of what follows the end marker."""

    jpeg: bytes
    segments: NDArray[np.uint32]
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Frame:
    """What the header of a JPEG says. An MCU is the smallest block of pixels that is coded together."""

    width: int
    height: int
    mcu_width: int
    mcu_height: int
    size_at: int  # where height and width stand: two bytes each
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
    """How pixels become JPEG: by a quality, or by the quantisation tables of another JPEG, one for each component."""

    subsampling: str = "4:2:0"
    quality: int = QUALITY
    tables: tuple[tuple[int, ...], ...] | None = None


def tile_mcus(mcus_per_row: int, mcu_width: int) -> int:
    """How many MCUs wide a tile is: the fewest that make 32 pixels and divide the row; else all of the row."""
    fewest = _NARROWEST_TILE // mcu_width
    return next((n for n in range(fewest, mcus_per_row) if mcus_per_row % n == 0), mcus_per_row)


def encode(image: Image.Image, coding: Coding) -> Tiled:
    """An image of mode L or RGB as tiles. No metadata goes along."""
    assert image.mode in ("L", "RGB"), image.mode
    mcu_width = 16 if image.mode == "RGB" and coding.subsampling != "4:4:4" else 8
    blocks = tile_mcus(-(-image.width // mcu_width), mcu_width)
    options: dict[str, Any] = {"subsampling": coding.subsampling, "restart_marker_blocks": blocks}
    options["comment"] = None  # the one thing that Pillow would copy unasked
    if coding.tables is None:
        options["quality"] = coding.quality
    else:
        options["qtables"] = [list(table) for table in coding.tables]
    out = io.BytesIO()
    image.save(out, "JPEG", **options)
    jpeg = out.getvalue()
    return Tiled(jpeg, find_segments(jpeg), image.width, image.height)


def read_frame(jpeg: bytes | bytearray | memoryview) -> Frame:
    """The header of a sequential JPEG whose pixels are all in one scan; refuses everything else."""
    size = mcu = None
    interval = components = 0
    at = 2
    if bytes(jpeg[:2]) != b"\xff\xd8":
        raise BadTiles("no JPEG starts like this")
    while True:
        at = _marker(jpeg, at)
        kind = jpeg[at + 1]
        end = at + 2 + (jpeg[at + 2] << 8 | jpeg[at + 3])
        if kind in _STAND_ALONE or end < at + 4 or end > len(jpeg):
            raise BadTiles(f"the JPEG's header is damaged at byte {at}")
        if kind in _STARTS_OF_FRAME:
            if kind not in _SEQUENTIAL or size is not None:
                raise BadTiles("the JPEG is progressive or of another kind that has no tiles")
            size, components, mcu = at + 5, *_sampling(jpeg, at, end)
        elif kind == _DRI:
            if end != at + 6:
                raise BadTiles(f"the JPEG's header is damaged at byte {at}")
            interval = jpeg[at + 4] << 8 | jpeg[at + 5]
        elif kind == _SOS:
            break
        at = end
    if size is None or mcu is None or end == at + 4 or jpeg[at + 4] != components:
        raise BadTiles("the JPEG's pixels are not in one scan")
    height, width = jpeg[size] << 8 | jpeg[size + 1], jpeg[size + 2] << 8 | jpeg[size + 3]
    if not (height and width):
        raise BadTiles("the JPEG has no pixels")
    return Frame(width, height, *mcu, size, end, interval)


def _marker(jpeg: bytes | bytearray | memoryview, at: int) -> int:
    """Where the marker at `at` has its last 0xFF: any number of them may stand before it as padding."""
    last = len(jpeg) - 4
    while at <= last and jpeg[at] == 0xFF:
        if jpeg[at + 1] != 0xFF:
            return at
        at += 1
    raise BadTiles(f"the JPEG's header is damaged at byte {at}")


def _sampling(jpeg: bytes | bytearray | memoryview, at: int, end: int) -> tuple[int, tuple[int, int]]:
    """The number of components, and the width and height of an MCU."""
    if end < at + 10 or end != at + 10 + 3 * jpeg[at + 9] or jpeg[at + 4] != 8:
        raise BadTiles(f"the JPEG's header is damaged at byte {at}")
    factors = [jpeg[component] for component in range(at + 11, end, 3)]
    if not all(1 <= factor >> 4 <= 4 and 1 <= factor & 15 <= 4 for factor in factors) or not factors:
        raise BadTiles(f"the JPEG's header is damaged at byte {at}")
    if len(factors) == 1:  # a component alone is never interleaved, whatever its factors say
        return 1, (8, 8)
    return len(factors), (8 * max(factor >> 4 for factor in factors), 8 * max(factor & 15 for factor in factors))


def find_segments(jpeg: bytes) -> NDArray[np.uint32]:
    """The offsets of a JPEG's tiles, as Tiled has them; refuses a JPEG whose markers do not make tiles."""
    frame = read_frame(jpeg)
    data = np.frombuffer(jpeg, np.uint8)[frame.scan_at :]
    escapes = np.flatnonzero(data[:-1] == 0xFF)
    kinds = data[escapes + 1]
    real = (kinds != 0) & (kinds != 0xFF)
    marks, kinds = escapes[real], kinds[real]
    per_row = frame.mcus_per_row
    count = frame.mcu_rows * (per_row // frame.interval if frame.interval else 0)
    expected = 0xD0 + (np.arange(count) & 7)
    expected[-1:] = _EOI
    if not frame.interval or per_row % frame.interval or not np.array_equal(kinds[:count], expected):
        raise BadTiles("the JPEG's restart markers do not divide its rows into tiles")
    return np.concatenate([[frame.scan_at], marks[:count] + (frame.scan_at + 2)]).astype(np.uint32)
