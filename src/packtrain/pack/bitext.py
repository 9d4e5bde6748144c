"""Aligned text: two files whose lines n are translations of each other, or one file of tab-separated pairs.

WMT's test sets are in SGML: `newstest2014-deen-src.en.sgm` and `newstest2014-deen-ref.de.sgm` are aligned by document
and segment instead of by line.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple, TypeVar

from packtrain.errors import Mistake, quoted
from packtrain.job.kinds import Drop, Source
from packtrain.job.part import Location, Ordinal
from packtrain.pack.compression import plain_name
from packtrain.pack.raw import MAX_LINE_BYTES, TextPair, is_text_file, read_lines

Item = TypeVar("Item")

_SGML = (".sgm", ".sgml")
_TAG = re.compile(r"<(/?)(seg|doc)\b([^<>]*)>", re.IGNORECASE)
_ATTRIBUTE = re.compile(r"""\b(id|docid)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""", re.IGNORECASE)
# WMT's files are not valid SGML: an ampersand may also stand for itself.
_ENTITY = re.compile(r"&(?:(amp|lt|gt|quot|apos)|#([0-9]{1,7})|#[xX]([0-9a-fA-F]{1,6}));")
_ENTITIES = {"amp": "&", "lt": "<", "gt": ">", "quot": '"', "apos": "'"}


class PairSource(Source):
    """Pairs of texts.

    `columns` are those of source and target in a file of tab-separated columns, from 1. `last` leaves only the last
    pairs of a set and `without_last` the others, so that a set without splits can be divided.
    """

    harmless = frozenset({"columns", "last", "without_last"})

    columns: tuple[Ordinal, Ordinal] | None = None
    last: Ordinal | None = None
    without_last: Ordinal | None = None

    def faults(self) -> Iterator[tuple[Location, str]]:
        yield from super().faults()
        if self.columns is not None and len(self.paths) != 1:
            yield ("columns",), "applies to one file of tab-separated columns only"
        if self.last is not None and self.without_last is not None:
            yield ("without_last",), "cannot be combined with last; remove one"

    def pack_kind(self) -> str:
        return "pairs"

    def part_of(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the part of a set that `last` or `without_last` choose."""
        if self.last is not None:
            yield from deque(items, self.last)
            return
        ahead: deque[Item] = deque()
        for item in items:
            ahead.append(item)
            if len(ahead) > (self.without_last or 0):
                yield ahead.popleft()


class BitextSource(PairSource):
    """Two aligned text files, or one TSV of pairs."""

    contents = frozenset({"pairs"})
    path_counts = (1, 2)
    example = "[train.en, train.de]"

    @classmethod
    def recognize(cls, paths: Sequence[str]) -> Sequence[str] | None:
        if not all(map(is_text_file, paths)):
            return None
        are_aligned = len(paths) == 2 and not any(plain_name(path).endswith(".tsv") for path in paths)
        return paths if len(paths) == 1 or are_aligned else None

    def pairs(self, drop: Drop) -> Iterator[TextPair]:  # noqa: ARG002
        """Yield all pairs; refuse files of unequal length, invalid UTF-8 and lines without a tab."""
        if len(self.paths) == 1:
            return self.part_of(read_tsv(Path(self.paths[0]), self.columns))
        return self.part_of(_read_two(Path(self.paths[0]), Path(self.paths[1])))


def read_tsv(path: Path, columns: tuple[int, int] | None = None) -> Iterator[TextPair]:
    """Yield the pairs of a file with two columns, or those of two of its columns. Blank lines separate documents."""
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        fields = line.split("\t")
        if columns is None and len(fields) != 2:
            advice = "; name the two to use, such as columns: [1, 2]" if len(fields) > 2 else ""
            raise Mistake(f"{path}:{number}: expected two texts separated by a tab, found {len(fields)}{advice}")
        source, target = columns or (1, 2)
        if max(source, target) > len(fields):
            raise Mistake(f"{path}:{number}: has no column {max(source, target)}, only {len(fields)} separated by tabs")
        yield TextPair(fields[source - 1], fields[target - 1], number)


class Segment(NamedTuple):
    """A text of one side, with its place in an SGML file; lines have none, since their number says it."""

    text: str
    place: tuple[str, str] | None = None


def _read_two(source: Path, target: Path) -> Iterator[TextPair]:
    for segment, translation in zip_longest(_segments(source), _segments(target)):
        if segment is None or translation is None:
            counts = [sum(1 for _ in _segments(path)) for path in (source, target)]
            units = "segments" if _is_sgml(source) or _is_sgml(target) else "lines"
            raise Mistake(
                f"{source} has {counts[0]:,} {units} and {target} has {counts[1]:,};"
                f" aligned files must have the same number of {units}"
            )
        if segment.place != translation.place and segment.place is not None and translation.place is not None:
            places = [
                f"segment {quoted(name)} of document {quoted(doc)}" for doc, name in (segment.place, translation.place)
            ]
            raise Mistake(f"{source} and {target} are not aligned: {places[0]} meets {places[1]}")
        yield TextPair(segment.text, translation.text)


def _segments(path: Path) -> Iterator[Segment]:
    return _read_sgml(path) if _is_sgml(path) else map(Segment, read_lines(path))


def _is_sgml(path: Path) -> bool:
    return plain_name(path.name).endswith(_SGML)


def _read_sgml(path: Path) -> Iterator[Segment]:
    """Yield the segments of all documents in order. A segment may have several lines, and a line several segments."""
    document = ""
    name: str | None = None  # of the segment that is being read
    texts: list[str] = []
    length = 0
    is_empty = True
    for number, line in enumerate(read_lines(path), 1):
        position = 0
        for tag in _TAG.finditer(line):
            is_end, kind = bool(tag[1]), tag[2].lower()
            attributes = {
                match[1].lower(): match[2] or match[3] or match[4] or "" for match in _ATTRIBUTE.finditer(tag[3])
            }
            if kind == "doc":
                document = "" if is_end else attributes.get("docid", "")
            elif is_end == (name is None):
                raise Mistake(f"{path}:{number}: {'</seg> without <seg>' if is_end else '<seg> inside of a segment'}")
            elif is_end and name is not None:
                is_empty = False
                text = " ".join([*texts, line[position : tag.start()]])
                yield Segment(_ENTITY.sub(_character, text).strip(), (document, name))
                name = None
            else:
                name, texts, length, position = attributes.get("id", ""), [], 0, tag.end()
        if name is not None:
            texts.append(line[position:])
            length += len(texts[-1]) + 1
            if length > MAX_LINE_BYTES:  # its end is missing; do not read the rest of the file into memory
                break
    if name is not None:
        raise Mistake(f"{path}: segment {quoted(name)} of document {quoted(document)} has no end; download it again")
    if is_empty:
        raise Mistake(f'{path}: contains no segments, such as <seg id="1">text</seg>')


def _character(entity: re.Match[str]) -> str:
    if entity[1]:
        return _ENTITIES[entity[1]]
    number = int(entity[2]) if entity[2] else int(entity[3], 16)
    # Surrogates are not characters, and numbers beyond the last one stay as they are written.
    return chr(number) if number <= 0x10FFFF and not 0xD800 <= number <= 0xDFFF else entity[0]
