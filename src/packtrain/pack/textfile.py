"""Text as it comes in files: lines, plain or compressed, and JSON; refused with its place when it is neither.

Lines end at line feeds and nowhere else, so that no other character can shift what belongs together.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal, NoReturn, TypeGuard, cast

from packtrain.errors import Mistake
from packtrain.pack.raw import quoted

Encoding = Literal["utf-8", "windows-1252"]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# What is longer is not a line that anybody wrote, and would be held in memory as a whole.
_LINE_BYTES = 16 << 20
_JSON_BYTES = 1 << 30
# Bytes 81, 8D, 8F, 90 and 9D have no character in windows-1252; they keep the control characters of ISO-8859-1.
_WINDOWS_1252 = {
    byte: character for byte in range(0x80, 0xA0) if (character := bytes([byte]).decode("cp1252", "ignore"))
}


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
