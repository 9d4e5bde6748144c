"""The words of a caption, as its scores see them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Ngram = tuple[str, ...]

_PIECE = r"(?:\d+(?:[.,:/]\d+)+|\w+)"
_WORD = re.compile(rf"{_PIECE}(?:[-']{_PIECE})*")
_BEFORE_CLITIC = re.compile(r"(?<=\w)(?=(?:n't|'(?:s|re|ve|ll|d|m))(?!\w))|(?<=^can)(?=not$)")
WORDS = "case:lc|tok:words+clitics"


def words(text: str) -> list[str]:
    """Lower case, without punctuation and signs; close to the Penn Treebank's words, which COCO's own scores go by.

    Hyphens and apostrophes inside a word stay, and so do `.`, `,`, `:` and `/` between digits. Clitics are words of
    their own: man's is man 's, isn't is is n't, cannot is can not. Unlike there, `$`, `%` and `&` are no words, and
    abbreviations lose their dots.
    """
    found = _WORD.findall(text.lower().replace("\u2019", "'"))
    return [part for word in found for part in _BEFORE_CLITIC.split(word)]


def ngrams(sentence: Sequence[str], length: int) -> Counter[Ngram]:
    return Counter(tuple(sentence[at : at + length]) for at in range(len(sentence) - length + 1))


# BLEU-1 to 4 of a corpus against several references each (Papineni et al., 2002), without smoothing.


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


# CIDEr of captions against several references each: CIDEr-D (Vedantam et al., 2015), as COCO's server computes it.
#
# n-grams of one to four words are weighed by how few images have them in a reference. A caption is compared with each
# of its references by the cosine of their weights, with counts clipped to those of the reference and a Gaussian over
# the
# difference in length. The score is ten times the mean over references, lengths of n-grams and images, in percent.


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
