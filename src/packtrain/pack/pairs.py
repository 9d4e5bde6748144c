"""Pack pairs of texts in streaming passes: memory holds one shard, the words of a sample, and 8 bytes for every pair.

The tokenizer uses all cores by itself, so packing pairs does not use workers.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from packtrain.job.job import DataSettings
from packtrain.job.kinds import Drop, Source
from packtrain.pack.build import (
    Advance,
    Learned,
    PackContents,
    Packing,
    ShardTarget,
    Sources,
    empty_contents,
    is_held_out,
    put_file,
    splits_of,
)
from packtrain.pack.manifest import RawText
from packtrain.pack.raw import DropCounter, TextPair
from packtrain.pack.shard import Columns, Ragged
from packtrain.pack.vocabulary import BOS, EOS, MAX_TEXT_BYTES, Vocabulary, is_too_long
from packtrain.pack.words import count_words

SHARD_PAIRS = 250_000
# Of the pairs that a vocabulary is learned from: beyond that, new words take memory, and change next to nothing.
FIT_CHARACTERS = 50_000_000
DUPLICATE = "duplicate pair"
TOO_LONG = f"text of more than {MAX_TEXT_BYTES:,} bytes"
_ADVANCE_EVERY = 1000  # pairs between two updates of the progress bar
BLOCK_PAIRS = 20_000  # encoded at a time: tokens are Python integers until they are in an array
_SORTED_PARTS = 16  # parts of the fingerprints, each sorted by itself to save memory


def pack_pairs(packing: Packing) -> PackContents:
    contents = empty_contents(packing.data)
    source, target = _learn(packing, contents) if packing.learned is None else _known(packing.learned)
    contents.vocabulary = put_file(packing.store, packing.name, "vocabulary.json", source.to_json().encode())
    if not packing.data.joint:
        target_json = target.to_json().encode()
        contents.target_vocabulary = put_file(packing.store, packing.name, "vocabulary-target.json", target_json)
    again = repeated(contents.fingerprints.get("train", array("Q")))
    for split, sources in splits_of(packing.data).items():
        if split == "train":
            chosen = _trained(packing, contents, again)
        elif split == "valid" and packing.data.held_out is not None:
            chosen = _held_out(packing, contents)
        else:
            chosen = _evaluated(contents, split, sources)
        with packing.progress.track(f"packing {split}", len(again) if split == "train" else None) as advance:
            _make_shards(packing, contents, split, chosen, (source, target), advance)
    return contents


def _learn(packing: Packing, contents: PackContents) -> tuple[Vocabulary, Vocabulary]:
    # First pass: lengths, and the fingerprints that find duplicates. The last pass encodes.
    with packing.progress.track("reading train", None) as advance:
        characters = _survey(packing, contents, advance)
    with packing.progress.track("learning the vocabulary", None) as advance:
        return _fit(packing, min(1.0, FIT_CHARACTERS / max(1, characters)), advance)


def _known(learned: Learned) -> tuple[Vocabulary, Vocabulary]:
    assert learned.vocabulary is not None
    source = Vocabulary.from_json(learned.vocabulary)
    return source, source if learned.target_vocabulary is None else Vocabulary.from_json(learned.target_vocabulary)


def _survey(packing: Packing, contents: PackContents, advance: Advance) -> int:
    """Note the fingerprint of every training pair; return the number of their characters."""
    seen = contents.fingerprints["train"]
    characters = 0
    for _, _, _, pair in _kept(packing, DropCounter(), DropCounter()):  # the last pass counts what is left out
        seen.append(fingerprint(pair))
        characters += len(pair.source) + len(pair.target)
        if len(seen) % _ADVANCE_EVERY == 0:
            advance(_ADVANCE_EVERY)
    return characters


def _fit(packing: Packing, share: float, advance: Advance) -> tuple[Vocabulary, Vocabulary]:
    """Learn the vocabularies from a share of the training pairs, evenly spaced."""

    def sample() -> Iterator[TextPair]:
        for number, (_, _, _, pair) in enumerate(_kept(packing, DropCounter(), DropCounter()), 1):
            if number % _ADVANCE_EVERY == 0:
                advance(_ADVANCE_EVERY)
            if int(number * share) > int((number - 1) * share):
                yield pair

    size = packing.data.vocabulary
    if packing.data.joint:
        joint = Vocabulary.fit((side for pair in sample() for side in (pair.source, pair.target)), size)
        return joint, joint
    source = Vocabulary.fit((pair.source for pair in sample()), size)
    return source, Vocabulary.fit((pair.target for pair in sample()), size)


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
    kept = _kept(packing, build.dropped, build.filtered, count=raw)
    for repeats, (index, name, line, pair) in zip(again, kept, strict=True):
        if repeats:
            build.filtered(DUPLICATE, name)
        else:
            yield index, line, pair
    build.raw = raw.sides


def _evaluated(contents: PackContents, split: str, sources: Sources) -> Chosen:
    """Yield all pairs of an evaluation split: filtering them would make scores incomparable."""
    dropped, raw = contents.splits[split].dropped, _RawCounter()
    for index, source in enumerate(sources):
        for name, line, pair in _read(source, dropped):
            raw(pair)
            if is_too_long(pair.source) or is_too_long(pair.target):
                dropped(TOO_LONG, name)
                continue
            contents.fingerprints[split].append(fingerprint(pair))
            yield index, line, pair
    contents.splits[split].raw = raw.sides


def _held_out(packing: Packing, contents: PackContents) -> Chosen:
    """Yield each pair of the training data that is held out, once."""
    seen = set[int]()
    for index, _, line, pair in _kept(packing, DropCounter(), DropCounter(), held_out=True):  # the others count them
        if (number := fingerprint(pair)) not in seen:
            seen.add(number)
            contents.fingerprints["valid"].append(number)
            yield index, line, pair


def _kept(
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
        for name, line, pair in _read(source, dropped):
            count(pair)
            # By the source alone: the same sentence with another translation is no test either.
            if is_held_out(pair.source.encode(errors="surrogatepass"), packing.data.held_out) != held_out:
                continue
            reason = filter_reason(pair, packing.data)
            if reason is None:
                yield index, name, line, pair
            else:
                filtered(reason, name)


def _read(source: Source, dropped: Drop) -> Iterator[tuple[str, int, TextPair]]:
    file = Path(source.paths[0]).name
    for number, pair in enumerate(source.pairs(dropped), 1):
        line = pair.line or number
        yield f"{file}:{line}", line, pair


def _make_shards(
    packing: Packing,
    contents: PackContents,
    split: str,
    chosen: Chosen,
    vocabularies: tuple[Vocabulary, Vocabulary],
    advance: Advance,
) -> None:
    for number, (index, lines, pairs) in enumerate(_parts(chosen)):
        target = ShardTarget(packing.name, split, number, index)
        finished = target.find(packing.store)
        if finished is None:
            columns = encode(pairs, *vocabularies)
            if split != "train":  # predictions for these are listed with their place in the raw data
                columns = replace(columns, plain={"line": np.array(lines, "<i8")})
            finished = target.put(packing.store, columns, DropCounter())
        contents.splits[split].shards.append(finished)
        advance(len(pairs))


def _parts(chosen: Chosen) -> Iterator[tuple[int, list[int], list[TextPair]]]:
    """Group consecutive pairs of one source into shards, with their lines."""
    part: list[TextPair] = []
    lines: list[int] = []
    current = 0
    for index, line, pair in chosen:
        if part and (index != current or len(part) == SHARD_PAIRS):
            yield current, lines, part
            part, lines = [], []
        current = index
        part.append(pair)
        lines.append(line)
    if part:
        yield current, lines, part


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
    for part in range(_SORTED_PARTS):  # sorting all at once would need several times their memory
        places = np.flatnonzero(values % _SORTED_PARTS == part)
        order = places[np.argsort(values[places], kind="stable")]
        again[order[1:][values[order[1:]] == values[order[:-1]]]] = True
    return again


def encode(pairs: list[TextPair], source: Vocabulary, target: Vocabulary, block_pairs: int = BLOCK_PAIRS) -> Columns:
    """Return the token columns. Sources end with EOS; targets also begin with BOS."""
    blocks = [pairs[start : start + block_pairs] for start in range(0, len(pairs), block_pairs)]
    sources = [_tokens([one.source for one in block], source, []) for block in blocks]
    targets = [_tokens([one.target for one in block], target, [BOS]) for block in blocks]
    return Columns({"source": Ragged.joined(sources), "target": Ragged.joined(targets)})


def _tokens(texts: list[str], vocabulary: Vocabulary, start: list[int]) -> Ragged:
    return Ragged.from_rows([[*start, *row, EOS] for row in vocabulary.encode(texts)], vocabulary.dtype)
