"""A pack opened for reading: its columns memory-mapped, every file checked against its hash."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from packtrain.digest import sha256_of
from packtrain.errors import PacktrainError
from packtrain.pack.manifest import Manifest, PackFile, pack_key, read_manifest
from packtrain.pack.shard import Ragged, open_shard
from packtrain.pack.vocabulary import Vocabulary
from packtrain.store import Store


class Pack:
    """Files are fetched into `directory` once and shared by all workers of the machine."""

    def __init__(self, store: Store, name: str, directory: Path) -> None:
        self._store, self.name = store, name
        self._directory = directory / name
        self.manifest: Manifest = read_manifest(store, name)
        self._vocabulary: Vocabulary | None = None

    @property
    def vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:
            path = self._fetch(self.manifest.vocabulary)
            self._vocabulary = Vocabulary.from_json(path.read_text())
        return self._vocabulary

    def columns(self, split: str) -> dict[str, Ragged]:
        """The columns of a split, whole; an empty mapping if the pack has no such split."""
        if split not in self.manifest.splits:
            return {}
        shards = [open_shard(self._fetch(shard)) for shard in self.manifest.splits[split].shards]
        return {name: _joined([shard[name] for shard in shards]) for name in shards[0]}

    def _fetch(self, file: PackFile) -> Path:
        path = self._directory / file.name
        if path.exists() and sha256_of(path) == file.sha256:
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._store.get_file(pack_key(self.name, file.name), path)
        if sha256_of(path) != file.sha256:
            raise PacktrainError(
                f"{file.name} of pack {self.name} in {self._store.url} does not have the hash it should;"
                " delete the pack's manifest.json and pack again"
            )
        return path


def _joined(parts: list[Ragged]) -> Ragged:
    if len(parts) == 1:
        return parts[0]
    ends = np.cumsum([0, *(len(part.values) for part in parts)])
    offsets = [part.offsets[:-1] + end for part, end in zip(parts, ends, strict=False)]
    return Ragged(np.concatenate([part.values for part in parts]), np.concatenate([*offsets, ends[-1:]]))
