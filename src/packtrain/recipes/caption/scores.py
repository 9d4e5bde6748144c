"""BLEU and CIDEr of captions against several references each, over words like those of COCO's evaluation."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from packtrain.pack.words import spaced
from packtrain.recipes.statistics import Floats, bleu_rows

Ngram = tuple[str, ...]

ORDERS = 4
SIGMA = 6.0
WORDS = "case:lc|tok:words+clitics"
BLEU_SIGNATURE = f"nrefs:var|{WORDS}|smooth:none|length:closest"
CIDER_SIGNATURE = f"CIDEr-D|n:{ORDERS}|sigma:{SIGMA:g}|{WORDS}|df:split"

_PIECE = r"(?:\d+(?:[.,:/]\d+)+|\w+)"
_WORD = re.compile(rf"{_PIECE}(?:[-']{_PIECE})*")
_BEFORE_CLITIC = re.compile(r"(?<=\w)(?=(?:n't|'(?:s|re|ve|ll|d|m))(?!\w))|(?<=^can)(?=not$)")


def words(text: str) -> list[str]:
    """Split a text into lower-case words without punctuation, close to the Penn Treebank's, which COCO uses.

    Hyphens and apostrophes inside a word stay, and so do `.`, `,`, `:` and `/` between digits. Clitics are words of
    their own: man's is man 's, isn't is is n't, cannot is can not. Unlike there, `$`, `%` and `&` are not words, and
    abbreviations lose their dots. Every letter of a script without spaces, such as Chinese, is a word.
    """
    pieces = _WORD.findall(spaced(text).lower().replace("\u2019", "'"))
    return [token for word in pieces for token in _BEFORE_CLITIC.split(word)]


def bleu_counts(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> Floats:
    """Return the row of each output that BLEU is computed from (recipes/statistics.py)."""
    spelled, spelled_references = _spelled(outputs), [_spelled(texts) for texts in references]
    return bleu_rows(spelled, spelled_references, tokenize="none")


def _spelled(texts: Sequence[str]) -> list[str]:
    return [" ".join(words(text)) for text in texts]


@dataclass(frozen=True)
class _Sentence:
    """The weighted n-grams of each order, their norms, and the number of words."""

    vectors: tuple[Mapping[Ngram, float], ...]
    norms: tuple[float, ...]
    length: int


class Cider:
    """CIDEr-D (Vedantam et al., 2015) as COCO's server computes it, in percent: 100 is COCO's `1.0`.

    n-grams of one to four words weigh more the fewer images of `corpus` have them in a reference. A caption is compared
    with each of its references by the cosine of their weights, with counts clipped to those of the reference and a
    Gaussian penalty on the difference in length. The score is ten times the mean over references and orders.
    """

    def __init__(self, corpus: Iterable[Sequence[str]]) -> None:
        self._images = 0
        self._having: Counter[Ngram] = Counter()
        for references in corpus:
            self._images += 1
            sentences = [words(text) for text in references]
            self._having.update(
                {ngram for sentence in sentences for order in range(ORDERS) for ngram in ngrams(sentence, order + 1)}
            )

    @classmethod
    def joined(cls, ciders: Iterable[Cider]) -> Cider:
        """Return the CIDEr of the references of all parts together."""
        union = cls(())
        for cider in ciders:
            union._images += cider._images
            union._having.update(cider._having)
        return union

    def score_of(self, output: str, references: Sequence[str]) -> float:
        sentence = self._sentence(output)
        similarities = [_similarity(sentence, self._sentence(text)) for text in references]
        return 100 * 10 * sum(similarities) / len(similarities)

    def _sentence(self, text: str) -> _Sentence:
        sentence = words(text)
        images, having = math.log(max(1, self._images)), self._having
        # The inverse document frequency; an n-gram that no reference has counts as if one image had it.
        vectors = tuple(
            {
                ngram: count * (images - math.log(max(1, having[ngram])))
                for ngram, count in ngrams(sentence, order + 1).items()
            }
            for order in range(ORDERS)
        )
        norms = tuple(math.hypot(*vector.values()) for vector in vectors)
        return _Sentence(vectors, norms, len(sentence))


def ngrams(sentence: Sequence[str], length: int) -> Counter[Ngram]:
    return Counter(tuple(sentence[at : at + length]) for at in range(len(sentence) - length + 1))


def _similarity(output: _Sentence, reference: _Sentence) -> float:
    penalty = math.exp(-((output.length - reference.length) ** 2) / (2 * SIGMA**2))
    total = 0.0
    for ours, theirs, our_norm, their_norm in zip(
        output.vectors, reference.vectors, output.norms, reference.norms, strict=True
    ):
        if our_norm and their_norm:
            clipped = sum(
                min(weight, theirs.get(ngram, 0.0)) * theirs.get(ngram, 0.0) for ngram, weight in ours.items()
            )
            total += penalty * clipped / (our_norm * their_norm)
    return total / ORDERS
