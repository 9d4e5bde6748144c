"""What classes are called, where their names are numbers: `n02123045 tabby, tabby cat` a line, as ImageNet has it."""

from __future__ import annotations

from pathlib import Path

from packtrain.errors import Mistake

_MOST_BYTES = 10_000_000


def read_words(path: Path, name: str) -> dict[str, str]:
    """The first of the words for each class. `name` is what errors call the file."""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1).decode("utf-8-sig")
    except OSError as error:
        raise Mistake(f"{name}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Mistake(f"{name}: not UTF-8; it has a line such as 'n02123045 tabby, tabby cat' for each class") from None
    if len(text) > _MOST_BYTES:
        raise Mistake(f"{name}: larger than {_MOST_BYTES // 1_000_000} MB, which no list of words is")
    rows = (line.split(None, 1) for line in text.splitlines())
    return {row[0]: row[1].partition(",")[0].strip() for row in rows if len(row) == 2}
