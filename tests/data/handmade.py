"""Packs made by hand for tests of what reads them, and a store that is not a directory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from packtrain.pack.manifest import FORMAT, Manifest, PackFile, ShardFile, Split, pack_key
from packtrain.pack.shard import Columns, Ragged, encode_shard
from packtrain.store import Store
from packtrain.store.directory import DirectoryStore

Rows = Sequence[Sequence[int]]
NAME = "handmade-0123"


class Remote(DirectoryStore):
    """A directory that is read as a bucket would be, file by file, and notes in a file what was fetched."""

    is_directory = False

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.create()
        self.notes = root.parent / f"{root.name}.fetched"

    def get_file(self, key: str, path: Path, limit: int | None = None) -> None:
        with self.notes.open("a") as notes:
            notes.write(key.rpartition("/")[2] + "\n")
        super().get_file(key, path, limit)

    @property
    def fetched(self) -> list[str]:
        return self.notes.read_text().split() if self.notes.exists() else []


def put_file(store: Store, name: str, data: bytes) -> PackFile:
    store.put(pack_key(NAME, name), data)
    return PackFile(name, len(data), hashlib.sha256(data).hexdigest())


def put_shard(store: Store, name: str, rows: Rows, first: int = 0) -> ShardFile:
    """A shard with a column `tokens` of these rows, and a column `number` of the samples' own numbers."""
    numbers = np.arange(first, first + len(rows), dtype=np.int32)
    data = encode_shard(Columns({"tokens": Ragged.from_rows(rows, np.dtype("<u2"))}, {"number": numbers}))
    file = put_file(store, name, data)
    return ShardFile(file.name, file.bytes, file.sha256, len(rows))


def put_pack(store: Store, rows: Rows, samples_per_shard: int) -> Manifest:
    """A pack with one split, `train`."""
    shards = tuple(
        put_shard(store, f"train-{number:05d}", rows[start : start + samples_per_shard], start)
        for number, start in enumerate(range(0, len(rows), samples_per_shard))
    )
    split = Split(samples=len(rows), filtered={}, dropped={}, sources=(len(rows),), shards=shards)
    manifest = Manifest(format=FORMAT, name=NAME, kind="pairs", settings={}, splits={"train": split})
    store.put(pack_key(NAME, "manifest.json"), manifest.to_json())
    return manifest


def rot(path: Path, at: int) -> None:
    """Change a byte, but neither the size nor the time of a file, as a failing disk does."""
    before, data = path.stat(), bytearray(path.read_bytes())
    data[at] ^= 0xFF
    with path.open("r+b") as file:  # in place: the file keeps its inode
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
