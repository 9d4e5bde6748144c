"""Pack pairs of texts in streaming passes: memory holds one shard, the words of a sample, and 8 bytes for every pair.

The tokenizer uses all cores by itself, so packing pairs does not use workers.
"""

# ruff: noqa: ARG002 - methods have the arguments of the interface, used or not

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packtrain.job.job import DataSettings
from packtrain.job.kinds import Drop, Source
from packtrain.pack.build import (
    Advance,
    PackContents,
    Packing,
    ShardTarget,
    Sources,
    empty_contents,
    is_held_out,
    put_file,
    splits_of,
)
from packtrain.pack.kind import PackKind, ShownSample
from packtrain.pack.manifest import RawText, Split
from packtrain.pack.raw import DropCounter, TextPair
from packtrain.pack.shard import Columns, Ragged
from packtrain.pack.vocabulary import BOS, EOS, MAX_TEXT_BYTES, Vocabulary, is_too_long
from packtrain.pack.words import count_words

SHARD_PAIRS = 250_000
# Of the pairs that a vocabulary is learned from: beyond that, new words take memory, and change next to nothing.
FIT_CHARACTERS = 50_000_000
DUPLICATE = "duplicate pair"
TOO_LONG = f"text of more than {MAX_TEXT_BYTES:,} bytes"
MAX_FILTERED = 0.05  # of the training pairs, by the settings; more usually means that a limit does not fit the data
BLOCK_PAIRS = 20_000  # encoded at a time: tokens are Python integers until they are in an array
_ADVANCE_EVERY = 1000  # pairs between two updates of the progress bar
_SORTED_PARTS = 16  # parts of the fingerprints, each sorted by itself to save memory
# In a shard: two bytes for each token of source and target, and 8 for the end of each row in each of the two columns.
_TOKEN_BYTES, _ROW_BYTES = 4, 16


class PairPacks(PackKind):
    """Pairs of texts: token columns `source` and `target` and, except for training, their `line` in the raw data."""

    noun, nouns, title = "pair", "pairs", "pairs of texts"
    heads = ("source", "target")
    first_samples = 4000
    reads_text = True

    def settings(self, data: DataSettings) -> dict[str, Any]:
        limits = {"max_words": data.max_words, "max_ratio": data.max_ratio}
        return {**limits, "joint": data.joint, "vocabulary": data.vocabulary}

    def samples(self, source: Source, drop: Drop, filtered: Drop, classes: Sequence[str] = ()) -> Iterator[TextPair]:
        return source.pairs(drop)

    def raw_bytes(self, sample: TextPair) -> int:
        return len(sample.source) + len(sample.target) + 2

    def pack(self, packing: Packing) -> PackContents:
        contents = empty_contents(packing.data)
        if packing.learned is None:
            vocabularies = _learn(packing, contents)
        else:
            assert packing.learned.vocabulary is not None
            source = Vocabulary.from_json(packing.learned.vocabulary)
            target_json = packing.learned.target_vocabulary
            vocabularies = source, source if target_json is None else Vocabulary.from_json(target_json)
        source_bytes, target_bytes = (vocabulary.to_json().encode() for vocabulary in vocabularies)
        contents.vocabulary = put_file(packing.store, packing.name, "vocabulary.json", source_bytes)
        if not packing.data.joint:
            contents.target_vocabulary = put_file(packing.store, packing.name, "vocabulary-target.json", target_bytes)
        again = repeated(contents.fingerprints.get("train", array("Q")))
        for split, sources in splits_of(packing.data).items():
            if split == "train":
                chosen = _trained(packing, contents, again)
            elif split == "valid" and packing.data.held_out is not None:
                chosen = _held_out(packing, contents)
            else:
                chosen = _evaluated(packing, contents, split, sources)
            with packing.progress.track(f"packing {split}", len(again) if split == "train" else None) as advance:
                for number, (index, lines, pairs) in enumerate(_by_shard(chosen)):
                    place = ShardTarget(packing.name, split, number, index)
                    finished = place.find(packing.store)
                    if finished is None:
                        columns = encode(pairs, *vocabularies)
                        if split != "train":  # predictions for these are listed with their place in the raw data
                            columns = replace(columns, plain={"line": np.array(lines, "<i8")})
                        finished = place.put(packing.store, columns, DropCounter())
                    contents.splits[split].shards.append(finished)
                    advance(len(pairs))
        return contents

    def warnings(self, splits: Mapping[str, Split]) -> Iterator[str]:
        if "train" not in splits:
            return
        train = splits["train"]
        # Duplicates are not counted: no setting would keep them.
        reasons = {reason: drops for reason, drops in train.filtered.items() if reason != DUPLICATE}
        share = train.share_of(sum(drops.count for drops in reasons.values()))
        if share > MAX_FILTERED:
            reason, drops = next(iter(reasons.items()))
            yield (
                f"{share:.1%} of the training pairs were filtered, most often ({drops.count:,}): {reason},"
                f" such as {drops.names[0]}; check them, data.max_words and data.max_ratio"
            )

    def mean_cost(self, train: Split) -> float:
        """Return the tokens of a side, which follow from the size of the shards."""
        return max(1.0, (train.shard_bytes / train.samples - _ROW_BYTES) / _TOKEN_BYTES)

    def measures(self) -> Mapping[str, Callable[[Columns], NDArray[Any]]]:
        return {
            "source, tokens": lambda shard: shard.ragged["source"].lengths,
            "target, tokens": lambda shard: shard.ragged["target"].lengths,
        }

    def shown(
        self, shard: Columns, row: int, classes: Sequence[str], vocabularies: Sequence[Vocabulary]
    ) -> ShownSample:
        sides = zip(self.heads, (vocabularies[0], vocabularies[-1]), strict=True)
        return ShownSample([vocabulary.decode([shard.ragged[side][row].tolist()])[0] for side, vocabulary in sides])


def packed_pair_bytes(length: float) -> float:
    """Return the size of a pair whose texts have so many tokens each."""
    return _TOKEN_BYTES * length + _ROW_BYTES


def _learn(packing: Packing, contents: PackContents) -> tuple[Vocabulary, Vocabulary]:
    """Note the fingerprint of every training pair, and learn the vocabularies from a share of the pairs."""
    fingerprints = contents.fingerprints["train"]
    characters = 0
    # First pass: lengths, and the fingerprints that find duplicates. The last pass counts drops, and encodes.
    with packing.progress.track("reading train", None) as advance:
        for _, _, _, pair in _usable_pairs(packing, DropCounter(), DropCounter()):
            fingerprints.append(fingerprint(pair))
            characters += len(pair.source) + len(pair.target)
            if len(fingerprints) % _ADVANCE_EVERY == 0:
                advance(_ADVANCE_EVERY)
    share = min(1.0, FIT_CHARACTERS / max(1, characters))

    def sample(advance: Advance) -> Iterator[TextPair]:
        """Yield that share of the pairs, evenly spaced."""
        for number, (_, _, _, pair) in enumerate(_usable_pairs(packing, DropCounter(), DropCounter()), 1):
            if number % _ADVANCE_EVERY == 0:
                advance(_ADVANCE_EVERY)
            if int(number * share) > int((number - 1) * share):
                yield pair

    size = packing.data.vocabulary
    with packing.progress.track("learning the vocabulary", None) as advance:
        if packing.data.joint:
            joint = Vocabulary.fit((side for pair in sample(advance) for side in (pair.source, pair.target)), size)
            return joint, joint
        source = Vocabulary.fit((pair.source for pair in sample(advance)), size)
        return source, Vocabulary.fit((pair.target for pair in sample(advance)), size)


Chosen = Iterator[tuple[int, int, TextPair]]
"""Pairs, each with the number of its source and its line there."""


@dataclass
class _RawCounter:
    """Counts both sides of the pairs that are read."""

    lines: int = 0
    source_bytes: int = 0
    target_bytes: int = 0

    def __call__(self, pair: TextPair) -> None:
        self.lines += 1
        self.source_bytes += _bytes_of(pair.source)
        self.target_bytes += _bytes_of(pair.target)

    @property
    def sides(self) -> tuple[RawText, RawText]:
        return RawText(self.source_bytes, self.lines), RawText(self.target_bytes, self.lines)


def _bytes_of(line: str) -> int:
    return 1 + (len(line) if line.isascii() else len(line.encode(errors="surrogatepass")))  # with its line feed


def _trained(packing: Packing, contents: PackContents, again: NDArray[np.bool_]) -> Chosen:
    build, raw = contents.splits["train"], _RawCounter()
    pairs = _usable_pairs(packing, build.dropped, build.filtered, count=raw)
    for repeats, (index, name, line, pair) in zip(again, pairs, strict=True):
        if repeats:
            build.filtered(DUPLICATE, name)
        else:
            yield index, line, pair
    build.raw = raw.sides


def _evaluated(packing: Packing, contents: PackContents, split: str, sources: Sources) -> Chosen:
    """Yield all pairs of an evaluation split: filtering them would make scores incomparable."""
    dropped, raw = contents.splits[split].dropped, _RawCounter()
    for index, source in enumerate(sources):
        for name, line, pair in _read(packing, source, dropped):
            raw(pair)
            if is_too_long(pair.source) or is_too_long(pair.target):
                dropped(TOO_LONG, name)
                continue
            contents.fingerprints[split].append(fingerprint(pair))
            yield index, line, pair
    contents.splits[split].raw = raw.sides


def _held_out(packing: Packing, contents: PackContents) -> Chosen:
    """Yield each pair of the training data that is held out, once."""
    fingerprints = set[int]()
    pairs = _usable_pairs(packing, DropCounter(), DropCounter(), held_out=True)  # the training data counts the others
    for index, _, line, pair in pairs:
        if (number := fingerprint(pair)) not in fingerprints:
            fingerprints.add(number)
            contents.fingerprints["valid"].append(number)
            yield index, line, pair


def _usable_pairs(
    packing: Packing,
    dropped: Drop,
    filtered: Drop,
    held_out: bool = False,
    count: Callable[[TextPair], None] = lambda _: None,
) -> Iterator[tuple[int, str, int, TextPair]]:
    """Yield the pairs of the training data that the settings keep: the number of their source, their name and line.

    Either those that are held out to validate, or the others.
    """
    for index, source in enumerate(packing.data.train):
        for name, line, pair in _read(packing, source, dropped):
            count(pair)
            # By the source alone: the same sentence with another translation is no test either.
            if is_held_out(pair.source.encode(errors="surrogatepass"), packing.data.held_out) != held_out:
                continue
            reason = filter_reason(pair, packing.data)
            if reason is None:
                yield index, name, line, pair
            else:
                filtered(reason, name)


def _read(packing: Packing, source: Source, dropped: Drop) -> Iterator[tuple[str, int, TextPair]]:
    """Yield the pairs of a source, each with its name and its line."""
    file = Path(source.paths[0]).name
    for number, pair in enumerate(islice(source.pairs(dropped), packing.first), 1):
        line = pair.line or number
        yield f"{file}:{line}", line, pair


def _by_shard(chosen: Chosen) -> Iterator[tuple[int, list[int], list[TextPair]]]:
    """Group consecutive pairs of one source into shards, with their lines."""
    pairs: list[TextPair] = []
    lines: list[int] = []
    current = 0
    for index, line, pair in chosen:
        if pairs and (index != current or len(pairs) == SHARD_PAIRS):
            yield current, lines, pairs
            pairs, lines = [], []
        current = index
        pairs.append(pair)
        lines.append(line)
    if pairs:
        yield current, lines, pairs


def filter_reason(pair: TextPair, data: DataSettings) -> str | None:
    """Return why the settings leave a pair out of training, or None."""
    if is_too_long(pair.source) or is_too_long(pair.target):
        return TOO_LONG
    lengths = count_words(pair.source), count_words(pair.target)
    if min(lengths) == 0:
        return "one side is empty"
    if max(lengths) > data.max_words:
        return f"more than {data.max_words} words"
    if max(lengths) > data.max_ratio * min(lengths):
        return f"one side more than {data.max_ratio:g} times as long"
    return None


def fingerprint(pair: TextPair) -> int:
    text = f"{pair.source}\t{pair.target}".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def repeated(fingerprints: array[int]) -> NDArray[np.bool_]:
    """Return, for each fingerprint, True if an earlier one is equal."""
    values = np.frombuffer(fingerprints, np.uint64)
    again = np.zeros(len(values), np.bool_)
    for remainder in range(_SORTED_PARTS):  # sorting all at once would need several times their memory
        places = np.flatnonzero(values % _SORTED_PARTS == remainder)
        order = places[np.argsort(values[places], kind="stable")]
        again[order[1:][values[order[1:]] == values[order[:-1]]]] = True
    return again


def encode(pairs: list[TextPair], source: Vocabulary, target: Vocabulary, block_pairs: int = BLOCK_PAIRS) -> Columns:
    """Return the token columns. Sources end with EOS; targets also begin with BOS."""
    blocks = [pairs[start : start + block_pairs] for start in range(0, len(pairs), block_pairs)]
    sources = [_tokens([pair.source for pair in block], source, []) for block in blocks]
    targets = [_tokens([pair.target for pair in block], target, [BOS]) for block in blocks]
    return Columns({"source": Ragged.joined(sources), "target": Ragged.joined(targets)})


def _tokens(texts: list[str], vocabulary: Vocabulary, start: list[int]) -> Ragged:
    return Ragged.from_rows([[*start, *row, EOS] for row in vocabulary.encode(texts)], vocabulary.dtype)
