from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pack.rawsets import MANY, json_lines, picture, refusal, write, zipped
from packtrain.pack.folder import FolderSource
from packtrain.pack.raw import EMPTY_CAPTION, MISSING_FILE, NO_CAPTION, DropCounter

LABELLED = [{"image": "b.jpg", "label": "dog"}, {"image": "deep/a.jpg", "label": "cat", "source_of_it": "me"}]
CAPTIONED = [{"image": "b.jpg", "caption": "a dog"}, {"image": "deep/a.jpg", "caption": ["a cat", "a tabby"]}]
TEXTS = [{"source": "one", "target": "eins"}, {"source": "two\n", "target": " zwei"}]


def of(path: str) -> FolderSource:
    return FolderSource(paths=(path,))


def folder(path: Path, *records: Any) -> FolderSource:
    """Two pictures, and a list with these lines: texts as they are, other values as JSON."""
    write(path / "b.jpg", picture(1))
    write(path / "deep/a.jpg", picture(2))
    lines = (record + "\n" if isinstance(record, str) else json_lines(record) for record in records)
    return of(write(path / "samples.jsonl", "".join(lines)))


def labeled(source: FolderSource, drop: DropCounter | None = None) -> list[tuple[str, int | None]]:
    return [
        (sample.name, sample.label) for sample in source.labeled(source.classes(), drop or DropCounter(), DropCounter())
    ]


def read(source: FolderSource) -> object:
    """All samples, as the first line says what they are."""
    match source.pack_kind():
        case "labels":
            return labeled(source)
        case "captions":
            return [(sample.name, sample.captions) for sample in source.captioned(DropCounter(), DropCounter())]
        case _:
            return [(pair.source, pair.target) for pair in source.pairs(DropCounter())]


def test_the_first_line_decides_the_kind_of_samples(tmp_path: Path) -> None:
    assert folder(tmp_path, *LABELLED).pack_kind() == "labels"
    assert folder(tmp_path, *CAPTIONED).pack_kind() == "captions"
    assert folder(tmp_path, *TEXTS).pack_kind() == "pairs"


def test_labels_become_classes_sorted_by_name(tmp_path: Path) -> None:
    source = folder(tmp_path, *LABELLED)
    assert source.classes() == ("cat", "dog")
    assert labeled(source) == [("b.jpg", 1), ("deep/a.jpg", 0)]


def test_images_are_found_beside_the_list(tmp_path: Path) -> None:
    first = next(folder(tmp_path, *LABELLED).labeled(("cat", "dog"), DropCounter(), DropCounter()))
    assert first.where.read(MANY) == picture(1)


def test_a_list_in_an_archive_may_have_texts_but_not_images(tmp_path: Path) -> None:
    members = [
        ("texts.jsonl", "".join(map(json_lines, TEXTS)).encode()),
        ("images.jsonl", json_lines(LABELLED[0]).encode()),
    ]
    path = write(tmp_path / "set.zip", zipped(members))
    assert read(of(f"{path}#texts.jsonl")) == [("one", "eins"), ("two\n", " zwei")]
    told = refusal(lambda: list(of(f"{path}#images.jsonl").named_files()))
    assert told == f"{path}: the images that images.jsonl names cannot be read inside; unpack it first"


def test_images_have_one_caption_or_several(tmp_path: Path) -> None:
    assert read(folder(tmp_path, *CAPTIONED)) == [("b.jpg", ("a dog",)), ("deep/a.jpg", ("a cat", "a tabby"))]


def test_texts_are_pairs_and_keep_every_character(tmp_path: Path) -> None:
    assert read(folder(tmp_path, *TEXTS)) == [("one", "eins"), ("two\n", " zwei")]


def test_an_unknown_label_is_refused(tmp_path: Path) -> None:
    source = folder(tmp_path, *LABELLED)
    said = refusal(lambda: list(source.labeled(("cat", "horse"), DropCounter(), DropCounter())))
    assert said == f"{source.path}:1: class 'dog' is not among the 2 classes of the training data"


def test_a_single_label_is_refused(tmp_path: Path) -> None:
    assert "only the class 'dog'" in refusal(folder(tmp_path, LABELLED[0]).classes)


def test_images_that_are_missing_are_dropped(tmp_path: Path) -> None:
    dropped = DropCounter()
    source = folder(tmp_path, *LABELLED, {"image": "gone.jpg", "label": "cat"}, {"image": "deep", "label": "cat"})
    assert len(labeled(source, dropped)) == 2
    assert dropped.names == {MISSING_FILE: ["gone.jpg", "deep"]}


def test_empty_captions_are_left_out_and_an_image_with_no_other_is_dropped(tmp_path: Path) -> None:
    records = [{"image": "b.jpg", "caption": ["a dog", " "]}, {"image": "deep/a.jpg", "caption": ""}]
    source = folder(tmp_path, *records, {"image": "c.jpg", "caption": []})
    dropped, filtered = DropCounter(), DropCounter()
    assert [sample.captions for sample in source.captioned(dropped, filtered)] == [("a dog",)]
    assert filtered.names == {EMPTY_CAPTION: ["b.jpg", "deep/a.jpg"]}
    assert dropped.names == {NO_CAPTION: ["deep/a.jpg", "c.jpg"]}


def test_a_byte_order_mark_blank_lines_and_carriage_returns_are_ignored(tmp_path: Path) -> None:
    lines = json_lines(*TEXTS).replace("\n", "\r\n\n")
    assert read(folder(tmp_path, "\ufeff" + lines)) == [("one", "eins"), ("two\n", " zwei")]


def test_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    assert read(folder(tmp_path, '{"source": "a\u2028b", "target": "c\u0085d"}')) == [("a\u2028b", "c\u0085d")]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        pytest.param("{", "not JSON", id="not JSON"),
        pytest.param("[1]", "must be a JSON object", id="no object"),
        pytest.param("[" * 100_000, "nested too deep", id="deep"),
        pytest.param('{"image": "b.jpg", "label": NaN}', "NaN is not a JSON value", id="NaN"),
        pytest.param('{"image": "x", "image": "y", "label": "cat"}', "the key 'image' occurs twice", id="key"),
        pytest.param({"image": "c.jpg", "label": 3}, '"label" must be a string', id="number"),
        pytest.param({"image": "c.jpg", "label": " "}, '"label" is empty', id="empty label"),
        pytest.param({"image": "c.jpg", "label": "\ud800"}, '"label" must be a string', id="lone surrogate"),
        pytest.param({"image": ["c.jpg"], "label": "cat"}, '"image" must be a string', id="image"),
        pytest.param({"image": "c.jpg", "lable": "cat"}, "'lable': did you mean 'label'?", id="misspelt"),
        pytest.param({"image": "c.jpg"}, 'must have "image" and "label", or', id="without label"),
        pytest.param({"image": "c.jpg", "label": "cat", "caption": "a cat"}, "; remove one", id="two shapes"),
        pytest.param({"image": "c.jpg", "caption": "a cat"}, "must have the same keys", id="other shape"),
        pytest.param({"source": "a", "target": "b"}, "must have the same keys", id="text among images"),
        pytest.param({"image": "b.jpg", "label": "cat"}, "image 'b.jpg' occurs twice", id="twice"),
        pytest.param({"image": "../b.jpg", "label": "cat"}, "must be a path below", id="dots"),
        pytest.param({"image": "/etc/hostname", "label": "cat"}, "must be a path below", id="absolute"),
        pytest.param({"image": "", "label": "cat"}, "must be a path below", id="no name"),
        pytest.param({"image": "out.jpg", "label": "cat"}, "points outside of", id="link"),
        pytest.param({"image": "out/hostname", "label": "cat"}, "points outside of", id="link of a folder"),
    ],
)
def test_a_bad_line_is_refused_with_its_place(tmp_path: Path, line: Any, said: str) -> None:
    (tmp_path / "out.jpg").symlink_to("/etc/hostname")
    (tmp_path / "out").symlink_to("/etc")
    source = folder(tmp_path, *LABELLED, line)
    found = refusal(lambda: read(source))
    assert found.startswith(f"{source.path}:3: ")
    assert said in found


@pytest.mark.parametrize("caption", [3, None, {"a": "b"}, ["a cat", 3], [["a cat"]], "\ud800"])
def test_captions_that_are_not_strings_are_refused(tmp_path: Path, caption: object) -> None:
    source = folder(tmp_path, CAPTIONED[0], {"image": "c.jpg", "caption": caption})
    assert refusal(lambda: read(source)) == f'{source.path}:2: "caption" must be a string or a list of strings'


def test_bad_utf8_is_refused_with_its_byte(tmp_path: Path) -> None:
    path = write(tmp_path / "samples.jsonl", b'{"source": "a", "target": "b"}\n\xff\n')
    assert f"{path}:2: not UTF-8 at byte 31" in refusal(lambda: read(of(path)))


def test_an_empty_list_is_refused(tmp_path: Path) -> None:
    assert "samples.jsonl: empty" in refusal(folder(tmp_path, "", " ").pack_kind)


def test_a_missing_list_is_named(tmp_path: Path) -> None:
    assert refusal(of(str(tmp_path / "x.jsonl")).pack_kind) == f"{tmp_path}/x.jsonl: No such file or directory"
