"""Pack images as tiles that can be decoded in part. Shards are independent tasks for any worker."""

# ruff: noqa: ARG002 - methods have the arguments of the interface, used or not

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packtrain.errors import FieldMistake, printable
from packtrain.job.job import DataSettings
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
from packtrain.pack.kind import PackKind, ShownSample
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


class ImagePacks(PackKind):
    """Images as tiles: `jpeg`, `segments`, `width` and `height`, with the `name` that a person knows each by."""

    noun = "image"
    has_sizes = True
    drops_samples_only = False  # captions are counted, too

    def settings(self, data: DataSettings) -> dict[str, Any]:
        return {"sizes": list(data.sizes)}

    def raw_bytes(self, sample: RawImage) -> int:
        return sample.where.size

    @abstractmethod
    def learn(self, packing: Packing, contents: PackContents) -> str | None:
        """Learn from the training data what the pack of all splits has beside images; return the vocabulary as JSON."""

    @abstractmethod
    def columns(self, images: Sequence[RawImage], vocabulary: str | None) -> Columns:
        """Return the columns of a shard that do not depend on the size of the images."""

    def pack(self, packing: Packing) -> PackContents:
        """Make the shards of all splits, and of their copies in other sizes, as independent tasks for any worker."""
        contents = empty_contents(packing.data)
        vocabulary = self.learn(packing, contents)
        for split, sources in splits_of(packing.data).items():
            drop, filtered = contents.splits[split].dropped, contents.splits[split].filtered
            if split == "valid" and packing.data.held_out is not None:  # its sources count for the training data
                drop, filtered = DropCounter(), DropCounter()
            reads = [partial(self.samples, source, drop, filtered, contents.classes) for source in sources]
            tasks = self._tasks(packing, split, reads, vocabulary)
            with packing.progress.track(f"packing {split}", None) as advance:
                for finished in packing.workers.do(make_shard, tasks):
                    contents.splits[split].shards.append(finished)
                    contents.fingerprints[split].extend(finished.fingerprints)
                    advance(finished.shard.samples)
        return contents

    def _tasks(
        self, packing: Packing, split: str, reads: Sequence[Read], vocabulary: str | None
    ) -> Iterator[ImageTask]:
        store, number = packing.store, 0
        for source, read in enumerate(reads):
            for images in shards_of(_side(islice(read(), packing.first), split, packing.data.held_out)):
                target = ShardTarget(packing.name, split, number, source)
                yield ImageTask(self, store.url, store.identity, target, images, packing.data.sizes, vocabulary)
                number += 1

    def measures(self) -> Mapping[str, Callable[[Columns], NDArray[Any]]]:
        return {
            "width, pixels": lambda shard: shard.plain["width"],
            "height, pixels": lambda shard: shard.plain["height"],
        }

    @staticmethod
    def picture(shard: Columns, row: int, texts: Sequence[str]) -> ShownSample:
        size = int(shard.plain["width"][row]), int(shard.plain["height"][row])
        return ShownSample(texts, shard.ragged["jpeg"][row].tobytes(), *size)


class LabelPacks(ImagePacks):
    """Images with the class of each in `label`; the classes are those of all training sources."""

    nouns, title = "images", "images with classes"

    def samples(self, source: Source, drop: Drop, filtered: Drop, classes: Sequence[str] = ()) -> Iterator[RawImage]:
        return source.labeled(classes or source.classes(), drop, filtered)

    def learn(self, packing: Packing, contents: PackContents) -> None:
        if packing.learned is not None:
            contents.classes = packing.learned.classes
            return
        classes = tuple(sorted({name for source in packing.data.train for name in source.classes()}))
        if len(classes) < 2:
            only = ", ".join(classes)
            raise FieldMistake("data.train", f"has only one class ({only}); a classifier needs at least two")
        contents.classes = classes

    def columns(self, images: Sequence[RawImage], vocabulary: str | None) -> Columns:
        return Columns(_names(images), {"label": np.array([image.label for image in images], "<i4")})

    def shown(
        self, shard: Columns, row: int, classes: Sequence[str], vocabularies: Sequence[Vocabulary]
    ) -> ShownSample:
        label = int(shard.plain["label"][row])
        name = printable(classes[label]) if label in range(len(classes)) else f"unknown class {label}"
        return self.picture(shard, row, [name])


class CaptionPacks(ImagePacks):
    """Images with the tokens of all captions of each in `captions`, and the length of each in `caption_lengths`."""

    nouns = title = "images with captions"

    def settings(self, data: DataSettings) -> dict[str, Any]:
        return {**super().settings(data), "vocabulary": data.vocabulary}

    def samples(self, source: Source, drop: Drop, filtered: Drop, classes: Sequence[str] = ()) -> Iterator[RawImage]:
        """Yield images with the captions that are not too long for a vocabulary."""
        for image in source.captioned(drop, filtered):
            captions = tuple(caption for caption in image.captions if not is_too_long(caption))
            for _ in range(len(image.captions) - len(captions)):
                filtered(LONG_CAPTION, image.name)
            if captions:
                yield replace(image, captions=captions)
            else:
                drop(NO_CAPTION, image.name)

    def learn(self, packing: Packing, contents: PackContents) -> str:
        if packing.learned is not None:
            assert packing.learned.vocabulary is not None
            vocabulary = packing.learned.vocabulary
        else:
            reads = (self.samples(source, DropCounter(), DropCounter()) for source in packing.data.train)
            images = (_side(islice(read, packing.first), "train", packing.data.held_out) for read in reads)
            captions = (caption for image in chain.from_iterable(images) for caption in image.captions)
            vocabulary = Vocabulary.fit(captions, packing.data.vocabulary).to_json()
        contents.vocabulary = put_file(packing.store, packing.name, "vocabulary.json", vocabulary.encode())
        return vocabulary

    def columns(self, images: Sequence[RawImage], vocabulary: str | None) -> Columns:
        assert vocabulary is not None
        encoder = Vocabulary.from_json(vocabulary)
        texts = encoder.encode([caption for image in images for caption in image.captions])
        tokens = iter([BOS, *row, EOS] for row in texts)
        captions = [[next(tokens) for _ in image.captions] for image in images]
        joined = [[token for row in rows for token in row] for rows in captions]
        lengths = [[len(row) for row in rows] for rows in captions]
        ragged = {
            "captions": Ragged.from_rows(joined, encoder.dtype),
            "caption_lengths": Ragged.from_rows(lengths, np.dtype("<u2")),
        }
        return Columns({**_names(images), **ragged})

    def measures(self) -> Mapping[str, Callable[[Columns], NDArray[Any]]]:
        return {
            **super().measures(),
            "caption, tokens": lambda shard: shard.ragged["caption_lengths"].values,
            "captions, per image": lambda shard: shard.ragged["caption_lengths"].lengths,
        }

    def shown(
        self, shard: Columns, row: int, classes: Sequence[str], vocabularies: Sequence[Vocabulary]
    ) -> ShownSample:
        ends = np.cumsum(shard.ragged["caption_lengths"][row], dtype=np.int64)[:-1]
        captions = [tokens.tolist() for tokens in np.split(shard.ragged["captions"][row], ends)]
        return self.picture(shard, row, vocabularies[0].decode(captions))


def _names(images: Sequence[RawImage]) -> dict[str, Ragged]:
    names = [np.frombuffer(image.name.encode(), np.uint8) for image in images]
    return {"name": Ragged.from_arrays(names, np.dtype("u1"))}


def _side(images: Iterable[RawImage], split: str, share: float | None) -> Iterator[RawImage]:
    """Yield the images of the training data that belong to one of its sides: trained on, or held out to validate."""
    if share is None or split == "test":
        yield from images
        return

    def is_out(image: RawImage) -> bool:
        try:
            return is_held_out(image.where.read(MAX_BYTES), share)
        except OSError:  # whoever packs the training data reports it
            return False

    with ThreadPoolExecutor(_READERS) as readers:  # reading is waiting, and hashing leaves the interpreter to others
        for shard in shards_of(images):
            outs = readers.map(is_out, shard)
            yield from (image for image, out in zip(shard, outs, strict=True) if out == (split == "valid"))


@dataclass(frozen=True)
class ImageTask:
    """A shard to make, in all sizes: a plain value that can be sent to another process or machine."""

    kind: ImagePacks
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
    usable: list[RawImage] = []
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
            usable.append(image)
            tiled.append(copies)
            fingerprints.append(int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big"))
    common = task.kind.columns(usable, task.vocabulary)
    original, *smaller = (
        _columns(common, [copies[size_index] for copies in tiled]) for size_index in range(1 + len(task.sizes))
    )
    return task.target.put(store, original, dropped, fingerprints, dict(zip(task.sizes, smaller, strict=True)))


def _columns(common: Columns, copies: Sequence[Tiled]) -> Columns:
    """Return the columns of a shard: pixels in one size, and what is the same in all sizes."""
    ragged = {
        "jpeg": Ragged.from_arrays([np.frombuffer(copy.jpeg, np.uint8) for copy in copies], np.dtype("u1")),
        "segments": Ragged.from_arrays([copy.segments for copy in copies], np.dtype("<u4")),
    }
    plain = {
        "width": np.array([copy.width for copy in copies], "<i4"),
        "height": np.array([copy.height for copy in copies], "<i4"),
    }
    return Columns({**common.ragged, **ragged}, {**common.plain, **plain})


def shards_of(images: Iterable[RawImage]) -> Iterator[tuple[RawImage, ...]]:
    """Group consecutive images into shards of similar size.

    Sizes are those of the raw files, so the grouping depends neither on the encoder nor on an archive's compression.
    """
    shard: list[RawImage] = []
    size = 0
    for image in images:
        shard.append(image)
        with suppress(OSError):  # the task that reads the file reports the error
            size += image.where.size
        if size >= SHARD_BYTES or len(shard) >= _MAX_SAMPLES:
            yield tuple(shard)
            shard, size = [], 0
    if shard:
        yield tuple(shard)
