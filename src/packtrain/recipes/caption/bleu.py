"""BLEU-1 to 4 of a corpus against several references each (Papineni et al., 2002), without smoothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from packtrain.recipes.caption.words import WORDS
from packtrain.recipes.caption.words import Ngram, ngrams, words

ORDERS = 4
BLEU_SIGNATURE = f"nrefs:var|{WORDS}|smooth:none|length:closest"


class Counts(NamedTuple):
    """Of one output, or of several added up: n-grams of each length that are right, and all; words, and wanted ones."""

    matches: tuple[int, ...]
    totals: tuple[int, ...]
    words: int
    wanted: int


def bleu(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> tuple[float, ...]:
    """BLEU-1, 2, 3 and 4 in percent. Each output has one reference or more."""
    return bleu_of([counted(output, wanted) for output, wanted in zip(outputs, references, strict=True)])


def counted(output: str, references: Sequence[str]) -> Counts:
    said, truths = words(output), [words(text) for text in references]
    matches, totals = [], []
    for order in range(1, ORDERS + 1):
        found = ngrams(said, order)
        most: Counter[Ngram] = Counter()
        for truth in truths:
            most |= ngrams(truth, order)
        matches.append((found & most).total())
        totals.append(found.total())
    nearest = min((abs(len(truth) - len(said)), len(truth)) for truth in truths)[1]
    return Counts(tuple(matches), tuple(totals), len(said), nearest)


def bleu_of(counts: Sequence[Counts]) -> tuple[float, ...]:
    said, wanted = sum(one.words for one in counts), sum(one.wanted for one in counts)
    brevity = min(0.0, 1 - wanted / said) if said else -math.inf
    scores, logarithms = [], 0.0
    for order in range(ORDERS):
        matches, totals = sum(one.matches[order] for one in counts), sum(one.totals[order] for one in counts)
        logarithms += math.log(matches / totals) if matches else -math.inf
        scores.append(100 * math.exp(brevity + logarithms / (order + 1)))
    return tuple(scores)
