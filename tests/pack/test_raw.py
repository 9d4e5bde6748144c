from __future__ import annotations

import os
from pathlib import Path

import pytest

from pack.rawsets import MANY, refusal, write
from packtrain.errors import printable
from packtrain.pack.archive import Locator
from packtrain.pack.raw import DropCounter, class_number, file_inside, sorted_classes


def test_a_locator_reads_a_file_or_a_part_of_it(tmp_path: Path) -> None:
    path = write(tmp_path / "a", b"0123456789")
    assert Locator(path).read(MANY) == b"0123456789"
    assert Locator(path, 2, 3).read(MANY) == b"234"
    assert Locator(path, 2, 0).read(MANY) == b""


def test_drops_are_counted_by_reason_and_the_first_ten_named() -> None:
    dropped = DropCounter()
    for number in range(25):
        dropped("too dark", f"{number}.jpg")
    dropped("no caption", "z.jpg")
    assert dropped.counts == {"too dark": 25, "no caption": 1}
    assert dropped.names == {"too dark": [f"{number}.jpg" for number in range(10)], "no caption": ["z.jpg"]}


@pytest.mark.parametrize(
    ("name", "shown"),
    [("käse 1.jpg", "käse 1.jpg"), ("a\nb", "a\\nb"), ("\x1b[2J", "\\x1b[2J"), ("a\u2028", "a\\u2028")],
)
def test_control_characters_in_names_are_escaped(name: str, shown: str) -> None:
    assert printable(name) == shown


def test_a_name_that_is_not_utf8_can_be_shown_and_stored() -> None:
    assert printable(os.fsdecode(b"k\xe4se.jpg")) == "k\\udce4se.jpg"


def test_classes_are_numbered_by_name_and_one_class_is_refused() -> None:
    assert sorted_classes(["dog", "cat", "dog"], "train") == ("cat", "dog")
    assert (
        refusal(lambda: sorted_classes(["dog"], "train"))
        == "train: only the class 'dog'; a classifier needs at least two"
    )
    assert refusal(lambda: sorted_classes([], "train")) == "train: no classes; a classifier needs at least two"


def test_an_unknown_class_is_named() -> None:
    assert class_number("dog", {"cat": 0, "dog": 1}, "val") == 1
    assert "val: class 'horse' is not among the 2 classes" in refusal(
        lambda: class_number("horse", {"cat": 0, "dog": 1}, "val")
    )


def test_files_are_found_below_their_folder(tmp_path: Path) -> None:
    write(tmp_path / "a.jpg", b"a")
    write(tmp_path / "deep/er/b.jpg", b"b")
    folder = str(tmp_path)
    assert file_inside(folder, "a.jpg", "list:1") == f"{folder}/a.jpg"
    assert file_inside(folder, "deep/er/b.jpg", "list:1") == f"{folder}/deep/er/b.jpg"


@pytest.mark.parametrize("name", ["missing.jpg", "deep", "a.jpg/b", "x" * 300, "/".join("x" * 3000), "loop"])
def test_missing_files_and_folders_are_not_found(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a.jpg", b"a")
    (tmp_path / "deep").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    assert file_inside(str(tmp_path), name, "list:1") is None


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../a.jpg", "a/../../b", "..", "a\0b"])
def test_names_that_point_outside_are_refused_with_their_place(tmp_path: Path, name: str) -> None:
    assert refusal(lambda: file_inside(str(tmp_path), name, "list:7")).startswith("list:7: ")


def test_links_may_point_inside_the_folder_but_not_outside(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    write(folder / "a.jpg", b"a")
    write(tmp_path / "secret/b.jpg", b"b")
    (folder / "again.jpg").symlink_to("a.jpg")
    (folder / "file.jpg").symlink_to("../secret/b.jpg")
    (folder / "folder").symlink_to("../secret")
    (folder / "twice").symlink_to("folder")
    assert file_inside(str(folder), "again.jpg", "list:1") == f"{folder}/again.jpg"
    for name in ("file.jpg", "folder/b.jpg", "twice/b.jpg"):
        assert "points outside of" in refusal(lambda name=name: file_inside(str(folder), name, "list:1"))  # type: ignore[misc]


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    write(tmp_path / "real/a.jpg", b"a")
    (tmp_path / "set").symlink_to("real")
    assert file_inside(str(tmp_path / "set"), "a.jpg", "list:1") is not None
