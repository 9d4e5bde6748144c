from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import zstandard

from pack.rawsets import MANY, coco, picture, refusal, tar, write, zipped
from packtrain.pack import raw
from packtrain.pack.coco import ONLY_FILTERED, PRECANNED, REJECTED, CocoSource
from packtrain.pack.raw import EMPTY_CAPTION, MISSING_FILE, NO_CAPTION, DropCounter, RawImage

PETS = coco([(7, "b.jpg"), (0, "a.jpg")], [(0, "a cat"), (7, "a dog"), (0, "a tabby")])


class Reading:
    """A folder of images with a captions file, and what was read from them."""

    def __init__(self, folder: Path, document: Any, images: tuple[str, ...] = ("a.jpg", "b.jpg")) -> None:
        for shade, name in enumerate(images):
            write(folder / "images" / name, picture(shade))
        (folder / "images").mkdir(exist_ok=True)
        self.images = str(folder / "images")
        text = document if isinstance(document, str | bytes) else json.dumps(document)
        self.annotations = write(folder / "captions.json", text)
        self.dropped, self.filtered = DropCounter(), DropCounter()

    def samples(self) -> list[RawImage]:
        return list(CocoSource(paths=(self.annotations, self.images)).captioned(self.dropped, self.filtered))

    def captions(self) -> dict[str, tuple[str, ...]]:
        return {sample.name: sample.captions for sample in self.samples()}

    def refusal(self) -> str:
        said = refusal(self.samples)
        assert said.startswith(self.annotations)
        return said.removeprefix(self.annotations)


def test_images_keep_the_order_of_the_file_and_all_captions(tmp_path: Path) -> None:
    reading = Reading(tmp_path, PETS)
    assert list(reading.captions().items()) == [("b.jpg", ("a dog",)), ("a.jpg", ("a cat", "a tabby"))]
    assert reading.samples()[1].where.read(MANY) == picture(0)
    assert not reading.dropped.counts
    assert not reading.filtered.counts


def test_ids_may_be_strings(tmp_path: Path) -> None:
    reading = Reading(tmp_path, coco([("x", "a.jpg"), (1, "b.jpg")], [("x", "a cat"), (1, "a dog")]))
    assert reading.captions() == {"a.jpg": ("a cat",), "b.jpg": ("a dog",)}


def test_images_may_be_in_subfolders(tmp_path: Path) -> None:
    reading = Reading(tmp_path, coco([(1, "deep/a.jpg")], [(1, "a cat")]), ("deep/a.jpg",))
    assert reading.captions() == {"deep/a.jpg": ("a cat",)}


def test_captions_that_were_precanned_or_rejected_are_filtered_and_counted(tmp_path: Path) -> None:
    document = coco([(0, "a.jpg"), (1, "b.jpg")], [(0, "one"), (0, "two"), (0, "three"), (0, "four"), (1, "unclear")])
    document["images"][0]["text_detected"] = True
    marks = [(False, False), (True, False), (False, True), (True, True), (True, False)]
    for annotation, (precanned, rejected) in zip(document["annotations"], marks, strict=True):
        annotation |= {"is_precanned": precanned, "is_rejected": rejected, "text_detected": False}
    reading = Reading(tmp_path, document)
    assert reading.captions() == {"a.jpg": ("one",)}
    assert reading.filtered.counts == {PRECANNED: 3, REJECTED: 1, ONLY_FILTERED: 1}
    assert reading.filtered.names[ONLY_FILTERED] == ["b.jpg"]
    assert not reading.dropped.counts


def test_images_without_a_file_or_a_caption_are_dropped(tmp_path: Path) -> None:
    images = [(0, "a.jpg"), (1, "gone.jpg"), (2, "b.jpg"), (3, "x" * 300)]
    reading = Reading(tmp_path, coco(images, [(0, "a cat"), (1, "a ghost"), (3, "a long name")]))
    assert reading.captions() == {"a.jpg": ("a cat",)}
    assert reading.dropped.names == {MISSING_FILE: ["gone.jpg", "x" * 300], NO_CAPTION: ["b.jpg"]}


def test_empty_captions_are_left_out_and_an_image_with_no_other_is_dropped(tmp_path: Path) -> None:
    reading = Reading(tmp_path, coco([(0, "a.jpg"), (1, "b.jpg")], [(0, "a cat"), (0, ""), (1, " \n\u2028")]))
    assert reading.captions() == {"a.jpg": ("a cat",)}
    assert reading.filtered.counts == {EMPTY_CAPTION: 2}
    assert reading.dropped.names == {NO_CAPTION: ["b.jpg"]}


def test_a_byte_order_mark_is_ignored_and_all_characters_are_kept(tmp_path: Path) -> None:
    text = json.dumps(coco([(0, "a.jpg")], [(0, "a\u2028cat\r\n 🐈")]), ensure_ascii=False)
    assert Reading(tmp_path, b"\xef\xbb\xbf" + text.encode()).captions() == {"a.jpg": ("a\u2028cat\r\n 🐈",)}


@pytest.mark.parametrize(
    ("document", "said"),
    [
        pytest.param(coco([(1, "a.jpg"), (1, "b.jpg")], [(1, "x")]), "images[1]: id 1 occurs twice", id="id"),
        pytest.param(coco([(1, "a.jpg"), (2, "a.jpg")], [(1, "x")]), "images[1]: file 'a.jpg' occurs twice", id="file"),
        pytest.param(coco([(1, "a.jpg")], [(2, "x")]), "annotations[0]: image 2 is not among", id="dangling"),
        pytest.param(coco([(1, "a.jpg")], [("1", "x")]), "annotations[0]: image '1' is not among", id="kind of id"),
        pytest.param(coco([(True, "a.jpg")], [(1, "x")]), "images[0].id: must be an integer", id="boolean id"),
        pytest.param(coco([(1.0, "a.jpg")], [(1, "x")]), "not a fraction", id="fraction"),
        pytest.param(coco([(None, "a.jpg")], [(1, "x")]), "images[0].id: must be", id="no id"),
        pytest.param(coco([(1, "../a.jpg")], [(1, "x")]), "'../a.jpg' must be a path below", id="dots"),
        pytest.param(coco([(1, "/etc/passwd")], [(1, "x")]), "'/etc/passwd' must be a path below", id="absolute"),
        pytest.param(coco([(1, "a\0.jpg")], [(1, "x")]), "must be a path below", id="NUL"),
        pytest.param(coco([(1, "\ud800")], [(1, "x")]), "images[0].file_name: must be a string", id="lone surrogate"),
        pytest.param(coco([(1, "a.jpg")], [(1, "\ud800")]), "annotations[0].caption: must be a string", id="half"),
        pytest.param({"images": [], "annotations": []}, 'the list "images" is empty', id="empty"),
        pytest.param({"images": [{"id": 1, "file_name": "a.jpg"}]}, 'must have a list "annotations"', id="test set"),
        pytest.param({"images": {"id": 1}}, 'must have a list "images"', id="no list"),
        pytest.param({"images": [3]}, "images[0]: must be an object, not a number", id="no object"),
        pytest.param([], 'must be an object with "images"', id="list"),
        pytest.param("", "not JSON: Expecting value at line 1, column 1", id="nothing"),
        pytest.param('{"images": [\n{"id": 1,}]}', "at line 2, column", id="comma"),
        pytest.param('{"images": [NaN]}', "NaN is not a JSON value", id="NaN"),
        pytest.param('{"images": [-Infinity]}', "-Infinity is not a JSON value", id="infinity"),
        pytest.param('{"images": [' + "9" * 5000 + "]}", "invalid JSON", id="huge number"),
        pytest.param("[" * 200_000, "nested too deep", id="deep"),
        pytest.param('{"a":' * 200_000, "nested too deep", id="deep objects"),
        pytest.param('{"images": [], "images": []}', "the key 'images' occurs twice", id="key"),
        pytest.param(b'{"a": "\xff"}', "not UTF-8 at byte 7", id="not UTF-8"),
        pytest.param('{"images": []}'.encode("utf-16"), "not UTF-8 at byte 0", id="UTF-16"),
    ],
)  # fmt: skip
def test_an_invalid_document_is_refused_with_the_place(tmp_path: Path, document: Any, said: str) -> None:
    assert said in Reading(tmp_path, document).refusal()


def test_the_same_annotation_id_twice_is_refused(tmp_path: Path) -> None:
    document = coco([(1, "a.jpg")], [(1, "x"), (1, "y")])
    document["annotations"][1]["id"] = 0
    assert Reading(tmp_path, document).refusal() == ": annotations[1]: id 0 occurs twice"


def test_annotations_need_no_ids(tmp_path: Path) -> None:
    document = coco([(1, "a.jpg")], [(1, "x"), (1, "y")])
    for annotation in document["annotations"]:
        del annotation["id"]
    assert Reading(tmp_path, document).captions() == {"a.jpg": ("x", "y")}


@pytest.mark.parametrize("value", [1, "true", None])
def test_flags_that_are_not_booleans_are_refused(tmp_path: Path, value: object) -> None:
    document = coco([(1, "a.jpg")], [(1, "x")])
    document["annotations"][0]["is_precanned"] = value
    assert "annotations[0].is_precanned: must be true or false" in Reading(tmp_path, document).refusal()


def test_links_that_point_outside_of_the_images_are_refused(tmp_path: Path) -> None:
    reading = Reading(tmp_path, coco([(1, "link.jpg")], [(1, "x")]))
    (tmp_path / "images/link.jpg").symlink_to("/etc/hostname")
    assert "points outside of" in reading.refusal()


def test_a_missing_folder_or_file_is_named(tmp_path: Path) -> None:
    reading = Reading(tmp_path, PETS)
    (tmp_path / "captions.json").unlink()
    assert reading.refusal() == ": No such file or directory"
    reading.images += "/none"
    assert refusal(reading.samples) == f"{reading.images}: not found; expected a folder, tar or zip of images"


ARCHIVES = {"tar": tar, "zip": zipped}


@pytest.mark.parametrize("form", ARCHIVES)
@pytest.mark.parametrize("top", ["", "train2014/"])
def test_images_may_be_in_an_archive_with_or_without_their_folder(tmp_path: Path, form: str, top: str) -> None:
    reading = Reading(tmp_path, coco([(0, "a.jpg"), (1, "deep/b.jpg"), (2, "c.jpg")], [(0, "x"), (1, "y"), (2, "z")]))
    members = [(f"{top}a.jpg", picture(5)), (f"{top}deep/b.jpg", picture(6)), (f"{top}notes.txt", b"none")]
    reading.images = write(tmp_path / "archive", ARCHIVES[form](members))  # the content decides, not the name
    assert [(one.name, one.where.read(MANY)) for one in reading.samples()] == [
        ("a.jpg", picture(5)), ("deep/b.jpg", picture(6)),
    ]  # fmt: skip
    assert reading.dropped.names == {MISSING_FILE: ["c.jpg"]}


def test_images_may_be_in_a_folder_of_an_archive(tmp_path: Path) -> None:
    reading = Reading(tmp_path, coco([(0, "a.jpg")], [(0, "x")]))
    members = [("set/one/a.jpg", picture(1)), ("set/two/a.jpg", picture(2))]
    reading.images = write(tmp_path / "images.zip", zipped(members)) + "#set/two"
    assert [one.where.read(MANY) for one in reading.samples()] == [picture(2)]
    (tmp_path / "images.zip").unlink()
    assert refusal(reading.samples) == f"{reading.images}: not found; expected a folder, tar or zip of images"


def test_an_ambiguous_name_in_an_archive_is_refused(tmp_path: Path) -> None:
    reading = Reading(tmp_path, coco([(0, "a.jpg")], [(0, "x")]))
    reading.images = write(tmp_path / "images.zip", zipped([("one/a.jpg", picture()), ("two/a.jpg", picture(1))]))
    assert "'a.jpg' is in several folders of" in reading.refusal()


def test_a_name_that_points_outside_of_an_archive_is_refused(tmp_path: Path) -> None:
    reading = Reading(tmp_path, coco([(0, "../a.jpg")], [(0, "x")]))
    reading.images = write(tmp_path / "images.tar", tar([("a.jpg", picture())]))
    assert "'../a.jpg' must be a path below" in reading.refusal()


def test_a_file_that_is_not_an_archive_is_refused(tmp_path: Path) -> None:
    reading = Reading(tmp_path, PETS)
    reading.images = write(tmp_path / "images.tar", b"nothing of the kind" * 100)
    assert refusal(reading.samples).startswith(f"{reading.images}: not a tar")


def test_too_large_json_is_refused_without_reading_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw, "MAX_JSON_BYTES", 100)
    assert "split the file" in Reading(tmp_path, PETS).refusal()


@pytest.mark.parametrize("place", ["folder", "zip", "tar"])
@pytest.mark.parametrize(
    ("listed", "stored"), [("u\u0308/e\u0301.jpg", "\u00fc/\u00e9.jpg"), ("\u00fc.jpg", "u\u0308.jpg")]
)
def test_an_image_is_found_however_its_accents_are_stored(tmp_path: Path, place: str, listed: str, stored: str) -> None:
    reading = Reading(tmp_path, coco([(0, listed)], [(0, "a cat")]), (stored,))
    if place != "folder":
        pack = {"zip": zipped, "tar": tar}[place]
        reading.images = write(tmp_path / "images.pack", pack([(stored, picture())]))
    [sample] = reading.samples()
    assert sample.where.read(MANY) == picture()


@pytest.mark.parametrize("ending", [".gz", ".GZ", ".zst"])
def test_captions_may_be_compressed(tmp_path: Path, ending: str) -> None:
    reading = Reading(tmp_path, PETS)
    compress = zstandard.compress if ending == ".zst" else gzip.compress
    listing = write(tmp_path / f"captions.json{ending}", compress(json.dumps(PETS).encode()))
    assert CocoSource.recognize([listing, reading.images])
    reading.annotations = listing
    assert len(reading.captions()) == 2
