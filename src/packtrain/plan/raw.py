"""Raw data of this machine that is not packed yet: how much there is, and a pack of its first samples to plan with."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from packtrain.data.pack import Pack
from packtrain.job.job import DataSettings
from packtrain.job.kinds import Source
from packtrain.pack.archive import split_member
from packtrain.pack.build import Packing, PlainProgress, build_pack, common_kind, splits_of
from packtrain.pack.compression import CODECS
from packtrain.pack.kind import PackKind, kind_of
from packtrain.pack.manifest import Manifest
from packtrain.pack.vocabulary import Vocabulary
from packtrain.pack.workers import InProcess
from packtrain.store import Store

_COUNT_SECONDS = 3.0  # to count the samples of a source; if there are more, the sizes of its files tell the rest
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
    word = common_kind(splits_of(data))
    kind = kind_of(word)
    packing = Packing("head", data, store, InProcess(), PlainProgress(lambda _: None), first=kind.first_samples)
    manifest = build_pack(packing, word, settings={}, allow_drops=True)
    samples: dict[str, list[float]] = {}
    for split, sources in splits_of(data).items():
        counts = [count_samples(source, kind) for source in sources]
        # Some of what was read may be unusable: the rest is taken to be alike.
        samples[split] = [
            count * usable / max(1.0, min(count, kind.first_samples))
            for count, usable in zip(counts, manifest.splits[split].sources, strict=True)
        ]
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


def count_samples(source: Source, kind: PackKind, seconds: float = _COUNT_SECONDS) -> float:
    """Return how many samples a source has: counted, or after some seconds estimated from the sizes of its files."""

    def ignore(_reason: str, _name: str) -> None:
        pass

    deadline, count, size = time.monotonic() + seconds, 0, 0
    for sample in kind.samples(source, ignore, ignore):
        count += 1
        size += kind.raw_bytes(sample)
        if count % 1000 == 0 and time.monotonic() > deadline:
            all_bytes = sum(file_bytes(split_member(path)[0], unpacked=kind.reads_text) or 0 for path in source.paths)
            return max(float(count), count * all_bytes / max(1, size))
    return float(count)


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
