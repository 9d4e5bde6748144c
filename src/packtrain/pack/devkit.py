"""ImageNet's devkit, as downloaded (ILSVRC2012_devkit_t12.tar.gz) or unpacked: the classes of the validation images.

`data/ILSVRC2012_validation_ground_truth.txt` has a number for each image. `data/meta.mat`, a MATLAB file of version 5,
says which synset has that number: a struct array `synsets` with the fields `ILSVRC2012_ID` and `WNID`. The numbers do
not follow the order of the names.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from packtrain.errors import Mistake, printable
from packtrain.pack.archive import Locator, member_of

TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"
META = "data/meta.mat"

_MAX_BYTES = 32 << 20  # of either file, unpacked; the real ones have a fraction of it
_HEADER_BYTES = 128
_ORDERS = {b"IM": "<", b"MI": ">"}
# Types of data elements.
_COMPRESSED = 15
_BYTES, _UTF_8 = {"<": "latin-1", ">": "latin-1"}, {"<": "utf-8", ">": "utf-8"}
_UTF_16 = {"<": "utf-16-le", ">": "utf-16-be"}
_CHARACTERS = {1: _BYTES, 2: _BYTES, 4: _UTF_16, 16: _UTF_8, 17: _UTF_16}
_NUMBERS = {1: "b", 2: "B", 3: "h", 4: "H", 5: "i", 6: "I", 7: "f", 9: "d", 12: "q", 13: "Q"}
# Classes of arrays.
_STRUCT, _TEXT = 2, 4

Element = tuple[int, memoryview]
"""The type of a data element, and its bytes."""


def devkit_truth(path: str) -> list[str]:
    return _read(path, TRUTH).decode("utf-8", "replace").split("\n")


def devkit_synsets(path: str) -> list[str]:
    """Return the name of each synset; the first one has the number 1."""
    place = f"{path}: {META}"
    try:
        synsets = dict(_synsets(_read(path, META)))
        names = [synsets[number] for number in range(1, len(synsets) + 1)]
    except (struct.error, zlib.error, ValueError, OverflowError, LookupError) as error:
        reason = printable(str(error), 100)
        raise Mistake(f"{place}: not the devkit's list of synsets ({reason}); download it again") from error
    if len(set(names)) != len(names):
        raise Mistake(f"{place}: two synsets have the same name; download it again")
    return names


def _read(path: str, name: str) -> bytes:
    try:
        where = Locator(str(Path(path, name))) if Path(path).is_dir() else member_of(path, name).where
        return where.read(_MAX_BYTES)
    except OSError as error:
        raise Mistake(f"{printable(path)}: {name}: {error.strerror or error}; expected ImageNet's devkit") from error


def _synsets(data: bytes) -> Iterator[tuple[int, str]]:
    """Yield the number and the name of each synset."""
    order = _ORDERS.get(data[126:_HEADER_BYTES])
    if order is None:
        raise ValueError("not a MATLAB file of version 5")
    for kind, content in _elements(memoryview(data)[_HEADER_BYTES:], order):
        variable = content
        if kind == _COMPRESSED:
            inflated = zlib.decompressobj().decompress(content, _MAX_BYTES)
            _, variable = _next(_elements(memoryview(inflated), order))
        for row in _struct_rows(variable, order):
            number, name = _value(row["ILSVRC2012_ID"], order), _value(row["WNID"], order)
            yield int(number), str(name)


def _struct_rows(variable: memoryview, order: str) -> Iterator[dict[str, memoryview]]:
    """Yield the values of each row of the struct array `synsets`, by field; nothing for other variables."""
    elements = _elements(variable, order)
    (_, flags), (_, sizes), (_, name) = _next(elements), _next(elements), _next(elements)
    if _class_of(flags, order) != _STRUCT or bytes(name) != b"synsets":
        return
    (_, width), (_, joined) = _next(elements), _next(elements)
    length = int(_first("i", width, order))
    fields = [bytes(joined[at : at + length]).split(b"\0", 1)[0].decode() for at in range(0, len(joined), length)]
    for _ in range(math.prod(struct.unpack(f"{order}{len(sizes) // 4}i", sizes))):
        yield {field: _next(elements)[1] for field in fields}


def _value(array: memoryview, order: str) -> float | str:
    """Return the text, or the first number, of an array."""
    elements = _elements(array, order)
    (_, flags), _, _, (kind, content) = _next(elements), _next(elements), _next(elements), _next(elements)
    if _class_of(flags, order) == _TEXT:
        return bytes(content).decode(_CHARACTERS[kind][order])
    return _first(_NUMBERS[kind], content, order)


def _class_of(flags: memoryview, order: str) -> int:
    return int(_first("I", flags, order)) & 0xFF


def _first(form: str, content: memoryview, order: str) -> float:
    [number] = struct.unpack_from(order + form, content)
    return float(number)


def _elements(data: memoryview, order: str) -> Iterator[Element]:
    at = 0
    while at + 8 <= len(data):
        kind, size = struct.unpack_from(f"{order}2I", data, at)
        if kind >> 16:  # up to four bytes are stored in the place of their size
            kind, size, start, end = kind & 0xFFFF, kind >> 16, at + 4, at + 8
        else:
            start = at + 8
            end = start + (size if kind == _COMPRESSED else -(-size // 8) * 8)
        if start + size > len(data):
            raise ValueError("truncated")
        yield kind, data[start : start + size]
        at = end


def _next(elements: Iterator[Element]) -> Element:
    element = next(elements, None)
    if element is None:
        raise ValueError("truncated")
    return element
