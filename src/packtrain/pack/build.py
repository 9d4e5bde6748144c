"""A pack while it is being built: its inputs, its progress, its finished shards and what was left out.

Every shard is stored with a note of its contents under `making/`, so that an interrupted build resumes after the shards
that exist. The manifest is written last and replaces the notes.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

from packtrain.job.job import DataSettings
from packtrain.job.kinds import Source
from packtrain.pack.manifest import Drops, PackFile, RawText, ShardFile, Split, pack_key, sized_split
from packtrain.pack.raw import DropCounter
from packtrain.pack.shard import Columns, encode_shard, names_digest
from packtrain.pack.workers import Workers
from packtrain.store import Store
from packtrain.store.records import DamagedRecord, Many, decode

Advance = Callable[[int], None]
Sources = tuple[Source, ...]

_FIRST_NAMES = 10


class PackProgress(Protocol):
    def say(self, text: str) -> None:
        """Print a line that stays."""

    def track(self, what: str, total: int | None) -> AbstractContextManager[Advance]:
        """Show a bar of that many samples; None if the total is unknown."""


class PlainProgress:
    """Lines only, for scripts."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def say(self, text: str) -> None:
        self._write(text)

    @contextmanager
    def track(self, what: str, total: int | None) -> Iterator[Advance]:  # noqa: ARG002
        yield lambda _: None


@dataclass(frozen=True)
class Learned:
    """Classes, and vocabularies as JSON, of training data. A pack of later samples takes them over."""

    classes: tuple[str, ...] = ()
    vocabulary: str | None = None
    target_vocabulary: str | None = None


@dataclass(frozen=True)
class Packing:
    """Everything a packer needs. `name` is the name of the pack's folder; without `learned`, it learns from `data`."""

    name: str
    data: DataSettings
    store: Store
    workers: Workers
    progress: PackProgress
    learned: Learned | None = None


@dataclass(frozen=True)
class FinishedShard:
    """A shard in the store, with its copies in other sizes: they have the same samples, so they are finished together.

    `fingerprints` are hashes of its raw samples, to find samples shared by two splits.
    """

    split: str
    number: int
    source: int
    shard: ShardFile
    dropped: dict[str, Drops]
    fingerprints: Many[int] = ()
    copies: dict[int, ShardFile] = field(default_factory=dict)


@dataclass(frozen=True)
class ShardTarget:
    """The place of a shard in a pack: a plain value that can be sent to any worker."""

    pack: str
    split: str
    number: int
    source: int

    def _name(self, split: str) -> str:
        return f"{split}-{self.number:05d}.safetensors"

    def _note(self) -> str:
        return pack_key(self.pack, f"making/{self._name(self.split)}.json")

    def find(self, store: Store) -> FinishedShard | None:
        """Return the shard if an interrupted build has stored it."""
        # The pack's name contains the digest of its data and settings, so an existing note is still valid.
        data = store.find(self._note())
        if data is None:
            return None
        try:
            return decode(FinishedShard, data, self._note())
        except DamagedRecord:  # or of another version: make the shard again
            return None

    def put(
        self,
        store: Store,
        columns: Columns,
        dropped: DropCounter,
        fingerprints: Iterable[int] = (),
        copies: Mapping[int, Columns] | None = None,
    ) -> FinishedShard:
        shard = self._put(store, self.split, columns)
        sized = {size: self._put(store, sized_split(self.split, size), copy) for size, copy in (copies or {}).items()}
        finished = FinishedShard(
            self.split, self.number, self.source, shard, drops_of(dropped), tuple(fingerprints), sized
        )
        # After the shard and all its copies: if the build is interrupted before, another try may drop other samples,
        # and must then drop them from every copy.
        store.put(self._note(), json.dumps(asdict(finished)).encode())
        return finished

    def _put(self, store: Store, split: str, columns: Columns) -> ShardFile:
        file = put_file(store, self.pack, self._name(split), encode_shard(columns))
        return ShardFile(file.name, file.bytes, file.sha256, len(columns), names_digest(columns))


def put_file(store: Store, pack: str, name: str, data: bytes) -> PackFile:
    store.put(pack_key(pack, name), data)
    return PackFile(name, len(data), hashlib.sha256(data).hexdigest())


def delete_notes(store: Store, pack: str) -> None:
    for entry in store.list(pack_key(pack, "making")):
        store.delete(entry.key)


def drops_of(dropped: DropCounter) -> dict[str, Drops]:
    return {reason: Drops(count, tuple(dropped.names[reason])) for reason, count in dropped.counts.most_common()}


@dataclass
class SplitBuild:
    """A split while its shards are being made, in any order."""

    sources: int
    shards: list[FinishedShard] = field(default_factory=list)
    filtered: DropCounter = field(default_factory=DropCounter)
    dropped: DropCounter = field(default_factory=DropCounter)
    raw: tuple[RawText, ...] = ()

    def finish(self) -> Split:
        ordered = self._ordered()
        counts = [0] * self.sources
        for finished in ordered:
            counts[finished.source] += finished.shard.samples
        return Split(
            sum(counts),
            drops_of(self.filtered),
            _merged([drops_of(self.dropped), *(finished.dropped for finished in ordered)]),
            tuple(counts),
            tuple(finished.shard for finished in ordered if finished.shard.samples),
            self.raw,
        )

    def finish_copy(self, size: int) -> Split:
        """Return the same split in another size."""
        shards = tuple(finished.copies[size] for finished in self._ordered() if finished.shard.samples)
        return replace(self.finish(), shards=shards)

    def _ordered(self) -> list[FinishedShard]:
        # Workers finish in any order; the manifest must not depend on it.
        return sorted(self.shards, key=lambda finished: finished.number)


def _merged(parts: Iterable[Mapping[str, Drops]]) -> dict[str, Drops]:
    """Return all drops by reason, the most frequent first, with the names from the first parts."""
    counts: dict[str, int] = {}
    names: dict[str, tuple[str, ...]] = {}
    for part in parts:
        for reason, drops in part.items():
            counts[reason] = counts.get(reason, 0) + drops.count
            names[reason] = (*names.get(reason, ()), *drops.names)[:_FIRST_NAMES]
    return {
        reason: Drops(counts[reason], names[reason]) for reason in sorted(counts, key=lambda one: (-counts[one], one))
    }


@dataclass
class PackContents:
    """All splits of a pack being built. `fingerprints` are hashes of raw samples, to find samples in two splits."""

    splits: dict[str, SplitBuild]
    classes: tuple[str, ...] = ()
    vocabulary: PackFile | None = None
    target_vocabulary: PackFile | None = None
    fingerprints: dict[str, array[int]] = field(default_factory=dict)


def empty_contents(data: DataSettings) -> PackContents:
    splits = splits_of(data)
    return PackContents(
        {split: SplitBuild(len(sources)) for split, sources in splits.items()},
        fingerprints={split: array("Q") for split in splits},
    )


def is_held_out(content: bytes, share: float | None) -> bool:
    """True if a sample of the training data belongs to validation: decided by a hash of its content alone.

    So the same samples are held out whatever their files and order, and equal ones are on the same side.
    """
    if share is None:
        return False
    word = int.from_bytes(hashlib.blake2b(content, digest_size=8, person=b"held out").digest(), "big")
    return word < share * 2**64


def splits_of(data: DataSettings) -> dict[str, Sources]:
    held_out = data.held_out is not None
    named = {"train": data.train, "valid": data.train if held_out else data.valid, "test": data.test}
    return {split: sources for split, sources in named.items() if sources}
