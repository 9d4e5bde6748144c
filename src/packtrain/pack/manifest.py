"""The manifest of a pack: its contents, with the hash of every file. It is written last."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from pydantic import Field

from packtrain.errors import NotFound, PacktrainError
from packtrain.pack.kind import PACK_KINDS
from packtrain.store import Store
from packtrain.store.records import Count, DamagedRecord, Digest, FileName, Many, decode

FORMAT = 4
_MAX_BYTES = 128 << 20  # of a manifest: more than 10 TB of images
_MAX_FILE_BYTES = 64 << 30  # of one file: a shard has some 20 MB, and a cache makes room for what a manifest says


@dataclass(frozen=True)
class FormatVersion:
    """The part of a manifest that every format has."""

    format: Count


@dataclass(frozen=True)
class PackFile:
    name: FileName
    bytes: Annotated[int, Field(ge=0, le=_MAX_FILE_BYTES)]
    sha256: Digest


@dataclass(frozen=True)
class ShardFile(PackFile):
    """A shard. `names` is the hash of its images' names, in order, by which copies in other sizes are compared."""

    samples: Count
    names: str = ""


@dataclass(frozen=True)
class Drops:
    """The number of samples left out for one reason, and the names of the first ones."""

    count: Count
    names: Many[str]


@dataclass(frozen=True)
class RawText:
    """One side of the pairs as they were read, before anything was left out: its lines, and their bytes in UTF-8."""

    bytes: Count
    lines: Count


@dataclass(frozen=True)
class Split:
    """`filtered` are raw samples that the settings leave out, `dropped` those that are unusable, by reason.

    `sources` is the number of samples from each source, in order; `raw` has both sides of pairs. What is held out of
    the training data is in its `raw`, and has none of its own.
    """

    samples: Count
    filtered: dict[str, Drops]
    dropped: dict[str, Drops]
    sources: Many[Count]
    shards: Annotated[Many[ShardFile], Field(min_length=1)]
    raw: Many[RawText] = ()

    def show_share(self, count: int) -> str:
        share = self.share_of(count)
        return f"{share:.1%}" if share >= 0.001 or not count else "<0.1%"

    def share_of(self, count: int) -> float:
        """Return the share of a number of samples in all that were read, those that were left out included."""
        return count / max(1, self.samples + self.num_filtered + self.num_dropped)

    @property
    def num_filtered(self) -> int:
        return sum(drops.count for drops in self.filtered.values())

    @property
    def num_dropped(self) -> int:
        return sum(drops.count for drops in self.dropped.values())

    @property
    def shard_bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)


@dataclass(frozen=True)
class Manifest:
    """`name` is the pack's folder: the name of the job and the digest of sources and settings.

    `kind` is a word of PACK_KINDS, and its class says which columns the shards have. Without `target_vocabulary` both
    sides of a pair use `vocabulary`. The split `train@160` has the samples of `train` with at most 160 pixels on the
    short side, in the same shards and the same order.
    """

    format: Count
    name: FileName
    kind: str
    settings: dict[str, Any]
    splits: dict[str, Split]
    classes: Many[str] = ()
    vocabulary: PackFile | None = None
    target_vocabulary: PackFile | None = None

    def files(self) -> Iterator[PackFile]:
        yield from (file for file in (self.vocabulary, self.target_vocabulary) if file is not None)
        for split in self.splits.values():
            yield from split.shards

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()


def sized_split(split: str, size: int) -> str:
    """Return the name of a split's copy in another size."""
    return f"{split}@{size}"


def is_copy(split: str) -> bool:
    """True for the name of a split's copy in another size."""
    return "@" in split


def check_copies(manifest: Manifest) -> None:
    """Refuse a pack whose copies in other sizes do not have the samples of their originals.

    A sample is read by its number, with its label or caption from one split and its pixels from another.
    """
    for name, copy in manifest.splits.items():
        original = name.partition("@")[0]
        if is_copy(name) and (original not in manifest.splits or _samples(copy) != _samples(manifest.splits[original])):
            raise PacktrainError(
                f"pack {manifest.name}: {name} has other samples than {original}; delete the pack and pack again"
            )


def _samples(split: Split) -> list[tuple[int, str]]:
    return [(shard.samples, shard.names) for shard in split.shards]


def pack_key(pack: str, name: str) -> str:
    return f"packs/{pack}/{name}"


def find_manifest(store: Store, pack: str) -> Manifest | None:
    data = store.find(pack_key(pack, "manifest.json"), _MAX_BYTES)
    if data is None:
        return None
    place = f"the manifest of pack {pack} in {store.url}"
    try:
        # Before the rest: a manifest of another format is not damaged, it has other fields.
        version = decode(FormatVersion, data, place).format
        if version != FORMAT:
            raise PacktrainError(
                f"pack {pack} in {store.url} has format {version}, but this version reads format {FORMAT};"
                " pack the data again"
            )
        manifest = decode(Manifest, data, place)
        fits_together = (
            manifest.name == pack
            and manifest.kind in PACK_KINDS
            and "train" in manifest.splits
            and all(
                split.samples == sum(split.sources) == sum(shard.samples for shard in split.shards)
                for name, split in manifest.splits.items()
                if not is_copy(name)  # copies are compared with their originals
            )
        )
        if not fits_together:
            raise DamagedRecord(place)
        return manifest
    except DamagedRecord as error:
        raise DamagedRecord(f"{place} is damaged; delete it and pack again") from error


def missing_files(store: Store, manifest: Manifest) -> list[str]:
    """Return the names of files that are not in the store, or not in the size that the manifest says."""
    sizes = {entry.key: entry.size for entry in store.list(pack_key(manifest.name, ""))}
    return [file.name for file in manifest.files() if sizes.get(pack_key(manifest.name, file.name)) != file.bytes]


def read_manifest(store: Store, pack: str) -> Manifest:
    manifest = find_manifest(store, pack)
    if manifest is None:
        raise NotFound(f"pack {pack} not found in {store.url}; make it with `packtrain pack JOB`")
    return manifest
