"""The words of a text, in scripts with spaces and in those without.

Chinese, Japanese, Thai and their neighbors do not separate words by spaces. There, words are estimated from the number
of characters, so that one limit and one ratio fit every pair of languages; docs/decisions.md has the measurements.
"""

from __future__ import annotations

import math
import re

# The letters of each script, and how many of them an English word takes in translation.
_HAN = "\u3005\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_KANA = "\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9f"
_SOUTHEAST = "\u0e01-\u0eff\u0f00-\u109f\u1780-\u17ff\uaa60-\uaa7f"  # Thai, Lao, Tibetan, Burmese, Khmer
_CHARACTERS_PER_WORD = ((_HAN, 2), (_KANA, 5), (_SOUTHEAST, 6))

_SCRIPTS = tuple(re.compile(f"[{letters}]") for letters, _ in _CHARACTERS_PER_WORD)
_UNSPACED = re.compile(f"[{_HAN}{_KANA}{_SOUTHEAST}]")
# Not words either, beside such letters: their punctuation, and the zero-width space that some texts put between words.
_BREAKS = re.compile(
    f"[{_HAN}{_KANA}{_SOUTHEAST}\u200b\u3000-\u3004\u3006\u3008-\u303f\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65]+"
)


def count_words(text: str) -> int:
    """Return the number of words between spaces, and an estimate where the script has no spaces."""
    if text.isascii() or _UNSPACED.search(text) is None:
        return len(text.split())
    counts = zip(count_letters(text), _CHARACTERS_PER_WORD, strict=True)
    estimated = sum(count / per_word for count, (_, per_word) in counts)
    return len(_BREAKS.sub(" ", text).split()) + math.ceil(estimated)


def count_letters(text: str) -> tuple[int, int, int]:
    """Return the number of Chinese letters, of Japanese syllables, and of letters of other scripts without spaces."""
    han, kana, southeast = (len(script.findall(text)) for script in _SCRIPTS)
    return han, kana, southeast


def split_words(text: str) -> list[str]:
    """Return the words between spaces; every letter of a script without spaces is a word of its own."""
    return spaced(text).split()


def spaced(text: str) -> str:
    """Return the text with spaces around every letter of a script without spaces."""
    return text if text.isascii() else _UNSPACED.sub(r" \g<0> ", text)
