"""Packing pairs of texts, as a stream in two passes: what is in memory is a shard, and some bytes for every pair.

The tokeniser uses all cores by itself, so that the workers of images have nothing to do here.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from packtrain.job.job import Data, Source
from packtrain.pack.formats import PAIRS
from packtrain.pack.raw import Drop, Dropped, TextPair
from packtrain.pack.shard import Columns, Place, Ragged, put_file
from packtrain.pack.vocabulary import BOS, EOS, Vocabulary
from packtrain.pack.workers import Advance, Contents, Packing, Sources, empty_contents, splits_of

SHARD_PAIRS = 250_000
_REPEATED = "the same pair again"
_TOLD_EVERY = 1000


def pack_pairs(packing: Packing) -> Contents:
    contents = empty_contents(packing.data)
    with packing.progress.track("reading train", None) as advance:
        source, target = _fit(packing, contents, advance)
    contents.vocabulary = put_file(packing.store, packing.name, "vocabulary.json", source.to_json().encode())
    if not packing.data.joint:
        target_json = target.to_json().encode()
        contents.target_vocabulary = put_file(packing.store, packing.name, "vocabulary-target.json", target_json)
    again = repeated(contents.fingerprints["train"])
    for split, sources in splits_of(packing.data).items():
        chosen = _trained(packing, contents, again) if split == "train" else _evaluated(contents, split, sources)
        with packing.progress.track(f"packing {split}", len(again) if split == "train" else None) as advance:
            _make_shards(packing, contents, split, chosen, (source, target), advance)
    return contents


def _fit(packing: Packing, contents: Contents, advance: Advance) -> tuple[Vocabulary, Vocabulary]:
    """The first pass over the training data: vocabularies, and the fingerprints that tell repeated pairs."""
    seen = contents.fingerprints["train"]

    def noted() -> Iterator[TextPair]:
        for _, _, pair in _kept(packing, Dropped(), Dropped()):
            seen.append(fingerprint(pair))
            if len(seen) % _TOLD_EVERY == 0:
                advance(_TOLD_EVERY)
            yield pair

    size = packing.data.vocabulary
    if packing.data.joint:
        joint = Vocabulary.fit((side for pair in noted() for side in (pair.source, pair.target)), size)
        return joint, joint
    source = Vocabulary.fit((pair.source for pair in noted()), size)
    kept = _kept(packing, Dropped(), Dropped())
    return source, Vocabulary.fit((pair.target for _, _, pair in kept), size)


Chosen = Iterator[tuple[int, TextPair]]
"""Pairs with the number of their source."""


def _trained(packing: Packing, contents: Contents, again: NDArray[np.bool_]) -> Chosen:
    gathered = contents.gathered["train"]
    kept = _kept(packing, gathered.dropped, gathered.filtered)
    for repeats, (index, name, pair) in zip(again, kept, strict=True):
        if repeats:
            gathered.filtered(_REPEATED, name)
        else:
            yield index, pair


def _evaluated(contents: Contents, split: str, sources: Sources) -> Chosen:
    """What is evaluated stays whole, or scores could not be compared."""
    for index, source in enumerate(sources):
        for _, pair in _read(source, contents.gathered[split].dropped):
            contents.fingerprints[split].append(fingerprint(pair))
            yield index, pair


def _kept(packing: Packing, dropped: Drop, filtered: Drop) -> Iterator[tuple[int, str, TextPair]]:
    """The training pairs that the settings keep, with their source's number and their own name."""
    for index, source in enumerate(packing.data.train):
        for name, pair in _read(source, dropped):
            reason = fault(pair, packing.data)
            if reason is None:
                yield index, name, pair
            else:
                filtered(reason, name)


def _read(source: Source, dropped: Drop) -> Iterator[tuple[str, TextPair]]:
    file = Path(source.paths[0]).name
    for number, pair in enumerate(PAIRS[source.kind](source.paths, dropped), 1):
        yield f"{file}:{number}", pair


def _make_shards(
    packing: Packing,
    contents: Contents,
    split: str,
    chosen: Chosen,
    vocabularies: tuple[Vocabulary, Vocabulary],
    advance: Advance,
) -> None:
    for number, (index, pairs) in enumerate(_parts(chosen)):
        place = Place(packing.name, split, number, index)
        made = place.made_before(packing.store)
        if made is None:
            made = place.put(packing.store, encode(pairs, *vocabularies), Dropped())
        contents.gathered[split].made.append(made)
        advance(len(pairs))


def _parts(chosen: Chosen) -> Iterator[tuple[int, list[TextPair]]]:
    """Runs of pairs of one source, a shard's worth at most."""
    part: list[TextPair] = []
    current = 0
    for index, pair in chosen:
        if part and (index != current or len(part) == SHARD_PAIRS):
            yield current, part
            part = []
        current = index
        part.append(pair)
    if part:
        yield current, part


# Pairs of texts: what the settings keep, which have come before, and their tokens.


_BLOCK_PAIRS = 20_000  # as many are lists of Python numbers at a time
_PARTS = 16


def fault(pair: TextPair, data: Data) -> str | None:
    """Why the settings leave a pair out of training."""
    lengths = len(pair.source.split()), len(pair.target.split())
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
    """Which of them have come before. Done in parts, so that sorting takes little memory beside them."""
    values = np.frombuffer(fingerprints, np.uint64)
    again = np.zeros(len(values), np.bool_)
    for part in range(_PARTS):
        places = np.flatnonzero(values % _PARTS == part)
        order = places[np.argsort(values[places], kind="stable")]
        again[order[1:][values[order[1:]] == values[order[:-1]]]] = True
    return again


def encode(pairs: list[TextPair], source: Vocabulary, target: Vocabulary) -> Columns:
    """Token columns. Sources end with EOS; targets also begin with BOS."""
    blocks = [pairs[start : start + _BLOCK_PAIRS] for start in range(0, len(pairs), _BLOCK_PAIRS)]
    sources = [Ragged.from_rows(_ended(source, [one.source for one in block]), _dtype(source)) for block in blocks]
    targets = [Ragged.from_rows(_begun(target, [one.target for one in block]), _dtype(target)) for block in blocks]
    return Columns({"source": Ragged.joined(sources), "target": Ragged.joined(targets)})


def _ended(vocabulary: Vocabulary, texts: list[str]) -> list[list[int]]:
    return [[*row, EOS] for row in vocabulary.encode(texts)]


def _begun(vocabulary: Vocabulary, texts: list[str]) -> list[list[int]]:
    return [[BOS, *row, EOS] for row in vocabulary.encode(texts)]


def _dtype(vocabulary: Vocabulary) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    return np.dtype("<u2") if len(vocabulary) <= 1 << 16 else np.dtype("<u4")
