"""Turn raw data into a pack in the store. An existing pack is reused; an interrupted one is resumed."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.errors import FieldMistake
from packtrain.job.job import DataSettings
from packtrain.job.kinds import Source
from packtrain.pack.archive import split_member
from packtrain.pack.build import PackContents, Packing, PackProgress, delete_notes, splits_of
from packtrain.pack.images import pack_captions, pack_labels
from packtrain.pack.manifest import FORMAT, Kind, Manifest, Split, find_manifest, missing_files, pack_key, sized_split
from packtrain.pack.pairs import DUPLICATE, pack_pairs
from packtrain.pack.workers import Workers
from packtrain.store import Store, StoreError
from packtrain.system import sha256_of
from packtrain.units import counted

PACKERS: Mapping[Kind, Callable[[Packing], PackContents]] = {
    "pairs": pack_pairs,
    "labels": pack_labels,
    "captions": pack_captions,
}
MAX_DROPPED = 0.01  # of a split's samples; more usually means that a path is wrong
MAX_FILTERED = 0.05  # of the training pairs, by the settings; more usually means that a limit does not fit the data
_HASHED_BYTES = 4_000_000_000  # larger files are identified by size and time: hashing them would take minutes
_COMPARED = 1_000_000  # training samples compared with those of another split at a time
_NOUNS: Mapping[Kind, str] = {"pairs": "pairs", "labels": "images", "captions": "images with captions"}


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
    return _made(Packing(folder, data, store, workers, progress), kind, settings, allow_drops)


def pack_later(packing: Packing, kind: Kind, allow_drops: bool = False) -> Manifest:
    """Pack the samples of a split other than `train` as those of the pack that has learned from its training data."""
    assert packing.learned is not None and not packing.data.train
    return _made(packing, kind, settings_of(packing.data, kind), allow_drops)


def _made(packing: Packing, kind: Kind, settings: dict[str, Any], allow_drops: bool) -> Manifest:
    folder, data, store, progress = packing.name, packing.data, packing.store, packing.progress
    contents = PACKERS[kind](packing)
    splits: dict[str, Split] = {}
    for split, build in contents.splits.items():
        splits[split] = found = build.finish()
        held_out = split == "valid" and data.held_out is not None
        if held_out and not found.samples:
            raise FieldMistake("data.valid", f"none of the samples is in {data.share} of them; hold out more")
        _check_drops(split, found, allow_drops)
        share = f", {data.share} of the training data, chosen by their content" if held_out else ""
        progress.say(f"{split}: {found.samples:,} {_NOUNS[kind]}{share}{_left_out(found, shares=kind == 'pairs')}")
        splits |= {sized_split(split, size): build.finish_copy(size) for size in data.sizes if kind != "pairs"}
    if kind == "pairs" and "train" in splits:
        _warn_of_filters(splits["train"], progress)
    _warn_of_overlap(contents, progress)
    manifest = Manifest(
        FORMAT, folder, kind, settings, splits, contents.classes, contents.vocabulary, contents.target_vocabulary
    )
    # Last: a pack without a manifest does not exist, so a reader never sees half of one.
    store.put(pack_key(folder, "manifest.json"), manifest.to_json())
    delete_notes(store, folder)
    try:
        store.remove_unfinished(f"packs/{folder}")  # of interrupted builds
    except StoreError as error:
        progress.say(f"warning: {error}")
    return manifest


def common_kind(splits: Mapping[str, Sequence[Source]]) -> Kind:
    """Return the kind of all sources of a job; a mix of kinds cannot be one pack."""
    kinds: dict[str, list[Kind]] = {split: [one.pack_kind() for one in sources] for split, sources in splits.items()}
    first = kinds["train"][0]
    for split, found in kinds.items():
        for number, kind in enumerate(found):
            if kind != first:
                raise FieldMistake(
                    f"data.{split}.{number}",
                    f"has {kind}, but the first training source has {first}; all sources must have the same kind",
                )
    return first


def _left_out(split: Split, shares: bool = False) -> str:
    reasons = {**split.filtered, **split.dropped}
    said = ", ".join(
        f"{drops.count:,} ({f'{split.show_share(drops.count)}, ' if shares else ''}{reason})"
        for reason, drops in reasons.items()
    )
    return f"; left out {said}" if said else ""


def _warn_of_filters(train: Split, progress: PackProgress) -> None:
    # Duplicates are not counted: no setting would keep them.
    reasons = {reason: drops for reason, drops in train.filtered.items() if reason != DUPLICATE}
    share = train.share_of(sum(drops.count for drops in reasons.values()))
    if share > MAX_FILTERED:
        reason, drops = next(iter(reasons.items()))
        progress.say(
            f"warning: {share:.1%} of the training pairs were filtered, most often ({drops.count:,}): {reason},"
            f" such as {drops.names[0]}; check them, data.max_words and data.max_ratio"
        )


def _check_drops(split: str, found: Split, allow_drops: bool) -> None:
    if not found.samples:
        raise FieldMistake(f"data.{split}", f"no usable samples{_left_out(found) or ': the source is empty'}")
    lost = sum(drops.count for drops in found.dropped.values())
    if lost > MAX_DROPPED * (lost + found.samples) and not allow_drops:
        reason, drops = next(iter(found.dropped.items()))
        raise FieldMistake(
            f"data.{split}",
            f"{lost:,} of {lost + found.samples:,} samples are unusable, most often ({drops.count:,}): {reason},"
            f" such as {drops.names[0]}; fix them, or pass --allow-drops",
        )


def _warn_of_overlap(contents: PackContents, progress: PackProgress) -> None:
    if "train" not in contents.fingerprints:
        return
    trained = np.frombuffer(contents.fingerprints["train"], np.uint64)
    for split in (name for name in contents.fingerprints if name != "train"):
        values = np.frombuffer(contents.fingerprints[split], np.uint64)
        # In parts, because sorting all training samples at once would need several times their memory.
        parts = (trained[start : start + _COMPARED] for start in range(0, max(1, len(trained)), _COMPARED))
        shared = np.concatenate([part[np.isin(part, values)] for part in parts])
        same = int(np.isin(values, shared).sum())
        if same:
            progress.say(f"warning: {same:,} samples of {split} are also in train; scores will be too optimistic")


def settings_of(data: DataSettings, kind: Kind) -> dict[str, Any]:
    """Return everything that the bytes of a pack depend on: the content of its sources, and settings."""
    settings: dict[str, Any] = {
        "format": FORMAT,
        "kind": kind,
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
    if kind == "pairs":
        settings |= {"max_words": data.max_words, "max_ratio": data.max_ratio, "joint": data.joint}
    else:
        settings |= {"sizes": list(data.sizes)}
    if kind != "labels":
        settings |= {"vocabulary": data.vocabulary}
    return settings


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
    what = "missing" if status is None else f"{status.st_size}\0{status.st_mtime_ns}"
    hasher.update(f"{name}\0{what}\n".encode(errors="surrogateescape"))
