"""TensorBoard's event files, read while a program still writes them.

A file is a sequence of records: length, checksum of the length, data, checksum of the data. A record whose end is
missing is yet to be written. After one that is damaged nothing can be found anymore, and the file is given up.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HEAD, _CHECKSUM = struct.Struct("<QI"), struct.Struct("<I")
_LENGTH_BYTES = 8
_MAX_RECORD_BYTES = 64 << 10  # of numbers; pictures and histograms are larger, and passed over
_FLOAT, _DOUBLE = 1, 2  # TensorFlow's types of tensors


@dataclass(frozen=True)
class Scalar:
    """A number in an event file."""

    tag: str
    step: int
    time: float
    value: float


class EventFile:
    """One file, and how far it has been read. `offset` is the start of a record."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self._offset = path, offset
        self.is_damaged = False

    @classmethod
    def at_end(cls, path: Path) -> EventFile:
        """Return a file of which only what comes later is read."""
        try:
            return cls(path, path.stat().st_size)
        except OSError:  # removed meanwhile
            return cls(path)

    def read(self) -> Iterator[Scalar]:
        """Yield the numbers that are new since the last call."""
        try:
            size = self.path.stat().st_size
            if self.is_damaged or size <= self._offset:
                return
            with self.path.open("rb") as file:
                yield from self._records(file, size)
        except (OSError, ImportError):  # removed, not to be read, no TensorBoard: its numbers are lost, not the run
            self.is_damaged = True

    def _records(self, file: Any, size: int) -> Iterator[Scalar]:
        # The messages are TensorBoard's own, which take half a second to import. The checksum is not: TensorBoard's is
        # pure Python, and takes longer than everything else here.
        import google_crc32c
        from tensorboard.compat.proto.event_pb2 import Event

        def is_intact(data: bytes, checksum: int) -> bool:
            crc: int = google_crc32c.value(data)
            # Rotated and shifted, since it is itself part of other checksums.
            return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF == checksum

        while self._offset + _HEAD.size <= size:
            file.seek(self._offset)
            head = file.read(_HEAD.size)
            length, checksum = _HEAD.unpack(head)
            if not is_intact(head[:_LENGTH_BYTES], checksum):
                self.is_damaged = True
                return
            end = self._offset + _HEAD.size + length + _CHECKSUM.size
            if end > size:  # the rest is yet to come
                return
            if length <= _MAX_RECORD_BYTES:
                data = file.read(length)
                if not is_intact(data, *_CHECKSUM.unpack(file.read(_CHECKSUM.size))):
                    self.is_damaged = True
                    return
                yield from _scalars(Event, data)
            self._offset = end


def _scalars(kind: Any, data: bytes) -> Iterator[Scalar]:
    from google.protobuf.message import DecodeError

    try:
        event = kind.FromString(data)
    except DecodeError:  # a record of another program, with a checksum that is right
        return
    for summary in event.summary.value:
        form = summary.WhichOneof("value")
        number = _single(summary.tensor) if form == "tensor" else None
        value = summary.simple_value if form == "simple_value" else number
        if value is not None and event.step >= 0:
            yield Scalar(summary.tag, event.step, event.wall_time, value)


def _single(tensor: Any) -> float | None:
    """Return the number of a tensor that has one, as Keras writes them."""
    if any(side.size != 1 for side in tensor.tensor_shape.dim) or tensor.dtype not in (_FLOAT, _DOUBLE):
        return None
    form = "<f" if tensor.dtype == _FLOAT else "<d"
    if len(tensor.tensor_content) == struct.calcsize(form):
        return float(struct.unpack(form, tensor.tensor_content)[0])
    values = tensor.float_val if tensor.dtype == _FLOAT else tensor.double_val
    return float(values[0]) if len(values) == 1 else None
