"""CIDEr of captions against several references each: CIDEr-D (Vedantam et al., 2015), as COCO's server computes it.

n-grams of one to four words are weighed by how few images have them in a reference. A caption is compared with each
of its references by the cosine of their weights, with counts clipped to those of the reference and a Gaussian over the
difference in length. The score is ten times the mean over references, lengths of n-grams and images, in percent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from packtrain.recipes.caption.words import WORDS
from packtrain.recipes.caption.words import Ngram, ngrams, words

SIGMA = 6.0
CIDER_SIGNATURE = f"CIDEr-D|n:{ORDERS}|sigma:{SIGMA:g}|{WORDS}|df:split"

Vector = Mapping[Ngram, float]


@dataclass(frozen=True)
class _Sentence:
    """The weighed n-grams of each order, their norms, and the number of words."""

    vectors: tuple[Vector, ...]
    norms: tuple[float, ...]
    length: int


class Cider:
    """Knows from a set of references how much each n-gram says. A score of 100 is that of COCO's `1.0`."""

    def __init__(self, corpus: Iterable[Sequence[str]]) -> None:
        self._images = 0
        self._having: Counter[Ngram] = Counter()
        for references in corpus:
            self._images += 1
            self._having.update({one for text in references for one in _all_ngrams(words(text))})

    @classmethod
    def joined(cls, parts: Iterable[Cider]) -> Cider:
        """As of the references of all parts together."""
        whole = cls(())
        for part in parts:
            whole._images += part._images
            whole._having.update(part._having)
        return whole

    def score(self, outputs: Sequence[str], references: Sequence[Sequence[str]]) -> float:
        """The mean over all outputs; nothing at all scores 0."""
        scores = [self.score_of(output, wanted) for output, wanted in zip(outputs, references, strict=True)]
        return sum(scores) / len(scores) if scores else 0.0

    def score_of(self, output: str, references: Sequence[str]) -> float:
        said = self._sentence(output)
        likenesses = [_likeness(said, self._sentence(text)) for text in references]
        return 100 * 10 * sum(likenesses) / len(likenesses)

    def _sentence(self, text: str) -> _Sentence:
        said = words(text)
        vectors = tuple(
            {one: count * self._weight(one) for one, count in ngrams(said, order + 1).items()}
            for order in range(ORDERS)
        )
        norms = tuple(math.hypot(*vector.values()) for vector in vectors)
        return _Sentence(vectors, norms, len(said))

    def _weight(self, ngram: Ngram) -> float:
        return math.log(max(1, self._images)) - math.log(max(1, self._having[ngram]))


def _all_ngrams(said: Sequence[str]) -> Iterable[Ngram]:
    for order in range(ORDERS):
        yield from ngrams(said, order + 1)


def _likeness(said: _Sentence, wanted: _Sentence) -> float:
    penalty = math.exp(-((said.length - wanted.length) ** 2) / (2 * SIGMA**2))
    total = 0.0
    for ours, theirs, our_norm, their_norm in zip(said.vectors, wanted.vectors, said.norms, wanted.norms, strict=True):
        if our_norm and their_norm:
            clipped = sum(min(weight, theirs.get(one, 0.0)) * theirs.get(one, 0.0) for one, weight in ours.items())
            total += penalty * clipped / (our_norm * their_norm)
    return total / ORDERS
