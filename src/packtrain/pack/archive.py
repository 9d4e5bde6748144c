"""The members of tars and zips, located by their headers: nothing is unpacked, and the data is never read.

A member that is itself a tar is listed in place, so ImageNet's tar of tars needs no extra disk space. An archive comes
from an untrusted source: it may contain only files and directories, and anything that points outside or claims more
bytes than the file has is refused.
"""

from __future__ import annotations

import io
import os
import re
import stat
import struct
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from packtrain.errors import Mistake, printable, quoted
from packtrain.pack.raw import Locator

MOST_MEMBERS = 2_000_000  # all names of an archive are held in memory
_NAME_BYTES = 4096

_BLOCK = tarfile.BLOCKSIZE
_HEADER_BYTES = 1 << 16  # of one member, with its long name and extended header
_PADDING_BYTES = 64 << 20  # writers fill the last record with zeros; no record is larger
_READ_BYTES = 1 << 20
_EXTENDED = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE)
_EXTENSIONS = (*_EXTENDED, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_MANY_DIGITS = re.compile(rb"[0-9]{300}")
_REFUSED_TYPES = {
    tarfile.LNKTYPE: "is a hard link",
    tarfile.SYMTYPE: "is a symbolic link",
    tarfile.CHRTYPE: "is a device",
    tarfile.BLKTYPE: "is a device",
    tarfile.FIFOTYPE: "is a pipe",
}
_COMPRESSED = {
    b"\x1f\x8b": "gunzip",
    b"BZh": "bunzip2",
    b"\xfd7zXZ\0": "unxz",
    b"\x28\xb5\x2f\xfd": "unzstd",
    b"PK\x03\x04": "unzip",
}
# What tarfile raises for forged headers.
_BAD_HEADER = (tarfile.TarError, ValueError, IndexError, OverflowError, RecursionError)

_ZIP_START, _ZIP_EMPTY = b"PK\x03\x04", b"PK\x05\x06"
_ZIP_HEADER = struct.Struct("<4s22xHH")  # before a member's data: signature, lengths of name and extra field
_ZIP_ENCRYPTED = 0x1
_INFLATED_BYTES = 1 << 30


class ArchiveMember(NamedTuple):
    name: str
    where: Locator


class MemberError(Exception):
    """The reason to refuse a member; the caller adds its name and place."""


def tar_members(where: Locator, called: str | None = None, most_members: int = MOST_MEMBERS) -> Iterator[ArchiveMember]:
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
            for name, offset, length in tar.members(most_members):
                yield ArchiveMember(name, Locator(where.path, where.offset + offset, length))
    except OSError as error:
        raise Mistake(f"{shown}: {error.strerror or error}") from error


class _Tar(io.RawIOBase):
    """The part of a file that is a tar, which tarfile reads headers from.

    tarfile would read as much as a header claims, and takes a damaged header for the end of the archive. So it gets
    only `_allowed` bytes for each member, and each header is asked for one by one.
    """

    def __init__(self, descriptor: int, start: int, length: int, shown: str) -> None:
        self._descriptor, self._start, self._length, self._shown = descriptor, start, length, shown
        self._go_to(0)

    def _go_to(self, position: int) -> None:
        self._position, self._allowed = position, _HEADER_BYTES

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self._allowed:
            raise tarfile.ReadError(f"claims {size:,} bytes")
        data = os.pread(self._descriptor, size, self._start + self._position)
        if len(data) != size or self._position + size > self._length:
            raise self._mistake(f"truncated at byte {self._length:,}; download it again")
        self._position += size
        self._allowed -= size
        return data

    def tell(self) -> int:
        return self._position

    def members(self, most_members: int) -> Iterator[tuple[str, int, int]]:
        """Yield the name, offset and length of each file."""
        self._refuse_other_formats()
        archive: tarfile.TarFile | None = None
        seen: set[bytes] = set()
        position = 0
        while True:
            self._go_to(position)
            block = self.read(_BLOCK)
            if not any(block):
                return self._refuse_trailing_data(position + _BLOCK)
            try:
                self._check_extensions(block)
                self._go_to(position)
                if archive is None:  # it reads the first header by itself
                    archive = tarfile.TarFile(fileobj=self, encoding="utf-8", errors="surrogateescape")
                    self._go_to(position)
                info = tarfile.TarInfo.fromtarfile(archive)
            except _BAD_HEADER as error:
                what = f"bad header at byte {position:,}" if position else "not a tar: bad first header"
                raise self._mistake(f"{what} ({printable(str(error))})") from None
            try:
                name = _checked_member(info, archive.pax_headers, self._length)
                if name in seen:
                    raise MemberError("occurs twice")
            except MemberError as error:
                raise self._mistake(f"member {quoted(info.name)} at byte {position:,} {error}") from None
            position = info.offset_data
            if info.isdir():
                continue
            seen.add(name)
            if len(seen) > most_members:
                raise self._mistake(f"more than {most_members:,} members; split it into several tars")
            yield name.decode("utf-8", "surrogateescape"), position, info.size
            position += -(-info.size // _BLOCK) * _BLOCK

    def _check_extensions(self, block: bytes) -> None:
        """Check the headers that give the next one a long name or records `length key=value`.

        tarfile ignores records from the first damaged one on, and takes minutes to search long rows of digits.
        """
        while block[156:157] in _EXTENSIONS:
            size = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape").size
            data = self.read(-(-size // _BLOCK) * _BLOCK)[:size]
            while block[156:157] in _EXTENDED and data and data[0]:
                digits = data.partition(b" ")[0]
                length = int(digits) if digits.isdigit() and len(digits) < 8 else 0
                record, data = data[:length], data[length:]
                whole = len(record) == length and b"=" in record and record.endswith(b"\n")
                if not whole or _MANY_DIGITS.search(record):
                    raise ValueError("damaged extended header")
            block = self.read(_BLOCK)

    def _refuse_other_formats(self) -> None:
        if not self._length:
            raise self._mistake("empty file, not a tar; download it again")
        start = os.pread(self._descriptor, 8, self._start)
        for magic, program in _COMPRESSED.items():
            if start.startswith(magic):
                raise self._mistake(f"compressed, so its members cannot be located; decompress it first ({program})")

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


def _checked_member(info: tarfile.TarInfo, of_all: Mapping[str, str], length: int) -> bytes:
    """Return the member's name. `of_all` are the records that a global header gives all members."""
    if not of_all.keys().isdisjoint(("path", "size")):
        raise MemberError("follows a header that gives all members one name or size")
    name = safe_name(info.name.encode("utf-8", "surrogateescape"))
    if info.isdir():
        return name
    if info.issparse() or any(key.startswith(("GNU.sparse", "SCHILY.realsize")) for key in info.pax_headers):
        raise MemberError("is sparse and may claim any size")
    if not info.isreg():
        raise MemberError(_REFUSED_TYPES.get(info.type, f"has the unknown type {info.type!r}"))
    size = info.pax_headers.get("size", "0")  # tarfile reads what is not a number as 0
    if info.size < 0 or not (size.isascii() and size.isdigit()):
        raise MemberError("has an invalid size")
    if info.offset_data + info.size > length:
        raise MemberError(f"has {info.size:,} bytes, more than the file has left; download the file again")
    return name


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
            if len(infos) > MOST_MEMBERS:
                raise Mistake(f"{shown}: more than {MOST_MEMBERS:,} members; split it into several zips")
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
