"""Pairs of texts: what the settings keep, which have come before, and their tokens."""

from __future__ import annotations

import hashlib
from array import array

import numpy as np
from numpy.typing import NDArray

from packtrain.job import Data
from packtrain.pack.raw import TextPair
from packtrain.pack.shard import Columns, Ragged
from packtrain.pack.vocabulary import BOS, EOS, Vocabulary

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
