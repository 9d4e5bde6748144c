"""Dialogue: prompts and replies, from the Cornell Movie-Dialogs files, or from a file of tab-separated pairs.

    movie_lines.txt          L1 +++$+++ u0 +++$+++ m0 +++$+++ BIANCA +++$+++ They do not!
    movie_conversations.txt  u0 +++$+++ u2 +++$+++ m0 +++$+++ ['L1', 'L2', 'L3']

Two consecutive lines of a conversation are a pair. Lines may be in any order, so all are held in memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from packtrain.errors import Mistake, printable, quoted
from packtrain.job.kinds import Drop
from packtrain.job.part import is_address
from packtrain.pack.archive import archive_members, is_archive
from packtrain.pack.bitext import PairSource, read_tsv
from packtrain.pack.compression import plain_name
from packtrain.pack.raw import TextPair, encoding_of, file_inside, is_text_file, read_lines

LINES, CONVERSATIONS = "movie_lines.txt", "movie_conversations.txt"
MISSING_LINE = "conversation with an unknown line"

_SEPARATOR = " +++$+++ "
_LINE_FIELDS, _CONVERSATION_FIELDS = 5, 4
_QUOTED = re.compile(r"""\s*(?:'([^'"\\]+)'|"([^'"\\]+)")\s*""")


class DialogueSource(PairSource):
    """Cornell Movie-Dialogs (its zip, its folder, or lines and conversations), or one TSV of prompts and replies.

    Of Cornell Movie-Dialogs, `last` and `without_last` count conversations.
    """

    contents = frozenset({"turns"})
    path_counts = (1, 2)
    example = "[movie_lines.txt, movie_conversations.txt]"

    @classmethod
    def recognize(cls, paths: Sequence[str]) -> Sequence[str] | None:
        names = [plain_name(path.rpartition("/")[2]) for path in paths]
        if names == [LINES, CONVERSATIONS]:
            return paths
        if len(paths) != 1:
            return None
        [path] = paths
        if is_text_file(path):
            return paths
        if Path(path).is_dir():
            names_inside = (entry.name for entry in Path(path).iterdir())
        else:
            names_inside = (
                entry.name.rpartition("/")[2] for entry in ([] if is_address(path) else archive_members(path))
            )
        return paths if any(plain_name(name) == LINES for name in names_inside) else None

    def pairs(self, drop: Drop) -> Iterator[TextPair]:
        paths = self._cornell()
        if paths is None:
            yield from self.part_of(read_tsv(Path(self.paths[0]), self.columns))
            return
        if self.columns is not None:
            raise Mistake(f"{self.paths[0]}: columns applies to one file of tab-separated columns only")
        texts: dict[str, str] = {}
        for place, fields in _rows(paths[0], _LINE_FIELDS):
            name = fields[0].strip()
            if name in texts:
                raise Mistake(f"{place}: line {quoted(name)} occurs twice; remove one")
            texts[name] = fields[-1]
        for place, fields in self.part_of(_rows(paths[1], _CONVERSATION_FIELDS)):
            for prompt, reply in pairwise(_ids(fields[-1], place)):
                missing = [name for name in (prompt, reply) if name not in texts]
                if missing:
                    drop(MISSING_LINE, f"{place} {printable(missing[0])}")
                else:
                    yield TextPair(texts[prompt], texts[reply])

    def _cornell(self) -> tuple[Path, Path] | None:
        """Return the files of lines and of conversations; None if the source is a TSV."""
        if len(self.paths) == 2:
            return Path(self.paths[0]), Path(self.paths[1])
        [path] = self.paths
        if Path(path).is_dir():
            return _find(path, LINES), _find(path, CONVERSATIONS)
        if not is_archive(path):
            return None
        members = [member.name for member in archive_members(path)]
        return _find_member(path, members, LINES), _find_member(path, members, CONVERSATIONS)


def _find(folder: str, name: str) -> Path:
    for entry in sorted(Path(folder).iterdir()):
        if plain_name(entry.name) == name and (path := file_inside(folder, entry.name, folder)) is not None:
            return Path(path)
    raise Mistake(f"{folder}: {name} not found; the folder must contain {LINES} and {CONVERSATIONS}")


def _find_member(archive: str, members: Sequence[str], name: str) -> Path:
    matches = [member for member in members if plain_name(member.rpartition("/")[2]) == name]
    if len(matches) != 1:
        count = "several times" if matches else "not found"
        raise Mistake(f"{archive}: {name} {count}; name both members: [{archive}#{LINES}, {archive}#{CONVERSATIONS}]")
    return Path(f"{archive}#{matches[0]}")


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
