from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from pack.rawsets import SEPARATOR, cornell_conversations, cornell_lines, refusal, tar, write, zipped
from packtrain.pack import raw
from packtrain.pack.dialogue import MISSING_LINE, DialogueSource
from packtrain.pack.raw import DropCounter

TEXTS = {"L4": "Where?", "L3": "There.", "L2": "They do to!", "L1": "They do not!"}


def pairs(*paths: str | Path, drop: DropCounter | None = None, **options: Any) -> list[tuple[str, str]]:
    found = DialogueSource(paths=tuple(map(str, paths)), **options).pairs(drop or DropCounter())
    return [(pair.source, pair.target) for pair in found]


def cornell(folder: Path, lines: str | bytes, conversations: str | bytes) -> Path:
    write(folder / "movie_lines.txt", lines)
    write(folder / "movie_conversations.txt", conversations)
    return folder


def test_consecutive_lines_of_a_conversation_are_pairs(tmp_path: Path) -> None:
    cornell(tmp_path, cornell_lines(TEXTS), cornell_conversations(["L1", "L2", "L3"], ["L4", "L3"]))
    assert pairs(tmp_path) == [("They do not!", "They do to!"), ("They do to!", "There."), ("Where?", "There.")]


def test_the_corpus_is_read_from_its_zip(tmp_path: Path) -> None:
    lines, conversations = cornell_lines(TEXTS).encode(), cornell_conversations(["L1", "L2"], ["L4", "L3"]).encode()
    folder = "cornell movie-dialogs corpus"
    members = [
        (f"{folder}/.DS_Store", b"\0"),
        (f"__MACOSX/{folder}/._movie_lines.txt", b"\0\5\x16\7"),
        (f"{folder}/movie_lines.txt", lines),
        (f"{folder}/movie_conversations.txt", conversations),
        (f"{folder}/README.txt", b"Cornell Movie-Dialogs Corpus"),
    ]
    path = write(tmp_path / "cornell_movie_dialogs_corpus.zip", zipped(members))
    assert pairs(path) == [("They do not!", "They do to!"), ("Where?", "There.")]
    assert pairs(path, without_last=1) == [("They do not!", "They do to!")]
    assert pairs(path, last=1) == [("Where?", "There.")]
    assert pairs(f"{path}#{folder}/movie_lines.txt", f"{path}#movie_conversations.txt") == pairs(path)
    compressed = write(tmp_path / "cornell.tgz", gzip.compress(tar(members)))
    assert pairs(compressed) == pairs(path)
    assert "columns applies to" in refusal(lambda: pairs(path, columns=(1, 2)))
    write(tmp_path / "twice.zip", zipped([*members, ("movie_lines.txt", lines)]))
    assert "movie_lines.txt several times; name both" in refusal(lambda: pairs(tmp_path / "twice.zip"))
    write(tmp_path / "other.zip", zipped(members[:3]))
    assert "movie_conversations.txt not found; name both" in refusal(lambda: pairs(tmp_path / "other.zip"))


def test_a_member_of_an_archive_may_be_a_file_of_pairs(tmp_path: Path) -> None:
    path = write(tmp_path / "deu-eng.zip", zipped([("deu.txt", b"Hi.\tHallo!\tCC-BY 2.0\n"), ("_about.txt", b"x")]))
    assert pairs(f"{path}#deu.txt", columns=(1, 2)) == [("Hi.", "Hallo!")]


def test_the_two_files_may_be_named_and_compressed(tmp_path: Path) -> None:
    lines, conversations = cornell_lines(TEXTS), cornell_conversations(["L4", "L3"])
    one = write(tmp_path / "elsewhere.txt", lines)
    other = write(tmp_path / "conversations.gz", gzip.compress(conversations.encode()))
    assert pairs(one, other) == [("Where?", "There.")]
    write(tmp_path / "set/movie_lines.txt.gz", gzip.compress(lines.encode()))
    write(tmp_path / "set/movie_conversations.txt", conversations)
    assert pairs(tmp_path / "set") == [("Where?", "There.")]


def test_a_file_of_pairs_is_read_like_bitext(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.tsv", "Where?\tThere.\r\nWhy?\u2028\tBecause.\n")
    assert pairs(path) == [("Where?", "There."), ("Why?\u2028", "Because.")]
    write(tmp_path / "pairs.tsv", "Where?\n")
    assert "pairs.tsv:1: expected two texts" in refusal(lambda: pairs(path))


def test_a_conversation_of_one_line_or_none_has_no_pairs(tmp_path: Path) -> None:
    assert pairs(cornell(tmp_path, cornell_lines(TEXTS), cornell_conversations(["L1"], []))) == []


def test_metadata_may_be_empty_and_so_may_a_text(tmp_path: Path) -> None:
    rows = [
        "L1 +++$+++  +++$+++  +++$+++  +++$+++ Hi.",
        "L2 +++$+++ u +++$+++ m +++$+++ N +++$+++ ",
        "L3 +++$+++ u +++$+++ m +++$+++ N +++$+++",  # an editor took the space at its end
    ]
    lines = "\n".join(rows)
    conversations = " +++$+++  +++$+++  +++$+++ ['L1', 'L2', 'L3']\n"
    assert pairs(cornell(tmp_path, lines, conversations)) == [("Hi.", ""), ("", "")]


def test_a_separator_inside_a_text_is_text(tmp_path: Path) -> None:
    lines = cornell_lines({"L1": f"a{SEPARATOR}b", "L2": "c"})
    assert pairs(cornell(tmp_path, lines, cornell_conversations(["L1", "L2"]))) == [(f"a{SEPARATOR}b", "c")]


def test_spaces_of_a_text_are_kept(tmp_path: Path) -> None:
    lines = cornell_lines({"L1": " a ", "L2": "b  "})
    assert pairs(cornell(tmp_path, lines, cornell_conversations(["L1", "L2"]))) == [(" a ", "b  ")]


def test_pairs_with_a_missing_line_are_dropped_and_its_neighbors_are_not_paired(tmp_path: Path) -> None:
    folder = cornell(tmp_path, cornell_lines(TEXTS), cornell_conversations(["L1", "L9", "L2", "L3"]))
    dropped = DropCounter()
    assert pairs(folder, drop=dropped) == [("They do to!", "There.")]
    place = f"{folder}/movie_conversations.txt:1 L9"
    assert dropped.names == {MISSING_LINE: [place, place]}


def test_a_duplicate_line_is_refused(tmp_path: Path) -> None:
    folder = cornell(tmp_path, cornell_lines(TEXTS) + cornell_lines({"L2": "No."}), cornell_conversations())
    assert "movie_lines.txt:5: line 'L2' occurs twice" in refusal(lambda: pairs(folder))


SAID = {"L1": "Café… “naïve” €", "L2": "déjà vu"}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "windows-1252"])
def test_the_encoding_is_detected(tmp_path: Path, encoding: str) -> None:
    folder = cornell(tmp_path, cornell_lines(SAID).encode(encoding), cornell_conversations(["L1", "L2"]))
    assert pairs(folder) == [(SAID["L1"], SAID["L2"])]


def test_iso_8859_1_is_read_as_windows_1252(tmp_path: Path) -> None:
    lines = cornell_lines({"L1": "Señor, déjà vu", "L2": "Ça va"})
    folder = cornell(tmp_path, lines.encode("latin-1"), cornell_conversations(["L1", "L2"]))
    assert pairs(folder) == [("Señor, déjà vu", "Ça va")]


def test_bytes_without_a_character_in_windows_1252_keep_their_control_characters(tmp_path: Path) -> None:
    lines = cornell_lines({"L1": "?", "L2": "c"}).encode().replace(b"?", b"\xe9\x81\x8d\x8f\x90\x9d\x85")
    folder = cornell(tmp_path, lines, cornell_conversations(["L1", "L2"]))
    assert pairs(folder) == [("é\x81\x8d\x8f\x90\x9d…", "c")]


def test_utf8_with_a_damaged_byte_is_refused(tmp_path: Path) -> None:
    lines = cornell_lines({"L1": "déjà", "L2": "vu é", "L3": "?"}).encode().replace(b"?", b"\xff")
    folder = cornell(tmp_path, lines, cornell_conversations(["L1", "L2"]))
    assert "movie_lines.txt:3: not UTF-8 at byte" in refusal(lambda: pairs(folder))


def test_a_byte_order_mark_means_utf8(tmp_path: Path) -> None:
    lines = b"\xef\xbb\xbf" + cornell_lines({"L1": "?"}).encode().replace(b"?", b"\xff")
    folder = cornell(tmp_path, lines, cornell_conversations())
    assert "movie_lines.txt:1: not UTF-8 at byte" in refusal(lambda: pairs(folder))


@pytest.mark.parametrize("break_", ["\u2028", "\x85", "\x0c", "\r", "\x1c"])
def test_lines_end_at_line_feeds_alone(tmp_path: Path, break_: str) -> None:
    lines = cornell_lines({"L1": f"a{break_}b", "L2": "c"})
    conversations = cornell_conversations(["L1", "L2"]).replace("\n", "\r\n")
    assert pairs(cornell(tmp_path, lines, conversations)) == [(f"a{break_}b", "c")]


def test_blank_lines_are_skipped(tmp_path: Path) -> None:
    lines = cornell_lines(TEXTS).replace("\n", "\n\r\n")
    assert len(pairs(cornell(tmp_path, lines, "\n" + cornell_conversations(["L4", "L3"]) + "\n"))) == 1


@pytest.mark.parametrize(
    ("names", "expected"),
    [("['L1','L2']", 1), ("[ 'L1' , 'L2' ] ", 1), ('["L1", "L2"]', 1), ("[]", 0), ("[ ]", 0)],
)
def test_lists_may_contain_any_spaces(tmp_path: Path, names: str, expected: int) -> None:
    folder = cornell(tmp_path, cornell_lines(TEXTS), f"u0{SEPARATOR}u1{SEPARATOR}m0{SEPARATOR}{names}\n")
    assert len(pairs(folder)) == expected


@pytest.mark.parametrize(
    "names",
    ["L1, L2", "['L1', L2]", "['L1', 'L2'", "['L1' 'L2']", "['L1',, 'L2']", "['L1', 'L2',]", "['']", "__import__('os')",
     "[__import__('os').system('true')]", "['L1'] + ['L2']", "['L\\x31']", "", "[[" * 9999 + "]"],
)  # fmt: skip
def test_lists_are_not_evaluated_as_python(tmp_path: Path, names: str) -> None:
    folder = cornell(tmp_path, cornell_lines(TEXTS), f"u0{SEPARATOR}u1{SEPARATOR}m0{SEPARATOR}{names}\n")
    said = refusal(lambda: pairs(folder))
    assert "movie_conversations.txt:1: " in said
    assert len(said) < 400


def test_a_line_with_too_few_fields_is_refused(tmp_path: Path) -> None:
    folder = cornell(tmp_path, cornell_lines(TEXTS) + "L9 +++$+++ u0\n", cornell_conversations())
    assert "movie_lines.txt:5: expected 5 fields" in refusal(lambda: pairs(folder))


def test_files_in_the_wrong_order_are_refused(tmp_path: Path) -> None:
    folder = cornell(tmp_path, cornell_lines(TEXTS), cornell_conversations(["L4", "L3"]))
    said = refusal(lambda: pairs(folder / "movie_conversations.txt", folder / "movie_lines.txt"))
    assert "name movie_lines.txt first" in said


def test_a_folder_without_the_files_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "movie_lines.txt", cornell_lines(TEXTS))
    assert "movie_conversations.txt not found" in refusal(lambda: pairs(tmp_path))


def test_files_that_link_outside_of_the_folder_are_refused(tmp_path: Path) -> None:
    folder = cornell(tmp_path / "set", cornell_lines(TEXTS), cornell_conversations())
    (folder / "movie_lines.txt").rename(tmp_path / "outside.txt")
    (folder / "movie_lines.txt").symlink_to("../outside.txt")
    assert "points outside of" in refusal(lambda: pairs(folder))


def test_a_too_long_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw, "MAX_LINE_BYTES", 1000)
    path = write(tmp_path / "pairs.tsv.gz", gzip.compress(b"a\tb\n" + b"x" * 2000))
    assert "at byte 4; is this a text file?" in refusal(lambda: pairs(path))
