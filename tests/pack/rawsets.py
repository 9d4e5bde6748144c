"""Small raw data sets in the shapes that real ones have, and the refusals that broken ones meet."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from packtrain.errors import Mistake

MANY = 10**6  # more bytes than any sample of the tests has
SEPARATOR = " +++$+++ "


def picture(shade: int = 0) -> bytes:
    """A JPEG; each shade has its own bytes."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (shade % 256, 100, 200)).save(file, "JPEG")
    return file.getvalue()


def header(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0, **fields: Any) -> bytes:
    """A tar header (with those before it that a long name needs), whatever it claims."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    for field, value in fields.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.GNU_FORMAT)


def member(name: str, data: bytes = b"") -> bytes:
    return header(name, size=len(data)) + data + bytes(-len(data) % 512)


END = bytes(1024)


def with_checksum(block: bytes) -> bytes:
    """A tar header with the checksum that its bytes have."""
    blank = block[:148] + b" " * 8 + block[156:512]
    return blank[:148] + b"%06o\0 " % sum(blank) + blank[156:] + block[512:]


def tar(members: Iterable[tuple[str, bytes]], form: int = tarfile.GNU_FORMAT) -> bytes:
    """A tar as tarfile writes it."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def zipped(members: Iterable[tuple[str, bytes]], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in members:
            archive.writestr(zipfile.ZipInfo(name), data, method)
    return file.getvalue()


def write(path: Path, data: bytes | str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


def write_classes(folder: Path, classes: Mapping[str, Sequence[str]]) -> str:
    """A folder for each class with pictures of these names."""
    for shade, (name, files) in enumerate(classes.items()):
        (folder / name).mkdir(parents=True)
        for file in files:
            write(folder / name / file, picture(shade))
    return str(folder)


def class_tars(classes: Mapping[str, Sequence[str]]) -> bytes:
    """The same as a tar of tars, as ILSVRC2012_img_train.tar is."""
    return tar(
        (f"{name}.tar", tar((file, picture(shade)) for file in files))
        for shade, (name, files) in enumerate(classes.items())
    )


def numbered(count: int) -> list[str]:
    return [f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, count + 1)]


def meta_mat(
    synsets: Mapping[int, str], *, compress: bool = True, order: str = "<", characters: int = 16, numbers: int = 9
) -> bytes:
    """The devkit's meta.mat: a struct array of synsets. The last two are the types of texts and of numbers."""

    def element(kind: int, data: bytes) -> bytes:
        if 0 < len(data) <= 4:
            return struct.pack(f"{order}I4s", len(data) << 16 | kind, data)
        return struct.pack(f"{order}2I", kind, len(data)) + data + bytes(-len(data) % 8)

    def array(flags: int, sizes: tuple[int, int], name: bytes, *rest: bytes) -> bytes:
        head = element(6, struct.pack(f"{order}2I", flags, 0)) + element(5, struct.pack(f"{order}2i", *sizes))
        return element(14, head + element(1, name) + b"".join(rest))

    def text(value: str) -> bytes:
        encoding = {4: {"<": "utf-16-le", ">": "utf-16-be"}[order], 16: "utf-8"}[characters]
        return array(4, (1, len(value)), b"", element(characters, value.encode(encoding)))

    def number(value: int) -> bytes:
        return array(6, (1, 1), b"", element(numbers, struct.pack(order + {2: "B", 9: "d"}[numbers], value)))

    fields = b"".join(name.ljust(32, b"\0") for name in (b"ILSVRC2012_ID", b"WNID", b"words"))
    rows = b"".join(number(one) + text(name) + text(f"the words of {name}") for one, name in synsets.items())
    names = element(5, struct.pack(f"{order}i", 32)) + element(1, fields)
    variables = [array(6, (1, 1), b"other", element(9, bytes(8))), array(2, (len(synsets), 1), b"synsets", names, rows)]
    if compress:
        variables = [struct.pack(f"{order}2I", 15, len(data)) + data for data in map(zlib.compress, variables)]
    mark = struct.pack(f"{order}HH", 0x0100, 0x4D49)
    return b"MATLAB 5.0 MAT-file".ljust(124) + mark + b"".join(variables)


def coco(images: Iterable[tuple[Any, str]], captions: Iterable[tuple[Any, str]]) -> dict[str, Any]:
    """A document of images (id, file name) and captions (image id, text)."""
    return {
        "info": {"year": 2014},
        "images": [{"id": image_id, "file_name": name, "width": 8, "height": 8} for image_id, name in images],
        "annotations": [
            {"id": number, "image_id": image_id, "caption": caption}
            for number, (image_id, caption) in enumerate(captions)
        ],
    }


def json_lines(*records: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def cornell_lines(texts: Mapping[str, str]) -> str:
    return "".join(SEPARATOR.join([name, "u0", "m0", "BIANCA", text]) + "\n" for name, text in texts.items())


def cornell_conversations(*conversations: Sequence[str]) -> str:
    return "".join(SEPARATOR.join(["u0", "u2", "m0", str(list(names))]) + "\n" for names in conversations)


def refusal(attempt: Callable[[], object]) -> str:
    """The one line that it is refused with."""
    with pytest.raises(Mistake) as refused:
        attempt()
    said = str(refused.value)
    assert said.isprintable()
    assert len(said) < 800
    return said
