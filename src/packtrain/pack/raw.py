"""What raw formats have in common: samples as they come, before anything is decoded, their names and classes."""

from __future__ import annotations

import errno
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packtrain.errors import Mistake

Drop = Callable[[str, str], None]
"""Tells of a sample that is left out: the reason, which is counted, and the sample's own name."""

# Reasons that several formats give.
MISSING_FILE = "missing file"
NO_CAPTION = "image without a caption"
EMPTY_CAPTION = "empty caption"

_FIRST_NAMES = 10
_QUOTED = 200


@dataclass(frozen=True, slots=True)
class Locator:
    """Where the bytes of a sample are: a file, or a part of one (a member of an archive, found without unpacking it).

    `inflated` is how many bytes a part comes to that is compressed, as it may be in a zip.
    """

    path: str
    offset: int = 0
    length: int | None = None
    inflated: int | None = None

    def read(self) -> bytes:
        with Path(self.path).open("rb") as file:
            file.seek(self.offset)
            data = file.read() if self.length is None else file.read(self.length)
        return data if self.inflated is None else _inflated(data, self.inflated)


def _inflated(data: bytes, size: int) -> bytes:
    """No more than a byte beyond that size is ever made, whatever the data would come to."""
    try:
        found = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, size + 1)
    except zlib.error:
        found = b""
    if len(found) != size:
        raise OSError(errno.EIO, "damaged in its archive")
    return found


@dataclass(frozen=True, slots=True)
class RawImage:
    """An image with its class or its captions. `name` is what people know it by, and unique in its source."""

    name: str
    where: Locator
    label: int | None = None
    captions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TextPair:
    source: str
    target: str


@dataclass
class Dropped:
    """What was left out and why: counts, and the first names of each reason for a person to look at."""

    counts: Counter[str] = field(default_factory=Counter)
    names: dict[str, list[str]] = field(default_factory=dict)

    def __call__(self, reason: str, name: str) -> None:
        self.counts[reason] += 1
        first = self.names.setdefault(reason, [])
        if len(first) < _FIRST_NAMES:
            first.append(name)


def printable(name: str) -> str:
    """The name as it can be shown and stored: escaped where it would break a line, steer a terminal or is not UTF-8."""
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in name)


def quoted(name: str) -> str:
    """The name in a message: escaped, and no longer than a person reads."""
    return repr(name if len(name) <= _QUOTED else name[:_QUOTED] + "...")


def in_order(classes: Iterable[str], where: str) -> tuple[str, ...]:
    """Classes numbered by name. A single one leaves nothing to learn."""
    names = tuple(sorted(set(classes)))
    if len(names) < 2:
        found = f"only the class {quoted(names[0])}" if names else "no classes"
        raise Mistake(f"{where}: {found}; a classifier needs at least two")
    return names


def number_of(name: str, numbers: Mapping[str, int], where: str) -> int:
    """The class's number in training, which every other split goes by."""
    if name not in numbers:
        raise Mistake(f"{where}: class {quoted(name)} is not one of the {len(numbers):,} of the training data")
    return numbers[name]


def file_inside(folder: str, name: str, place: str) -> str | None:
    """The path of a file that a list names, or None if there is none. Names and links that lead out are refused."""
    check_inside(folder, name, place)
    path = folder
    try:
        for part in name.split("/"):
            path = f"{path}/{part}"
            if Path(path).is_symlink():
                refuse_leading_out(folder, path, place)
        return path if Path(path).is_file() else None
    except OSError:  # a name longer than the file system has
        return None


def check_inside(folder: str, name: str, place: str) -> None:
    if not name or name.startswith("/") or "\0" in name or ".." in name.split("/"):
        raise Mistake(f"{place}: {quoted(name)} must be a path below {folder}, without '..'")


def refuse_leading_out(folder: str, path: str, place: str) -> None:
    root = os.path.realpath(folder)
    if os.path.commonpath([root, os.path.realpath(path)]) != root:
        raise Mistake(f"{place}: {printable(path)} is a link that leads out of {folder}; copy what it points to")
