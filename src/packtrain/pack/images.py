"""Pack images as tiles that can be decoded in part. Shards are independent tasks for any worker."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from packtrain.errors import FieldMistake
from packtrain.job.kinds import Drop, Source
from packtrain.pack.build import (
    FinishedShard,
    PackContents,
    Packing,
    ShardTarget,
    empty_contents,
    is_held_out,
    put_file,
    splits_of,
)
from packtrain.pack.picture import MAX_BYTES, UnusableImage, to_copies
from packtrain.pack.raw import NO_CAPTION, DropCounter, RawImage
from packtrain.pack.shard import Columns, Ragged
from packtrain.pack.tiles import Tiled
from packtrain.pack.vocabulary import BOS, EOS, MAX_TEXT_BYTES, Vocabulary, is_too_long
from packtrain.store import open_store

LONG_CAPTION = f"caption of more than {MAX_TEXT_BYTES:,} bytes"
SHARD_BYTES = 20_000_000  # of raw files: small enough to download ahead of use, large enough for few requests
_READERS = 8  # threads that look which images are held out
_MAX_SAMPLES = 20_000  # in a shard, for images of a few bytes

Read = Callable[[], Iterator[RawImage]]


def pack_labels(packing: Packing) -> PackContents:
    """Pack images with labels; the classes are those of all training sources."""
    contents = empty_contents(packing.data)
    if packing.learned is not None:
        classes = packing.learned.classes
    else:
        classes = tuple(sorted({name for source in packing.data.train for name in source.classes()}))
    contents.classes = classes
    if len(classes) < 2:
        raise FieldMistake("data.train", f"has only one class ({', '.join(classes)}); a classifier needs at least two")
    for split, sources in splits_of(packing.data).items():
        drop, filtered = _counters(packing, contents, split)
        reads = [partial(one.labeled, classes, drop, filtered) for one in sources]
        _make_shards(packing, contents, split, reads, None)
    return contents


def pack_captions(packing: Packing) -> PackContents:
    contents = empty_contents(packing.data)
    if packing.learned is not None:
        vocabulary = packing.learned.vocabulary
        assert vocabulary is not None
    else:
        vocabulary = Vocabulary.fit(_training_captions(packing), packing.data.vocabulary).to_json()
    contents.vocabulary = put_file(packing.store, packing.name, "vocabulary.json", vocabulary.encode())
    for split, sources in splits_of(packing.data).items():
        drop, filtered = _counters(packing, contents, split)
        reads = [partial(_captioned, one, drop, filtered) for one in sources]
        _make_shards(packing, contents, split, reads, vocabulary)
    return contents


def _counters(packing: Packing, contents: PackContents, split: str) -> tuple[DropCounter, DropCounter]:
    """Return where the samples that a split leaves out are counted."""
    if split == "valid" and packing.data.held_out is not None:  # those of its sources count for the training data
        return DropCounter(), DropCounter()
    return contents.splits[split].dropped, contents.splits[split].filtered


def _side(images: Iterable[RawImage], split: str, share: float | None) -> Iterator[RawImage]:
    """Yield the images of the training data that belong to one of its sides: trained on, or held out to validate."""
    if share is None or split == "test":
        yield from images
        return
    with ThreadPoolExecutor(_READERS) as readers:  # reading is waiting, and hashing leaves the interpreter to others
        for part in shards_of(images):
            held = readers.map(lambda image: _is_held_out(image, share), part)
            yield from (image for image, out in zip(part, held, strict=True) if out == (split == "valid"))


def _is_held_out(image: RawImage, share: float) -> bool:
    try:
        return is_held_out(image.where.read(MAX_BYTES), share)
    except OSError:  # whoever packs the training data reports it
        return False


def _training_captions(packing: Packing) -> Iterator[str]:
    for source in packing.data.train:
        for image in _side(_captioned(source, DropCounter(), DropCounter()), "train", packing.data.held_out):
            yield from image.captions


def _captioned(source: Source, drop: Drop, filtered: Drop) -> Iterator[RawImage]:
    """Yield images with the captions that are not too long for a vocabulary."""
    for image in source.captioned(drop, filtered):
        captions = tuple(caption for caption in image.captions if not is_too_long(caption))
        for _ in range(len(image.captions) - len(captions)):
            filtered(LONG_CAPTION, image.name)
        if captions:
            yield replace(image, captions=captions)
        else:
            drop(NO_CAPTION, image.name)


def _make_shards(
    packing: Packing, contents: PackContents, split: str, reads: Sequence[Read], vocabulary: str | None
) -> None:
    """Make the shards of a split and of its copies in other sizes."""
    with packing.progress.track(f"packing {split}", None) as advance:
        for finished in packing.workers.do(make_shard, _tasks(packing, split, reads, vocabulary)):
            contents.splits[split].shards.append(finished)
            contents.fingerprints[split].extend(finished.fingerprints)
            advance(finished.shard.samples)


def _tasks(packing: Packing, split: str, reads: Sequence[Read], vocabulary: str | None) -> Iterator[ImageTask]:
    number = 0
    for index, read in enumerate(reads):
        for part in shards_of(_side(read(), split, packing.data.held_out)):
            target = ShardTarget(packing.name, split, number, index)
            yield ImageTask(packing.store.url, packing.store.identity, target, part, packing.data.sizes, vocabulary)
            number += 1


@dataclass(frozen=True)
class ImageTask:
    """A shard to make, in all sizes: a plain value that can be sent to another process or machine."""

    store: str
    store_id: str | None
    target: ShardTarget
    images: tuple[RawImage, ...]
    sizes: tuple[int, ...]
    vocabulary: str | None


def make_shard(task: ImageTask) -> FinishedShard:
    """Make the shard and its copies in other sizes, unless an interrupted build has already stored them.

    An image is read once, and is in all copies or in none: training takes a sample's pixels from one copy and its
    caption from another, both by its number.
    """
    # By each task: a client of a store cannot be sent to another process.
    store = open_store(task.store, identity=task.store_id)
    finished = task.target.find(store)
    if finished is not None:
        return finished
    dropped = DropCounter()
    kept: list[RawImage] = []
    tiled: list[list[Tiled]] = []
    fingerprints: list[int] = []
    for image in task.images:
        try:
            data = image.where.read(MAX_BYTES)
            copies = to_copies(data, (None, *task.sizes))
        except UnusableImage as error:
            dropped(error.reason, image.name)
        except OSError as error:
            dropped(f"unreadable: {error.strerror}", image.name)
        else:
            kept.append(image)
            tiled.append(copies)
            fingerprints.append(int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big"))
    about = _about(kept, task.vocabulary)
    original, *others = (_columns(about, [copies[which] for copies in tiled]) for which in range(1 + len(task.sizes)))
    return task.target.put(store, original, dropped, fingerprints, dict(zip(task.sizes, others, strict=True)))


def _columns(about: Columns, tiled: list[Tiled]) -> Columns:
    """Return the columns of a shard: pixels in one size, and what is the same in all sizes."""
    ragged = {
        "jpeg": Ragged.from_arrays([np.frombuffer(one.jpeg, np.uint8) for one in tiled], np.dtype("u1")),
        "segments": Ragged.from_arrays([one.segments for one in tiled], np.dtype("<u4")),
    }
    plain = {
        "width": np.array([one.width for one in tiled], "<i4"),
        "height": np.array([one.height for one in tiled], "<i4"),
    }
    return Columns({**about.ragged, **ragged}, {**about.plain, **plain})


def _about(images: list[RawImage], vocabulary: str | None) -> Columns:
    """Return the columns that do not depend on the size: names, and labels or captions."""
    names = [np.frombuffer(image.name.encode(), np.uint8) for image in images]
    ragged = {"name": Ragged.from_arrays(names, np.dtype("u1"))}
    if vocabulary is None:
        return Columns(ragged, {"label": np.array([image.label for image in images], "<i4")})
    encoder = Vocabulary.from_json(vocabulary)
    texts = encoder.encode([caption for image in images for caption in image.captions])
    tokens = iter([BOS, *row, EOS] for row in texts)
    captions = [[next(tokens) for _ in image.captions] for image in images]
    ragged["captions"] = Ragged.from_rows(
        [[token for row in rows for token in row] for rows in captions], encoder.dtype
    )
    ragged["caption_lengths"] = Ragged.from_rows([[len(row) for row in rows] for rows in captions], np.dtype("<u2"))
    return Columns(ragged)


def shards_of(images: Iterable[RawImage]) -> Iterator[tuple[RawImage, ...]]:
    """Group consecutive images into shards of similar size.

    Sizes are those of the raw files, so the grouping depends neither on the encoder nor on an archive's compression.
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
    try:
        return image.where.size
    except OSError:
        return 0  # the task that reads the file reports the error
