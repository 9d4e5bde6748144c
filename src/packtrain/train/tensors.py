"""Tensors in files: in one, or in the parts that the ranks of a sharded model wrote, which are read as one.

A part has some rows of a tensor, and its metadata says which. Files are mapped, and only the rows that are asked for
are read: no process needs memory for a whole model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from packtrain.pack.shard import check_header
from packtrain.run.checkpoint import CorruptCheckpoint, parts_of

Shapes = dict[str, tuple[int, ...]]
RowsOf = Mapping[str, tuple[int, int]]
"""For tensors of which a part has some rows: the first one, and how many rows the whole tensor has."""

_ROWS = "rows"  # the key of the metadata


@dataclass(frozen=True)
class _Piece:
    """Rows of a tensor that one file has."""

    file: Any  # safetensors does not export the type of an open file
    first: int
    shape: tuple[int, ...]

    @property
    def after(self) -> int:
        return self.first + (self.shape[0] if self.shape else 0)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in files that are open, with the shape of the whole."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[_Piece, ...]

    def read(self) -> Tensor:
        if len(self.pieces) == 1:
            tensor: Tensor = self.pieces[0].file.get_tensor(self.name)
            return tensor
        return self.read_rows(0, self.shape[0])

    def read_rows(self, first: int, after: int) -> Tensor:
        """Return the rows from `first` to before `after`; no others are read."""
        slices = [
            piece.file.get_slice(self.name)[max(0, first - piece.first) : min(after, piece.after) - piece.first]
            for piece in self.pieces
            if piece.first < after and first < piece.after
        ]
        if not slices:
            return self.pieces[0].file.get_slice(self.name)[0:0]  # type: ignore[no-any-return]
        return slices[0] if len(slices) == 1 else torch.cat(slices)


def shard_rows(rows: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """Return the rows of a tensor that a rank has, from the first to before the second, as torch divides them."""
    size = -(-rows // num_ranks)
    return min(rank * size, rows), min((rank + 1) * size, rows)


def own_rows(tensor: DTensor) -> tuple[int, int]:
    """Return the rows of a sharded tensor that this rank has."""
    return shard_rows(tensor.shape[0], tensor.device_mesh.size(), tensor.device_mesh.get_local_rank())


def own_part(tensors: Mapping[str, Tensor], is_first: bool) -> tuple[dict[str, Tensor], RowsOf]:
    """Return what a rank writes of tensors that may be sharded: its rows; the first rank also what is not sharded."""
    own_tensors: dict[str, Tensor] = {}
    rows: dict[str, tuple[int, int]] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            if is_first:
                own_tensors[name] = tensor
            continue
        first, after = own_rows(tensor)
        if first < after:
            own_tensors[name], rows[name] = tensor.to_local(), (first, tensor.shape[0])
    return own_tensors, rows


def save_tensors(path: Path, tensors: dict[str, Tensor], rows: RowsOf) -> None:
    save_file(tensors, path, {_ROWS: json.dumps(rows)} if rows else None)


def open_tensors(directory: Path, name: str) -> dict[str, StoredTensor]:
    """Open a file of a checkpoint, or the parts of it; of the tensors only names and shapes are read."""
    try:
        files = parts_of(name, [path.name for path in directory.iterdir()])
        if not files:
            raise ValueError("it is missing, or a part of it is")
        pieces: dict[str, list[_Piece]] = {}
        totals: dict[str, int] = {}
        for file in files:
            check_header(directory / file)
            opened: Any = safe_open(directory / file, "pt")
            rows = _rows_in(opened.metadata())
            for key in opened.keys():  # noqa: SIM118 - no mapping
                first, totals[key] = rows.get(key, (0, -1))
                pieces.setdefault(key, []).append(_Piece(opened, first, tuple(opened.get_slice(key).get_shape())))
        return {key: _assembled(key, pieces[key], totals[key]) for key in pieces}
    except (OSError, SafetensorError, ValueError) as error:
        raise CorruptCheckpoint(f"{name} cannot be read: {error}") from error


def _rows_in(metadata: Mapping[str, str] | None) -> RowsOf:
    """Read the metadata of a part. Others may write to the store: nothing in it is taken on trust."""
    rows = json.loads((metadata or {}).get(_ROWS, "{}"))
    if not isinstance(rows, dict) or not all(
        isinstance(entry, list) and len(entry) == 2 and all(type(number) is int for number in entry)
        for entry in rows.values()
    ):
        raise ValueError("its rows are not numbers")
    return {key: (first, total) for key, (first, total) in rows.items()}


def _assembled(name: str, pieces: list[_Piece], total: int) -> StoredTensor:
    """Put the pieces of a tensor into order; raise ValueError unless they have each row once."""
    shape = pieces[0].shape
    if total < 0:
        if len(pieces) > 1:
            raise ValueError(f"several parts have {name}")
        return StoredTensor(name, shape, tuple(pieces))
    ordered = sorted(pieces, key=lambda piece: piece.first)
    after = 0
    for piece in ordered:
        if not piece.shape or piece.first != after or piece.shape[1:] != shape[1:]:
            raise ValueError(f"rows of {name} are missing or there twice")
        after = piece.after
    if after != total:
        raise ValueError(f"rows of {name} are missing or there twice")
    return StoredTensor(name, (total, *shape[1:]), tuple(ordered))


def shapes_of(tensors: Mapping[str, Tensor | StoredTensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def placed(value: Tensor | StoredTensor, beside: Tensor) -> Tensor:
    """Return a copy of a whole tensor with the device, the sharding and the memory layout of another one.

    Fused optimizers walk the memory of a weight and of its state in parallel, whatever the order of their elements.
    """
    if isinstance(beside, DTensor):
        first, after = own_rows(beside)
        rows = value.read_rows(first, after) if isinstance(value, StoredTensor) else value[first:after]
        return DTensor.from_local(
            rows.to(beside.device, copy=True),
            beside.device_mesh,
            beside.placements,
            run_check=False,
            shape=beside.shape,
            stride=beside.stride(),
        )
    tensor = value.read() if isinstance(value, StoredTensor) else value
    if tensor.shape != beside.shape:
        return tensor.to(beside.device, copy=True)
    return torch.empty_like(beside, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
