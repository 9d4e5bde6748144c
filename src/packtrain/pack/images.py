"""Packing images: every one made ready for partial decoding, in tasks that any process can do."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packtrain.errors import FieldMistake
from packtrain.pack.formats import CAPTIONS, LABELS
from packtrain.pack.picture import Unusable, to_tiled
from packtrain.pack.raw import Dropped, RawImage
from packtrain.pack.shard import Columns, Gathered, Made, Place, Ragged, put_file
from packtrain.pack.tiles import Tiled
from packtrain.pack.vocabulary import BOS, EOS, Vocabulary
from packtrain.pack.workers import Contents, Packing, empty_contents, splits_of
from packtrain.store import open_store

SHARD_BYTES = 20_000_000
_MOST_SAMPLES = 20_000

Read = Callable[[], Iterator[RawImage]]


def pack_labels(packing: Packing) -> Contents:
    """Images with a class each; the classes are those of the training sources together."""
    contents = empty_contents(packing.data)
    readers = {
        split: [LABELS[one.kind](one.paths) for one in sources] for split, sources in splits_of(packing.data).items()
    }
    classes = contents.classes = tuple(sorted({name for reader in readers["train"] for name in reader.classes()}))
    if len(classes) < 2:
        raise FieldMistake("data.train", f"has one class only ({', '.join(classes)}); there is nothing to tell apart")
    for split, found in readers.items():
        dropped = contents.gathered[split].dropped
        _make_shards(packing, contents, split, [partial(one.samples, classes, dropped) for one in found], None)
    return contents


def pack_captions(packing: Packing) -> Contents:
    contents = empty_contents(packing.data)
    vocabulary = Vocabulary.fit(_training_captions(packing), packing.data.vocabulary).to_json()
    contents.vocabulary = put_file(packing.store, packing.name, "vocabulary.json", vocabulary.encode())
    for split, sources in splits_of(packing.data).items():
        gathered = contents.gathered[split]
        reads = [partial(CAPTIONS[one.kind], one.paths, gathered.dropped, gathered.filtered) for one in sources]
        _make_shards(packing, contents, split, reads, vocabulary)
    return contents


def _training_captions(packing: Packing) -> Iterator[str]:
    for source in packing.data.train:
        for image in CAPTIONS[source.kind](source.paths, Dropped(), Dropped()):
            yield from image.captions


def _make_shards(
    packing: Packing, contents: Contents, split: str, reads: Sequence[Read], vocabulary: str | None
) -> None:
    """The shards of a split, and of its copies in other sizes."""
    for size in packing.data.sizes:
        contents.gathered[_sized(split, size)] = Gathered(len(reads))
    with packing.progress.track(f"packing {split}", None) as advance:
        for made in packing.workers.do(make_shard, _tasks(packing, split, reads, vocabulary)):
            contents.gathered[made.split].made.append(made)
            if made.split == split:
                contents.fingerprints[split].extend(made.fingerprints)
                advance(made.shard.samples)


def _tasks(packing: Packing, split: str, reads: Sequence[Read], vocabulary: str | None) -> Iterator[ImageTask]:
    number = 0
    for index, read in enumerate(reads):
        for part in shards_of(read()):
            for size in (None, *packing.data.sizes):
                place = Place(packing.name, _sized(split, size), number, index)
                yield ImageTask(packing.store.url, place, part, size, vocabulary)
            number += 1


def _sized(split: str, size: int | None) -> str:
    return split if size is None else f"{split}@{size}"


@dataclass(frozen=True)
class ImageTask:
    """A shard to be made: a value that goes to another process or machine."""

    store: str
    place: Place
    images: tuple[RawImage, ...]
    short_side: int | None
    vocabulary: str | None


def make_shard(task: ImageTask) -> Made:
    """Does the task, unless an earlier attempt has done it."""
    store = open_store(task.store)
    before = task.place.made_before(store)
    if before is not None:
        return before
    dropped = Dropped()
    kept: list[RawImage] = []
    tiled: list[Tiled] = []
    fingerprints: list[int] = []
    for image in task.images:
        try:
            data = image.where.read()
            tiled.append(to_tiled(data, task.short_side))
        except Unusable as error:
            dropped(error.reason, image.name)
        except OSError as error:
            dropped(f"cannot be read: {error.strerror}", image.name)
        else:
            kept.append(image)
            fingerprints.append(int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big"))
    return task.place.put(store, _columns(kept, tiled, task.vocabulary), dropped, fingerprints)


def _columns(images: list[RawImage], tiled: list[Tiled], vocabulary: str | None) -> Columns:
    ragged = {
        "jpeg": _joined([np.frombuffer(one.jpeg, np.uint8) for one in tiled], np.dtype("u1")),
        "segments": _joined([one.segments for one in tiled], np.dtype("<u4")),
    }
    plain = {
        "width": np.array([one.width for one in tiled], "<i4"),
        "height": np.array([one.height for one in tiled], "<i4"),
    }
    if vocabulary is None:
        plain["label"] = np.array([image.label for image in images], "<i4")
        return Columns(ragged, plain)
    encoder = Vocabulary.from_json(vocabulary)
    texts = encoder.encode([caption for image in images for caption in image.captions])
    tokens = iter([BOS, *row, EOS] for row in texts)
    captions = [[next(tokens) for _ in image.captions] for image in images]
    dtype = np.dtype("<u2") if len(encoder) <= 1 << 16 else np.dtype("<u4")
    ragged["captions"] = Ragged.from_rows([[token for row in rows for token in row] for rows in captions], dtype)
    ragged["caption_lengths"] = Ragged.from_rows([[len(row) for row in rows] for rows in captions], np.dtype("<u2"))
    return Columns(ragged, plain)


def _joined(rows: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> Ragged:
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return Ragged(np.concatenate([np.zeros(0, dtype), *rows]).astype(dtype, copy=False), offsets)


def shards_of(images: Iterable[RawImage]) -> Iterator[tuple[RawImage, ...]]:
    """Consecutive runs of images of about a shard's size: by their raw bytes, so that it depends on the data alone."""
    part: list[RawImage] = []
    size = 0
    for image in images:
        part.append(image)
        size += _bytes_of(image)
        if size >= SHARD_BYTES or len(part) >= _MOST_SAMPLES:
            yield tuple(part)
            part, size = [], 0
    if part:
        yield tuple(part)


def _bytes_of(image: RawImage) -> int:
    if image.where.length is not None:
        return image.where.length
    try:
        return Path(image.where.path).stat().st_size
    except OSError:
        return 0  # the task that reads it says what is wrong
