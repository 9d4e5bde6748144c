"""Tiles, the read side: the pixels under a crop, from a JPEG that packtrain.pack.tiles wrote.

The header and the tiles under the crop make a smaller JPEG, which is decoded in place of the whole. Its
pixels are those of a full decode, bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from packtrain.pack.tiles import BadTiles, read_frame

Pixels = NDArray[np.uint8]

_MARGIN = 2  # pixels: colour is stored at half the resolution, and each value is blended with its neighbours
_MOST_TILES = 1 << 16
_RESTART_MARKERS = (0xD0 + (np.arange(_MOST_TILES) & 7)).astype(np.uint8)
_END_MARKER = 0xD9


class Box(NamedTuple):
    """A part of an image, in its pixels."""

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
    """The pixels in `box` as a view [height, width, RGB] of what was decoded.

    `jpeg` is any buffer of bytes. Pixels are decoded into `scratch`, a flat array, if it is large enough for the
    whole image: fresh memory for each would take time.
    """
    small, left, top = splice(memoryview(jpeg), segments, width, height, box)
    if scratch is not None and len(scratch) < 3 * width * height:
        scratch = None
    pixels: Pixels = simplejpeg.decode_jpeg(small, buffer=scratch)
    return pixels[top : top + box.height, left : left + box.width]


def splice(
    jpeg: memoryview, segments: NDArray[np.uint32], width: int, height: int, box: Box
) -> tuple[memoryview | bytearray, int, int]:
    """A JPEG of the tiles under the box, or the whole if all are; and where the box starts in it, from left and top."""
    left, top, box_width, box_height = box
    if not (0 <= left < left + box_width <= width and 0 <= top < top + box_height <= height):
        raise ValueError(f"{box} is not within {width} x {height} pixels")
    offsets = segments.astype(np.int64)
    head_bytes = int(offsets[0])
    head = bytearray(jpeg[:head_bytes])
    frame = read_frame(head)
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

    first_column, end_column = max(0, left - _MARGIN) // tile_width, -(-(left + box_width + _MARGIN) // tile_width)
    first_row, end_row = max(0, top - _MARGIN) // tile_height, -(-(top + box_height + _MARGIN) // tile_height)
    end_column, end_row = min(columns, end_column), min(rows, end_row)
    if end_column - first_column == columns and end_row - first_row == rows:
        return jpeg, left, top

    new_left, new_top = first_column * tile_width, first_row * tile_height
    new_width = min(width, end_column * tile_width) - new_left
    new_height = min(height, end_row * tile_height) - new_top
    at = frame.size_at
    head[at : at + 4] = new_height.to_bytes(2, "big") + new_width.to_bytes(2, "big")

    # The tiles of a row that are wanted follow each other in the file: one slice for each row.
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
    written[marks] = _RESTART_MARKERS[: len(marks)]
    written[-1] = _END_MARKER
    return out, left - new_left, top - new_top
