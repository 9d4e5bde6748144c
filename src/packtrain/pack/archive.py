"""The members of tars and zips, located by their headers: nothing is unpacked.

A member that is itself a tar is listed in place, so ImageNet's tar of tars needs no extra disk space. A compressed tar
can only be read from its start to its end. A job names a member, or a folder of members, after the archive:
`annotations_trainval2014.zip#annotations/captions_train2014.json`.

An archive comes from an untrusted source: it may contain only files and directories, and anything that points outside
or claims more bytes than the file has is refused.
"""

from __future__ import annotations

import errno
import gzip
import io
import os
import re
import stat
import struct
import sys
import unicodedata
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from packtrain.errors import Mistake, nearest, printable, quoted
from packtrain.pack.compression import ByteStream, codec_of, decompressed, faults_as_mistakes

MAX_MEMBERS = 5_000_000  # all names are held in memory; ImageNet has over 2 million as Kaggle zips it
_NAME_BYTES = 4096
_SHOWN_MEMBERS = 200  # of which an error names the nearest

_BLOCK = 512
_EXTENSION_BYTES = 1 << 20  # of one extension header: a long name, or extended attributes
_PADDING_BYTES = 64 << 20  # writers fill the last record with zeros; no record is larger
_READ_BYTES = 1 << 18
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
_GZIP = b"\x1f\x8b"
_PROGRAMS = (b"MZ", b"\x7fELF", b"#!")
_ZIP_NAMES = (".zip", ".exe")

_ZIP_START, _ZIP_EMPTY = b"PK\x03\x04", b"PK\x05\x06"
_ZIP_ENTRY_START, _ZIP64_END_START, _ZIP64_PLACE_START = b"PK\x01\x02", b"PK\x06\x06", b"PK\x06\x07"
_ZIP_HEADER = struct.Struct("<4s22xHH")  # before a member's data: signature, lengths of name and extra field
_ZIP_ENTRY = struct.Struct("<4s4xHH4x3L3H4xLL")  # of the directory
_ZIP_END = struct.Struct("<4s8xLL2x")  # after the directory: its length and offset
_ZIP64_END = struct.Struct("<4s36xQQ4s16x")  # before that in a large zip: the same again, and the place of this record
_ZIP_COMMENT_BYTES = 0xFFFF
_ZIP64 = 0xFFFFFFFF  # instead of a number that is in an extra field
_ZIP64_EXTRA, _UNICODE_NAME_EXTRA = 0x0001, 0x7075  # kinds of extra fields
_UNICODE_NAME = struct.Struct("<xL")  # before the name in such a field: the checksum of the name that it replaces
_ZIP_ENCRYPTED, _ZIP_UTF8 = 0x1, 0x800  # flags
_ZIP_STORED, _ZIP_DEFLATED = 0, 8

# Perhaps after the query of a URL.
_NAMED_IN = re.compile(r"\.(?:zip|exe|tar|tgz|tar\.gz)(?:\?[^#]*)?(#)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Locator:
    """The place of a sample's bytes: a file, or a part of one (a member of an archive that is not unpacked).

    `inflated` is the unpacked size of a part that is compressed, and `crc` the checksum of its bytes: zips have both.
    `is_gzip`: the whole file is compressed, and offset and length are those in what it unpacks to. `held` are the bytes
    themselves, if they were read while passing by.
    """

    path: str
    offset: int = 0
    length: int | None = None
    inflated: int | None = None
    crc: int | None = None
    is_gzip: bool = False
    held: bytes | None = None

    @property
    def size(self) -> int:
        """The number of bytes that `read` returns."""
        if self.inflated is not None:
            return self.inflated
        return Path(self.path).stat().st_size if self.length is None else self.length

    def read(self, max_bytes: int) -> bytes:
        """Return all bytes; raise OSError if they are damaged, or more than `max_bytes`, which are then not read."""
        size = self.size
        if size > max_bytes:
            raise OSError(errno.EFBIG, f"more than {max_bytes // 1_000_000:,} MB")
        if self.held is not None:
            return self.held
        with self.open() as file:
            return file.read(size)

    def open(self) -> BinaryIO:
        """Return the bytes as a stream, which raises OSError where they are damaged."""
        file = _opened(self.path, self.is_gzip)
        return file if self.length is None else io.BufferedReader(_Part(file, self, self.length), _READ_BYTES)


def _opened(path: str, is_gzip: bool) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if is_gzip else Path(path).open("rb")


class _Part(ByteStream):
    """A part of a file as a stream: bounded by the size that its archive says, and checked against its checksum."""

    def __init__(self, file: BinaryIO, where: Locator, packed: int) -> None:
        self._file = file
        file.seek(where.offset)
        self._inflater = None if where.inflated is None else zlib.decompressobj(-zlib.MAX_WBITS)
        self._packed, self._left = packed, where.size
        self._crc, self._expected_crc = 0, where.crc

    def next_bytes(self, size: int) -> bytes:
        size = min(size, self._left)
        try:
            data = self._inflated(size) if self._inflater is not None else self._file.read(size)
        except (zlib.error, EOFError):
            data = b""
        self._left -= len(data)
        if self._expected_crc is not None:
            self._crc = zlib.crc32(data, self._crc)
        is_wrong = self._expected_crc is not None and not self._left and self._crc != self._expected_crc
        if is_wrong or (size and not data):
            raise OSError(errno.EIO, "damaged in its archive")
        return data

    def _inflated(self, size: int) -> bytes:
        """Return the next bytes, never more than `size`, whatever the data would unpack to."""
        assert self._inflater is not None
        while size:
            packed = self._inflater.unconsumed_tail
            if not packed:
                packed = self._file.read(min(self._packed, _READ_BYTES))
                self._packed -= len(packed)
            data = self._inflater.decompress(packed, size)
            if data or not packed:
                return data
        return b""

    def close(self) -> None:
        self._file.close()
        super().close()


class ArchiveMember(NamedTuple):
    name: str
    where: Locator


class MemberError(Exception):
    """The reason to refuse a member; the caller adds its name and place."""


def composed(name: str) -> str:
    """Return the name with each accent and its letter as a character: Macs store them apart, other systems as typed."""
    return unicodedata.normalize("NFC", name)


def split_member(path: str) -> tuple[str, str]:
    """Return the archive of `archive.zip#inner`, and what is named in it; nothing if the path is the file itself."""
    match = _NAMED_IN.search(path)
    if match is None or os.path.lexists(path):  # not Path.exists, which fails for a name that is too long
        return path, ""
    return path[: match.start(1)], path[match.end(1) :]


def member_of(archive: str, name: str) -> ArchiveMember:
    """Return the member of that name; the folder that the archive was made of may be omitted."""
    exact: list[ArchiveMember] = []
    below: list[ArchiveMember] = []
    first_names: list[str] = []
    for member in archive_members(archive):  # to the end, where the checksum of a compressed tar is
        if member.name == composed(name):
            exact.append(member)
        elif member.name.partition("/")[2] == composed(name):
            below.append(member)
        if len(first_names) < _SHOWN_MEMBERS:
            first_names.append(member.name)
    if exact or len(below) == 1:
        return (exact or below)[0]
    if below:
        raise Mistake(f"{printable(archive)}: has several members {quoted(name)}; include the folder in the name")
    raise Mistake(f"{printable(archive)}: has no member {quoted(name)}; {printable(nearest(name, first_names), 300)}")


def archive_members(path: str, hold_bytes: int = 0) -> Iterator[ArchiveMember]:
    """Yield the files of a tar, a compressed tar or a zip; of `archive.zip#folder`, those below the folder.

    Members of a compressed tar of at most `hold_bytes` hold their bytes: to get back to one would unpack all before it.
    """
    archive, folder = split_member(path)
    if is_zip(archive):
        members = zip_members(archive)
    elif _starts_with(archive, _GZIP):
        members = _compressed_members(archive, hold_bytes)
    else:
        members = tar_members(Locator(archive))
    if not folder:
        yield from members
        return
    below = composed(folder.strip("/")) + "/"
    is_empty = True
    for member in members:
        if member.name.startswith(below):
            is_empty = False
            yield ArchiveMember(member.name.removeprefix(below), member.where)
    if is_empty:
        raise Mistake(f"{printable(archive)}: has no folder {quoted(folder)}, or no file in it")


def tar_members(where: Locator, called: str | None = None, max_members: int = MAX_MEMBERS) -> Iterator[ArchiveMember]:
    """Yield the files of a tar in its order. `where` is the tar itself, or the part of a file that is a tar."""
    shown = printable(called or where.path)
    with faults_as_mistakes(shown):
        if not stat.S_ISREG(Path(where.path).stat().st_mode):
            raise Mistake(f"{shown}: not a file; expected a tar")
        with Path(where.path).open("rb", buffering=0) as file:
            descriptor = file.fileno()
            size = os.fstat(descriptor).st_size
            end = size if where.length is None else where.offset + where.length
            if end > size:
                raise Mistake(f"{shown}: extends beyond the end of {where.path}; download it again")
            start = where.offset
            tar = _Tar(lambda at, count: os.pread(descriptor, count, start + at), end - start, shown)
            for name, offset, length in tar.members(max_members):
                yield ArchiveMember(name, Locator(where.path, start + offset, length))


def _compressed_members(path: str, hold_bytes: int) -> Iterator[ArchiveMember]:
    shown = printable(path)
    with faults_as_mistakes(shown), gzip.open(path) as file:

        def read_at(position: int, count: int) -> bytes:
            file.seek(position)  # forward, except from the first header to the first header
            return file.read(count)

        for name, offset, length in _Tar(read_at, None, shown).members(MAX_MEMBERS):
            held = None
            if length <= hold_bytes:
                held = read_at(offset, length)
                if len(held) != length:
                    raise EOFError("it ends within a member")
            yield ArchiveMember(name, Locator(path, offset, length, is_gzip=True, held=held))


class TarHeader(NamedTuple):
    name: bytes
    kind: bytes
    size: int


class _Tar:
    """A tar, read by a function of position and size. The length is None if only reading to the end would tell it."""

    def __init__(self, read_at: Callable[[int, int], bytes], length: int | None, shown: str) -> None:
        self._read_at, self._shown = read_at, shown
        self._length = sys.maxsize if length is None else length

    def members(self, max_members: int) -> Iterator[tuple[str, int, int]]:
        """Yield the name, offset and length of each file."""
        self._refuse_other_formats()
        names: set[str] = set()
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
                text = _text(name)
                if header.kind == _DIRECTORY:
                    position = offset
                    continue
                if header.kind not in _FILES:
                    raise MemberError(_REFUSED_KINDS.get(header.kind, f"has the unknown type {header.kind!r}"))
                if text in names:
                    raise MemberError("occurs twice")
                if offset + header.size > self._length:
                    size = f"{header.size:,}"
                    raise MemberError(f"has {size} bytes, more than the file has left; download the file again")
            except MemberError as error:
                raise self._mistake(f"member {quoted(_text(name))} at byte {position:,} {error}") from None
            names.add(text)
            if len(names) > max_members:
                raise self._mistake(f"more than {max_members:,} members; split it into several tars")
            yield text, offset, header.size
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
        size = header.size
        if b"size" in records:
            if not records[b"size"].isdigit() or len(records[b"size"]) > 20:
                raise MemberError("has an invalid size")
            size = int(records[b"size"])
        is_directory = header.kind == b"\0" and name.endswith(b"/")  # how V7 writers mark a directory
        return TarHeader(name, _DIRECTORY if is_directory else header.kind, size), position

    def _extension(self, header: TarHeader, position: int) -> bytes:
        if header.size > _EXTENSION_BYTES:
            raise MemberError(f"is an extension header of {header.size:,} bytes; at most {_EXTENSION_BYTES:,} are read")
        return self._read(position, header.size)

    def _read(self, position: int, size: int) -> bytes:
        # Checked before reading: a header may claim any size.
        data = self._read_at(position, size) if position + size <= self._length else b""
        if len(data) != size:
            end = position + len(data) if self._length == sys.maxsize else self._length
            raise self._mistake(f"truncated at byte {end:,}; download it again")
        return data

    def _refuse_other_formats(self) -> None:
        if not self._length:
            raise self._mistake("empty file, not a tar; download it again")
        start = self._read_at(0, min(_BLOCK, self._length))
        codec = codec_of(start)
        if codec is not None or start.startswith(_ZIP_START):
            command = "unzip" if codec is None else codec.command
            raise self._mistake(f"compressed, so its members cannot be located; decompress it first ({command})")
        if len(start) == _BLOCK and any(start):
            try:
                parse_tar_header(start)
            except MemberError as error:
                if start.startswith(_PROGRAMS):  # a name may start like that, too
                    raise self._mistake("an executable without a zip at its end; unpack it first") from None
                raise self._mistake(f"not a tar: its first header {error}") from None

    def _refuse_trailing_data(self, position: int) -> None:
        """Refuse tars that were appended to each other: all but the first would be lost."""
        end = min(self._length, position + _PADDING_BYTES)
        while position < end and (data := self._read_at(position, min(_READ_BYTES, end - position))):
            if any(data):
                raise self._mistake(f"more data follows the end mark at byte {position:,}; make one tar of it")
            position += len(data)
        if position < self._length and self._read_at(position, 1):
            raise self._mistake(f"more than {_PADDING_BYTES:,} bytes follow the end mark; make one tar of it")

    def _mistake(self, text: str) -> Mistake:
        return Mistake(f"{self._shown}: {text}")


def parse_tar_header(block: bytes) -> TarHeader:
    """Parse a POSIX, GNU or V7 header."""
    summed = block[:148] + b" " * 8 + block[156:]
    excess = _number(block[148:156]) - sum(summed)
    if excess and excess != -256 * sum(byte > 127 for byte in summed):  # some old writers summed signed bytes
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


def _parse_records(data: bytes) -> dict[bytes, bytes]:
    """Parse the records `length key=value` of an extended header."""
    records: dict[bytes, bytes] = {}
    start = 0
    while start < len(data) and data[start]:  # by position: cutting off each record would copy all others
        digits, space, _ = data[start : start + 8].partition(b" ")
        length = int(digits) if digits.isdigit() else 0
        key, equals, value = data[start + len(digits) + 1 : start + length].partition(b"=")
        if not space or not equals or start + length > len(data) or not value.endswith(b"\n"):
            raise MemberError("has a damaged extended header")
        records[key] = value[:-1]
        start += length
    return records


def _is_sparse(records: dict[bytes, bytes]) -> bool:
    return any(key.startswith((b"GNU.sparse", b"SCHILY.realsize")) for key in records)


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _text(name: bytes) -> str:
    return composed(name.decode("utf-8", "surrogateescape"))


def safe_name(name: bytes) -> bytes:
    """Return the name without empty and `.` parts; refuse one that points outside."""
    components = name.split(b"/")
    if name.startswith(b"/"):
        raise MemberError("has an absolute name")
    if b".." in components:
        raise MemberError("has '..' in its name")
    if b"\0" in name or not name:
        raise MemberError("has no usable name")
    if len(name) > _NAME_BYTES:
        raise MemberError(f"has a name of {len(name):,} bytes")
    return b"/".join(component for component in components if component not in (b"", b".")) or b"."


def is_zip(path: str) -> bool:
    """True if the file starts like a zip, or has one at its end, as programs have that unpack it."""
    if _starts_with(path, _ZIP_START, _ZIP_EMPTY):
        return True
    if not _starts_with(path, *_PROGRAMS) and not path.lower().endswith(_ZIP_NAMES):
        return False
    try:
        with Path(path).open("rb") as file:
            start, _, _ = _zip_directory(file, os.fstat(file.fileno()).st_size)
            file.seek(start)
            return file.read(len(_ZIP_ENTRY_START)) == _ZIP_ENTRY_START
    except (ValueError, OSError):
        return False


def is_archive(path: str) -> bool:
    """True if the file starts like a zip or a tar, compressed or not; a member of one is none."""
    if split_member(path)[1]:
        return False
    if is_zip(path):
        return True
    try:
        with faults_as_mistakes(path), decompressed(Path(path).open("rb")) as file:
            block = file.read(_BLOCK)
        parse_tar_header(block)
    except (MemberError, IndexError, Mistake):
        return False
    return any(block)


def _starts_with(path: str, *starts: bytes) -> bool:
    with faults_as_mistakes(printable(path)), Path(path).open("rb") as file:
        return file.read(4).startswith(starts)


def zip_members(path: str, max_members: int = MAX_MEMBERS) -> Iterator[ArchiveMember]:
    """Yield the files of a zip, in the order of its directory.

    Not with the module `zipfile`, which holds nearly a kilobyte for each member before it tells their number.
    """
    shown = printable(path)
    try:
        with Path(path).open("rb") as file:
            end = os.fstat(file.fileno()).st_size
            names: set[str] = set()
            for number, entry in enumerate(_zip_entries(file, end)):
                if number == max_members:
                    raise Mistake(f"{shown}: more than {max_members:,} members; split it into several zips")
                if entry.name.endswith(b"/"):
                    continue
                try:
                    name = _text(safe_name(entry.name))
                    if name in names:
                        raise MemberError("occurs twice")
                    names.add(name)
                    where = _located(entry, file.fileno(), end, path)
                except MemberError as error:
                    raise Mistake(f"{shown}: member {quoted(_text(entry.name))} {error}") from None
                yield ArchiveMember(name, where)
    except ValueError as error:
        raise Mistake(f"{shown}: damaged or incomplete zip ({printable(str(error))}); download it again") from error
    except OSError as error:
        raise Mistake(f"{shown}: {error.strerror or printable(str(error))}") from error


class ZipEntry(NamedTuple):
    """A member as the directory of a zip describes it."""

    name: bytes
    flags: int
    method: int
    crc: int
    packed: int
    unpacked: int
    attributes: int
    offset: int


def _zip_entries(file: BinaryIO, end: int) -> Iterator[ZipEntry]:
    """Yield the entries of the directory; raise ValueError if it is damaged."""
    start, unread_bytes, shift = _zip_directory(file, end)
    file.seek(start)
    while unread_bytes > 0:
        fixed = file.read(_ZIP_ENTRY.size)
        if len(fixed) < _ZIP_ENTRY.size or not fixed.startswith(_ZIP_ENTRY_START):
            raise ValueError("its directory is damaged")
        (
            _, flags, method, crc, packed, unpacked,
            name_length, extra_length, comment_length, attributes, offset,
        ) = _ZIP_ENTRY.unpack(fixed)  # fmt: skip
        name, extra, _ = file.read(name_length), file.read(extra_length), file.read(comment_length)
        unread_bytes -= len(fixed) + name_length + extra_length + comment_length
        if _ZIP64 in (unpacked, packed, offset):
            # Those that do not fit into 32 bits are in the extra field, which has only them, in this order.
            field = _extra_field(extra, _ZIP64_EXTRA)
            wide = (number for (number,) in struct.iter_unpack("<Q", field[: len(field) // 8 * 8]))
            unpacked, packed, offset = (
                next(wide, number) if number == _ZIP64 else number for number in (unpacked, packed, offset)
            )
        yield ZipEntry(_zip_name(name, extra, flags), flags, method, crc, packed, unpacked, attributes, offset + shift)


def _zip_directory(file: BinaryIO, end: int) -> tuple[int, int, int]:
    """Return the start and the length of the directory, and what to add to the offsets in it.

    That is the length of what was put in front of the zip, such as a program that unpacks it.
    """
    start = max(0, end - _ZIP_END.size - _ZIP_COMMENT_BYTES)
    file.seek(start)
    tail = file.read(_ZIP_END.size + _ZIP_COMMENT_BYTES)
    at = tail.rfind(_ZIP_EMPTY, 0, max(0, len(tail) - _ZIP_END.size + len(_ZIP_EMPTY)))
    if at < 0:
        raise ValueError("its end is missing")
    _, length, offset = _ZIP_END.unpack_from(tail, at)
    behind = start + at
    file.seek(max(0, behind - _ZIP64_END.size))
    large = file.read(_ZIP64_END.size)
    if large.startswith(_ZIP64_END_START) and behind >= _ZIP64_END.size:
        _, wide_length, wide_offset, mark = _ZIP64_END.unpack(large)
        if mark == _ZIP64_PLACE_START:
            length, offset, behind = wide_length, wide_offset, behind - _ZIP64_END.size
    if length > behind:
        raise ValueError("its directory is larger than the file")
    return behind - length, length, behind - length - offset


def _zip_name(raw: bytes, extra: bytes, flags: int) -> bytes:
    """Return a member's name in UTF-8, with slashes. Tools differ in how they say its encoding, and Macs do not."""
    field = _extra_field(extra, _UNICODE_NAME_EXTRA)
    if flags & _ZIP_UTF8:
        name = raw.decode()
    elif len(field) > _UNICODE_NAME.size and _UNICODE_NAME.unpack_from(field) == (zlib.crc32(raw),):
        name = field[_UNICODE_NAME.size :].decode()
    else:
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            name = raw.decode("cp437")
    if "/" not in name:
        name = name.replace("\\", "/")  # as .NET wrote it, and programs elsewhere that take paths of Windows for names
    return name.encode()


def _extra_field(extra: bytes, wanted_kind: int) -> bytes:
    """Return the content of the extra field of a kind; nothing if there is none."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == wanted_kind:
            return extra[at + 4 : at + 4 + length]
        at += 4 + length
    return b""


def _located(entry: ZipEntry, descriptor: int, end: int, path: str) -> Locator:
    """Return where a member's data is, which only the header in front of the data says."""
    if entry.flags & _ZIP_ENCRYPTED:
        raise MemberError("is encrypted; unpack it first")
    if stat.S_ISLNK(entry.attributes >> 16):
        raise MemberError("is a symbolic link")
    if entry.method not in (_ZIP_STORED, _ZIP_DEFLATED):
        raise MemberError("uses an unsupported compression; unpack it first")
    header = os.pread(descriptor, _ZIP_HEADER.size, entry.offset) if 0 <= entry.offset < end else b""
    if len(header) < _ZIP_HEADER.size:
        raise MemberError("is beyond the end of the file; download it again")
    mark, name_length, extra_length = _ZIP_HEADER.unpack(header)
    offset = entry.offset + _ZIP_HEADER.size + name_length + extra_length
    if mark != _ZIP_START or offset + entry.packed > end:
        raise MemberError("is not where the zip's directory says; download the file again")
    is_stored = entry.method == _ZIP_STORED
    if is_stored and entry.unpacked != entry.packed:
        raise MemberError("has two sizes; download the file again")
    return Locator(path, offset, entry.packed, None if is_stored else entry.unpacked, entry.crc)
