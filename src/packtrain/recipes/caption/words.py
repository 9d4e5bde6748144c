"""The words of a caption, as its scores see them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

Ngram = tuple[str, ...]

_WORD = re.compile("\\w+(?:[-'\u2019]\\w+)*")
SIGNATURE = "case:lc|tok:words"


def words(text: str) -> list[str]:
    """Lower case, without punctuation, as COCO's own scores have it; hyphens and apostrophes inside a word stay."""
    return _WORD.findall(text.lower())


def ngrams(sentence: Sequence[str], length: int) -> Counter[Ngram]:
    return Counter(tuple(sentence[at : at + length]) for at in range(len(sentence) - length + 1))
