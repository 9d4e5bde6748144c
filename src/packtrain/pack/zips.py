"""The members of a zip, found by its directory: nothing is unpacked.

As with tars, whatever could lead elsewhere or claims more than is there is refused.
"""

from __future__ import annotations

import os
import stat
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

from packtrain.errors import Mistake
from packtrain.pack.archive import Fault, Member, safe_name
from packtrain.pack.raw import Locator, printable, quoted

_START = b"PK\x03\x04"
_EMPTY = b"PK\x05\x06"
_HEADER = struct.Struct(
    "<4s22xHH"
)  # a member's own header, in front of its data: mark, lengths of name and extra field
_ENCRYPTED = 0x1
_INFLATED_BYTES = 1 << 30


def is_zip(path: str) -> bool:
    """Whether a file starts as a zip does."""
    try:
        with Path(path).open("rb") as file:
            return file.read(4) in (_START, _EMPTY)
    except OSError as error:
        raise Mistake(f"{printable(path)}: {error.strerror or error}") from error


def zip_members(path: str) -> Iterator[Member]:
    """The plain files of a zip, in the order of its directory."""
    shown = printable(path)
    try:
        with zipfile.ZipFile(path) as archive, Path(path).open("rb", buffering=0) as file:
            infos = archive.infolist()
            if len(infos) > _MEMBERS:
                raise Mistake(f"{shown}: more than {_MEMBERS:,} members; make several zips of it")
            yield from _members(infos, file.fileno(), path)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, EOFError) as error:
        raise Mistake(f"{shown}: not a whole zip ({printable(str(error))}); fetch it again") from error
    except OSError as error:
        raise Mistake(f"{shown}: {error.strerror or printable(str(error))}") from error


def _members(infos: list[zipfile.ZipInfo], descriptor: int, path: str) -> Iterator[Member]:
    end = os.fstat(descriptor).st_size
    seen: set[bytes] = set()
    for info in infos:
        if info.is_dir():
            continue
        try:
            name = safe_name(info.filename.encode("utf-8", "surrogateescape"))
            if name in seen:
                raise Fault("is there twice")
            seen.add(name)
            where = _where(info, descriptor, path, end)
        except Fault as fault:
            raise Mistake(f"{printable(path)}: member {quoted(info.filename)} {fault}") from None
        yield Member(name.decode("utf-8", "surrogateescape"), where)


def _where(info: zipfile.ZipInfo, descriptor: int, path: str, end: int) -> Locator:
    if info.flag_bits & _ENCRYPTED:
        raise Fault("is encrypted; unpack it first")
    if stat.S_ISLNK(info.external_attr >> 16):
        raise Fault("is a symbolic link")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise Fault("is compressed in a way that is not read here; unpack it first")
    if info.file_size > _INFLATED_BYTES:
        raise Fault(f"comes to {info.file_size:,} bytes, more than any picture")
    header = os.pread(descriptor, _HEADER.size, info.header_offset) if 0 <= info.header_offset < end else b""
    if len(header) < _HEADER.size:
        raise Fault("lies beyond the end of the file; fetch it again")
    mark, name_length, extra_length = _HEADER.unpack(header)
    offset = info.header_offset + _HEADER.size + name_length + extra_length
    if mark != _START or offset + info.compress_size > end:
        raise Fault("is not where the zip says; fetch the file again")
    is_stored = info.compress_type == zipfile.ZIP_STORED
    if is_stored and info.file_size != info.compress_size:
        raise Fault("has two sizes; fetch the file again")
    return Locator(path, offset, info.compress_size, None if is_stored else info.file_size)
