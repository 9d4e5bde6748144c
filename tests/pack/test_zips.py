"""Zips are read in place; members that point outside or are incomplete are refused."""

from __future__ import annotations

import io
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from pack.rawsets import MANY, picture, refusal, tar, write, zipped
from packtrain.pack.archive import archive_members, is_archive, is_zip, member_of, zip_members

PICTURES = [("a.jpg", picture(1)), ("deep/b.jpg", picture(2)), ("empty", b"")]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_members_are_read_as_they_are(tmp_path: Path, method: int) -> None:
    path = write(tmp_path / "some.zip", zipped([*PICTURES, ("deep/", b"")], method))
    assert is_zip(path)
    assert [(one.name, one.where.read(MANY)) for one in zip_members(path)] == PICTURES


def test_self_extracting_and_zip64_files_are_read(tmp_path: Path) -> None:
    for start in (b"#!/bin/sh\n", b"MZ\x90\0", b"\x7fELF"):
        path = write(tmp_path / "set.exe", start + bytes(5000) + zipped(PICTURES))
        assert is_archive(path)
        assert [(one.name, one.where.read(MANY)) for one in archive_members(path)] == PICTURES
        assert [one.name for one in archive_members(f"{path}#deep")] == ["b.jpg"]
        assert not is_archive(write(tmp_path / "program", start + bytes(5000)))
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive, archive.open("a.jpg", "w", force_zip64=True) as member:
        member.write(picture())
    [found] = zip_members(write(tmp_path / "large.zip", file.getvalue()))
    assert found.where.read(MANY) == picture()


@pytest.mark.parametrize("start", [b"PK00", b"\xcf\xfa\xed\xfe", b"anything"])
def test_a_zip_may_follow_anything_if_its_name_says_so(tmp_path: Path, start: bytes) -> None:
    path = write(tmp_path / "set.ZIP", start + bytes(700) + zipped(PICTURES))
    assert is_archive(path)
    assert [(one.name, one.where.read(MANY)) for one in archive_members(path)] == PICTURES


def test_a_program_without_a_zip_is_called_that(tmp_path: Path) -> None:
    path = write(tmp_path / "set.exe", b"MZ\x90\0" + bytes(5000))
    said = refusal(lambda: list(archive_members(path)))
    assert said == f"{path}: an executable without a zip at its end; unpack it first"


def test_a_tar_may_start_like_a_program(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", tar([("MZ/a.jpg", picture())]))
    assert is_archive(path)
    assert [one.name for one in archive_members(path)] == ["MZ/a.jpg"]


def test_a_zip_of_more_than_4_gigabytes_is_read(tmp_path: Path) -> None:
    """Both its directory and its members are beyond what 32 bits can say; most of the file is a hole."""
    with (tmp_path / "large.zip").open("wb") as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.jpg", picture(1))
        file.seek(5 << 30)
        archive.start_dir = file.tell()
        archive.writestr("deep/b.jpg", picture(2))
        archive.comment = b"a comment"
    members = [(one.name, one.where.read(MANY)) for one in zip_members(str(tmp_path / "large.zip"))]
    assert members == [("a.jpg", picture(1)), ("deep/b.jpg", picture(2))]


def names(path: Path, data: bytes) -> list[str]:
    return [member.name for member in zip_members(write(path, data))]


def without_flag(data: bytes) -> bytes:
    return changed(data, b"PK\x01\x02", 8, b"\0\0")


def test_names_are_utf8_with_and_without_the_flag_that_says_so(tmp_path: Path) -> None:
    data = zipped([("\u732b.jpg", b"")])
    assert names(tmp_path / "flag.zip", data) == ["\u732b.jpg"]
    assert names(tmp_path / "mac.zip", without_flag(data)) == ["\u732b.jpg"]


def test_other_names_are_those_of_dos(tmp_path: Path) -> None:
    data = zipped([("M\u00bcnch.jpg", b"")]).replace("\u00bc".encode(), b"\x81n")
    assert names(tmp_path / "dos.zip", without_flag(data)) == ["M\u00fcnnch.jpg"]


@pytest.mark.parametrize(("checksum_of", "name"), [(b"_.jpg", "\u732b.jpg"), (b"renamed.jpg", "_.jpg")])
def test_a_name_may_be_in_an_extra_field_if_its_checksum_fits(tmp_path: Path, checksum_of: bytes, name: str) -> None:
    info = zipfile.ZipInfo("_.jpg")
    unicode_name = b"\1" + struct.pack("<L", zlib.crc32(checksum_of)) + "\u732b.jpg".encode()
    info.extra = struct.pack("<HH4sHH", 0x5455, 4, b"time", 0x7075, len(unicode_name)) + unicode_name
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(info, picture())
    assert names(tmp_path / "a.zip", file.getvalue()) == [name]


def test_names_that_only_spell_their_accents_differently_are_the_same(tmp_path: Path) -> None:
    data = without_flag(zipped([("cafe\u0301/a.txt", b"one\n")]))
    assert names(tmp_path / "mac.zip", data) == ["caf\u00e9/a.txt"]
    for typed in ("caf\u00e9", "cafe\u0301"):
        assert member_of(str(tmp_path / "mac.zip"), f"{typed}/a.txt").where.read(MANY) == b"one\n"
        assert [one.name for one in archive_members(f"{tmp_path / 'mac.zip'}#{typed}")] == ["a.txt"]


@pytest.mark.parametrize(
    ("system", "name", "expected"),
    [
        (0, "train\\cat\\a.jpg", ["train/cat/a.jpg"]),
        (10, "train\\cat\\", []),
        (3, "train\\cat\\a.jpg", ["train/cat/a.jpg"]),
        (0, "train/a\\b.jpg", ["train/a\\b.jpg"]),
        (3, "train/a\\b.jpg", ["train/a\\b.jpg"]),
    ],
)
def test_backslashes_of_windows_separate_folders(tmp_path: Path, system: int, name: str, expected: list[str]) -> None:
    data = changed(zipped([(name, b"")]), b"PK\x01\x02", 5, bytes([system]))
    assert names(tmp_path / "a.zip", data) == expected


def test_backslashes_do_not_lead_outside(tmp_path: Path) -> None:
    data = changed(zipped([("..\\..\\a.jpg", b"")]), b"PK\x01\x02", 5, b"\0")
    assert "has '..' in its name" in refusal(lambda: names(tmp_path / "a.zip", data))


def test_too_many_members_are_refused_while_they_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "some.zip", zipped(PICTURES))
    assert len(list(zip_members(path, max_members=3))) == 3
    assert "more than 2 members; split it" in refusal(lambda: list(zip_members(path, max_members=2)))


def test_an_empty_zip_has_no_members(tmp_path: Path) -> None:
    path = write(tmp_path / "none.zip", zipped([]))
    assert is_zip(path)
    assert list(zip_members(path)) == []


def linked(info: zipfile.ZipInfo) -> None:
    info.external_attr = (stat.S_IFLNK | 0o777) << 16


def renamed(name: str) -> Callable[[zipfile.ZipInfo], None]:
    def rename(info: zipfile.ZipInfo) -> None:
        info.filename = name

    return rename


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (linked, "member 'a.jpg' is a symbolic link"),
        (renamed("../a.jpg"), "member '../a.jpg' has '..' in its name"),
        (renamed("/etc/a.jpg"), "has an absolute name"),
        (renamed("b.jpg"), "member 'b.jpg' occurs twice"),
    ],
)
def test_members_that_point_outside_are_refused(
    tmp_path: Path, change: Callable[[zipfile.ZipInfo], None], fault: str
) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("b.jpg", picture())
        info = zipfile.ZipInfo("a.jpg")
        change(info)
        if info.filename == "b.jpg":
            with pytest.warns(UserWarning, match="Duplicate name"):
                archive.writestr(info, picture())
        else:
            archive.writestr(info, picture())
    path = write(tmp_path / "some.zip", file.getvalue())
    assert fault in refusal(lambda: list(zip_members(path)))


def changed(data: bytes, mark: bytes, place: int, new: bytes) -> bytes:
    start = data.index(mark) + place
    return data[:start] + new + data[start + len(new) :]


@pytest.mark.parametrize(
    ("place", "new", "fault"),
    [
        (8, b"\x01\x00", "is encrypted; unpack it first"),
        (10, b"\x0c\x00", "uses an unsupported compression"),
        (20, b"\xff\xff\xff\x0f", "is not where the zip's directory says; download the file again"),
        (42, b"\xff\xff\xff\x0f", "is beyond the end of the file; download it again"),
        (42, b"\x02\x00\x00\x00", "is not where the zip's directory says; download the file again"),
    ],
)
def test_unreadable_members_are_refused(tmp_path: Path, place: int, new: bytes, fault: str) -> None:
    data = changed(zipped([("a.jpg", picture())]), b"PK\x01\x02", place, new)
    path = write(tmp_path / "some.zip", data)
    assert fault in refusal(lambda: list(zip_members(path)))


def test_a_member_with_two_sizes_is_refused(tmp_path: Path) -> None:
    data = changed(zipped([("a.jpg", picture())], zipfile.ZIP_STORED), b"PK\x01\x02", 24, b"\x01\0\0\0")
    path = write(tmp_path / "some.zip", data)
    assert "has two sizes" in refusal(lambda: list(zip_members(path)))


def test_truncated_and_missing_zips_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "cut.zip", zipped(PICTURES)[:-30])
    assert "damaged or incomplete zip" in refusal(lambda: list(zip_members(path)))
    assert refusal(lambda: is_zip(str(tmp_path / "none"))) == f"{tmp_path / 'none'}: No such file or directory"


def test_a_member_never_unpacks_to_more_than_it_claims(tmp_path: Path) -> None:
    bomb = changed(zipped([("a.jpg", bytes(10_000_000))]), b"PK\x01\x02", 24, b"\x64\0\0\0")
    [member] = zip_members(write(tmp_path / "bomb.zip", bomb))
    with pytest.raises(OSError, match="damaged in its archive"):
        member.where.read(MANY)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_changed_member_is_damaged(tmp_path: Path, method: int) -> None:
    data = bytearray(zipped([("a.jpg", picture(1)), ("b.jpg", picture(2))], method))
    [first, _] = zip_members(write(tmp_path / "whole.zip", bytes(data)))
    data[first.where.offset + 200] ^= 1
    [changed_one, other] = zip_members(write(tmp_path / "changed.zip", bytes(data)))
    with pytest.raises(OSError, match="damaged in its archive"):
        changed_one.where.read(MANY)
    assert other.where.read(MANY) == picture(2)


def test_a_large_member_is_read_as_a_stream_and_refused_as_a_whole(tmp_path: Path) -> None:
    lines = b"".join(b"line %d\n" % number for number in range(200_000))
    [member] = zip_members(write(tmp_path / "text.zip", zipped([("a.txt", lines)])))
    with pytest.raises(OSError, match="more than 1 MB"):
        member.where.read(MANY)
    with member.where.open() as file:
        assert list(file) == lines.splitlines(keepends=True)


def test_a_member_that_claims_gigabytes_is_not_read(tmp_path: Path) -> None:
    claims = changed(zipped([("a.jpg", picture())]), b"PK\x01\x02", 24, b"\xff\xff\xff\x7f")
    [member] = zip_members(write(tmp_path / "some.zip", claims))
    with pytest.raises(OSError, match="more than 1 MB"):
        member.where.read(MANY)
