"""A shard: named arrays in one file that is memory-mapped, so reading it copies nothing.

The container is safetensors (a JSON header, then aligned little-endian data), so any tool that knows the format can
look inside. A ragged column `x` is two arrays: `x.values`, and `x.offsets` with one more entry than there are rows.
A column with one number per row is one array.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packtrain.errors import PacktrainError

Array = NDArray[Any]

_DTYPES: dict[str, np.dtype[Any]] = {
    "U8": np.dtype("u1"),
    "U16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
    "F32": np.dtype("<f4"),
}
_MAX_TENSORS = 50_000
_MAX_TENSOR_HEADER = 8 << 20  # of a file with the tensors of a model
_MAX_HEADER = 1 << 20  # our own headers have about a kilobyte; a damaged length must not be trusted


class ShardError(PacktrainError):
    """A shard that does not match its manifest."""


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths in one flat array."""

    values: Array
    offsets: NDArray[np.int64]

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]], dtype: np.dtype[Any]) -> Ragged:
        offsets = _offsets([len(row) for row in rows])
        values = np.fromiter((value for row in rows for value in row), dtype, int(offsets[-1]))
        return cls(values, offsets)

    @classmethod
    def from_arrays(cls, rows: Sequence[Array], dtype: np.dtype[Any]) -> Ragged:
        values = np.concatenate([np.zeros(0, dtype), *rows]).astype(dtype, copy=False)
        return cls(values, _offsets([len(row) for row in rows]))

    @classmethod
    def joined(cls, columns: Sequence[Ragged]) -> Ragged:
        """Return the rows of all parts, in order."""
        lengths = np.concatenate([column.lengths for column in columns])
        return cls(np.concatenate([column.values for column in columns]), _offsets(lengths))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Array:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)


def _offsets(lengths: Sequence[int] | Array) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


@dataclass(frozen=True)
class Columns:
    """The columns of a shard, all with the same number of rows; `plain` ones have one number per row."""

    ragged: Mapping[str, Ragged]
    plain: Mapping[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return next(iter(self.lengths()), 0)  # all columns have the same length; `open_shard` checks it

    def lengths(self) -> list[int]:
        return [*map(len, self.ragged.values()), *map(len, self.plain.values())]


def names_digest(columns: Columns) -> str:
    """Return the hash of the column `name`, or nothing if there is none."""
    names = columns.ragged.get("name")
    if names is None:
        return ""
    return hashlib.sha256(names.offsets.tobytes() + names.values.tobytes()).hexdigest()


def encode_shard(columns: Columns) -> bytes:
    from safetensors.numpy import save

    arrays: dict[str, Array] = dict(columns.plain)
    for name, column in columns.ragged.items():
        arrays[f"{name}.values"] = column.values
        arrays[f"{name}.offsets"] = column.offsets
    return bytes(save(arrays))


def open_shard(path: Path) -> Columns:
    arrays = _map_arrays(path)
    ragged = {}
    for name in [name.removesuffix(".offsets") for name in arrays if name.endswith(".offsets")]:
        values, offsets = arrays.pop(f"{name}.values", None), arrays.pop(f"{name}.offsets")
        # A bad offset would otherwise read beyond its row, and show up as wrong samples much later.
        if values is None or not _fit(offsets, len(values)):
            raise ShardError(f"{path}: column {name!r} does not match its offsets; pack the data again")
        ragged[name] = Ragged(values, offsets)
    columns = Columns(ragged, arrays)
    if any(length != len(columns) for length in columns.lengths()):
        raise ShardError(f"{path}: columns differ in length; pack the data again")
    return columns


def _fit(offsets: Array, count: int) -> bool:
    """True if `offsets` divide `count` values into rows."""
    if offsets.dtype != np.int64 or not len(offsets) or offsets[0] != 0 or offsets[-1] != count:
        return False
    return bool((offsets[1:] >= offsets[:-1]).all())


def check_header(path: Path) -> None:
    """Raise ValueError if a safetensors file claims more tensors than a model has.

    Call it before the safetensors package reads a file from a store: for a header of a million tensors it takes
    gigabytes.
    """
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > _MAX_TENSOR_HEADER:
            raise ValueError(f"its header has {header_bytes:,} bytes, and at most {_MAX_TENSOR_HEADER:,} are accepted")
        # Each tensor is an object of the header; a brace inside of a name only counts too much.
        tensors = file.read(header_bytes).count(b"{") - 1
        if tensors > _MAX_TENSORS:
            raise ValueError(f"it has {tensors:,} tensors, and at most {_MAX_TENSORS:,} are accepted")


def _map_arrays(path: Path) -> dict[str, Array]:
    """Map a safetensors file and return its arrays as read-only views.

    The safetensors package itself copies every array that it returns.
    """
    try:
        data = np.memmap(path, np.uint8, mode="r")
        header_bytes = int.from_bytes(data[:8].tobytes(), "little")
        if not 2 <= header_bytes <= min(_MAX_HEADER, len(data) - 8):
            raise ValueError("header length")
        body = data[8 + header_bytes :]
        arrays: dict[str, Array] = {}
        # The safetensors header: its length in 8 bytes, then JSON with the type and place of each array.
        for name, entry in json.loads(data[8 : 8 + header_bytes].tobytes()).items():
            if name == "__metadata__":
                continue
            start, end = (int(edge) for edge in entry["data_offsets"])
            if not 0 <= start <= end <= len(body):
                raise ValueError(f"offsets of {name!r}")
            arrays[name] = body[start:end].view(_DTYPES[str(entry["dtype"])])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ShardError(f"{path}: not a valid shard ({error}); pack the data again") from error
    return arrays
