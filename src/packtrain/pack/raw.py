"""Shared by all raw formats: samples before decoding, dropped samples, classes, files inside a folder, text, JSON.

Lines end at line feeds and nowhere else, so that no other character can shift aligned lines.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import BinaryIO, Literal, NoReturn, TypeGuard

from packtrain.errors import Mistake, printable, quoted
from packtrain.job.kinds import Source
from packtrain.job.part import Boolean, is_address
from packtrain.pack.archive import Locator, composed, is_archive, member_of, split_member
from packtrain.pack.compression import decompressed, faults_as_mistakes, plain_name

# Reasons that several formats give.
MISSING_FILE = "missing file"
NO_CAPTION = "image without a caption"
EMPTY_CAPTION = "empty caption"
HIDDEN = "hidden or system file"
NO_PICTURE = "not a picture by its name"

FIRST_NAMES = 10  # of the samples that are left out for a reason
# Left by file managers, unpackers and file systems beside what a person put there.
_SYSTEM_NAMES = {"__macosx", "thumbs.db", "desktop.ini", "@eadir", "$recycle.bin", "lost+found"}
# Names of what people keep beside pictures. A name without an ending, or with an unknown one, may be that of a picture.
_OTHER_NAMES = re.compile(
    r"(readme|licen[sc]e|copying|notice|authors|changelog|changes|makefile|(md5|sha[0-9]*|check)[-_]?sums?)"
    r"|.*\.(txt|text|md|rst|rtf|pdf|docx?|odt|tex|bib|html?|css|js|xml|jsonl?|ya?ml|toml|ini|cfg|conf|csv|tsv|xlsx?|ods|log"
    r"|db|sqlite|pyc?|ipynb|m|mat|r|sh|bat|np[yz]|h5|hdf5|pkl|pth?|parquet|arrow|md5|sha[0-9]+|crc|sfv|sig|asc|lst|lnk|url"
    r"|bak|mp[34]|wav|avi|mov|mkv|webm)",
    re.ASCII | re.DOTALL,
)

_ARCHIVES = (".zip", ".tar", ".tgz", ".tar.gz")

Encoding = Literal["utf-8", "windows-1252"]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# A longer line is not text, and it would have to fit into memory.
MAX_LINE_BYTES = 16 << 20
MAX_JSON_BYTES = 256 << 20  # four times COCO's captions; the values take up to twenty times their text
# Bytes 81, 8D, 8F, 90 and 9D have no character in windows-1252; they keep the control characters of ISO-8859-1.
_WINDOWS_1252 = {
    byte: character for byte in range(0x80, 0xA0) if (character := bytes([byte]).decode("cp1252", "ignore"))
}


class ImageSource(Source):
    """Images. With `links`, links in a folder may lead out of it, for example to shared storage."""

    harmless = frozenset({"links"})

    links: Boolean = False


@dataclass(frozen=True, slots=True)
class RawImage:
    """An image with its class or its captions. `name` is shown to people, and unique in its source."""

    name: str
    where: Locator
    label: int | None = None
    captions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TextPair:
    """`line` is its line in the file, if that is not its number among the pairs."""

    source: str
    target: str
    line: int = 0


@dataclass
class DropCounter:
    """Samples that were left out: their number and the first names, by reason."""

    counts: Counter[str] = field(default_factory=Counter)
    names: dict[str, list[str]] = field(default_factory=dict)

    def __call__(self, reason: str, name: str) -> None:
        self.counts[reason] += 1
        first = self.names.setdefault(reason, [])
        if len(first) < FIRST_NAMES:
            first.append(name)


def sorted_classes(classes: Iterable[str], where: str) -> tuple[str, ...]:
    """Return the classes sorted by name, which is how they are numbered."""
    names = tuple(sorted(set(map(composed, classes))))
    if len(names) < 2:
        listed = f"only the class {quoted(names[0])}" if names else "no classes"
        raise Mistake(f"{where}: {listed}; a classifier needs at least two")
    return names


def class_number(name: str, numbers: Mapping[str, int], where: str) -> int:
    """Return the number of a class in the training data, which all splits use."""
    name = composed(name)
    if name not in numbers:
        raise Mistake(f"{where}: class {quoted(name)} is not among the {len(numbers):,} classes of the training data")
    return numbers[name]


def is_folder_or_archive(path: str) -> bool:
    """True for a folder, a tar or a zip, or for a folder in one; what is remote or in one is told by its name."""
    archive, member = split_member(path)
    if member:
        return not Path(member).suffix
    return archive.lower().endswith(_ARCHIVES) if is_address(archive) else Path(path).is_dir() or is_archive(path)


def is_text_file(path: str) -> bool:
    """True for a file that is neither an archive nor JSON, which a format has of its own."""
    is_json = plain_name(path).endswith((".json", ".jsonl"))
    return not is_json and not is_folder_or_archive(path)


def is_hidden(name: str) -> bool:
    """True for the name of a file or folder that a person did not put there, such as `.DS_Store`."""
    return name.startswith(".") or name.lower() in _SYSTEM_NAMES


def may_be_picture(name: str) -> bool:
    """False for the name of a file that nobody would give to a picture, such as `README.txt` or `SHA256SUMS`."""
    return _OTHER_NAMES.fullmatch(name.lower()) is None


def file_inside(folder: str, name: str, place: str, links: bool = False) -> str | None:
    """Return the path of a file below `folder`, or None; refuse names that point outside, and links unless allowed."""
    check_inside(folder, name, place)
    # Part by part, because any directory on the way may be a link that leads outside.
    path = folder
    try:
        for name_part in name.split("/"):
            path = _entry(path, name_part)
            if not links and Path(path).is_symlink():
                check_link(folder, path, place)
        return path if Path(path).is_file() else None
    except OSError:  # a name longer than the file system allows
        return None


def _entry(folder: str, name: str) -> str:
    """Return the path of a name in a folder, which may spell its accents differently."""
    paths = (f"{folder}/{spelled}" for spelled in (name, composed(name), unicodedata.normalize("NFD", name)))
    return f"{folder}/{name}" if name.isascii() else next(filter(os.path.lexists, paths), f"{folder}/{name}")


def check_inside(folder: str, name: str, place: str) -> None:
    if not name or name.startswith("/") or "\0" in name or ".." in name.split("/"):
        raise Mistake(f"{place}: {quoted(name)} must be a path below {folder}, without '..'")


def check_link(folder: str, path: str, place: str) -> None:
    root = os.path.realpath(folder)
    if os.path.commonpath([root, os.path.realpath(path)]) != root:
        raise Mistake(
            f"{place}: {printable(path)} is a link that points outside of {folder};"
            " copy its target, or allow such links with 'links: true' beside the path"
        )


def read_lines(path: Path, encoding: Encoding = "utf-8") -> Iterator[str]:
    """Yield lines without line ends and without a byte order mark; refuse text that is not UTF-8."""
    for number, (offset, raw) in enumerate(_raw_lines(path), 1):
        line = raw.rstrip(b"\r\n")
        if encoding == "windows-1252":
            yield line.decode("latin-1").translate(_WINDOWS_1252)  # never fails: every byte has a character
            continue
        # By hand instead of utf-8-sig, so that the error can name the byte of the file.
        skipped = len(_BYTE_ORDER_MARK) if offset == 0 and line.startswith(_BYTE_ORDER_MARK) else 0
        try:
            yield line[skipped:].decode()
        except UnicodeDecodeError as error:
            at = offset + skipped + error.start
            raise Mistake(f"{path}:{number}: not UTF-8 at byte {at:,} of the file; convert it first") from None


def encoding_of(path: Path) -> Encoding:
    """Return UTF-8 or windows-1252, which includes the characters of ISO-8859-1.

    Hardly any line with an accent in windows-1252 is valid UTF-8. If most are, the file is UTF-8 with damaged bytes:
    reading it reports them with their place, instead of turning every accent into two wrong characters.
    """
    valid_lines = invalid_lines = 0
    for offset, raw in _raw_lines(path):
        if offset == 0 and raw.startswith(_BYTE_ORDER_MARK):
            return "utf-8"
        if not raw.isascii():
            try:
                raw.decode()
                valid_lines += 1
            except UnicodeDecodeError:
                invalid_lines += 1
    return "windows-1252" if invalid_lines > valid_lines else "utf-8"


def read_json(path: Path) -> object:
    with _opened(path) as file:
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise Mistake(f"{path}: more than {MAX_JSON_BYTES:,} bytes of JSON are too large for memory; split the file")
    data = data.removeprefix(_BYTE_ORDER_MARK)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise Mistake(f"{path}: not UTF-8 at byte {error.start:,}; convert it first") from None
    del data  # up to a gigabyte, and the text is as large
    return parse_json(text, str(path))


def parse_json(text: str, place: str) -> object:
    """Parse strict JSON: no NaN, and no duplicate keys, of which one would be lost."""
    try:
        return json.loads(text, parse_constant=_raise_constant, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise Mistake(f"{place}: not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise Mistake(f"{place}: invalid JSON: nested too deeply") from None
    except ValueError as error:
        raise Mistake(f"{place}: invalid JSON: {error}") from None


def is_text(value: object) -> TypeGuard[str]:
    """True for a string that can be written as UTF-8; JSON can contain lone surrogates."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    offset = 0
    with _opened(path) as file:
        for raw in iter(partial(file.readline, MAX_LINE_BYTES + 1), b""):
            if len(raw) > MAX_LINE_BYTES:
                raise Mistake(
                    f"{path}: line longer than {MAX_LINE_BYTES >> 20} MB at byte {offset:,}; is this a text file?"
                )
            yield offset, raw
            offset += len(raw)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    with faults_as_mistakes(path), decompressed(_located(path).open(), path.name) as file:
        yield file


def _located(path: Path) -> Locator:
    """Return where a file's bytes are: in the file itself, or in the archive that `archive.tgz#member` names."""
    archive, member = split_member(str(path))
    if not member:
        return Locator(archive)
    with faults_as_mistakes(printable(archive)):
        status = Path(archive).stat()
    return _member(archive, member, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=64)  # packing reads a file several times, and finding a member unpacks its whole archive
def _member(archive: str, name: str, size: int, modified: int) -> Locator:  # noqa: ARG001 - of another file: other ones
    return member_of(archive, name).where


def _raise_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        again, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {quoted(again)} occurs twice in one object")
    return fields
