"""Raw data of this machine that is not packed yet: how much there is, and a pack of its first samples to plan with."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

from packtrain.data.pack import Pack
from packtrain.errors import FieldMistake
from packtrain.job.job import DataSettings
from packtrain.job.kinds import Source
from packtrain.pack.archive import split_member
from packtrain.pack.build import Packing, PlainProgress, splits_of
from packtrain.pack.compression import CODECS
from packtrain.pack.manifest import FORMAT, Kind, Manifest, pack_key, sized_split
from packtrain.pack.packing import PACKERS, common_kind
from packtrain.pack.vocabulary import Vocabulary
from packtrain.pack.workers import InProcess
from packtrain.store import Store

_COUNT_SECONDS = 3.0  # to count the samples of a source; if there are more, the sizes of its files tell the rest
_HEAD: Mapping[Kind, int] = {"pairs": 4000, "labels": 256, "captions": 256}
_COMPRESSED = (*(codec.ending for codec in CODECS), ".tgz", ".zip")
_TEXT_RATIO = 3.0  # of a compressed text


@dataclass(frozen=True)
class RawHead:
    """A pack of the first samples, and about how many usable samples each source has in all, by split."""

    manifest: Manifest
    samples: dict[str, list[float]]

    @property
    def is_all(self) -> bool:
        """True if the training data has no other samples."""
        return sum(self.samples["train"]) <= self.manifest.splits["train"].samples


def pack_head(data: DataSettings, store: Store) -> RawHead:
    """Pack the first samples of every source into a store of its own."""
    kind = common_kind(splits_of(data))
    heads = data.map_sources(lambda source: cast(Source, _SourceHead(source, _HEAD[kind])))
    packing = Packing("head", heads, store, InProcess(), PlainProgress(lambda _: None))
    contents = PACKERS[kind](packing)
    splits = {}
    for split, build in contents.splits.items():
        splits[split] = build.finish()
        if not splits[split].samples:
            raise FieldMistake(f"data.{split}", "no usable samples")
        splits |= {sized_split(split, size): build.finish_copy(size) for size in data.sizes if kind != "pairs"}
    manifest = Manifest(
        FORMAT, "head", kind, {}, splits, contents.classes, contents.vocabulary, contents.target_vocabulary
    )
    store.put(pack_key("head", "manifest.json"), manifest.to_json())
    begun: Mapping[str, Any] = splits_of(heads)
    samples: dict[str, list[float]] = {}
    for split, sources in splits_of(data).items():
        # Some of what was read may be unusable: the rest is taken to be alike.
        kept = zip(splits[split].sources, (min(one.read, _HEAD[kind]) for one in begun[split]), strict=True)
        usable = (count / max(1, read) for count, read in kept)
        samples[split] = [count_samples(source, kind) * share for source, share in zip(sources, usable, strict=True)]
    return RawHead(manifest, samples)


class LargerVocabulary(Vocabulary):
    """The vocabulary of a few samples, with the size that all samples will give it."""

    def __init__(self, small: Vocabulary, size: int) -> None:
        super().__init__(small._tokenizer)
        self._size = size

    def __len__(self) -> int:
        return self._size


def enlarge_vocabulary(pack: Pack, size: int) -> None:
    """Have a pack of a few samples pretend to have a vocabulary of that size, as the model that is planned will."""
    if pack.manifest.vocabulary is not None and len(pack.vocabulary) < size:
        pack.vocabulary = LargerVocabulary(pack.vocabulary, size)


class _SourceHead:
    """A source that ends after its first samples; everything else is the source's own."""

    def __init__(self, source: Source, count: int) -> None:
        self._source, self._count, self.read = source, count, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def _first(self, samples: Iterator[Any]) -> Iterator[Any]:
        read = 0
        for sample in islice(samples, self._count):
            read += 1
            yield sample
        self.read = max(self.read, read)

    def pairs(self, drop: Any) -> Iterator[Any]:
        return self._first(self._source.pairs(drop))

    def labeled(self, classes: Sequence[str], drop: Any, filtered: Any) -> Iterator[Any]:
        return self._first(self._source.labeled(classes, drop, filtered))

    def captioned(self, drop: Any, filtered: Any) -> Iterator[Any]:
        return self._first(self._source.captioned(drop, filtered))


def count_samples(source: Source, kind: Kind, seconds: float = _COUNT_SECONDS) -> float:
    """Return how many samples a source has: counted, or after some seconds estimated from the sizes of its files."""

    def ignore(_reason: str, _name: str) -> None:
        pass

    deadline, count, size = time.monotonic() + seconds, 0, 0
    samples: Iterator[Any] = (
        source.pairs(ignore)
        if kind == "pairs"
        else source.captioned(ignore, ignore)
        if kind == "captions"
        else source.labeled(source.classes(), ignore, ignore)
    )
    for sample in samples:
        count += 1
        size += len(sample.source) + len(sample.target) + 2 if kind == "pairs" else sample.where.size
        if count % 1000 == 0 and time.monotonic() > deadline:
            return max(float(count), count * _raw_bytes(source.paths, kind) / max(1, size))
    return float(count)


def _raw_bytes(paths: Sequence[str], kind: Kind) -> float:
    return sum(file_bytes(split_member(path)[0], unpacked=kind == "pairs") or 0 for path in paths)


def file_bytes(place: str, unpacked: bool = True) -> int | None:
    """Return the size of a file or a folder, of a compressed text what it unpacks to; None if there is none."""
    path = Path(place)
    files = [Path(root, name) for root, _, names in os.walk(path) for name in names] if path.is_dir() else [path]
    try:
        size = sum(file.stat().st_size for file in files)
    except OSError:
        return None
    return round(size * text_ratio(place)) if unpacked else size


def text_ratio(place: str) -> float:
    """Return how much larger a text becomes when it is unpacked."""
    return _TEXT_RATIO if place.lower().endswith(_COMPRESSED) else 1.0
