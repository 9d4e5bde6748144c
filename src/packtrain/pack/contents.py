"""What all packers work with, and what they come to."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from packtrain.job import Data, Source
from packtrain.pack.manifest import PackFile
from packtrain.pack.progress import Progress
from packtrain.pack.shards import Gathered
from packtrain.pack.workers import Workers
from packtrain.store import Store

Sources = tuple[Source, ...]


@dataclass(frozen=True)
class Packing:
    """What is packed, where to and by whom. `name` is that of the pack's folder."""

    name: str
    data: Data
    store: Store
    workers: Workers
    progress: Progress


@dataclass
class Contents:
    """Splits in the making. `fingerprints` are hashes of raw samples, to find one that is in two splits."""

    gathered: dict[str, Gathered]
    classes: tuple[str, ...] = ()
    vocabulary: PackFile | None = None
    target_vocabulary: PackFile | None = None
    fingerprints: dict[str, array[int]] = field(default_factory=dict)


def splits_of(data: Data) -> dict[str, Sources]:
    named = {"train": data.train, "valid": data.valid, "test": data.test}
    return {split: sources for split, sources in named.items() if sources}


def empty_contents(data: Data) -> Contents:
    splits = splits_of(data)
    return Contents(
        {split: Gathered(len(sources)) for split, sources in splits.items()},
        fingerprints={split: array("Q") for split in splits},
    )
