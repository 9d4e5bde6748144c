"""Pairs of texts to token columns: filters, the joint vocabulary, shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from packtrain.job import Data, Source
from packtrain.pack.bitext import read_bitext
from packtrain.pack.raw import TextPair
from packtrain.pack.shard import Ragged, encode_shard
from packtrain.pack.vocabulary import BOS, EOS, Vocabulary

READERS = {"bitext": read_bitext}
_SHARD_SAMPLES = 1_000_000


@dataclass
class Selection:
    """The pairs that the filters kept, and how many each of them dropped."""

    pairs: list[TextPair] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)


def select(sources: tuple[Source, ...], data: Data, training: bool) -> Selection:
    """What is trained on is filtered; what is evaluated stays whole, or scores could not be compared."""
    selection = Selection()
    seen: set[tuple[str, str]] = set()
    for source in sources:
        for pair in READERS[source.kind](source.paths):
            reason = _fault(pair, data, seen) if training else None
            if reason is not None:
                selection.dropped[reason] += 1
                continue
            seen.add((pair.source, pair.target))
            selection.pairs.append(pair)
    return selection


def _fault(pair: TextPair, data: Data, seen: set[tuple[str, str]]) -> str | None:
    lengths = len(pair.source.split()), len(pair.target.split())
    if min(lengths) == 0:
        return "one side is empty"
    if max(lengths) > data.max_words:
        return f"more than {data.max_words} words"
    if max(lengths) > data.max_ratio * min(lengths):
        return f"one side more than {data.max_ratio:g} times as long"
    if (pair.source, pair.target) in seen:
        return "the same pair again"
    return None


def fit_vocabulary(pairs: list[TextPair], size: int) -> Vocabulary:
    return Vocabulary.fit((text for pair in pairs for text in (pair.source, pair.target)), size)


def encode_pairs(pairs: list[TextPair], vocabulary: Vocabulary) -> Iterator[tuple[bytes, int]]:
    """The shards of a split with their numbers of samples. Sources end with EOS; targets also begin with BOS."""
    dtype = np.dtype("<u2") if len(vocabulary) <= 1 << 16 else np.dtype("<u4")
    for start in range(0, len(pairs), _SHARD_SAMPLES):
        part = pairs[start : start + _SHARD_SAMPLES]
        sources = [[*row, EOS] for row in vocabulary.encode([pair.source for pair in part])]
        targets = [[BOS, *row, EOS] for row in vocabulary.encode([pair.target for pair in part])]
        columns = {"source": Ragged.from_rows(sources, dtype), "target": Ragged.from_rows(targets, dtype)}
        yield encode_shard(columns), len(part)
