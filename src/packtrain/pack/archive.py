"""The members of tars and zips, located by their headers: nothing is unpacked, and the data is never read.

A member that is itself a tar is listed in place, so ImageNet's tar of tars needs no extra disk space. An archive comes
from an untrusted source: it may contain only files and directories, and anything that points outside or claims more
bytes than the file has is refused.
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

MAX_MEMBERS = 2_000_000  # all names of an archive are held in memory
_NAME_BYTES = 4096

_BLOCK = 512
_EXTENSION_BYTES = 1 << 20  # of one extension header: a long name, or extended attributes
_PADDING_BYTES = 64 << 20  # writers fill the last record with zeros; no record is larger
_READ_BYTES = 1 << 20
_FILES = (b"0", b"\0", b"7")
_DIRECTORY = b"5"
_LONG_NAME, _LONG_LINK = b"L", b"K"
_EXTENDED, _GLOBAL = (b"x", b"X"), b"g"
_REFUSED_KINDS = {
    b"1": "is a hard link",
    b"2": "is a symbolic link",
    b"3": "is a device",
    b"4": "is a device",
    b"6": "is a pipe",
    b"S": "is sparse and may claim any size",
    b"M": "continues from another volume",
}
_OCTAL = re.compile(rb" *([0-7]*) *")
_COMPRESSED = {
    b"\x1f\x8b": "gunzip",
    b"BZh": "bunzip2",
    b"\xfd7zXZ\0": "unxz",
    b"\x28\xb5\x2f\xfd": "unzstd",
    b"PK\x03\x04": "unzip",
}

_ZIP_START, _ZIP_EMPTY = b"PK\x03\x04", b"PK\x05\x06"
_ZIP_HEADER = struct.Struct("<4s22xHH")  # before a member's data: signature, lengths of name and extra field
_ZIP_ENCRYPTED = 0x1
_INFLATED_BYTES = 1 << 30


class ArchiveMember(NamedTuple):
    name: str
    where: Locator


class MemberError(Exception):
    """The reason to refuse a member; the caller adds its name and place."""


def tar_members(where: Locator, called: str | None = None, max_members: int = MAX_MEMBERS) -> Iterator[ArchiveMember]:
    """Yield the files of a tar in its order. `where` is the tar itself, or the part of a file that is a tar."""
    shown = printable(called or where.path)
    try:
        if not stat.S_ISREG(Path(where.path).stat().st_mode):
            raise Mistake(f"{shown}: not a file; expected a tar")
        with Path(where.path).open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            end = size if where.length is None else where.offset + where.length
            if end > size:
                raise Mistake(f"{shown}: extends beyond the end of {where.path}; download it again")
            tar = _Tar(file.fileno(), where.offset, end - where.offset, shown)
            for name, offset, length in tar.members(max_members):
                yield ArchiveMember(name, Locator(where.path, where.offset + offset, length))
    except OSError as error:
        raise Mistake(f"{shown}: {error.strerror or error}") from error


class TarHeader(NamedTuple):
    name: bytes
    kind: bytes
    size: int


class _Tar:
    """The part of a file that is a tar. Positions count from its start."""

    def __init__(self, descriptor: int, start: int, length: int, shown: str) -> None:
        self._descriptor, self._start, self._length, self._shown = descriptor, start, length, shown

    def members(self, max_members: int) -> Iterator[tuple[str, int, int]]:
        """Yield the name, offset and length of each file."""
        self._refuse_other_formats()
        seen: set[bytes] = set()
        position = 0
        while True:
            block = self._read(position, _BLOCK)
            if not any(block):
                return self._refuse_trailing_data(position + _BLOCK)
            name = block[:100].split(b"\0", 1)[0]  # to name the member if its header is refused
            try:
                header, offset = self._header(block, position)
                name = header.name
                name = safe_name(name)
                if header.kind == _DIRECTORY:
                    position = offset
                    continue
                if header.kind not in _FILES:
                    raise MemberError(_REFUSED_KINDS.get(header.kind, f"has the unknown type {header.kind!r}"))
                if name in seen:
                    raise MemberError("occurs twice")
                if offset + header.size > self._length:
                    size = f"{header.size:,}"
                    raise MemberError(f"has {size} bytes, more than the file has left; download the file again")
            except MemberError as error:
                raise self._mistake(f"member {quoted(_text(name))} at byte {position:,} {error}") from None
            seen.add(name)
            if len(seen) > max_members:
                raise self._mistake(f"more than {max_members:,} members; split it into several tars")
            yield _text(name), offset, header.size
            position = offset + _padded(header.size)

    def _header(self, block: bytes, position: int) -> tuple[TarHeader, int]:
        """Return a member's header, completed by the extension headers before it, and where its data starts."""
        long_name: bytes | None = None
        records: dict[bytes, bytes] = {}
        header = parse_tar_header(block)
        while True:
            position += _BLOCK
            if header.kind in (_LONG_NAME, _LONG_LINK):
                data = self._extension(header, position).split(b"\0", 1)[0]
                if header.kind == _LONG_NAME:
                    long_name = data
            elif header.kind in _EXTENDED:
                records |= _parse_records(self._extension(header, position))
            elif header.kind == _GLOBAL:
                # Checked but not kept: its other attributes, such as owners, do not matter here.
                of_all = _parse_records(self._extension(header, position))
                if not of_all.keys().isdisjoint((b"path", b"size")) or _is_sparse(of_all):
                    raise MemberError("is a header that gives all members one name or size")
            else:
                break
            position += _padded(header.size)
            block = self._read(position, _BLOCK)
            if not any(block):
                raise MemberError("is a header without its member")
            header = parse_tar_header(block)
        if _is_sparse(records):
            raise MemberError(_REFUSED_KINDS[b"S"])
        name = records.get(b"path", header.name if long_name is None else long_name)
        size = _decimal(records[b"size"]) if b"size" in records else header.size
        is_directory = header.kind == b"\0" and name.endswith(b"/")  # how V7 writers mark a directory
        return TarHeader(name, _DIRECTORY if is_directory else header.kind, size), position

    def _extension(self, header: TarHeader, position: int) -> bytes:
        if header.size > _EXTENSION_BYTES:
            raise MemberError(f"is an extension header of {header.size:,} bytes; at most {_EXTENSION_BYTES:,} are read")
        return self._read(position, header.size)

    def _read(self, position: int, size: int) -> bytes:
        # Checked before reading: a header may claim any size.
        is_inside = position + size <= self._length
        data = os.pread(self._descriptor, size, self._start + position) if is_inside else b""
        if len(data) != size:
            raise self._mistake(f"truncated at byte {self._length:,}; download it again")
        return data

    def _refuse_other_formats(self) -> None:
        if not self._length:
            raise self._mistake("empty file, not a tar; download it again")
        start = os.pread(self._descriptor, min(_BLOCK, self._length), self._start)
        for magic, program in _COMPRESSED.items():
            if start.startswith(magic):
                raise self._mistake(f"compressed, so its members cannot be located; decompress it first ({program})")
        if len(start) == _BLOCK and any(start):
            try:
                parse_tar_header(start)
            except MemberError as error:
                raise self._mistake(f"not a tar: its first header {error}") from None

    def _refuse_trailing_data(self, position: int) -> None:
        """Refuse tars that were appended to each other: all but the first would be lost."""
        if self._length - position > _PADDING_BYTES:
            raise self._mistake(f"{self._length - position:,} bytes follow the end mark; make one tar of it")
        while position < self._length:
            data = os.pread(self._descriptor, min(_READ_BYTES, self._length - position), self._start + position)
            if any(data) or not data:
                raise self._mistake(f"more data follows the end mark at byte {position:,}; make one tar of it")
            position += len(data)

    def _mistake(self, text: str) -> Mistake:
        return Mistake(f"{self._shown}: {text}")


def parse_tar_header(block: bytes) -> TarHeader:
    """Parse a POSIX, GNU or V7 header."""
    rest = block[:148] + b" " * 8 + block[156:]
    excess = _number(block[148:156]) - sum(rest)
    if excess and excess != -256 * sum(byte > 127 for byte in rest):  # some old writers summed signed bytes
        raise MemberError("has a wrong checksum")
    size = _number(block[124:136])
    if size < 0:
        raise MemberError("has a negative size")
    name = block[:100].split(b"\0", 1)[0]
    # Where POSIX has the start of a long name, GNU's own header has dates, and V7's may have anything.
    prefix = block[345:500].split(b"\0", 1)[0] if block[257:263] == b"ustar\0" else b""
    return TarHeader(prefix + b"/" + name if prefix else name, block[156:157], size)


def _number(field: bytes) -> int:
    """Read octal digits, or GNU's big-endian number, marked by its first byte, for numbers that are too large."""
    if field[0] in (0x80, 0xFF):
        return int.from_bytes(field[1:], "big") - (256 ** (len(field) - 1) if field[0] == 0xFF else 0)
    match = _OCTAL.fullmatch(field.split(b"\0", 1)[0])
    if match is None:
        raise MemberError("has an invalid number in its header")
    return int(match[1] or b"0", 8)


def _decimal(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > 20:
        raise MemberError("has an invalid size")
    return int(digits)


def _parse_records(data: bytes) -> dict[bytes, bytes]:
    """Parse the records `length key=value` of an extended header."""
    records: dict[bytes, bytes] = {}
    while data and data[0]:
        digits, space, _ = data.partition(b" ")
        length = int(digits) if digits.isdigit() and len(digits) <= 7 else 0
        key, equals, value = data[len(digits) + 1 : length].partition(b"=")
        if not space or not equals or length > len(data) or not value.endswith(b"\n"):
            raise MemberError("has a damaged extended header")
        records[key] = value[:-1]
        data = data[length:]
    return records


def _is_sparse(records: dict[bytes, bytes]) -> bool:
    return any(key.startswith((b"GNU.sparse", b"SCHILY.realsize")) for key in records)


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def safe_name(name: bytes) -> bytes:
    """Return the name without empty and `.` parts; refuse one that points outside."""
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


def is_zip(path: str) -> bool:
    """True if the file starts like a zip."""
    try:
        with Path(path).open("rb") as file:
            return file.read(4) in (_ZIP_START, _ZIP_EMPTY)
    except OSError as error:
        raise Mistake(f"{printable(path)}: {error.strerror or error}") from error


def zip_members(path: str) -> Iterator[ArchiveMember]:
    """Yield the files of a zip, in the order of its directory."""
    shown = printable(path)
    try:
        with zipfile.ZipFile(path) as archive, Path(path).open("rb", buffering=0) as file:
            infos = archive.infolist()
            if len(infos) > MAX_MEMBERS:
                raise Mistake(f"{shown}: more than {MAX_MEMBERS:,} members; split it into several zips")
            seen: set[bytes] = set()
            for info in (one for one in infos if not one.is_dir()):
                try:
                    name = safe_name(info.filename.encode("utf-8", "surrogateescape"))
                    if name in seen:
                        raise MemberError("occurs twice")
                    seen.add(name)
                    where = _located(info, file.fileno(), path)
                except MemberError as error:
                    raise Mistake(f"{shown}: member {quoted(info.filename)} {error}") from None
                yield ArchiveMember(name.decode("utf-8", "surrogateescape"), where)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, EOFError) as error:
        raise Mistake(f"{shown}: damaged or incomplete zip ({printable(str(error))}); download it again") from error
    except OSError as error:
        raise Mistake(f"{shown}: {error.strerror or printable(str(error))}") from error


def _located(info: zipfile.ZipInfo, descriptor: int, path: str) -> Locator:
    """Return where a member's data is, which only the header in front of the data says."""
    end = os.fstat(descriptor).st_size
    if info.flag_bits & _ZIP_ENCRYPTED:
        raise MemberError("is encrypted; unpack it first")
    if stat.S_ISLNK(info.external_attr >> 16):
        raise MemberError("is a symbolic link")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise MemberError("uses an unsupported compression; unpack it first")
    if info.file_size > _INFLATED_BYTES:
        raise MemberError(f"unpacks to {info.file_size:,} bytes, more than any image")
    header = os.pread(descriptor, _ZIP_HEADER.size, info.header_offset) if 0 <= info.header_offset < end else b""
    if len(header) < _ZIP_HEADER.size:
        raise MemberError("is beyond the end of the file; download it again")
    mark, name_length, extra_length = _ZIP_HEADER.unpack(header)
    offset = info.header_offset + _ZIP_HEADER.size + name_length + extra_length
    if mark != _ZIP_START or offset + info.compress_size > end:
        raise MemberError("is not where the zip's directory says; download the file again")
    is_stored = info.compress_type == zipfile.ZIP_STORED
    if is_stored and info.file_size != info.compress_size:
        raise MemberError("has two sizes; download the file again")
    return Locator(path, offset, info.compress_size, None if is_stored else info.file_size)
