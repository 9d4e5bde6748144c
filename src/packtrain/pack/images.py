"""Pack images as tiles that can be decoded in part. Shards are independent tasks for any worker."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from packtrain.errors import FieldMistake
from packtrain.pack.build import (
    FinishedShard,
    PackContents,
    Packing,
    ShardTarget,
    SplitBuild,
    empty_contents,
    put_file,
    splits_of,
)
from packtrain.pack.picture import UnusableImage, to_tiled
from packtrain.pack.raw import DropCounter, RawImage
from packtrain.pack.shard import Columns, Ragged
from packtrain.pack.tiles import Tiled
from packtrain.pack.vocabulary import BOS, EOS, Vocabulary
from packtrain.store import open_store

SHARD_BYTES = 20_000_000  # of raw files: small enough to download ahead of use, large enough for few requests
_MAX_SAMPLES = 20_000  # in a shard, for images of a few bytes

Read = Callable[[], Iterator[RawImage]]


def pack_labels(packing: Packing) -> PackContents:
    """Pack images with labels; the classes are those of all training sources."""
    contents = empty_contents(packing.data)
    classes = contents.classes = tuple(sorted({name for source in packing.data.train for name in source.classes()}))
    if len(classes) < 2:
        raise FieldMistake("data.train", f"has only one class ({', '.join(classes)}); a classifier needs at least two")
    for split, sources in splits_of(packing.data).items():
        dropped = contents.splits[split].dropped
        _make_shards(packing, contents, split, [partial(one.labeled, classes, dropped) for one in sources], None)
    return contents


def pack_captions(packing: Packing) -> PackContents:
    contents = empty_contents(packing.data)
    vocabulary = Vocabulary.fit(_training_captions(packing), packing.data.vocabulary).to_json()
    contents.vocabulary = put_file(packing.store, packing.name, "vocabulary.json", vocabulary.encode())
    for split, sources in splits_of(packing.data).items():
        build = contents.splits[split]
        reads = [partial(one.captioned, build.dropped, build.filtered) for one in sources]
        _make_shards(packing, contents, split, reads, vocabulary)
    return contents


def _training_captions(packing: Packing) -> Iterator[str]:
    for source in packing.data.train:
        for image in source.captioned(DropCounter(), DropCounter()):
            yield from image.captions


def _make_shards(
    packing: Packing, contents: PackContents, split: str, reads: Sequence[Read], vocabulary: str | None
) -> None:
    """Make the shards of a split and of its copies in other sizes."""
    for size in packing.data.sizes:
        contents.splits[_sized(split, size)] = SplitBuild(len(reads))
    with packing.progress.track(f"packing {split}", None) as advance:
        for finished in packing.workers.do(make_shard, _tasks(packing, split, reads, vocabulary)):
            contents.splits[finished.split].shards.append(finished)
            if finished.split == split:
                contents.fingerprints[split].extend(finished.fingerprints)
                advance(finished.shard.samples)


def _tasks(packing: Packing, split: str, reads: Sequence[Read], vocabulary: str | None) -> Iterator[ImageTask]:
    number = 0
    for index, read in enumerate(reads):
        for part in shards_of(read()):
            # Copies in other sizes have the same images in the same shards, so they share the numbers.
            for size in (None, *packing.data.sizes):
                target = ShardTarget(packing.name, _sized(split, size), number, index)
                yield ImageTask(packing.store.url, target, part, size, vocabulary)
            number += 1


def _sized(split: str, size: int | None) -> str:
    return split if size is None else f"{split}@{size}"


@dataclass(frozen=True)
class ImageTask:
    """A shard to make: a plain value that can be sent to another process or machine."""

    store: str
    target: ShardTarget
    images: tuple[RawImage, ...]
    short_side: int | None
    vocabulary: str | None


def make_shard(task: ImageTask) -> FinishedShard:
    """Make the shard, unless an interrupted build has already stored it."""
    store = open_store(task.store)  # by each task: a client of a store cannot be sent to another process
    finished = task.target.find(store)
    if finished is not None:
        return finished
    dropped = DropCounter()
    kept: list[RawImage] = []
    tiled: list[Tiled] = []
    fingerprints: list[int] = []
    for image in task.images:
        try:
            data = image.where.read()
            tiled.append(to_tiled(data, task.short_side))
        except UnusableImage as error:
            dropped(error.reason, image.name)
        except OSError as error:
            dropped(f"unreadable: {error.strerror}", image.name)
        else:
            kept.append(image)
            fingerprints.append(int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big"))
    return task.target.put(store, _columns(kept, tiled, task.vocabulary), dropped, fingerprints)


def _columns(images: list[RawImage], tiled: list[Tiled], vocabulary: str | None) -> Columns:
    ragged = {
        "jpeg": Ragged.from_arrays([np.frombuffer(one.jpeg, np.uint8) for one in tiled], np.dtype("u1")),
        "segments": Ragged.from_arrays([one.segments for one in tiled], np.dtype("<u4")),
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
    ragged["captions"] = Ragged.from_rows(
        [[token for row in rows for token in row] for rows in captions], encoder.dtype
    )
    ragged["caption_lengths"] = Ragged.from_rows([[len(row) for row in rows] for rows in captions], np.dtype("<u2"))
    return Columns(ragged, plain)


def shards_of(images: Iterable[RawImage]) -> Iterator[tuple[RawImage, ...]]:
    """Group consecutive images into shards of similar size.

    Sizes are those of the raw files, so the grouping depends on the data alone and not on the encoder.
    """
    part: list[RawImage] = []
    size = 0
    for image in images:
        part.append(image)
        size += _bytes_of(image)
        if size >= SHARD_BYTES or len(part) >= _MAX_SAMPLES:
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
        return 0  # the task that reads the file reports the error
