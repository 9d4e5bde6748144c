"""A pack opened for reading: its shards mapped into memory where they are, or from the cache of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from packtrain.data.cache import Cache, Lock
from packtrain.data.split import SplitReader
from packtrain.errors import NotFound, PacktrainError
from packtrain.pack.manifest import Manifest, PackFile, pack_key, read_manifest
from packtrain.pack.vocabulary import Vocabulary
from packtrain.store import Store

GIVEN = "files/"  # files that jobs name beside their data, by hash: first weights, say


class Pack:
    """A pack whose files come through the cache in `directory`, each checked against its hash when first used."""

    def __init__(self, store: Store, name: str, directory: Path, cache_bytes: int | None = None) -> None:
        self._store, self.name = store, name
        self._cache = Cache(directory, cache_bytes)
        self.manifest: Manifest = read_manifest(store, name)
        self._hold: Lock | None = None  # as long as it lives, the cache keeps what it has of this pack
        self._splits: dict[str, SplitReader] = {}

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Of both sides of a pair, or of the sources where targets have their own."""
        return self._vocabulary(self.manifest.vocabulary)

    @cached_property
    def target_vocabulary(self) -> Vocabulary:
        own = self.manifest.target_vocabulary
        return self.vocabulary if own is None else self._vocabulary(own)

    def _vocabulary(self, file: PackFile | None) -> Vocabulary:
        if file is None:
            raise PacktrainError(f"pack {self.name} has no vocabulary: it has {self.manifest.kind}")
        return Vocabulary.from_json(self._path_of(file).read_text())

    def split(self, name: str) -> SplitReader:
        if name not in self.manifest.splits:
            raise NotFound(f"pack {self.name} has no split {name!r}; it has {', '.join(self.manifest.splits)}")
        if name not in self._splits:
            self._splits[name] = SplitReader(self.manifest.splits[name].shards, self._path_of)
        return self._splits[name]

    def given_file(self, path: str) -> Path:
        """A file that a job names: of the store, under its hash, once the job runs; until then where it is."""
        key = path.removeprefix("store:")
        if not path.startswith(f"store:{GIVEN}"):
            return Path(path)
        entry = self._store.entry(key)
        if entry is None:
            raise NotFound(f"there is no {key} in {self._store.url}, which the run was given")
        return self._cache.path_of(self._store, key, PackFile(path, entry.size, key.removeprefix(GIVEN)))

    def _path_of(self, file: PackFile) -> Path:
        if self._hold is None and not self._store.is_directory:
            self._hold = self._cache.hold(self._hashes())
        return self._cache.path_of(self._store, pack_key(self.name, file.name), file)

    def _hashes(self) -> Iterator[str]:
        vocabularies = (self.manifest.vocabulary, self.manifest.target_vocabulary)
        yield from (file.sha256 for file in vocabularies if file is not None)
        for split in self.manifest.splits.values():
            yield from (shard.sha256 for shard in split.shards)
