"""Aligned text: two files of which line n translates line n, or one file of tab-separated pairs.

Lines end at line feeds and nowhere else, so that no other character can shift the alignment.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO, cast

from packtrain.errors import Mistake
from packtrain.pack.raw import TextPair

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_bitext(paths: tuple[str, ...]) -> Iterator[TextPair]:
    """All pairs in order. Unequal files, bad UTF-8 and lines without a tab are refused with their place."""
    if len(paths) == 1:
        yield from _read_tsv(Path(paths[0]))
    else:
        yield from _read_two(Path(paths[0]), Path(paths[1]))


def _read_two(source: Path, target: Path) -> Iterator[TextPair]:
    for one, other in zip_longest(_lines(source), _lines(target)):
        if one is None or other is None:
            counts = [sum(1 for _ in _lines(path)) for path in (source, target)]
            raise Mistake(
                f"{source} has {counts[0]:,} lines and {target} has {counts[1]:,}; aligned files must have equally many"
            )
        yield TextPair(one, other)


def _read_tsv(path: Path) -> Iterator[TextPair]:
    for number, line in enumerate(_lines(path), 1):
        fields = line.split("\t")
        if len(fields) != 2:
            raise Mistake(f"{path}:{number}: a line must be two texts with a tab between them, not {len(fields)}")
        yield TextPair(fields[0], fields[1])


def _lines(path: Path) -> Iterator[str]:
    offset = 0
    try:
        with _open(path) as file:
            for number, raw in enumerate(file, 1):
                line = raw.removeprefix(_BYTE_ORDER_MARK) if offset == 0 else raw
                try:
                    yield line.rstrip(b"\r\n").decode()
                except UnicodeDecodeError as error:
                    at = offset + len(raw) - len(line) + error.start
                    raise Mistake(f"{path}:{number}: not UTF-8 at byte {at:,} of the file; convert it first") from None
                offset += len(raw)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise Mistake(f"{path}: not a whole gzip file ({error})") from error
    except OSError as error:
        raise Mistake(f"{path}: {error.strerror or error}") from error


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")
