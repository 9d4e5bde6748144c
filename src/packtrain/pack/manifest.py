"""A pack's manifest: what is in it, with the hash of every file. It is written last."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from packtrain.errors import NotFound, PacktrainError
from packtrain.store import Store, is_key

FORMAT = 1


def _plain(name: str) -> str:
    if not is_key(name) or "/" in name:
        raise ValueError(f"{name!r} is not the name of a file")
    return name


@dataclass(frozen=True)
class Version:
    """The part of a manifest that every format has."""

    format: int


@dataclass(frozen=True)
class PackFile:
    name: Annotated[str, AfterValidator(_plain)]
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Shard(PackFile):
    samples: int


@dataclass(frozen=True)
class Split:
    """`dropped` counts the raw samples left out, by reason."""

    samples: int
    dropped: dict[str, int]
    shards: Annotated[tuple[Shard, ...], Field(min_length=1)]


@dataclass(frozen=True)
class Manifest:
    """`name` is that of the pack's folder: the job's name and the digest of sources and settings."""

    format: int
    name: str
    settings: dict[str, Any]
    splits: dict[str, Split]
    vocabulary: PackFile

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()


def pack_key(pack: str, name: str) -> str:
    return f"packs/{pack}/{name}"


def find_manifest(store: Store, pack: str) -> Manifest | None:
    data = store.find(pack_key(pack, "manifest.json"))
    if data is None:
        return None
    try:
        version = TypeAdapter(Version).validate_json(data).format
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
