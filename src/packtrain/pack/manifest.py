"""A pack's manifest: what is in it, with the hash of every file. It is written last."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from packtrain.errors import NotFound, PacktrainError
from packtrain.store import Store, is_key

FORMAT = 2

Kind = Literal["pairs", "labels", "captions"]


def _plain(name: str) -> str:
    if not is_key(name) or "/" in name:
        raise ValueError(f"{name!r} is not the name of a file")
    return name


@dataclass(frozen=True)
class FormatVersion:
    """The part of a manifest that every format has."""

    format: int


@dataclass(frozen=True)
class PackFile:
    name: Annotated[str, AfterValidator(_plain)]
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ShardFile(PackFile):
    samples: int


@dataclass(frozen=True)
class Drops:
    """How many samples were left out for a reason, and the names of the first of them."""

    count: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Split:
    """`filtered` has the raw samples that the settings leave out, `dropped` those that could not be used, by reason.

    `sources` says how many samples came from each source, in their order.
    """

    samples: int
    filtered: dict[str, Drops]
    dropped: dict[str, Drops]
    sources: tuple[int, ...]
    shards: Annotated[tuple[ShardFile, ...], Field(min_length=1)]


@dataclass(frozen=True)
class Manifest:
    """`name` is that of the pack's folder: the job's name and the digest of sources and settings.

    Pairs have token columns `source` and `target`. Images have `jpeg`, `segments`, `width` and `height`, with the
    class in `label`, or with `captions` (tokens of all captions of an image) and `caption_lengths` (of each).
    Without `target_vocabulary` both sides of a pair share `vocabulary`. A split `train@160` has the same samples as
    `train`, at most 160 pixels on the short side.
    """

    format: int
    name: str
    kind: Kind
    settings: dict[str, Any]
    splits: dict[str, Split]
    classes: tuple[str, ...] = ()
    vocabulary: PackFile | None = None
    target_vocabulary: PackFile | None = None

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()


def pack_key(pack: str, name: str) -> str:
    return f"packs/{pack}/{name}"


def find_manifest(store: Store, pack: str) -> Manifest | None:
    data = store.find(pack_key(pack, "manifest.json"))
    if data is None:
        return None
    try:
        version = TypeAdapter(FormatVersion).validate_json(data).format
        if version != FORMAT:
            raise PacktrainError(f"pack {pack} in {store.url} has format {version}, this version reads {FORMAT}")
        return TypeAdapter(Manifest).validate_json(data)
    except ValidationError as error:
        raise PacktrainError(
            f"the manifest of pack {pack} in {store.url} is damaged; delete it and pack again"
        ) from error


def read_manifest(store: Store, pack: str) -> Manifest:
    manifest = find_manifest(store, pack)
    if manifest is None:
        raise NotFound(f"no pack {pack} in {store.url}; `packtrain pack JOB` makes it")
    return manifest
