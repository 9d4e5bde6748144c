"""Turn raw data into a pack in the store: its inputs, its progress, its finished shards and what was left out.

An existing pack is reused. Every shard is stored with a note of its contents under `making/`, so that an interrupted
build resumes after the shards that exist. The manifest is written last and replaces the notes.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from packtrain.errors import FieldMistake
from packtrain.files import sha256_of
from packtrain.job.job import DataSettings
from packtrain.job.kinds import Source
from packtrain.pack.archive import split_member
from packtrain.pack.kind import kind_of
from packtrain.pack.manifest import (
    FORMAT,
    Drops,
    Manifest,
    PackFile,
    RawText,
    ShardFile,
    Split,
    find_manifest,
    missing_files,
    pack_key,
    sized_split,
)
from packtrain.pack.raw import FIRST_NAMES, DropCounter
from packtrain.pack.shard import Columns, encode_shard, names_digest
from packtrain.pack.workers import Workers
from packtrain.store import Store, StoreError
from packtrain.store.records import DamagedRecord, Many, decode
from packtrain.units import counted

Advance = Callable[[int], None]
Sources = tuple[Source, ...]

MAX_DROPPED = 0.01  # of a split's samples; more usually means that a path is wrong
_HASHED_BYTES = 4_000_000_000  # larger files are identified by size and time: hashing them would take minutes
_COMPARED = 1_000_000  # training samples compared with those of another split at a time


class PackProgress(Protocol):
    def say(self, text: str) -> None:
        """Print a line that stays."""

    def track(self, activity: str, total: int | None) -> AbstractContextManager[Advance]:
        """Show a bar of that many samples; None if the total is unknown."""


class PlainProgress:
    """Lines only, for scripts."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def say(self, text: str) -> None:
        self._write(text)

    @contextmanager
    def track(self, activity: str, total: int | None) -> Iterator[Advance]:  # noqa: ARG002
        yield lambda _: None


@dataclass(frozen=True)
class Learned:
    """Classes, and vocabularies as JSON, of training data. A pack of later samples takes them over."""

    classes: tuple[str, ...] = ()
    vocabulary: str | None = None
    target_vocabulary: str | None = None


@dataclass(frozen=True)
class Packing:
    """Everything that packing needs. `name` is the name of the pack's folder; without `learned`, it learns from `data`.

    `first`: only so many samples of each source are packed, to plan with.
    """

    name: str
    data: DataSettings
    store: Store
    workers: Workers
    progress: PackProgress
    learned: Learned | None = None
    first: int | None = None


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
        shards = tuple(finished.copies[size] for finished in self._ordered() if finished.shard.samples)
        return replace(self.finish(), shards=shards)

    def _ordered(self) -> list[FinishedShard]:
        # Workers finish in any order; the manifest must not depend on it.
        return sorted(self.shards, key=lambda finished: finished.number)


def _merged(drops_of_shards: Iterable[Mapping[str, Drops]]) -> dict[str, Drops]:
    """Return all drops by reason, the most frequent first, with the names from the first parts."""
    counts: dict[str, int] = {}
    names: dict[str, tuple[str, ...]] = {}
    for drops_by_reason in drops_of_shards:
        for reason, drops in drops_by_reason.items():
            counts[reason] = counts.get(reason, 0) + drops.count
            names[reason] = (*names.get(reason, ()), *drops.names)[:FIRST_NAMES]
    return {
        reason: Drops(counts[reason], names[reason])
        for reason in sorted(counts, key=lambda reason: (-counts[reason], reason))
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


# A whole pack.


def pack(
    name: str, data: DataSettings, store: Store, workers: Workers, progress: PackProgress, allow_drops: bool = False
) -> Manifest:
    """Return the pack of a job's data, packing it if the store does not have it. `name` is the name of the job."""
    kind = common_kind(splits_of(data))
    settings = settings_of(data, kind)
    folder = f"{name}-{digest(settings)}"
    # The folder's name is a digest of everything that the pack depends on, so an existing one is never stale.
    existing = find_manifest(store, folder)
    if existing is not None:
        missing = missing_files(store, existing)
        if not missing:
            progress.say(f"pack {folder} already exists")
            return existing
        progress.say(f"pack {folder} lacks {counted(len(missing), 'file')}, such as {missing[0]}; packing again")
    return build_pack(Packing(folder, data, store, workers, progress), kind, settings, allow_drops)


def pack_later(packing: Packing, word: str, allow_drops: bool = False) -> Manifest:
    """Pack the samples of a split other than `train` as those of the pack that has learned from its training data."""
    assert packing.learned is not None and not packing.data.train
    return build_pack(packing, word, settings_of(packing.data, word), allow_drops)


def build_pack(packing: Packing, word: str, settings: dict[str, Any], allow_drops: bool) -> Manifest:
    """Make a pack of the kind that `word` names; `settings` are all that its bytes depend on."""
    folder, data, store, progress = packing.name, packing.data, packing.store, packing.progress
    kind = kind_of(word)
    contents = kind.pack(packing)
    splits: dict[str, Split] = {}
    for name, build in contents.splits.items():
        splits[name] = split = build.finish()
        held_out = name == "valid" and data.held_out is not None
        if held_out and not split.samples:
            raise FieldMistake("data.valid", f"none of the samples is in {data.share} of them; hold out more")
        if not split.samples:
            raise FieldMistake(f"data.{name}", f"no usable samples{_left_out(split) or ': the source is empty'}")
        dropped = split.num_dropped
        if dropped > MAX_DROPPED * (dropped + split.samples) and not allow_drops:
            reason, drops = next(iter(split.dropped.items()))
            raise FieldMistake(
                f"data.{name}",
                f"{dropped:,} of {dropped + split.samples:,} samples are unusable, most often ({drops.count:,}):"
                f" {reason}, such as {drops.names[0]}; fix them, or pass --allow-drops",
            )
        share = f", {data.share} of the training data, chosen by their content" if held_out else ""
        progress.say(f"{name}: {split.samples:,} {kind.nouns}{share}{_left_out(split, kind.drops_samples_only)}")
        if kind.has_sizes:
            splits |= {sized_split(name, size): build.finish_copy(size) for size in data.sizes}
    for warning in kind.warnings(splits):
        progress.say(f"warning: {warning}")
    _warn_of_overlap(contents, progress)
    manifest = Manifest(
        FORMAT, folder, word, settings, splits, contents.classes, contents.vocabulary, contents.target_vocabulary
    )
    # Last: a pack without a manifest does not exist, so a reader never sees half of one.
    store.put(pack_key(folder, "manifest.json"), manifest.to_json())
    for entry in store.list(pack_key(folder, "making")):
        store.delete(entry.key)
    try:
        store.remove_unfinished(f"packs/{folder}")  # of interrupted builds
    except StoreError as error:
        progress.say(f"warning: {error}")
    return manifest


def common_kind(splits: Mapping[str, Sequence[Source]]) -> str:
    """Return the kind of all sources of a job; a mix of kinds cannot be one pack."""
    kinds = {split: [source.pack_kind() for source in sources] for split, sources in splits.items()}
    first = kinds["train"][0]
    for split, kinds_of_sources in kinds.items():
        for number, kind in enumerate(kinds_of_sources):
            if kind != first:
                raise FieldMistake(
                    f"data.{split}.{number}",
                    f"has {kind}, but the first training source has {first}; all sources must have the same kind",
                )
    return first


def _left_out(split: Split, shares: bool = False) -> str:
    reasons = {**split.filtered, **split.dropped}
    listed = ", ".join(
        f"{drops.count:,} ({f'{split.show_share(drops.count)}, ' if shares else ''}{reason})"
        for reason, drops in reasons.items()
    )
    return f"; left out {listed}" if listed else ""


def _warn_of_overlap(contents: PackContents, progress: PackProgress) -> None:
    if "train" not in contents.fingerprints:
        return
    trained = np.frombuffer(contents.fingerprints["train"], np.uint64)
    for split in (name for name in contents.fingerprints if name != "train"):
        values = np.frombuffer(contents.fingerprints[split], np.uint64)
        # In parts, because sorting all training samples at once would need several times their memory.
        blocks = (trained[start : start + _COMPARED] for start in range(0, max(1, len(trained)), _COMPARED))
        shared = np.concatenate([block[np.isin(block, values)] for block in blocks])
        same = int(np.isin(values, shared).sum())
        if same:
            progress.say(f"warning: {same:,} samples of {split} are also in train; scores will be too optimistic")


def settings_of(data: DataSettings, word: str) -> dict[str, Any]:
    """Return everything that the bytes of a pack depend on: the content of its sources, and settings."""
    settings: dict[str, Any] = {
        "format": FORMAT,
        "kind": word,
        "splits": {
            split: [
                [
                    source.kind,
                    *(_content_of(path, f"data.{split}.{number}") for path in source.paths),
                    _named_files_digest(source),
                    *([source.options] if source.options else []),
                ]
                for number, source in enumerate(sources)
            ]
            for split, sources in splits_of(data).items()
            if split != "valid" or data.held_out is None  # the same files again
        },
    }
    if data.held_out is not None:
        settings |= {"held_out": data.held_out}
    return settings | kind_of(word).settings(data)


def digest(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def _content_of(place: str, field: str) -> str:
    """Return the hash of a file; for a folder or a very large file, of names, sizes and times, which is faster."""
    archive, member = split_member(place)
    path = Path(archive)
    try:
        if path.is_dir():
            return _listing_digest(path)
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe could block, and a device may never end
            raise FieldMistake(field, f"{path}: is not a regular file")
        content = f"{status.st_size}-{status.st_mtime_ns}" if status.st_size > _HASHED_BYTES else sha256_of(path)
        return f"{content}#{member}" if member else content
    except OSError as error:
        raise FieldMistake(field, f"{path}: {error.strerror}; packing needs the raw data") from error


def _listing_digest(folder: Path, outer: frozenset[Path] = frozenset()) -> str:
    """Hash names, sizes and times of all files below a folder and its links; `outer` ends circles of links."""
    hasher = hashlib.sha256()
    outer |= {folder.resolve()}
    for root, folders, files in os.walk(folder):
        folders.sort()  # in place: os.walk then visits them in this order on every file system
        for name in sorted(files):
            path = Path(root, name)
            _add_line(hasher, str(path.relative_to(folder)), path.stat() if path.exists() else path.lstat())
        for path in (Path(root, name) for name in folders):
            if path.is_symlink() and path.resolve() not in outer:
                line = f"{path.relative_to(folder)}\0{_listing_digest(path.resolve(), outer)}\n"
                hasher.update(line.encode(errors="surrogateescape"))
    return hasher.hexdigest()


def _named_files_digest(source: Source) -> str:
    hasher = hashlib.sha256()
    for name, path in source.named_files():
        _add_line(hasher, name, None if path is None else Path(path).stat())
    return hasher.hexdigest()


def _add_line(hasher: hashlib._Hash, name: str, status: os.stat_result | None) -> None:
    identity = "missing" if status is None else f"{status.st_size}\0{status.st_mtime_ns}"
    hasher.update(f"{name}\0{identity}\n".encode(errors="surrogateescape"))
