"""The stream of metrics: steps that have the same measurements are stored as one block of numbers.

A point as a line of JSON has its names again at every step, and reading a million of them takes many seconds. So points
in a row that differ in numbers only become one line: their names, and the numbers as base64. All other points, such as
evaluations with samples, are lines of their own.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, TypeAdapter

from packtrain.run.chunks import ChunkReader, ChunkWriter, encode_line, lines_of
from packtrain.run.records import Point
from packtrain.store import Store
from packtrain.store.records import MAX_MEASUREMENT, Count, DamagedRecord, Label, Many, decode, decode_many

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MAX_ROWS = 2000  # of a block
_MAX_STEP = 2**53  # that a float holds exactly
_OPENING = b'{"rows":'
_POINT = TypeAdapter(Point)


@dataclass(frozen=True)
class PointBlock:
    """Points of one kind and generation. A row of `numbers` has step, time, and a number for each of the names.

    They are little-endian floats of 64 bits, row after row, in base64.
    """

    __pydantic_config__ = ConfigDict(val_json_bytes="base64")  # several times faster than binascii

    rows: Count
    kind: Label
    generation: Count
    names: Many[Label]
    numbers: bytes

    def matrix(self, subject: str) -> NDArray[np.float64]:
        """Return the numbers, a row for each point; DamagedRecord names `subject` if they are not those of points."""
        import numpy as np  # here, because most who read a run's records need no numbers

        try:
            numbers = np.frombuffer(self.numbers, "<f8").reshape(self.rows, 2 + len(self.names))
            steps = numbers[:, 0]
            # The limits of a point are lowest and highest numbers, and NaN is the lowest and highest of its column.
            for row in (numbers.min(0), numbers.max(0)):
                _POINT.validate_python(self._fields(row.tolist()))
            is_whole = steps.max() <= _MAX_STEP and not (steps % 1).any()
            if self.kind == "start" or not is_whole or len(set(self.names)) < len(self.names):
                raise ValueError("not a block of points")
        except (ValueError, OverflowError) as error:  # also pydantic's
            raise DamagedRecord(f"{subject} is damaged, or from another version (field numbers)") from error
        is_large = np.abs(numbers) > MAX_MEASUREMENT
        return np.where(is_large, np.copysign(np.inf, numbers), numbers) if is_large.any() else numbers

    def _fields(self, row: Sequence[float]) -> dict[str, Any]:
        values = dict(zip(self.names, row[2:], strict=True))
        return {"kind": self.kind, "generation": self.generation, "step": int(row[0]), "time": row[1], "values": values}

    def points(self, subject: str, last: int | None = None) -> list[Point]:
        rows = self.matrix(subject)[-(last or self.rows) :]
        return [Point(**self._fields(row)) for row in rows.tolist()]


class PointWriter(ChunkWriter[Point]):
    """Writes points; those in a row that differ in numbers only as a block."""

    def __init__(self, store: Store, stream: str, writer: str) -> None:
        super().__init__(store, stream, writer)
        self._first: Point | None = None  # of the block that is being collected
        self._numbers = array("d")
        self._rows = 0

    def append(self, record: Point) -> None:
        row = array("d", (record.step, record.time, *record.values.values()))  # refuses now what is not a number
        with self._collecting:
            if not self._continues(record):
                self._end_block()
                self._first = record
            self._numbers += row
            self._rows += 1

    def _continues(self, point: Point) -> bool:
        first = self._first
        return (
            first is not None
            and self._rows < _MAX_ROWS
            and not (first.samples or point.samples or first.counts or point.counts or point.kind == "start")
            and (first.kind, first.generation) == (point.kind, point.generation)
            and list(first.values) == list(point.values)
            and max(first.step, point.step) <= _MAX_STEP
        )

    def _end_block(self) -> None:
        first = self._first
        if first is None:
            return
        if self._rows == 1:
            self._lines.append(encode_line(first))
        else:
            if sys.byteorder == "big":
                self._numbers.byteswap()
            block = PointBlock(self._rows, first.kind, first.generation, tuple(first.values), self._numbers.tobytes())
            self._lines.append(encode_line(block))
        self._first, self._numbers, self._rows = None, array("d"), 0

    def _take_lines(self) -> list[bytes]:
        self._end_block()
        return super()._take_lines()


class PointReader(ChunkReader[Point]):
    def __init__(self, store: Store, stream: str) -> None:
        super().__init__(store, stream, Point)

    def _decoded(self, data: bytes, subject: str) -> list[Point]:
        return decode_points(data, subject)


def parts_of(data: bytes, subject: str) -> Iterator[PointBlock | Point]:
    """Yield the lines of a chunk. The numbers of a block are checked when they are asked for."""
    if _OPENING not in data:
        yield from decode_many(Point, lines_of(data), subject)  # all at once, which is faster
        return
    for line in [data] if data.find(b"\n") == len(data) - 1 else data.splitlines():
        yield decode(PointBlock, line, subject) if line.startswith(_OPENING) else decode(Point, line, subject)


def decode_points(data: bytes, subject: str) -> list[Point]:
    points: list[Point] = []
    for block in parts_of(data, subject):
        points += [block] if isinstance(block, Point) else block.points(subject)
    return points
