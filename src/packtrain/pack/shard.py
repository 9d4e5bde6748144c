"""A shard: named arrays in one file that is memory-mapped and never copied to be read.

The container is that of safetensors (a JSON header, then aligned little-endian data), so any
tool that knows the format can look inside. A ragged column `x` is two arrays: `x.values`, and
`x.offsets` with one more entry than there are rows. A column of one number a row is an array.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from packtrain.errors import PacktrainError
from packtrain.pack.manifest import Drops, PackFile, Shard, Split, pack_key
from packtrain.pack.raw import Dropped
from packtrain.store import Store

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
_LARGEST_HEADER = 1 << 20


class ShardError(PacktrainError):
    """A shard that is not what its manifest says."""


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths in one flat array."""

    values: Array
    offsets: NDArray[np.int64]

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]], dtype: np.dtype[Any]) -> Ragged:
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        values = np.fromiter((value for row in rows for value in row), dtype, int(offsets[-1]))
        return cls(values, offsets)

    @classmethod
    def joined(cls, parts: Sequence[Ragged]) -> Ragged:
        """The rows of all parts, one behind the other."""
        lengths = np.concatenate([part.lengths for part in parts])
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        return cls(np.concatenate([part.values for part in parts]), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Array:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)


@dataclass(frozen=True)
class Columns:
    """The columns of a shard, all with as many rows: those of unequal rows, and those of one number a row."""

    ragged: Mapping[str, Ragged]
    plain: Mapping[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return next(iter(self.lengths()), 0)

    def lengths(self) -> list[int]:
        return [*map(len, self.ragged.values()), *map(len, self.plain.values())]


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
        if values is None or not _fit(offsets, len(values)):
            raise ShardError(f"{path}: column {name!r} does not fit its offsets; pack the data again")
        ragged[name] = Ragged(values, offsets)
    columns = Columns(ragged, arrays)
    if any(length != len(columns) for length in columns.lengths()):
        raise ShardError(f"{path}: its columns are not equally long; pack the data again")
    return columns


def _fit(offsets: Array, count: int) -> bool:
    """Whether `offsets` cut `count` values into rows."""
    if offsets.dtype != np.int64 or not len(offsets) or offsets[0] != 0 or offsets[-1] != count:
        return False
    return bool((offsets[1:] >= offsets[:-1]).all())


def _map_arrays(path: Path) -> dict[str, Array]:
    """The arrays of a safetensors file as read-only views of the mapped file."""
    try:
        data = np.memmap(path, np.uint8, mode="r")
        header_bytes = int.from_bytes(data[:8].tobytes(), "little")
        if not 2 <= header_bytes <= min(_LARGEST_HEADER, len(data) - 8):
            raise ValueError("header length")
        body = data[8 + header_bytes :]
        arrays: dict[str, Array] = {}
        for name, entry in json.loads(data[8 : 8 + header_bytes].tobytes()).items():
            if name == "__metadata__":
                continue
            start, end = (int(edge) for edge in entry["data_offsets"])
            if not 0 <= start <= end <= len(body):
                raise ValueError(f"offsets of {name!r}")
            arrays[name] = body[start:end].view(_DTYPES[str(entry["dtype"])])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ShardError(f"{path} is not a shard ({error}); pack the data again") from error
    return arrays


# Shards of a pack in the making. Each is put with a note of what is in it, so that an interrupted pack goes on.


@dataclass(frozen=True)
class Made:
    """A shard that is in the store. `fingerprints` are hashes of its raw samples, to find the same one elsewhere."""

    split: str
    number: int
    source: int
    shard: Shard
    dropped: dict[str, Drops]
    fingerprints: tuple[int, ...] = ()


@dataclass(frozen=True)
class Place:
    """Where a shard goes: a value that any machine can work with."""

    pack: str
    split: str
    number: int
    source: int

    @property
    def name(self) -> str:
        return f"{self.split}-{self.number:05d}.safetensors"

    def _note(self) -> str:
        return pack_key(self.pack, f"making/{self.name}.json")

    def made_before(self, store: Store) -> Made | None:
        """The note of an earlier attempt. A pack's name has the digest of all that it depends on, so it still holds."""
        data = store.find(self._note())
        if data is None:
            return None
        try:
            return TypeAdapter(Made).validate_json(data)
        except ValidationError:
            return None

    def put(self, store: Store, columns: Columns, dropped: Dropped, fingerprints: Iterable[int] = ()) -> Made:
        data = encode_shard(columns)
        file = put_file(store, self.pack, self.name, data)
        shard = Shard(file.name, file.bytes, file.sha256, len(columns))
        made = Made(self.split, self.number, self.source, shard, drops_of(dropped), tuple(fingerprints))
        store.put(self._note(), json.dumps(asdict(made)).encode())
        return made


def put_file(store: Store, pack: str, name: str, data: bytes) -> PackFile:
    store.put(pack_key(pack, name), data)
    return PackFile(name, len(data), hashlib.sha256(data).hexdigest())


def drops_of(dropped: Dropped) -> dict[str, Drops]:
    return {reason: Drops(count, tuple(dropped.names[reason])) for reason, count in dropped.counts.most_common()}


def forget_notes(store: Store, pack: str) -> None:
    """The notes of a pack that is whole."""
    for entry in store.list(pack_key(pack, "making")):
        store.delete(entry.key)


@dataclass
class Gathered:
    """What a split has come to, as its shards are made, in any order."""

    sources: int
    made: list[Made] = field(default_factory=list)
    filtered: Dropped = field(default_factory=Dropped)
    dropped: Dropped = field(default_factory=Dropped)

    def split(self) -> Split:
        ordered = sorted(self.made, key=lambda made: made.number)
        counts = [0] * self.sources
        for made in ordered:
            counts[made.source] += made.shard.samples
        return Split(
            sum(counts),
            drops_of(self.filtered),
            _together([drops_of(self.dropped), *(made.dropped for made in ordered)]),
            tuple(counts),
            tuple(made.shard for made in ordered if made.shard.samples),
        )


def _together(parts: Iterable[Mapping[str, Drops]]) -> dict[str, Drops]:
    """All drops by reason, the most frequent first; the names are those of the first parts."""
    counts: dict[str, int] = {}
    names: dict[str, tuple[str, ...]] = {}
    for part in parts:
        for reason, drops in part.items():
            counts[reason] = counts.get(reason, 0) + drops.count
            names[reason] = (*names.get(reason, ()), *drops.names)[:10]
    return {
        reason: Drops(counts[reason], names[reason]) for reason in sorted(counts, key=lambda one: (-counts[one], one))
    }
