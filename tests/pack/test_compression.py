"""Text is read whatever it is compressed with, and whatever its name is."""

from __future__ import annotations

import bz2
import gzip
import lzma
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from pack.rawsets import refusal, tar, write, zipped
from packtrain.pack.archive import is_archive
from packtrain.pack.bitext import BitextSource
from packtrain.pack.compression import CODECS, codec_of, plain_name
from packtrain.pack.dialogue import CONVERSATIONS, LINES, DialogueSource
from packtrain.pack.folder import FolderSource
from packtrain.pack.raw import DropCounter, read_lines

COMPRESS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
LINES_OF_TEXT = [f"line {number} \u00fc" for number in range(20_000)]
TEXT = "".join(f"{line}\n" for line in LINES_OF_TEXT).encode()

each_codec = pytest.mark.parametrize(("ending", "compress"), COMPRESS.items(), ids=COMPRESS)
Compress = Callable[[bytes], bytes]


@each_codec
@pytest.mark.parametrize("name", ["a.en{}", "a.en"])
def test_text_is_decompressed_by_what_it_is(tmp_path: Path, name: str, ending: str, compress: Compress) -> None:
    for spelled in (ending, ending.upper()):
        path = write(tmp_path / name.format(spelled), compress(TEXT))
        assert list(read_lines(Path(path))) == LINES_OF_TEXT
        assert BitextSource.recognize([path])


@each_codec
def test_parts_compressed_one_by_one_are_one_text(tmp_path: Path, ending: str, compress: Compress) -> None:
    path = write(tmp_path / f"a{ending}", compress(b"one\n") + compress(b"") + compress(b"two\n"))
    assert list(read_lines(Path(path))) == ["one", "two"]
    assert list(read_lines(Path(write(tmp_path / f"empty{ending}", compress(b""))))) == []


@each_codec
def test_a_member_of_an_archive_may_be_compressed(tmp_path: Path, ending: str, compress: Compress) -> None:
    path = write(tmp_path / "a.zip", zipped([(f"a.en{ending}", compress(TEXT))]))
    assert list(read_lines(Path(f"{path}#a.en{ending}"))) == LINES_OF_TEXT


@each_codec
@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: data[:-1], lambda _: TEXT])
def test_a_damaged_file_is_refused(
    tmp_path: Path, damage: Callable[[bytes], bytes], ending: str, compress: Compress
) -> None:
    path = write(tmp_path / f"a.en{ending}", damage(compress(TEXT)))
    said = refusal(lambda: list(read_lines(Path(path))))
    assert said.startswith(f"{path}: damaged or incomplete compressed file (")


@each_codec
def test_a_wrong_checksum_is_noticed(tmp_path: Path, ending: str, compress: Compress) -> None:
    data = bytearray(compress(TEXT))
    data[-3] ^= 0x55
    path = write(tmp_path / f"a.en{ending}", bytes(data))
    assert "damaged or incomplete compressed file" in refusal(lambda: list(read_lines(Path(path))))


@each_codec
@pytest.mark.parametrize("start", [b"", b"\x99", b"\x99" * 3000], ids=["no start", "one byte", "a longer part"])
def test_damage_between_the_parts_of_a_file_is_not_its_end(
    tmp_path: Path, start: bytes, ending: str, compress: Compress
) -> None:
    path = write(tmp_path / f"a{ending}", compress(b"one\n") + start + compress(b"two\n")[max(1, len(start)) :])
    assert "damaged or incomplete compressed file" in refusal(lambda: list(read_lines(Path(path))))


@each_codec
def test_zeros_may_follow_a_part(tmp_path: Path, ending: str, compress: Compress) -> None:
    zeros = bytes(5000)
    path = write(tmp_path / f"a{ending}", compress(b"one\n") + zeros + compress(b"two\n") + zeros)
    assert list(read_lines(Path(path))) == ["one", "two"]


def test_an_xz_file_that_asks_for_gigabytes_of_memory_is_refused(tmp_path: Path) -> None:
    data = bytearray(lzma.compress(TEXT))
    header = data[12:24]  # of the first block: its length, flags, the filter with the size of its dictionary, checksum
    assert header[2:4] == b"\x21\x01"
    header[4] = 40  # 4 GB
    header[8:] = struct.pack("<L", zlib.crc32(header[:8]))
    data[12:24] = header
    assert "emory" in refusal(lambda: list(read_lines(Path(write(tmp_path / "a.xz", bytes(data))))))


@each_codec
def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(
    tmp_path: Path, ending: str, compress: Compress
) -> None:
    path = write(tmp_path / f"a{ending}", compress(bytes(30 << 20)))
    assert "line longer than 16 MB" in refusal(lambda: list(read_lines(Path(path))))


@each_codec
def test_tars_are_told_from_text(tmp_path: Path, ending: str, compress: Compress) -> None:
    assert is_archive(write(tmp_path / f"a.tar{ending}", compress(tar([("a.en", b"one\n")]))))
    assert not is_archive(write(tmp_path / f"a{ending}", compress(TEXT)))


def test_frames_of_zstd_that_have_no_content_are_skipped(tmp_path: Path) -> None:
    skipped = b"\x50\x2a\x4d\x18\x04\0\0\0skip"
    data = zstandard.compress(b"one\n") + skipped + zstandard.compress(b"two\n") + skipped
    assert list(read_lines(Path(write(tmp_path / "a.zst", data)))) == ["one", "two"]


def test_text_that_starts_like_a_compressed_file_is_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.en", b"BZh9 is how bzip2 starts\n")
    assert list(read_lines(Path(path))) == ["BZh9 is how bzip2 starts"]
    assert codec_of(b"PK\x03\x04") is None


def test_names_are_read_without_the_ending_and_in_lower_case() -> None:
    assert [plain_name(f"Train.TSV{codec.ending.upper()}") for codec in CODECS] == ["train.tsv"] * len(CODECS)
    assert plain_name("a.en") == "a.en"


@each_codec
def test_every_format_of_text_may_be_compressed(tmp_path: Path, ending: str, compress: Compress) -> None:
    ending = ending.upper()
    record = b'{"source": "one", "target": "eins"}\n'
    listing = write(tmp_path / f"a.jsonl{ending}", compress(record))
    assert FolderSource.recognize([listing]) == [listing]
    [pair] = FolderSource(paths=(listing,)).pairs(DropCounter())
    assert (pair.source, pair.target) == ("one", "eins")
    lines = "L1 +++$+++ u0 +++$+++ m0 +++$+++ A +++$+++ Hi.\nL2 +++$+++ u1 +++$+++ m0 +++$+++ B +++$+++ Ho.\n"
    write(tmp_path / f"cornell/{LINES}{ending}", compress(lines.encode()))
    write(tmp_path / f"cornell/{CONVERSATIONS}{ending}", compress(b"u0 +++$+++ u1 +++$+++ m0 +++$+++ ['L1', 'L2']\n"))
    folder = str(tmp_path / "cornell")
    assert DialogueSource.recognize([folder]) == [folder]
    [turn] = DialogueSource(paths=(folder,)).pairs(DropCounter())
    assert (turn.source, turn.target) == ("Hi.", "Ho.")
