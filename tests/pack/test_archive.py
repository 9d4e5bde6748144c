from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pack.rawsets import END, MANY, header, member, refusal, tar, with_checksum, write, zipped
from packtrain.errors import printable
from packtrain.pack.archive import Locator, archive_members, composed, is_archive, member_of, split_member, tar_members
from packtrain.pack.raw import read_lines

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


def contents(path: Path | str) -> list[tuple[str, bytes]]:
    return [(found.name, found.where.read(MANY)) for found in tar_members(Locator(str(path)))]


def refused(folder: Path, data: bytes) -> str:
    path = write(folder / "a.tar", data)
    said = refusal(lambda: contents(path))
    assert said.startswith(f"{path}: ")
    return said


@pytest.mark.parametrize("form", FORMATS)
def test_members_are_listed_in_order_with_the_place_of_their_bytes(tmp_path: Path, form: int) -> None:
    files = [("b.jpg", b"bytes"), ("a/c.jpg", bytes(range(256)) * 5), ("empty", b"")]
    assert contents(write(tmp_path / "a.tar", tar(files, form))) == files


names = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=60).filter(
    lambda part: part not in (".", "..")
)
paths = st.lists(names, min_size=1, max_size=6).map("/".join)


@settings(max_examples=120)
@given(
    st.lists(st.tuples(paths, st.binary(max_size=1500)), max_size=6, unique_by=lambda item: composed(item[0])),
    st.sampled_from(FORMATS[1:]),
)
def test_members_are_those_that_tarfile_lists(files: list[tuple[str, bytes]], form: int) -> None:
    data = tar(files, form)
    with tarfile.open(fileobj=io.BytesIO(data)) as theirs:
        expected = [(composed(info.name), info.offset_data, info.size) for info in theirs]
    with tempfile.NamedTemporaryFile(suffix=".tar") as file:
        file.write(data)
        file.flush()
        found = list(tar_members(Locator(file.name)))
        assert [(one.name, one.where.offset, one.where.length) for one in found] == expected
        assert [(one.name, one.where.read(MANY)) for one in found] == [(composed(name), data) for name, data in files]


@pytest.mark.parametrize("form", FORMATS)
def test_long_names_are_whole_in_every_format(tmp_path: Path, form: int) -> None:
    name = "/".join(["f" * 80, "g" * 60, "h" * 90])
    assert contents(write(tmp_path / "a.tar", tar([(name, b"x")], form))) == [(name, b"x")]


@pytest.mark.parametrize("form", FORMATS)
def test_directories_are_skipped(tmp_path: Path, form: int) -> None:
    write(tmp_path / "set/n01/1.jpg", b"one")
    with tarfile.open(tmp_path / "a.tar", "w", format=form) as file:
        file.add(tmp_path / "set", ".")
    assert contents(tmp_path / "a.tar") == [("n01/1.jpg", b"one")]


def test_a_leading_dot_is_not_part_of_a_name(tmp_path: Path) -> None:
    assert contents(write(tmp_path / "a.tar", member("./a//b", b"x") + END)) == [("a/b", b"x")]


def test_a_tar_inside_a_tar_is_read_in_place(tmp_path: Path) -> None:
    inner = [tar([("1.jpg", b"one"), ("2.jpg", b"two")]), tar([("1.jpg", b"uno")])]
    path = write(tmp_path / "a.tar", tar([("x.tar", inner[0]), ("y.tar", inner[1])]))
    found = [
        (outer.name, one.name, one.where.path, one.where.read(MANY))
        for outer in tar_members(Locator(path))
        for one in tar_members(outer.where, outer.name)
    ]
    assert found == [
        ("x.tar", "1.jpg", path, b"one"),
        ("x.tar", "2.jpg", path, b"two"),
        ("y.tar", "1.jpg", path, b"uno"),
    ]


def test_a_tar_inside_a_tar_cannot_reach_beyond_itself(tmp_path: Path) -> None:
    cut = tar([("1.jpg", bytes(2000))])[:1024]
    path = write(tmp_path / "a.tar", tar([("x.tar", cut), ("y.tar", bytes(4000))]))
    first = next(tar_members(Locator(path)))
    said = refusal(lambda: list(tar_members(first.where, f"{path}: x.tar")))
    assert (
        said == f"{path}: x.tar: member '1.jpg' at byte 0 has 2,000 bytes,"
        " more than the file has left; download the file again"
    )


def test_the_data_of_members_is_never_read(tmp_path: Path) -> None:
    huge = 20 << 30  # more than eleven octal digits can say, and mostly a hole on disk
    path = tmp_path / "a.tar"
    with path.open("wb") as file:
        file.write(header("huge.bin", size=huge))
        file.seek(huge, io.SEEK_CUR)
        file.write(member("small.bin", b"x") + END)
    assert [(one.name, one.where.length) for one in tar_members(Locator(str(path)))] == [
        ("huge.bin", huge),
        ("small.bin", 1),
    ]


def test_members_before_a_damaged_header_are_listed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", member("1", b"x") + b"damage" * 200)
    members = tar_members(Locator(path))
    assert next(members).name == "1"  # although what follows is damaged
    refusal(lambda: next(members))


def test_a_size_in_an_extended_header_is_used(tmp_path: Path) -> None:
    data = extended(b"12 size=600\n") + header("a.bin", size=0) + b"x" * 600 + bytes(424) + END
    assert contents(write(tmp_path / "a.tar", data)) == [("a.bin", b"x" * 600)]


def test_a_global_comment_is_ignored(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "c0ffee"}) as file:
        file.addfile(tarfile.TarInfo("a"))
    assert contents(tmp_path / "a.tar") == [("a", b"")]


def test_checksums_of_signed_bytes_are_accepted(tmp_path: Path) -> None:
    block = header("käse", size=0)
    blank = block[:148] + b" " * 8 + block[156:]
    signed = sum(byte - 256 if byte > 127 else byte for byte in blank)
    path = write(tmp_path / "a.tar", blank[:148] + b"%06o\0 " % signed + blank[156:] + END)
    assert contents(path) == [("käse", b"")]


def test_names_that_are_not_utf8_keep_their_bytes(tmp_path: Path) -> None:
    block = with_checksum(b"k\xe4se.jpg".ljust(100, b"\0") + header("x")[100:])
    [(name, _)] = contents(write(tmp_path / "a.tar", block + END))
    assert printable(name) == "k\\udce4se.jpg"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        pytest.param(member("/etc/passwd"), "has an absolute name", id="absolute"),
        pytest.param(member("a/../../b"), "has '..' in its name", id="dots"),
        pytest.param(header("/d", tarfile.DIRTYPE), "has an absolute name", id="absolute directory"),
        pytest.param(header("a", tarfile.SYMTYPE, linkname="/etc"), "is a symbolic link", id="symbolic link"),
        pytest.param(header("a", tarfile.LNKTYPE, linkname="b"), "is a hard link", id="hard link"),
        pytest.param(header("a", tarfile.CHRTYPE), "is a device", id="character device"),
        pytest.param(header("a", tarfile.BLKTYPE), "is a device", id="block device"),
        pytest.param(header("a", tarfile.FIFOTYPE), "is a pipe", id="pipe"),
        pytest.param(header("a", tarfile.GNUTYPE_SPARSE), "is sparse", id="sparse"),
        pytest.param(header("a", b"M"), "continues from another volume", id="volume"),
        pytest.param(header("a", b"Z"), "has the unknown type b'Z'", id="unknown type"),
        pytest.param(member("a") + member("b") + member("./a"), "'a' at byte 1,024 occurs twice", id="duplicate"),
        pytest.param(header("a", size=10**9), "1,000,000,000 bytes, more than the file has left", id="beyond the end"),
        pytest.param(header("a", size=1 << 80), "more than the file has left", id="absurd size"),
        pytest.param(
            with_checksum(header("a")[:124] + b"\xff" * 12 + header("a")[136:]), "has a negative size", id="negative"
        ),
        pytest.param(
            with_checksum(header("a")[:124] + b"12345678901x" + header("a")[136:]),
            "not a tar: its first header has an invalid number",
            id="not a number",
        ),
        pytest.param(
            header("a", b"L", size=2 << 20) + bytes(2 << 20),
            "is an extension header of 2,097,152 bytes",
            id="long header",
        ),
        pytest.param(
            header("a", b"L", size=3) + b"abc" + bytes(509), "is a header without its member", id="header alone"
        ),
        pytest.param(header("a", b"L", size=4) + b"/etc" + bytes(508) + member("b"), "absolute", id="long absolute"),
        pytest.param(header("y" * 5000), "a name of 5,000 bytes", id="absurd name"),
        pytest.param(with_checksum(bytes(100) + header("a")[100:]), "no usable name", id="no name"),
        pytest.param(member("a") + END + member("b"), "more data follows the end mark", id="two tars"),
        pytest.param(member("a") + b"x" * 512, "at byte 512 has an invalid number in its header", id="damage"),
        pytest.param(
            member("a") + with_checksum(header("b"))[:-1] + b"!", "'b' at byte 512 has a wrong checksum", id="checksum"
        ),
    ],
)
def test_dangerous_and_damaged_members_are_refused(tmp_path: Path, data: bytes, said: str) -> None:
    assert said in refused(tmp_path, data + END)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        pytest.param(member("a", b"x" * 600)[:-424], "truncated at byte 1,112", id="after data"),
        pytest.param(member("a", b"x" * 600)[:700], "more than the file has left", id="in data"),
        pytest.param(member("a") + header("b")[:300], "truncated at byte 812", id="in a header"),
        pytest.param(header("n" * 200)[:600], "truncated at byte 600", id="in a long name"),
        pytest.param(member("a"), "truncated at byte 512", id="before the end mark"),
    ],
)
def test_a_truncated_tar_is_refused(tmp_path: Path, data: bytes, said: str) -> None:
    assert said in refused(tmp_path, data)


def extended(records: bytes, kind: bytes = tarfile.XHDTYPE) -> bytes:
    return header("pax", kind, len(records)) + records + bytes(-len(records) % 512)


@pytest.mark.parametrize(
    ("records", "said"),
    [
        (b"21 GNU.sparse.size=9\n", "is sparse"),
        (b"21 SCHILY.realsize=9\n", "is sparse"),
        (b"13 path=/etc\n", "absolute"),
        (b"11 path=..\n", "'..'"),
        (b"11 path=a\0\n", "no usable name"),
        (b"9 path=\n", "damaged"),
        (b"8 path=\n", "no usable name"),
        (b"9 size=x\n", "invalid size"),
        (b"11 size=-1\n", "invalid size"),
        (b"29 size=99999999999999999999\n", "more than the file has left"),
        (b"99 path=a\n", "damaged"),
        (b"0 path=a\n", "damaged"),
        (b"5 size", "damaged"),
        (b"a=b\n", "damaged"),
        (b"99999999999999999999999 path=a\n", "damaged"),
    ],
)
def test_bad_extended_headers_are_refused(tmp_path: Path, records: bytes, said: str) -> None:
    assert said in refused(tmp_path, member("first") + extended(records) + member("a") + END)


def test_a_header_that_renames_all_members_is_refused(tmp_path: Path) -> None:
    data = extended(b"9 path=a\n", tarfile.XGLTYPE) + member("a") + END
    assert "all members one name" in refused(tmp_path, data)


@pytest.mark.parametrize(
    ("compress", "program"),
    [
        (gzip.compress, "gunzip"),
        (bz2.compress, "bunzip2"),
        (lzma.compress, "unxz"),
        (lambda data: zipped([("a", data)]), "unzip"),
    ],
)
def test_a_compressed_tar_is_refused_with_the_program_to_use(
    tmp_path: Path, compress: Callable[[bytes], bytes], program: str
) -> None:
    assert f"decompress it first ({program})" in refused(tmp_path, compress(tar([("a", b"x")])))


@pytest.mark.parametrize("data", [b"", b"text", b"x" * 5000, b"\x89PNG" + bytes(600)])
def test_a_file_that_is_not_a_tar_is_refused(tmp_path: Path, data: bytes) -> None:
    refused(tmp_path, data)


def test_a_directory_and_a_missing_file_are_not_tars(tmp_path: Path) -> None:
    assert refusal(lambda: contents(tmp_path)) == f"{tmp_path}: not a file; expected a tar"
    assert refusal(lambda: contents(tmp_path / "x")) == f"{tmp_path / 'x'}: No such file or directory"


def test_more_members_than_fit_into_memory_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", b"".join(member(str(number)) for number in range(4)) + END)
    assert "more than 3 members" in refusal(lambda: list(tar_members(Locator(path), max_members=3)))


def test_any_number_of_extension_headers_is_read_in_linear_time(tmp_path: Path) -> None:
    chain = b"".join(header("x", b"L", size=2) + b"a\0" + bytes(510) for _ in range(5000))
    assert contents(write(tmp_path / "a.tar", chain + member("b") + END)) == [("a", b"")]
    records = b"".join(b"%d k%05d=v\n" % (12, number) for number in range(80_000))
    many = b"".join(extended(records, tarfile.XGLTYPE) + member(f"{number}") for number in range(4))
    assert len(contents(write(tmp_path / "b.tar", many + END))) == 4


def test_a_sparse_map_is_refused_unread(tmp_path: Path) -> None:
    numbers = extended(b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n") + header("a", size=1 << 20)
    assert "is sparse" in refused(tmp_path, member("b") + numbers + b"1000000000\n" + b"1\n" * (1 << 19) + END)


def test_a_second_extended_header_cannot_hide_that_a_member_is_sparse(tmp_path: Path) -> None:
    hidden = extended(b"25 GNU.sparse.realsize=2\n") + extended(b"10 path=b\n")
    assert "is sparse" in refused(tmp_path, hidden + member("a") + END)


@pytest.mark.parametrize("magic", [b"ustar  \0", bytes(8)], ids=["GNU", "V7"])
def test_only_a_posix_header_has_a_prefix(tmp_path: Path, magic: bytes) -> None:
    """GNU's header has dates there, and V7's has anything."""
    block = header("a.jpg")
    block = with_checksum(block[:257] + magic + block[265:345] + b"14500000000" + block[356:])
    assert contents(write(tmp_path / "a.tar", block + END)) == [("a.jpg", b"")]


def test_a_long_name_that_is_cut_at_a_slash_is_not_a_directory(tmp_path: Path) -> None:
    name = b"n" * 99 + b"/1.jpg"
    block = with_checksum(name[:100] + header("a", b"\0")[100:])
    data = header("x", b"L", size=len(name) + 1) + name.ljust(512, b"\0") + block + END
    assert contents(write(tmp_path / "a.tar", data)) == [(name.decode(), b"")]


def test_large_extended_attributes_are_accepted(tmp_path: Path) -> None:
    value = b"v" * 70_000
    record = b"70018 SCHILY.xattr=" + value[: 70018 - len(b"70018 SCHILY.xattr=") - 1] + b"\n"
    assert contents(write(tmp_path / "a.tar", extended(record) + member("a") + END)) == [("a", b"")]


def test_too_much_padding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(member("a") + END)
    with path.open("r+b") as file:
        file.truncate(1 << 30)
    assert "bytes follow the end mark" in refusal(lambda: contents(path))


def test_an_error_shows_a_long_name_in_full(tmp_path: Path) -> None:
    name = "long/" * 25 + "name"
    assert name in refused(tmp_path, header(name, tarfile.SYMTYPE, linkname="x") + END)


def test_control_characters_in_a_name_are_escaped_in_the_error(tmp_path: Path) -> None:
    assert "\\n\\x1b[2J" in refused(tmp_path, member("/a\n\x1b[2J") + END)


FILES = [("set/a.txt", b"one\ntwo\n"), ("set/deep/b.txt", b"three\n"), ("set/c.bin", bytes(range(256)) * 100)]
KINDS = {
    "a.tar": tar(FILES),
    "a.tgz": gzip.compress(tar(FILES)),
    "a.tar.gz": gzip.compress(tar(FILES)),
    "a.zip": zipped(FILES),
}


@pytest.mark.parametrize("name", KINDS)
def test_all_kinds_of_archives_have_the_same_members(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, KINDS[name])
    assert is_archive(path)
    assert [(one.name, one.where.read(MANY)) for one in archive_members(path)] == FILES
    assert [(one.name, one.where.read(MANY)) for one in archive_members(path, MANY)] == FILES


@pytest.mark.parametrize("name", KINDS)
def test_a_member_is_named_after_its_archive(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, KINDS[name])
    assert member_of(path, "set/deep/b.txt").where.read(MANY) == b"three\n"
    assert member_of(path, "deep/b.txt").where.read(MANY) == b"three\n"
    assert list(read_lines(Path(f"{path}#a.txt"))) == ["one", "two"]
    assert refusal(lambda: member_of(path, "set/a.txd")) == (
        f"{path}: has no member 'set/a.txd'; did you mean 'set/a.txt'?"
    )


@pytest.mark.parametrize("name", KINDS)
def test_a_folder_is_named_after_its_archive(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, KINDS[name])
    assert [one.name for one in archive_members(f"{path}#set/deep/")] == ["b.txt"]
    assert refusal(lambda: list(archive_members(f"{path}#other"))) == f"{path}: has no folder 'other', or no file in it"


def test_a_member_that_two_folders_have_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", tar([("one/x", b"1"), ("two/x", b"2")]))
    assert "has several members 'x'; include the folder in the name" in refusal(lambda: member_of(path, "x"))


def test_a_compressed_member_of_a_compressed_tar_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tgz", gzip.compress(tar([("a.gz", gzip.compress(b"one\n"))])))
    assert list(read_lines(Path(f"{path}#a.gz"))) == ["one"]


def test_a_file_with_a_number_sign_in_its_name_is_itself(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar#b", b"one\n")
    assert split_member(path) == (path, "")
    assert list(read_lines(Path(path))) == ["one"]
    assert split_member("https://host/a.zip?version=1#b/c") == ("https://host/a.zip?version=1", "b/c")
    assert split_member("c#/data") == ("c#/data", "")
    assert split_member("a.zip#" + "b" * 300) == ("a.zip", "b" * 300)


@pytest.mark.parametrize("damage", [lambda data: data[:-200], lambda data: data[:3000] + b"????" + data[3004:]])
def test_a_damaged_compressed_tar_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    files = [("a", bytes(5000)), ("b", bytes(5000))]
    # Stored as they are, so that only the checksum shows the change.
    path = write(tmp_path / "a.tgz", damage(gzip.compress(tar(files), compresslevel=0)))
    for read in (lambda: list(archive_members(path, MANY)), lambda: member_of(path, "a")):
        assert refusal(read).startswith(f"{path}: damaged or incomplete compressed file (")


def test_only_archives_look_like_archives(tmp_path: Path) -> None:
    for data in (b"", b"PK", bytes(2048), b"490\n361\n" * 200, gzip.compress(b"text"), b"\x1f\x8bnot gzip"):
        assert not is_archive(write(tmp_path / "file", data))
