"""The members of a tar, found by its headers alone: nothing is unpacked, and data is never read, only sought over.

A member that is itself a tar is read in place, so the tar of tars that ImageNet comes as needs no space on disk.
Only plain files (and directories, which are passed over) may be in it. Everything that could lead elsewhere or claim
more than is there is refused: a header is data from strangers.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from packtrain.errors import Mistake, printable, quoted
from packtrain.pack.raw import Locator

_BLOCK = 512
_NAME_BYTES = 4096
# Bounds for what has to be held in memory: the names of one tar, and a header that extends the next.
_MEMBERS = 2_000_000
_EXTENSION_BYTES = 1 << 20
# Writers fill up their last record with zeros; no record is larger than this.
_FILL_BYTES = 64 << 20
_READ_BYTES = 1 << 20

_FILES = (b"0", b"\0", b"7")
_DIRECTORY = b"5"
_LONG_NAME, _LONG_LINK = b"L", b"K"
_EXTENDED, _GLOBAL = (b"x", b"X"), b"g"
_REFUSED = {
    b"1": "is a hard link",
    b"2": "is a symbolic link",
    b"3": "is a device",
    b"4": "is a device",
    b"6": "is a pipe",
    b"S": "is sparse, and may claim any size",
    b"M": "goes on from another volume",
}
_COMPRESSED = {
    b"\x1f\x8b": "gunzip",
    b"BZh": "bunzip2",
    b"\xfd7zXZ\0": "unxz",
    b"\x28\xb5\x2f\xfd": "unzstd",
    b"PK\x03\x04": "unzip",
}
_OCTAL = re.compile(rb" *([0-7]*) *")


class ArchiveMember(NamedTuple):
    name: str
    where: Locator


class _Header(NamedTuple):
    name: bytes
    kind: bytes
    size: int


class MemberError(Exception):
    """What is wrong with a member; the reader adds where."""


def tar_members(where: Locator, called: str | None = None) -> Iterator[ArchiveMember]:
    """The plain files of a tar in its order. `where` is the tar itself, or the part of a file that is one."""
    shown = printable(called or where.path)
    try:
        if not stat.S_ISREG(Path(where.path).stat().st_mode):
            raise Mistake(f"{shown}: not a file, so not a tar")
        with Path(where.path).open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            end = size if where.length is None else where.offset + where.length
            if end > size:
                raise Mistake(f"{shown}: goes beyond the end of {where.path}; fetch it again")
            yield from _Tar(file.fileno(), where.path, shown, where.offset, end).members()
    except OSError as error:
        raise Mistake(f"{shown}: {error.strerror or error}") from error


class _Tar:
    def __init__(self, descriptor: int, path: str, shown: str, start: int, end: int) -> None:
        self._descriptor, self._path, self._shown, self._start, self._end = descriptor, path, shown, start, end

    def members(self) -> Iterator[ArchiveMember]:
        self._refuse_other_formats()
        seen: set[bytes] = set()
        position = self._start
        while True:
            block = self._read(position, _BLOCK)
            if not any(block):
                return self._refuse_more_after(position + _BLOCK)
            name = block[:100].split(b"\0", 1)[0]
            try:
                header, offset = self._header(block, position)
                name = header.name
                name = safe_name(name)
                if header.kind == _DIRECTORY:
                    position = offset
                    continue
                if header.kind not in _FILES:
                    raise MemberError(_REFUSED.get(header.kind, f"is of the unknown kind {header.kind!r}"))
                if name in seen:
                    raise MemberError("is there twice")
                if offset + header.size > self._end:
                    raise MemberError(f"has {header.size:,} bytes, more than are left; fetch the file again")
            except MemberError as fault:
                raise self._mistake(f"member {quoted(_text(name))} at byte {position:,} {fault}") from None
            seen.add(name)
            if len(seen) > _MEMBERS:
                raise self._mistake(f"more than {_MEMBERS:,} members; make several tars of it")
            yield ArchiveMember(_text(name), Locator(self._path, offset, header.size))
            position = offset + _padded(header.size)

    def _header(self, block: bytes, position: int) -> tuple[_Header, int]:
        """The member's header, with what headers before it say about it, and where its data starts."""
        long_name: bytes | None = None
        extended: dict[bytes, bytes] = {}
        header = _parse(block)
        while True:
            position += _BLOCK
            if header.kind in (_LONG_NAME, _LONG_LINK):
                data = self._extension(header, position).split(b"\0", 1)[0]
                if header.kind == _LONG_NAME:
                    long_name = data
            elif header.kind in _EXTENDED:
                extended |= _records(self._extension(header, position))
            elif header.kind == _GLOBAL:
                said = _records(self._extension(header, position))
                if not said.keys().isdisjoint((b"path", b"size")) or _is_sparse(said):
                    raise MemberError("is a header that gives all members one name or size")
            else:
                break
            position += _padded(header.size)
            block = self._read(position, _BLOCK)
            if not any(block):
                raise MemberError("is a header without the member it is about")
            header = _parse(block)
        if _is_sparse(extended):
            raise MemberError(_REFUSED[b"S"])
        name = extended.get(b"path", header.name if long_name is None else long_name)
        size = _decimal(extended[b"size"]) if b"size" in extended else header.size
        is_directory = header.kind == b"\0" and name.endswith(b"/")  # as the oldest writers had it
        return _Header(name, _DIRECTORY if is_directory else header.kind, size), position

    def _extension(self, header: _Header, position: int) -> bytes:
        if header.size > _EXTENSION_BYTES:
            raise MemberError(f"is a header of {header.size:,} bytes, which no name needs")
        return self._read(position, header.size)

    def _read(self, position: int, size: int) -> bytes:
        data = os.pread(self._descriptor, size, position) if position + size <= self._end else b""
        if len(data) != size:
            raise self._mistake(f"cut off at byte {self._end - self._start:,}; fetch it again")
        return data

    def _refuse_other_formats(self) -> None:
        if self._start == self._end:
            raise self._mistake("an empty file, not a tar; fetch it again")
        start = os.pread(self._descriptor, min(_BLOCK, self._end - self._start), self._start)
        for magic, program in _COMPRESSED.items():
            if start.startswith(magic):
                raise self._mistake(f"compressed, so its parts cannot be found; decompress it first ({program})")
        if len(start) == _BLOCK and any(start):
            try:
                _parse(start)
            except MemberError as fault:
                raise self._mistake(f"not a tar: its first header {fault}") from None

    def _refuse_more_after(self, position: int) -> None:
        """Tars that were written one after the other would otherwise lose all but the first."""
        if self._end - position > _FILL_BYTES:
            raise self._mistake(f"{self._end - position:,} bytes follow its end mark; make one tar of it")
        while position < self._end:
            data = os.pread(self._descriptor, min(_READ_BYTES, self._end - position), position)
            if any(data) or not data:
                raise self._mistake(f"more data follows its end mark at byte {position:,}; make one tar of it")
            position += len(data)

    def _mistake(self, fault: str) -> Mistake:
        return Mistake(f"{self._shown}: {fault}")


def _parse(block: bytes) -> _Header:
    """A header of the ustar, GNU or oldest kind."""
    rest = block[:148] + b" " * 8 + block[156:]
    excess = _number(block[148:156]) - sum(rest)
    if excess and excess != -256 * sum(byte > 127 for byte in rest):  # some old writers added up signed bytes
        raise MemberError("has a wrong checksum")
    size = _number(block[124:136])
    if size < 0:
        raise MemberError("has a negative size")
    name = block[:100].split(b"\0", 1)[0]
    # GNU's own kind of header has dates where the standard has the start of a long name.
    prefix = block[345:500].split(b"\0", 1)[0] if block[257:263] == b"ustar\0" else b""
    return _Header(prefix + b"/" + name if prefix else name, block[156:157], size)


def _number(field: bytes) -> int:
    """Octal digits, or for what they cannot say GNU's big-endian number behind a mark."""
    if field[0] in (0x80, 0xFF):
        return int.from_bytes(field[1:], "big") - (256 ** (len(field) - 1) if field[0] == 0xFF else 0)
    match = _OCTAL.fullmatch(field.split(b"\0", 1)[0])
    if match is None:
        raise MemberError("has a number that is none")
    return int(match[1] or b"0", 8)


def _decimal(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > 20:
        raise MemberError("has a size that is no number")
    return int(digits)


def _records(data: bytes) -> dict[bytes, bytes]:
    """The records `length key=value` of an extended header."""
    records: dict[bytes, bytes] = {}
    while data and data[0]:
        digits, space, _ = data.partition(b" ")
        length = int(digits) if digits.isdigit() and len(digits) <= 7 else 0
        key, equals, value = data[len(digits) + 1 : length].partition(b"=")
        if not space or not equals or length > len(data) or not value.endswith(b"\n"):
            raise MemberError("has an extended header that is damaged")
        records[key] = value[:-1]
        data = data[length:]
    return records


def _is_sparse(records: dict[bytes, bytes]) -> bool:
    return any(key.startswith((b"GNU.sparse", b"SCHILY.realsize")) for key in records)


def safe_name(name: bytes) -> bytes:
    """The name without what says nothing; what could lead elsewhere is refused."""
    parts = name.split(b"/")
    if name.startswith(b"/"):
        raise MemberError("has an absolute name")
    if b".." in parts:
        raise MemberError("has '..' in its name")
    if b"\0" in name or not name:
        raise MemberError("has no usable name")
    if len(name) > _NAME_BYTES:
        raise MemberError(f"has a name of {len(name):,} bytes")
    return b"/".join(part for part in parts if part not in (b"", b".")) or b"."


def _padded(size: int) -> int:
    return (size + _BLOCK - 1) // _BLOCK * _BLOCK


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


# The members of a zip, found by its directory: nothing is unpacked.
#
# As with tars, whatever could lead elsewhere or claims more than is there is refused.


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


def zip_members(path: str) -> Iterator[ArchiveMember]:
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


def _members(infos: list[zipfile.ZipInfo], descriptor: int, path: str) -> Iterator[ArchiveMember]:
    end = os.fstat(descriptor).st_size
    seen: set[bytes] = set()
    for info in infos:
        if info.is_dir():
            continue
        try:
            name = safe_name(info.filename.encode("utf-8", "surrogateescape"))
            if name in seen:
                raise MemberError("is there twice")
            seen.add(name)
            where = _where(info, descriptor, path, end)
        except MemberError as fault:
            raise Mistake(f"{printable(path)}: member {quoted(info.filename)} {fault}") from None
        yield ArchiveMember(name.decode("utf-8", "surrogateescape"), where)


def _where(info: zipfile.ZipInfo, descriptor: int, path: str, end: int) -> Locator:
    if info.flag_bits & _ENCRYPTED:
        raise MemberError("is encrypted; unpack it first")
    if stat.S_ISLNK(info.external_attr >> 16):
        raise MemberError("is a symbolic link")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise MemberError("is compressed in a way that is not read here; unpack it first")
    if info.file_size > _INFLATED_BYTES:
        raise MemberError(f"comes to {info.file_size:,} bytes, more than any picture")
    header = os.pread(descriptor, _HEADER.size, info.header_offset) if 0 <= info.header_offset < end else b""
    if len(header) < _HEADER.size:
        raise MemberError("lies beyond the end of the file; fetch it again")
    mark, name_length, extra_length = _HEADER.unpack(header)
    offset = info.header_offset + _HEADER.size + name_length + extra_length
    if mark != _START or offset + info.compress_size > end:
        raise MemberError("is not where the zip says; fetch the file again")
    is_stored = info.compress_type == zipfile.ZIP_STORED
    if is_stored and info.file_size != info.compress_size:
        raise MemberError("has two sizes; fetch the file again")
    return Locator(path, offset, info.compress_size, None if is_stored else info.file_size)
