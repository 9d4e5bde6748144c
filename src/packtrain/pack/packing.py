"""Raw data to a pack in the store. Packing what is packed already does nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from packtrain.digest import sha256_of
from packtrain.errors import Mistake
from packtrain.job import Data, Job, Source
from packtrain.pack.manifest import FORMAT, Manifest, PackFile, Shard, Split, find_manifest, pack_key
from packtrain.pack.text import Selection, encode_pairs, fit_vocabulary, select
from packtrain.store import Store

Tell = Callable[[str], None]


def splits_of(data: Data) -> dict[str, tuple[Source, ...]]:
    named = {"train": data.train, "valid": data.valid, "test": data.test}
    return {name: sources for name, sources in named.items() if sources}


def pack(job: Job, store: Store, tell: Tell) -> Manifest:
    """The pack of the job's data; made now unless it is there."""
    settings = pack_settings(job.data)
    name = f"{job.name}-{digest(settings)}"
    existing = find_manifest(store, name)
    if existing is not None:
        tell(f"pack {name} is there already")
        return existing
    return _make(job, store, name, settings, tell)


def pack_settings(data: Data) -> dict[str, object]:
    """All that the pack's bytes depend on: sources by content, and settings."""
    return {
        "format": FORMAT,
        "splits": {
            name: [[source.kind, *(_content_digest(Path(path)) for path in source.paths)] for source in sources]
            for name, sources in splits_of(data).items()
        },
        "vocabulary": data.vocabulary,
        "max_words": data.max_words,
        "max_ratio": data.max_ratio,
    }


def digest(settings: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def _content_digest(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as error:
        raise Mistake(f"{path}: {error.strerror}; the job's data must be there to be packed") from error


def _make(job: Job, store: Store, name: str, settings: dict[str, object], tell: Tell) -> Manifest:
    selections = {
        split: select(sources, job.data, training=split == "train") for split, sources in splits_of(job.data).items()
    }
    for split, selection in selections.items():
        if not selection.pairs:
            raise Mistake(f"data.{split} has no usable sample: {_said(selection)}")
        tell(
            f"{split}: {len(selection.pairs):,} pairs" + (f", dropped {_said(selection)}" if selection.dropped else "")
        )
    vocabulary = fit_vocabulary(selections["train"].pairs, job.data.vocabulary)
    tell(f"vocabulary: {len(vocabulary):,} pieces")

    vocabulary_json = vocabulary.to_json().encode()
    vocabulary_file = _put(store, name, "vocabulary.json", vocabulary_json)
    splits = {}
    for split, selection in selections.items():
        shards = []
        for number, (data, samples) in enumerate(encode_pairs(selection.pairs, vocabulary)):
            file = _put(store, name, f"{split}-{number:05d}.safetensors", data)
            shards.append(Shard(file.name, file.bytes, file.sha256, samples))
        splits[split] = Split(len(selection.pairs), dict(selection.dropped), tuple(shards))
    manifest = Manifest(FORMAT, name, settings, splits, vocabulary_file)
    store.put(pack_key(name, "manifest.json"), manifest.to_json())
    return manifest


def _said(selection: Selection) -> str:
    return ", ".join(f"{count:,} ({reason})" for reason, count in selection.dropped.most_common()) or "it is empty"


def _put(store: Store, pack_name: str, name: str, data: bytes) -> PackFile:
    store.put(pack_key(pack_name, name), data)
    return PackFile(name, len(data), hashlib.sha256(data).hexdigest())
