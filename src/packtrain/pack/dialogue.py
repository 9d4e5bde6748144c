"""Dialogue: prompts and replies, from the Cornell Movie-Dialogs files or a file of tab-separated pairs.

    movie_lines.txt          L1 +++$+++ u0 +++$+++ m0 +++$+++ BIANCA +++$+++ They do not!
    movie_conversations.txt  u0 +++$+++ u2 +++$+++ m0 +++$+++ ['L1', 'L2', 'L3']

Two consecutive lines of a conversation are a pair. Lines may be in any order, so all are held in memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from packtrain.errors import Mistake, printable, quoted
from packtrain.job.kinds import Drop, Source
from packtrain.pack.bitext import read_tsv
from packtrain.pack.manifest import Kind
from packtrain.pack.raw import TextPair, encoding_of, file_inside, read_lines

LINES, CONVERSATIONS = "movie_lines.txt", "movie_conversations.txt"
MISSING_LINE = "conversation with an unknown line"

_SEPARATOR = " +++$+++ "
_LINE_FIELDS, _CONVERSATION_FIELDS = 5, 4
_QUOTED = re.compile(r"""\s*(?:'([^'"\\]+)'|"([^'"\\]+)")\s*""")


class DialogueSource(Source):
    """Cornell Movie-Dialogs (its folder, or lines and conversations), or one TSV of prompts and replies."""

    contents = frozenset({"turns"})
    path_counts = (1, 2)
    example = "[movie_lines.txt, movie_conversations.txt]"

    def pack_kind(self) -> Kind:
        return "pairs"

    def pairs(self, drop: Drop) -> Iterator[TextPair]:
        if len(self.paths) == 2:
            yield from _read_cornell(Path(self.paths[0]), Path(self.paths[1]), drop)
        elif Path(self.paths[0]).is_dir():
            folder = self.paths[0]
            yield from _read_cornell(_find(folder, LINES), _find(folder, CONVERSATIONS), drop)
        else:
            yield from read_tsv(Path(self.paths[0]))


def _find(folder: str, name: str) -> Path:
    for choice in (name, f"{name}.gz"):
        path = file_inside(folder, choice, folder)
        if path is not None:
            return Path(path)
    raise Mistake(f"{folder}: {name} not found; the folder must contain {LINES} and {CONVERSATIONS}")


def _read_cornell(lines_path: Path, conversations_path: Path, drop: Drop) -> Iterator[TextPair]:
    texts = _texts(lines_path)
    for place, fields in _rows(conversations_path, _CONVERSATION_FIELDS):
        for one, other in pairwise(_ids(fields[-1], place)):
            missing = [name for name in (one, other) if name not in texts]
            if missing:
                drop(MISSING_LINE, f"{place} {printable(missing[0])}")
            else:
                yield TextPair(texts[one], texts[other])


def _texts(path: Path) -> dict[str, str]:
    texts: dict[str, str] = {}
    for place, fields in _rows(path, _LINE_FIELDS):
        name = fields[0].strip()
        if name in texts:
            raise Mistake(f"{place}: line {quoted(name)} occurs twice; remove one")
        texts[name] = fields[-1]
    return texts


def _rows(path: Path, count: int) -> Iterator[tuple[str, list[str]]]:
    """Yield the fields of each line with its place. An empty last field may have lost the space before it."""
    for number, line in enumerate(read_lines(path, encoding_of(path)), 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        # The added space completes the separator before an empty last field; it is removed below.
        fields = f"{line} ".split(_SEPARATOR, count - 1)
        if len(fields) != count:
            raise Mistake(
                f"{place}: expected {count} fields separated by '{_SEPARATOR}', found {len(fields)};"
                f" name {LINES} first, then {CONVERSATIONS}"
            )
        fields[-1] = fields[-1].removesuffix(" ")
        yield place, fields


def _ids(text: str, place: str) -> list[str]:
    """Parse a list of names in Python's syntax, without evaluating it."""
    inner = text.strip()
    if not (inner.startswith("[") and inner.endswith("]")):
        raise Mistake(f"{place}: the last field must be a list such as ['L194', 'L195'], not {quoted(text)}")
    inner = inner[1:-1].strip()
    names = []
    # Not ast.literal_eval: the file is untrusted, and only lists of quoted names are valid.
    for item in inner.split(",") if inner else []:
        match = _QUOTED.fullmatch(item)
        if match is None:
            raise Mistake(f"{place}: {quoted(item)} must be a quoted line name such as 'L194'")
        names.append(match[1] or match[2])
    return names
