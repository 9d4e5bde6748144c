"""What raw formats have in common: samples as they come, before anything is decoded, their names and classes."""

from __future__ import annotations

import errno
import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal, NoReturn, TypeGuard, cast

from packtrain.errors import Mistake, printable, quoted

Drop = Callable[[str, str], None]
"""Tells of a sample that is left out: the reason, which is counted, and the sample's own name."""

# Reasons that several formats give.
MISSING_FILE = "missing file"
NO_CAPTION = "image without a caption"
EMPTY_CAPTION = "empty caption"

_FIRST_NAMES = 10

Encoding = Literal["utf-8", "windows-1252"]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# What is longer is not a line that anybody wrote, and would be held in memory as a whole.
_LINE_BYTES = 16 << 20
_JSON_BYTES = 1 << 30
# Bytes 81, 8D, 8F, 90 and 9D have no character in windows-1252; they keep the control characters of ISO-8859-1.
_WINDOWS_1252 = {
    byte: character for byte in range(0x80, 0xA0) if (character := bytes([byte]).decode("cp1252", "ignore"))
}


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


def read_lines(path: Path, encoding: Encoding = "utf-8") -> Iterator[str]:
    """Lines without their ends. A byte order mark at the start is not text; what is not UTF-8 is refused."""
    for number, (offset, raw) in enumerate(_raw_lines(path), 1):
        line = raw.rstrip(b"\r\n")
        if encoding == "windows-1252":
            yield line.decode("latin-1").translate(_WINDOWS_1252)
            continue
        skipped = len(_BYTE_ORDER_MARK) if offset == 0 and line.startswith(_BYTE_ORDER_MARK) else 0
        try:
            yield line[skipped:].decode()
        except UnicodeDecodeError as error:
            at = offset + skipped + error.start
            raise Mistake(f"{path}:{number}: not UTF-8 at byte {at:,} of the file; convert it first") from None


def encoding_of(path: Path) -> Encoding:
    """UTF-8 if the file is, or was but for some damage; otherwise windows-1252, which has ISO-8859-1's characters too.

    In windows-1252 hardly a line with an accent is also UTF-8. Where most are, the file is UTF-8 with bad
    bytes: reading it then refuses them with their place, instead of turning every accent into two wrong characters.
    """
    whole = broken = 0
    for offset, raw in _raw_lines(path):
        if offset == 0 and raw.startswith(_BYTE_ORDER_MARK):
            return "utf-8"
        if not raw.isascii():
            if _is_utf8(raw):
                whole += 1
            else:
                broken += 1
    return "windows-1252" if broken > whole else "utf-8"


def read_json(path: Path) -> object:
    """A whole file of JSON, as a value."""
    try:
        size = path.stat().st_size
        if size > _JSON_BYTES:
            raise Mistake(f"{path}: {size:,} bytes of JSON are more than fit into memory; split it into several files")
        data = path.read_bytes().removeprefix(_BYTE_ORDER_MARK)
    except OSError as error:
        raise Mistake(f"{path}: {error.strerror or error}") from error
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise Mistake(f"{path}: not UTF-8 at byte {error.start:,}; convert it first") from None
    del data
    return parse_json(text, str(path))


def parse_json(text: str, place: str) -> object:
    """JSON as it is defined: without NaN, and without a key that is there twice, of which one would be lost."""
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise Mistake(f"{place}: not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise Mistake(f"{place}: not usable JSON: nested too deep") from None
    except ValueError as error:
        raise Mistake(f"{place}: not usable JSON: {error}") from None


def is_text(value: object) -> TypeGuard[str]:
    """Whether it is a text that can be written as UTF-8; JSON can spell halves of characters."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    offset = 0
    try:
        with _open(path) as file:
            for raw in iter(partial(file.readline, _LINE_BYTES + 1), b""):
                if len(raw) > _LINE_BYTES:
                    raise Mistake(f"{path}: a line of more than {_LINE_BYTES >> 20} MB at byte {offset:,}; is it text?")
                yield offset, raw
                offset += len(raw)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise Mistake(f"{path}: not a whole gzip file ({error})") from error
    except OSError as error:
        raise Mistake(f"{path}: {error.strerror or error}") from error


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        again, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {quoted(again)} is there twice in one object")
    return fields
