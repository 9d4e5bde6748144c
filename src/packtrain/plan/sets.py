"""Sizes of data that nobody has read: as a person says, of well-known sets by the names of their files, or by the sizes
of files, which remote ones tell without a download."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from packtrain.data.order import block
from packtrain.errors import Mistake, nearest
from packtrain.job.job import Job
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


def _source_set(title: str, pattern: str, samples: int, length: float = 1.0, conversations: int = 0) -> KnownSource:
    return KnownSource(title, re.compile(pattern, re.IGNORECASE), samples, length, conversations)


_WMT, _WMT_TOKENS = "WMT14 English-German", 28.0
_CORNELL = "Cornell Movie-Dialogs"
_KNOWN: Sequence[KnownSource] = (
    _source_set("ImageNet", r"ILSVRC2012_img_train\.tar|CLS-LOC/train/?$", 1_281_167),
    _source_set("ImageNet", r"ILSVRC2012_img_val\.tar|CLS-LOC/val/?$", 50_000),
    _source_set(_WMT, r"europarl-v7\.de-en\.", 1_920_209, _WMT_TOKENS),
    _source_set(_WMT, r"commoncrawl\.de-en\.", 2_399_123, _WMT_TOKENS),
    _source_set(_WMT, r"news-commentary-v11\.de-en\.", 242_770, _WMT_TOKENS),
    _source_set(_WMT, r"newstest2013", 3_000, _WMT_TOKENS),
    _source_set(_WMT, r"newstest2014", 3_003, _WMT_TOKENS),
    _source_set(_CORNELL, r"cornell[_ ]movie[-_]dialogs[_ ]corpus|movie_lines\.txt", 221_282, 11.7, 83_097),
    _source_set("COCO 2014", r"captions_train2014\.json", 82_783),
    _source_set("COCO 2014", r"captions_val2014\.json", 40_504),
    _source_set("VizWiz-Captions", r"vizwiz.*\btrain\.json", 23_431),
    _source_set("VizWiz-Captions", r"vizwiz.*\bval\.json", 7_750),
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
    sources_said = [_named_or_counted(word, samples, length) for word in words]
    if len(sources_said) < len(sources):  # their sum is all that counts
        shares = [len(block(sources_said[0].samples, number, len(sources))) for number in range(len(sources))]
        sources_said = [replace(sources_said[0], samples=share) for share in shares]
    named = [NAMED[word] for word in words if word in NAMED]
    if any((own_length == 1.0) != _has_images(job) for *_, own_length in named):
        have, want = ("texts", "images") if _has_images(job) else ("images", "texts")
        raise Mistake(f"--samples {samples}: is a set of {have}, and this job learns from {want}")
    notes = ["the size of the data is that of --samples; it was not read"]
    if not named:
        notes.append("evaluations are not included: --samples covers only training samples")
    if not _has_images(job) and length is None and not named:
        notes.append(f"targets of {DEFAULT_LENGTH:g} tokens are assumed; set --length")
    return _unseen(job, sources_said, sum(counts[1] for counts in named), sum(counts[2] for counts in named), notes)


def _named_or_counted(word: str, samples: str, length: float | None) -> KnownSource:
    if word in NAMED:
        count, _, _, own_length = NAMED[word]
        return _source_set(word, "", count, length or own_length)
    if not word.isdecimal() or not 1 <= int(word) <= 10**12:
        hint = nearest(word, NAMED) if re.search("[a-z]", word) else "such as 1281167"
        raise Mistake(f"--samples {samples}: must be a number of samples, or a well-known set; {hint}")
    return _source_set(word, "", int(word), length or DEFAULT_LENGTH)


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

    for split, source in ((split, source) for split, sources in splits_of(job.data).items() for source in sources):
        estimated = _recognized(source) or _by_size(source, size_of, length)
        if estimated is None:
            return None
        by_split.setdefault(split, []).append(estimated if length is None else replace(estimated, length=length))
    titles = dict.fromkeys(sized.title for sets in by_split.values() for sized in sets if sized.pattern.pattern)
    if titles:
        notes.append(f"the data was not read: its size is that of {' and '.join(titles)}, by the names of its files")
    if len(titles) < len({sized.title for sets in by_split.values() for sized in sets}):
        notes.append("the data was not read: its samples are estimated from the sizes of its files; set --samples")
    counts = {split: sum(sized.samples for sized in sets) for split, sets in by_split.items()}
    return _unseen(job, by_split["train"], counts.get("valid", 0), counts.get("test", 0), notes)


def _recognized(source: Source) -> KnownSource | None:
    recognized = next((source_set for source_set in _KNOWN if source_set.pattern.search(source.paths[0])), None)
    if recognized is None or not isinstance(source, PairSource):
        return recognized
    pairs = recognized.samples / recognized.conversations if recognized.conversations else 1.0  # of a conversation
    if source.last is not None:
        return replace(recognized, samples=min(recognized.samples, round(source.last * pairs)))
    return replace(recognized, samples=max(1, recognized.samples - round((source.without_last or 0) * pairs)))


def _by_size(source: Source, size_of: Callable[[str], int | None], length: float | None) -> KnownSource | None:
    """Return an estimate from the size of the file that has the targets, or the images."""
    archive = split_member(source.paths[-1])[0]
    size = size_of(archive)
    if size is None:
        return None
    if not isinstance(source, PairSource):
        return _source_set("sizes", "", max(1, round(size / _IMAGE_BYTES)))
    # Of a file with both columns, or of an archive with both files, half are targets.
    both = len(source.paths) == 1 or archive == split_member(source.paths[0])[0]
    tokens = text_ratio(archive) * size / (2 if both else 1) / _TEXT_BYTES
    return _source_set("sizes", "", max(1, round(tokens / (length or DEFAULT_LENGTH))), length or DEFAULT_LENGTH)


def _has_images(job: Job) -> bool:
    return not isinstance(job.data.train[0], PairSource)


def _unseen(job: Job, sets: Sequence[KnownSource], valid: int, test: int, notes: Sequence[str]) -> UnseenData:
    images = _has_images(job)
    costs = [1.0 if images else sized.length for sized in sets]
    size = sum(sized.samples * (_IMAGE_BYTES if images else packed_pair_bytes(sized.length)) for sized in sets)
    if "labels" in job.data.train[0].contents and not all(sized.title.lower() == "imagenet" for sized in sets):
        notes = [*notes, f"{_DEFAULT_CLASSES:,} classes are assumed"]
    data = estimated_data(job, [sized.samples for sized in sets], costs, size, valid, test)
    return UnseenData(data, _DEFAULT_CLASSES, tuple(notes))
