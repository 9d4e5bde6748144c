"""The words of a caption, as its scores see them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

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
