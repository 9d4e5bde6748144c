"""Shards of a pack in the making. Each is put with a note of what is in it, so that an interrupted pack goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from pydantic import TypeAdapter, ValidationError

from packtrain.pack.manifest import Drops, PackFile, Shard, Split, pack_key
from packtrain.pack.raw import Dropped
from packtrain.pack.shard import Columns, encode_shard
from packtrain.store import Store


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
