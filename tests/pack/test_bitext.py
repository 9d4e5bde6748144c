from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import pytest

from pack.rawsets import tar, write, zipped
from packtrain.errors import Mistake
from packtrain.pack.bitext import BitextSource
from packtrain.pack.raw import DropCounter


def texts(*paths: Path, **options: Any) -> list[tuple[str, str]]:
    source = BitextSource(paths=tuple(map(str, paths)), **options)
    return [(pair.source, pair.target) for pair in source.pairs(DropCounter())]


def two_files(folder: Path, source: bytes, target: bytes) -> tuple[Path, Path]:
    paths = folder / "a.en", folder / "a.de"
    paths[0].write_bytes(source)
    paths[1].write_bytes(target)
    return paths


def refusal(*paths: Path) -> str:
    with pytest.raises(Mistake) as refused:
        texts(*paths)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_lines_of_two_files_are_paired_by_number(tmp_path: Path) -> None:
    paths = two_files(tmp_path, b"one\ntwo\n", b"eins\nzwei\n")
    assert texts(*paths) == [("one", "eins"), ("two", "zwei")]


def test_the_last_line_needs_no_line_feed(tmp_path: Path) -> None:
    assert texts(*two_files(tmp_path, b"one\ntwo", b"eins\nzwei\n")) == [("one", "eins"), ("two", "zwei")]


def test_empty_lines_are_kept(tmp_path: Path) -> None:
    assert texts(*two_files(tmp_path, b"one\n\nthree\n", b"eins\n\n\n")) == [("one", "eins"), ("", ""), ("three", "")]


def test_empty_files_have_no_pairs(tmp_path: Path) -> None:
    assert texts(*two_files(tmp_path, b"", b"")) == []


def test_compressed_files_read_like_plain_ones(tmp_path: Path) -> None:
    source, target = tmp_path / "a.en.gz", tmp_path / "a.de"
    source.write_bytes(gzip.compress(b"one\n") + gzip.compress(b"two\n"))
    target.write_bytes(b"eins\nzwei\n")
    assert texts(source, target) == [("one", "eins"), ("two", "zwei")]


def test_one_file_may_have_tab_separated_pairs(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_bytes(b"one\teins\ntwo \t zwei\n")
    assert texts(tmp_path / "a.tsv") == [("one", "eins"), ("two ", " zwei")]


def test_a_file_of_pairs_may_be_compressed(tmp_path: Path) -> None:
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(b"one\teins\n"))
    assert texts(tmp_path / "a.tsv.gz") == [("one", "eins")]


@pytest.mark.parametrize(("line", "fields"), [(b"no tab", 1), (b"a\tb\tc", 3)])
def test_a_line_that_is_not_a_pair_is_refused_with_its_place(tmp_path: Path, line: bytes, fields: int) -> None:
    (tmp_path / "a.tsv").write_bytes(b"one\teins\n" + line + b"\nthree\tdrei\n")
    said = refusal(tmp_path / "a.tsv")
    assert f"{tmp_path / 'a.tsv'}:2: " in said
    assert f"found {fields}" in said


def test_two_of_several_columns_are_chosen_by_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(b"1.08\tone\teins\tCC-BY\n1.07\ttwo\tzwei\n")
    assert "found 4; name the two to use, such as columns: [1, 2]" in refusal(path)
    assert texts(path, columns=(2, 3)) == [("one", "eins"), ("two", "zwei")]
    assert texts(path, columns=(3, 1)) == [("eins", "1.08"), ("zwei", "1.07")]
    with pytest.raises(Mistake, match=r"a\.tsv:2: has no column 4, only 3 separated by tabs"):
        texts(path, columns=(2, 4))


def test_blank_lines_of_a_file_of_pairs_separate_documents(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_bytes(b"one\teins\n\n\t\n \r\ntwo\t\n")
    pairs = list(BitextSource(paths=(str(tmp_path / "a.tsv"),)).pairs(DropCounter()))
    assert [(pair.source, pair.target, pair.line) for pair in pairs] == [("one", "eins", 1), ("two", "", 5)]


def test_a_set_is_divided_by_its_last_pairs(tmp_path: Path) -> None:
    paths = two_files(tmp_path, b"a\nb\nc\n", b"u\nv\nw\n")
    assert texts(*paths, without_last=1) == [("a", "u"), ("b", "v")]
    assert texts(*paths, last=1) == [("c", "w")]
    assert texts(*paths, last=9) == texts(*paths)
    assert texts(*paths, without_last=9) == []


SGML = """<srcset setid="newstest2014" srclang="any">
<doc sysid="ref" docid="1.abc.net" genre="news" origlang="de">
<hl>
<seg id="1">AT&T &amp; &quot;Söhne&quot; &lt;b&gt; &#8364; &#x2014; &amp;lt; &euro;</seg>
</hl><p>
<seg id="2"> two  spaces </seg> <SEG ID='3'>on one line</SEG>
<seg id=4>over
two lines</seg>
</p></doc>
<DOC docid="2.abc.net"><seg id="1"></seg></DOC>
</srcset>
"""


def test_segments_of_sgml_are_paired_in_order(tmp_path: Path) -> None:
    paths = tmp_path / "newstest-src.en.sgm", tmp_path / "newstest-ref.de.sgm.gz"
    paths[0].write_text(SGML)
    paths[1].write_bytes(gzip.compress(SGML.replace("srcset", "refset").encode()))
    found = texts(*paths)
    assert [source for source, _ in found] == [
        'AT&T & "Söhne" <b> € — &lt; &euro;', "two  spaces", "on one line", "over two lines", ""
    ]  # fmt: skip
    assert all(source == target for source, target in found)


def test_sgml_may_be_paired_with_plain_lines(tmp_path: Path) -> None:
    (tmp_path / "a.sgm").write_text(SGML)
    (tmp_path / "a.txt").write_text("u\nv\nw\nx\ny\n")
    assert [target for _, target in texts(tmp_path / "a.sgm", tmp_path / "a.txt")] == ["u", "v", "w", "x", "y"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('<seg id="2">', '<seg id="7">', "not aligned: segment '2' of document '1.abc.net' meets segment '7'"),
        ("2.abc.net", "3.abc.net", "segment '1' of document '2.abc.net' meets segment '1' of document '3.abc.net'"),
        ('<seg id="1"></seg></DOC>', "</DOC>", "5 segments and .* has 4;"),
        ("on one line</SEG>", "on one line", "a-ref.sgm:7: <seg> inside of a segment"),
        ("</seg></DOC>", "</DOC>", "segment '1' of document .* has no end; download it again"),
        ("<seg id=4>", "", "a-ref.sgm:8: </seg> without <seg>"),
        ("<", "[", "contains no segments, such as"),
    ],
)
def test_damaged_sgml_is_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    paths = tmp_path / "a-src.sgm", tmp_path / "a-ref.sgm"
    paths[0].write_text(SGML)
    paths[1].write_text(SGML.replace(old, new))
    assert re.search(words, refusal(*paths))


@pytest.mark.parametrize("suffix", [".tgz", ".tar.gz", ".tar", ".zip"])
def test_members_of_archives_are_named_behind_a_hash(tmp_path: Path, suffix: str) -> None:
    members = [
        ("training/", b""),
        ("training/a.de-en.de", b"eins\nzwei\n"),
        ("training/a.de-en.en.gz", gzip.compress(b"one\ntwo\n")),
    ]
    data = zipped(members[1:]) if suffix == ".zip" else tar(members[1:])
    path = write(tmp_path / f"parallel{suffix}", gzip.compress(data) if suffix.endswith("gz") else data)
    pair = Path(f"{path}#training/a.de-en.en.gz"), Path(f"{path}#training/a.de-en.de")
    assert texts(*pair) == [("one", "eins"), ("two", "zwei")]
    assert "has no member 'training/a.de-en.fr'" in refusal(pair[0], Path(f"{path}#training/a.de-en.fr"))


@pytest.mark.parametrize(("source_lines", "target_lines"), [(3, 2), (2, 3), (0, 1), (1500, 3)])
def test_files_of_unequal_length_are_refused_with_both_counts(
    tmp_path: Path, source_lines: int, target_lines: int
) -> None:
    paths = two_files(tmp_path, b"x\n" * source_lines, b"y\n" * target_lines)
    assert refusal(*paths) == (
        f"{paths[0]} has {source_lines:,} lines and {paths[1]} has {target_lines:,};"
        " aligned files must have the same number of lines"
    )


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("a\u2028b", id="U+2028"),
        pytest.param("a\u2029b", id="U+2029"),
        pytest.param("a\u0085b", id="U+0085"),
        pytest.param("a\x0cb\x0b", id="form feed"),
        pytest.param("a\x1cb\x1db\x1e", id="separators"),
        pytest.param("a\rb", id="lone CR"),
        pytest.param("a\x00b", id="NUL"),
        pytest.param("a\ufeffb", id="a byte order mark inside"),
    ],
)
def test_no_character_but_the_line_feed_shifts_the_alignment(tmp_path: Path, text: str) -> None:
    paths = two_files(tmp_path, f"one\n{text}\nthree\n".encode(), b"eins\nzwei\ndrei\n")
    assert texts(*paths) == [("one", "eins"), (text, "zwei"), ("three", "drei")]


def test_a_byte_order_mark_is_not_part_of_the_first_line(tmp_path: Path) -> None:
    paths = two_files(tmp_path, b"\xef\xbb\xbfone\ntwo\n", b"\xef\xbb\xbfeins\nzwei\n")
    assert texts(*paths) == [("one", "eins"), ("two", "zwei")]


def test_carriage_returns_before_a_line_feed_are_removed(tmp_path: Path) -> None:
    assert texts(*two_files(tmp_path, b"one\r\n\r\n", b"eins\nzwei\n")) == [("one", "eins"), ("", "zwei")]


@pytest.mark.parametrize(
    ("content", "line", "offset"),
    [
        (b"\xffone\n", 1, 0),
        (b"one\ntw\xff\n", 2, 6),
        (b"\xef\xbb\xbfon\xff\n", 1, 5),
        (b"one\r\nz\xc3\xbcg\n\xc3\n", 3, 10),
        ("schön\n".encode("latin-1"), 1, 3),
    ],
)
def test_invalid_utf8_is_refused_with_its_byte(tmp_path: Path, content: bytes, line: int, offset: int) -> None:
    paths = two_files(tmp_path, content, b"x\n" * content.count(b"\n"))
    assert refusal(*paths) == f"{paths[0]}:{line}: not UTF-8 at byte {offset} of the file; convert it first"


def test_a_truncated_compressed_file_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress(b"one\teins\n" * 1000)
    (tmp_path / "a.tsv.gz").write_bytes(whole[: len(whole) // 2])
    assert "a.tsv.gz: damaged or incomplete compressed file" in refusal(tmp_path / "a.tsv.gz")


def test_a_damaged_compressed_file_is_refused(tmp_path: Path) -> None:
    damaged = bytearray(gzip.compress(b"one\teins\n" * 1000))
    damaged[10] = 0xFF  # the first block behind the header is of a type that does not exist
    (tmp_path / "a.tsv.gz").write_bytes(damaged)
    assert "a.tsv.gz: damaged or incomplete compressed file" in refusal(tmp_path / "a.tsv.gz")


def test_plain_text_named_gz_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tsv.gz").write_bytes(b"one\teins\n")
    assert "a.tsv.gz: damaged or incomplete compressed file" in refusal(tmp_path / "a.tsv.gz")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.en").write_bytes(b"one\n")
    assert refusal(tmp_path / "a.en", tmp_path / "a.de") == f"{tmp_path / 'a.de'}: No such file or directory"
    assert refusal(tmp_path / "a.tsv.gz") == f"{tmp_path / 'a.tsv.gz'}: No such file or directory"


def test_a_directory_is_not_a_file(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path}: Is a directory"
