"""BLEU-1 to 4 of a corpus against several references each (Papineni et al., 2002), without smoothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from packtrain.recipes.caption.words import SIGNATURE as WORDS
from packtrain.recipes.caption.words import Ngram, ngrams, words

ORDERS = 4
SIGNATURE = f"nrefs:var|{WORDS}|smooth:none|length:closest"


def bleu(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> tuple[float, ...]:
    """BLEU-1, 2, 3 and 4 in percent. Each output has one reference or more."""
    matches, totals = [0] * ORDERS, [0] * ORDERS
    output_words = reference_words = 0
    for output, wanted in zip(outputs, references, strict=True):
        said = words(output)
        truths = [words(text) for text in wanted]
        output_words += len(said)
        reference_words += min((abs(len(truth) - len(said)), len(truth)) for truth in truths)[1]
        for order in range(ORDERS):
            found = ngrams(said, order + 1)
            most: Counter[Ngram] = Counter()
            for truth in truths:
                most |= ngrams(truth, order + 1)
            matches[order] += (found & most).total()
            totals[order] += found.total()
    brevity = min(0.0, 1 - reference_words / output_words) if output_words else -math.inf
    scores, logarithms = [], 0.0
    for order in range(ORDERS):
        precision = matches[order] / totals[order] if totals[order] else 0.0
        logarithms += math.log(precision) if precision else -math.inf
        scores.append(100 * math.exp(brevity + logarithms / (order + 1)))
    return tuple(scores)
