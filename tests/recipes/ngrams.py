"""Perplexities of unigrams and bigrams: baselines that a model must beat."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

Rows = Sequence[Sequence[int]]
"""Rows of tokens; the first of each, BOS, is not predicted."""


def unigram_perplexity(seen: Rows, unseen: Rows, vocabulary: int) -> float:
    """Return the perplexity if every token is as likely as it is frequent."""
    counts = Counter(token for row in seen for token in row[1:])
    return _perplexity([_smoothed(counts, vocabulary, token) for row in unseen for token in row[1:]])


def bigram_perplexity(seen: Rows, unseen: Rows, vocabulary: int) -> float:
    """Return the perplexity of Witten-Bell smoothed bigrams."""
    counts = Counter(token for row in seen for token in row[1:])
    pairs = Counter(pair for row in seen for pair in pairwise(row))
    before = Counter(token for row in seen for token in row[:-1])
    kinds = Counter(one for one, _ in pairs)
    likely = []
    for row in unseen:
        for one, other in pairwise(row):
            trust = before[one] / (before[one] + kinds[one]) if before[one] else 0.0
            seen_share = pairs[one, other] / before[one] if before[one] else 0.0
            likely.append(trust * seen_share + (1 - trust) * _smoothed(counts, vocabulary, other))
    return _perplexity(likely)


def _smoothed(counts: Counter[int], vocabulary: int, token: int) -> float:
    return (counts[token] + 1) / (counts.total() + vocabulary)


def _perplexity(likely: Sequence[float]) -> float:
    return math.exp(-sum(map(math.log, likely)) / len(likely))
