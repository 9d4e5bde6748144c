"""Sizes of data that nobody has read: as a person says, of well-known sets by the names of their files, or by the sizes
of files, which remote ones tell without a download."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from packtrain.data.order import block
from packtrain.errors import Mistake, nearest
from packtrain.job.job import DataSettings, Job
from packtrain.job.kinds import Source
from packtrain.job.part import is_address
from packtrain.pack.archive import split_member
from packtrain.pack.bitext import PairSource
from packtrain.pack.build import splits_of
from packtrain.pack.fetch import remote_size
from packtrain.pack.pairs import packed_pair_bytes
from packtrain.plan.raw import file_bytes, text_ratio
from packtrain.plan.workload import DataSize, estimated_data
from packtrain.store import Store

DEFAULT_LENGTH = 25.0  # tokens of a target
_TEXT_BYTES = 5.0  # of a token
_IMAGE_BYTES = 115_000.0  # of a photograph: ImageNet's 147.9 GB by its images
_DEFAULT_CLASSES = 1000


@dataclass(frozen=True)
class KnownSource:
    """A part of a well-known set: `pattern` finds it in the first path of a source. `length` is that of a target."""

    title: str
    pattern: re.Pattern[str]
    samples: int
    length: float = 1.0
    conversations: int = 0


def _known(title: str, pattern: str, samples: int, length: float = 1.0, conversations: int = 0) -> KnownSource:
    return KnownSource(title, re.compile(pattern, re.IGNORECASE), samples, length, conversations)


_WMT, _WMT_TOKENS = "WMT14 English-German", 28.0
_CORNELL = "Cornell Movie-Dialogs"
_KNOWN: Sequence[KnownSource] = (
    _known("ImageNet", r"ILSVRC2012_img_train\.tar|CLS-LOC/train/?$", 1_281_167),
    _known("ImageNet", r"ILSVRC2012_img_val\.tar|CLS-LOC/val/?$", 50_000),
    _known(_WMT, r"europarl-v7\.de-en\.", 1_920_209, _WMT_TOKENS),
    _known(_WMT, r"commoncrawl\.de-en\.", 2_399_123, _WMT_TOKENS),
    _known(_WMT, r"news-commentary-v11\.de-en\.", 242_770, _WMT_TOKENS),
    _known(_WMT, r"newstest2013", 3_000, _WMT_TOKENS),
    _known(_WMT, r"newstest2014", 3_003, _WMT_TOKENS),
    _known(_CORNELL, r"cornell[_ ]movie[-_]dialogs[_ ]corpus|movie_lines\.txt", 221_282, 11.7, 83_097),
    _known("COCO 2014", r"captions_train2014\.json", 82_783),
    _known("COCO 2014", r"captions_val2014\.json", 40_504),
    _known("VizWiz-Captions", r"vizwiz.*\btrain\.json", 23_431),
    _known("VizWiz-Captions", r"vizwiz.*\bval\.json", 7_750),
)
# As --samples takes them: samples for training, validation and testing, and the length of a target.
NAMED: Mapping[str, tuple[int, int, int, float]] = {
    "imagenet": (1_281_167, 50_000, 0, 1.0),
    "wmt14-en-de": (4_562_102, 3_000, 3_003, _WMT_TOKENS),
    "cornell": (215_956, 5_326, 0, 11.7),  # without the last 2,000 conversations, which validate
    "coco": (82_783, 40_504, 0, 1.0),
    "vizwiz": (23_431, 7_750, 0, 1.0),
}


@dataclass(frozen=True)
class UnseenData:
    """The size of data that nobody has read, the number of its classes, and how both are known."""

    size: DataSize
    classes: int
    notes: tuple[str, ...]


def said_data(job: Job, samples: str, length: float | None) -> UnseenData:
    """Return the size of the data as --samples and --length say."""
    sources, words = job.data.train, [word.strip().lower() for word in samples.split(",")]
    weights = {source.weight for source in sources}
    if len(words) not in (1, len(sources)):
        raise Mistake(f"--samples {samples}: has {len(words)} values, but data.train has {len(sources)} sources")
    if len(words) < len(sources) and len(weights) > 1:
        example = ",".join(["100000"] * len(sources))
        raise Mistake(f"--samples {samples}: data.train is a mix with weights; give each source's, as in {example}")
    parts = [_said(word, samples, length) for word in words]
    if len(parts) < len(sources):  # their sum is all that counts
        shares = [len(block(parts[0].samples, number, len(sources))) for number in range(len(sources))]
        parts = [replace(parts[0], samples=share) for share in shares]
    named = [NAMED[word] for word in words if word in NAMED]
    if any((own_length == 1.0) != _has_images(job) for *_, own_length in named):
        have, want = ("texts", "images") if _has_images(job) else ("images", "texts")
        raise Mistake(f"--samples {samples}: is a set of {have}, and this job learns from {want}")
    notes = ["the size of the data is that of --samples; it was not read"]
    if not named:
        notes.append("evaluations are not included: --samples covers only training samples")
    if not _has_images(job) and length is None and not named:
        notes.append(f"targets of {DEFAULT_LENGTH:g} tokens are assumed; set --length")
    return _unseen(job, parts, sum(one[1] for one in named), sum(one[2] for one in named), notes)


def _said(word: str, samples: str, length: float | None) -> KnownSource:
    if word in NAMED:
        count, _, _, own_length = NAMED[word]
        return _known(word, "", count, length or own_length)
    if not word.isdecimal() or not 1 <= int(word) <= 10**12:
        known = nearest(word, NAMED) if re.search("[a-z]", word) else "such as 1281167"
        raise Mistake(f"--samples {samples}: must be a number of samples, or a well-known set; {known}")
    return _known(word, "", int(word), length or DEFAULT_LENGTH)


def unseen_data(job: Job, store: Store, length: float | None) -> UnseenData | None:
    """Return the size of the data by the names of well-known files, or else by the sizes of files.

    None if a file is missing here and not well known.
    """
    by_split: dict[str, list[KnownSource]] = {}
    notes = []
    sizes: dict[str, int | None] = {}

    def size_of(path: str) -> int | None:
        if path not in sizes:
            sizes[path] = remote_size(path, store) if is_address(path) else file_bytes(path, unpacked=False)
        return sizes[path]

    for split, source in _sources(job.data):
        found = _recognized(source) or _by_size(source, size_of, length)
        if found is None:
            return None
        by_split.setdefault(split, []).append(found if length is None else replace(found, length=length))
    titles = dict.fromkeys(one.title for parts in by_split.values() for one in parts if one.pattern.pattern)
    if titles:
        notes.append(f"the data was not read: its size is that of {' and '.join(titles)}, by the names of its files")
    if len(titles) < len({one.title for parts in by_split.values() for one in parts}):
        notes.append("the data was not read: its samples are estimated from the sizes of its files; set --samples")
    counts = {split: sum(one.samples for one in parts) for split, parts in by_split.items()}
    return _unseen(job, by_split["train"], counts.get("valid", 0), counts.get("test", 0), notes)


def _sources(data: DataSettings) -> Iterator[tuple[str, Source]]:
    for split, sources in splits_of(data).items():
        for source in sources:
            yield split, source


def _recognized(source: Source) -> KnownSource | None:
    known = next((one for one in _KNOWN if one.pattern.search(source.paths[0])), None)
    if known is None or not isinstance(source, PairSource):
        return known
    share = 1.0 if not known.conversations else known.samples / known.conversations  # pairs of a conversation
    if source.last is not None:
        return replace(known, samples=min(known.samples, round(source.last * share)))
    return replace(known, samples=max(1, known.samples - round((source.without_last or 0) * share)))


def _by_size(source: Source, size_of: Callable[[str], int | None], length: float | None) -> KnownSource | None:
    """Return an estimate from the size of the file that has the targets, or the images."""
    archive = split_member(source.paths[-1])[0]
    size = size_of(archive)
    if size is None:
        return None
    if not isinstance(source, PairSource):
        return _known("sizes", "", max(1, round(size / _IMAGE_BYTES)))
    # Of a file with both columns, or of an archive with both files, half are targets.
    both = len(source.paths) == 1 or archive == split_member(source.paths[0])[0]
    tokens = text_ratio(archive) * size / (2 if both else 1) / _TEXT_BYTES
    return _known("sizes", "", max(1, round(tokens / (length or DEFAULT_LENGTH))), length or DEFAULT_LENGTH)


def _has_images(job: Job) -> bool:
    return not isinstance(job.data.train[0], PairSource)


def _unseen(job: Job, parts: Sequence[KnownSource], valid: int, test: int, notes: Sequence[str]) -> UnseenData:
    images = _has_images(job)
    costs = [1.0 if images else one.length for one in parts]
    size = sum(one.samples * (_IMAGE_BYTES if images else packed_pair_bytes(one.length)) for one in parts)
    if "labels" in job.data.train[0].contents and not all(one.title.lower() == "imagenet" for one in parts):
        notes = [*notes, f"{_DEFAULT_CLASSES:,} classes are assumed"]
    data = estimated_data(job, [one.samples for one in parts], costs, size, valid, test)
    return UnseenData(data, _DEFAULT_CLASSES, tuple(notes))
