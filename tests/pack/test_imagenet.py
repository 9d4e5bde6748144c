from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pack.rawsets import (
    MANY,
    class_tars,
    header,
    meta_mat,
    numbered,
    picture,
    refusal,
    tar,
    write,
    write_classes,
    zipped,
)
from packtrain.errors import Mistake
from packtrain.pack.devkit import devkit_synsets
from packtrain.pack.imagenet import CIRCLE, EMPTY_CLASS, NO_CLASS, NO_FILE, NO_IMAGE, ImageNetSource
from packtrain.pack.raw import HIDDEN, MISSING_FILE, NO_PICTURE, DropCounter, RawImage

ANIMALS = {"n02": ["b.JPEG", "a.JPEG"], "n01": ["c.JPEG"], "n03": ["d.JPEG", "e.JPEG", "f.JPEG"]}


def samples(
    *paths: str,
    classes: tuple[str, ...] | None = None,
    drop: DropCounter | None = None,
    filtered: DropCounter | None = None,
    links: bool = False,
) -> list[RawImage]:
    source = ImageNetSource(paths=paths, links=links)
    return list(source.labeled(classes or source.classes(), drop or DropCounter(), filtered or DropCounter()))


def labels(*paths: str, classes: tuple[str, ...] | None = None) -> dict[str, int | None]:
    return {sample.name: sample.label for sample in samples(*paths, classes=classes)}


def flat(folder: Path, truth: str, synsets: str | None = "n01\nn02\nn03\n", pictures: int = 3) -> tuple[str, ...]:
    """A validation tar with its ground truth and, if there is one, the list of synsets."""
    paths = [
        write(folder / "val.tar", tar((name, picture(shade)) for shade, name in enumerate(numbered(pictures)))),
        write(folder / "truth.txt", truth),
    ]
    return (*paths, write(folder / "synsets.txt", synsets)) if synsets is not None else tuple(paths)


def test_a_class_is_the_same_however_its_accents_are_stored(tmp_path: Path) -> None:
    """Macs store an accent and its letter apart."""
    train = write_classes(tmp_path / "train", {"caf\u00e9": ["a.jpg"], "tea": ["b.jpg"]})
    valid = write_classes(tmp_path / "valid", {"cafe\u0301": ["c.jpg"], "tea": ["d.jpg"]})
    zips = [
        write(tmp_path / f"{name}.zip", zipped([(f"{class_name}/a.jpg", picture()), ("tea/b.jpg", picture(1))]))
        for name, class_name in (("composed", "caf\u00e9"), ("apart", "cafe\u0301"))
    ]
    for source in (train, valid, *zips):
        assert ImageNetSource(paths=(source,)).classes() == ("caf\u00e9", "tea")
        assert list(labels(source, classes=("caf\u00e9", "tea")).values()) == [0, 1]


class TestFoldersOfClasses:
    def test_the_folder_is_the_class_and_everything_is_sorted(self, tmp_path: Path) -> None:
        train = write_classes(tmp_path / "train", ANIMALS)
        assert ImageNetSource(paths=(train,)).classes() == ("n01", "n02", "n03")
        assert [(sample.name, sample.label) for sample in samples(train)] == [
            ("n01/c.JPEG", 0),
            ("n02/a.JPEG", 1),
            ("n02/b.JPEG", 1),
            ("n03/d.JPEG", 2),
            ("n03/e.JPEG", 2),
            ("n03/f.JPEG", 2),
        ]

    def test_samples_locate_their_bytes(self, tmp_path: Path) -> None:
        train = write_classes(tmp_path / "train", ANIMALS)
        assert samples(train)[0].where.read(MANY) == picture(1)

    def test_validation_uses_the_class_numbers_of_training(self, tmp_path: Path) -> None:
        val = write_classes(tmp_path / "val", {"n03": ["x"], "n01": ["y"]})
        assert labels(val, classes=("n01", "n02", "n03")) == {"n01/y": 0, "n03/x": 2}

    def test_an_unknown_class_is_refused_before_the_first_image(self, tmp_path: Path) -> None:
        val = write_classes(tmp_path / "val", {"n01": ["x"], "n09": ["y"]})
        found = ImageNetSource(paths=(val,)).labeled(("n01", "n02"), DropCounter(), DropCounter())
        assert refusal(lambda: next(found)) == f"{val}: class 'n09' is not among the 2 classes of the training data"

    def test_a_single_class_is_refused(self, tmp_path: Path) -> None:
        train = write_classes(tmp_path / "train", {"n01": ["x"]})
        assert "only the class 'n01'" in refusal(ImageNetSource(paths=(train,)).classes)

    def test_a_class_without_images_is_reported_and_keeps_its_number(self, tmp_path: Path) -> None:
        train = write_classes(tmp_path / "train", {"n01": ["x"], "n02": [], "n03": ["y"]})
        dropped = DropCounter()
        assert [sample.label for sample in samples(train, drop=dropped)] == [0, 2]
        assert dropped.names == {EMPTY_CLASS: ["n02"]}

    def test_a_source_without_images_is_refused(self, tmp_path: Path) -> None:
        train = write_classes(tmp_path / "train", {"n01": [], "n02": []})
        assert refusal(lambda: samples(train)) == f"{train}: contains no images"

    def test_images_below_a_class_folder_belong_to_the_class(self, tmp_path: Path) -> None:
        train = write_classes(tmp_path / "train", {"n01": ["z.jpg"], "n02": ["y.JPG"]})
        write(tmp_path / "train/n01/b/deep/1.jpg", picture(5))
        write(tmp_path / "train/n01/a/2.jpg", picture(6))
        (tmp_path / "train/n02/empty").mkdir()
        assert list(labels(train).items()) == [
            ("n01/z.jpg", 0),
            ("n01/a/2.jpg", 0),
            ("n01/b/deep/1.jpg", 0),
            ("n02/y.JPG", 1),
        ]

    def test_what_is_not_a_sample_is_counted(self, tmp_path: Path) -> None:
        classes = {"n01": ["x", ".DS_Store", "._x", "Thumbs.db", "desktop.ini"], "n02": ["y"]}
        train = write_classes(tmp_path / "train", {**classes, ".cache": ["z"], "__MACOSX": ["._n01"]})
        write(tmp_path / "train/README", "hello")
        write(tmp_path / "train/n01/__MACOSX/._x", "?")
        os.mkfifo(tmp_path / "train/n01/pipe")
        (tmp_path / "train/n02/again").symlink_to("../n02")
        filtered = DropCounter()
        assert [sample.name for sample in samples(train, filtered=filtered)] == ["n01/x", "n02/y"]
        assert filtered.counts == {HIDDEN: 7, NO_CLASS: 1, NO_FILE: 1, CIRCLE: 1}

    def test_what_is_no_picture_by_its_name_is_no_sample(self, tmp_path: Path) -> None:
        others = ["README.txt", "SHA256SUMS", "md5sum.txt", "labels.CSV", "index.html", "photos.db", "README"]
        pictures = ["x", "y.JPEG", "notes.txt.jpg", "readme-1.png", "1.heic", "2.xyz"]
        train = write_classes(tmp_path / "train", {"n01": [*others, *pictures], "n02": ["z"]})
        (tmp_path / "train/n02/LICENSE").symlink_to("nowhere")
        (tmp_path / "train/n02/photos.db").mkdir()
        write(tmp_path / "train/n02/photos.db/deep", picture(5))
        dropped, filtered = DropCounter(), DropCounter()
        found = {sample.name for sample in samples(train, drop=dropped, filtered=filtered)}
        assert found == {*(f"n01/{name}" for name in pictures), "n02/z", "n02/photos.db/deep"}
        assert filtered.counts == {NO_PICTURE: len(others) + 1}
        assert not dropped.counts

    def test_splits_are_not_taken_for_classes(self, tmp_path: Path) -> None:
        data = write_classes(tmp_path / "data", {"train": ["x"], "val": ["y"]})
        assert refusal(ImageNetSource(paths=(data,)).classes) == (
            f"{data}: train and val are splits, not classes; name one of them: {data}/train"
        )

    def test_images_with_names_that_are_not_utf8_are_samples(self, tmp_path: Path) -> None:
        train = write_classes(tmp_path / "train", {"n01": [os.fsdecode(b"k\xe4se")], "n02": ["y"]})
        first = samples(train)[0]
        assert first.name == "n01/k\\udce4se"
        assert first.where.read(MANY) == picture(0)

    def test_a_class_whose_name_is_not_utf8_is_refused(self, tmp_path: Path) -> None:
        train = write_classes(tmp_path / "train", {os.fsdecode(b"k\xe4se"): ["x"], "n02": ["y"]})
        assert "'k\\udce4se' is not UTF-8; rename it" in refusal(ImageNetSource(paths=(train,)).classes)

    def test_links_inside_the_source_are_followed(self, tmp_path: Path) -> None:
        train = write_classes(tmp_path / "train", {"n01": ["x"], "n02": ["y"]})
        (tmp_path / "train/n02/z").symlink_to("../n01/x")
        (tmp_path / "train/n03").symlink_to("n01")
        assert labels(train) == {"n01/x": 0, "n02/y": 1, "n02/z": 1, "n03/x": 2}

    @pytest.mark.parametrize(("link", "target"), [("n01/z", "/etc/hostname"), ("n03", "/etc"), ("n01/z", "/nowhere")])
    def test_links_that_point_outside_of_the_source_are_refused(self, tmp_path: Path, link: str, target: str) -> None:
        train = write_classes(tmp_path / "train", {"n01": ["x"], "n02": ["y"]})
        (tmp_path / "train" / link).symlink_to(target)
        assert "points outside of" in refusal(lambda: samples(train))

    def test_links_that_point_outside_are_followed_if_the_job_allows_it(self, tmp_path: Path) -> None:
        shared = write_classes(tmp_path / "shared", {"n02": ["y"], "loose": ["z"]})
        train = write_classes(tmp_path / "train", {"n01": ["x"]})
        (tmp_path / "train/n02").symlink_to(f"{shared}/n02")
        (tmp_path / "train/n01/z").symlink_to(f"{shared}/loose/z")
        (tmp_path / "train/n01/gone").symlink_to("/nowhere")
        dropped = DropCounter()
        found = samples(train, links=True, drop=dropped)
        assert {sample.name: sample.where.read(MANY) for sample in found} == {
            "n01/x": picture(0),
            "n01/z": picture(1),
            "n02/y": picture(0),
        }
        assert dropped.counts == {MISSING_FILE: 1}

    def test_broken_links_are_dropped(self, tmp_path: Path) -> None:
        train = write_classes(tmp_path / "train", {"n01": ["x"], "n02": ["y"]})
        (tmp_path / "train/n01/gone").symlink_to("nothing")
        (tmp_path / "train/n01/loop").symlink_to("loop")
        (tmp_path / "train/n09").symlink_to("n09")
        dropped = DropCounter()
        assert len(samples(train, drop=dropped)) == 2
        assert dropped.counts == {MISSING_FILE: 2}

    def test_images_without_class_folders_need_a_ground_truth(self, tmp_path: Path) -> None:
        write(tmp_path / "val/1.JPEG", picture())
        assert "name the ground truth too" in refusal(lambda: samples(str(tmp_path / "val")))

    def test_a_missing_path_is_named(self, tmp_path: Path) -> None:
        missing = str(tmp_path / "train")
        assert refusal(lambda: samples(missing)) == f"{missing}: No such file or directory"

    def test_a_source_has_one_to_three_paths(self) -> None:
        with pytest.raises(ValidationError, match="takes 1 or 2 or 3 paths, not 0"):
            ImageNetSource(paths=())


class TestTarOfTars:
    def test_a_tar_of_tars_reads_like_folders(self, tmp_path: Path) -> None:
        train = write(tmp_path / "train.tar", class_tars(ANIMALS))
        folders = write_classes(tmp_path / "train", ANIMALS)
        assert ImageNetSource(paths=(train,)).classes() == ImageNetSource(paths=(folders,)).classes()
        assert {(s.name, s.label, s.where.read(MANY)) for s in samples(train)} == {
            (s.name, s.label, s.where.read(MANY)) for s in samples(folders)
        }
        assert {sample.where.path for sample in samples(train)} == {train}

    def test_images_keep_the_order_of_the_tar(self, tmp_path: Path) -> None:
        train = write(tmp_path / "train.tar", class_tars(ANIMALS))
        assert list(labels(train))[:3] == ["n02/b.JPEG", "n02/a.JPEG", "n01/c.JPEG"]

    def test_a_class_tar_without_images_is_reported(self, tmp_path: Path) -> None:
        train = write(tmp_path / "train.tar", class_tars({"n01": ["x"], "n02": []}))
        dropped = DropCounter()
        assert len(samples(train, drop=dropped)) == 1
        assert dropped.names == {EMPTY_CLASS: ["n02"]}

    def test_hidden_members_are_not_samples(self, tmp_path: Path) -> None:
        inner = tar([("._x", b"?"), ("x", picture())])
        train = write(tmp_path / "train.tar", tar([("._n01.tar", b"?"), ("n01.tar", inner), ("n02.tar", inner)]))
        assert labels(train) == {"n01/x": 0, "n02/x": 1}

    def test_images_beside_the_class_tars_are_refused(self, tmp_path: Path) -> None:
        train = write(tmp_path / "train.tar", tar([("n01.tar", tar([])), ("x.JPEG", picture())]))
        assert "x.JPEG is not the tar of a class" in refusal(ImageNetSource(paths=(train,)).classes)

    def test_the_validation_tar_without_ground_truth_is_refused_with_advice(self, tmp_path: Path) -> None:
        val = write(tmp_path / "val.tar", tar([(numbered(1)[0], picture())]))
        assert "[images, devkit]" in refusal(ImageNetSource(paths=(val,)).classes)

    def test_two_tars_of_a_class_are_refused(self, tmp_path: Path) -> None:
        train = write(tmp_path / "train.tar", tar([("a/n01.tar", tar([])), ("b/n01.tar", tar([]))]))
        assert "two tars of class 'n01'" in refusal(ImageNetSource(paths=(train,)).classes)

    def test_damage_inside_a_class_names_both_tars(self, tmp_path: Path) -> None:
        inner = header("x", b"2", linkname="/etc/passwd") + bytes(1024)
        train = write(tmp_path / "train.tar", tar([("n01.tar", inner), ("n02.tar", tar([]))]))
        said = refusal(lambda: samples(train))
        assert said == f"{train}: n01.tar: member 'x' at byte 0 is a symbolic link"


ARCHIVES: dict[str, Callable[[Sequence[tuple[str, bytes]]], bytes]] = {
    "train.tar": tar,
    "train.tar.gz": lambda files: gzip.compress(tar(files)),
    "train.zip": zipped,
}
CLASS_FILES = [
    ("n02/b.JPEG", picture(1)),
    ("n01/c.JPEG", picture(2)),
    ("n02/deep/a.JPEG", picture(3)),
    ("__MACOSX/n02/._b.JPEG", b"?"),
    ("n01/.DS_Store", b"?"),
    ("LABELS", b"?"),
    ("README", b"?"),
    ("n01/README.txt", b"?"),
    ("docs/index.html", b"?"),
]


@pytest.mark.parametrize("name", ARCHIVES)
class TestClassFoldersInArchives:
    def test_an_archive_reads_like_a_folder(self, tmp_path: Path, name: str) -> None:
        train = write(tmp_path / name, ARCHIVES[name](CLASS_FILES))
        filtered = DropCounter()
        found = [(sample.name, sample.label, sample.where.read(MANY)) for sample in samples(train, filtered=filtered)]
        assert found == [
            ("n02/b.JPEG", 1, picture(1)),
            ("n01/c.JPEG", 0, picture(2)),
            ("n02/deep/a.JPEG", 1, picture(3)),
        ]
        assert filtered.counts == {HIDDEN: 2, NO_CLASS: 1, NO_PICTURE: 3}

    def test_folders_around_the_class_folders_do_not_matter(self, tmp_path: Path, name: str) -> None:
        around = [(f"data/train/{file}", data) for file, data in CLASS_FILES]
        train = write(tmp_path / name, ARCHIVES[name]([*around, ("LICENSE", b"?")]))
        assert labels(train) == {"n01/c.JPEG": 0, "n02/b.JPEG": 1, "n02/deep/a.JPEG": 1}

    def test_a_folder_of_an_archive_with_several_splits_is_named(self, tmp_path: Path, name: str) -> None:
        both = [(f"set/{split}/{file}", data) for split in ("train", "val") for file, data in CLASS_FILES]
        archive = write(tmp_path / name, ARCHIVES[name](both))
        assert labels(f"{archive}#set/val") == {"n01/c.JPEG": 0, "n02/b.JPEG": 1, "n02/deep/a.JPEG": 1}
        assert refusal(ImageNetSource(paths=(archive,)).classes) == (
            f"{archive}: train and val are splits, not classes; name one of them: {archive}#set/train"
        )

    def test_numbered_images_are_read_from_any_archive(self, tmp_path: Path, name: str) -> None:
        files = [(f"val/{file}", picture(shade)) for shade, file in enumerate(numbered(3))]
        val, truth = write(tmp_path / name, ARCHIVES[name](files)), write(tmp_path / "truth", "n02\nn01\nn02\n")
        assert [(sample.label, sample.where.read(MANY)) for sample in samples(val, truth)] == [
            (1, picture(0)),
            (0, picture(1)),
            (1, picture(2)),
        ]


def test_class_tars_in_a_compressed_tar_are_refused(tmp_path: Path) -> None:
    train = write(tmp_path / "train.tgz", gzip.compress(class_tars(ANIMALS)))
    assert "the tars in it cannot be read in place; decompress it first" in refusal(
        ImageNetSource(paths=(train,)).classes
    )


SYNSETS = {1: "n02", 2: "n03", 3: "n01", 4: "n00"}  # the devkit's order is not that of the names


@pytest.fixture(params=["downloaded", "unpacked"])
def devkit(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., str]:
    def make(truth: str = "3\n1\n2\n", meta: bytes = meta_mat(SYNSETS)) -> str:
        files = {
            "data/meta.mat": meta,
            "data/ILSVRC2012_validation_ground_truth.txt": truth.encode(),
            "readme.txt": b"",
        }
        if request.param == "downloaded":
            packed = tar((f"ILSVRC2012_devkit_t12/{name}", data) for name, data in files.items())
            return write(tmp_path / "ILSVRC2012_devkit_t12.tar.gz", gzip.compress(packed))
        for name, data in files.items():
            write(tmp_path / "ILSVRC2012_devkit_t12" / name, data)
        return str(tmp_path / "ILSVRC2012_devkit_t12")

    return make


class TestDevkit:
    def test_its_numbers_are_those_of_its_synsets(self, tmp_path: Path, devkit: Callable[..., str]) -> None:
        val, *_ = flat(tmp_path, "")
        one, two, three = numbered(3)
        assert labels(val, devkit(), classes=("n01", "n02", "n03")) == {one: 0, two: 1, three: 2}
        assert ImageNetSource(paths=(val, devkit())).classes() == ("n01", "n02", "n03")

    @pytest.mark.parametrize(
        "meta",
        [
            meta_mat(SYNSETS, compress=False),
            meta_mat(SYNSETS, order=">"),
            meta_mat(SYNSETS, characters=4),
            meta_mat(SYNSETS, numbers=2),
        ],
        ids=["not compressed", "big-endian", "UTF-16", "small numbers"],
    )
    def test_matlab_may_store_the_list_in_several_ways(
        self, tmp_path: Path, devkit: Callable[..., str], meta: bytes
    ) -> None:
        val, *_ = flat(tmp_path, "")
        assert list(labels(val, devkit(meta=meta), classes=("n01", "n02", "n03")).values()) == [0, 1, 2]

    @pytest.mark.parametrize(
        ("meta", "fault"),
        [
            (b"", "not a MATLAB file of version 5"),
            (b"MATLAB 7.3 MAT-file" + bytes(600), "not a MATLAB file of version 5"),
            (meta_mat(SYNSETS)[:-30], "not the devkit's list of synsets"),
            (meta_mat(SYNSETS, compress=False)[:-300], "truncated"),
            (meta_mat({1: "n01", 3: "n02"}), "not the devkit's list of synsets (2)"),
            (meta_mat({1: "n01", 2: "n01"}), "two synsets have the same name"),
            (meta_mat({1: "n01"}), "'3' must be a number from 1 to 1, the synsets of"),
        ],
    )
    def test_a_damaged_list_is_refused(
        self, tmp_path: Path, devkit: Callable[..., str], meta: bytes, fault: str
    ) -> None:
        val, *_ = flat(tmp_path, "")
        path = devkit(meta=meta)
        found = refusal(lambda: samples(val, path))
        assert found.startswith(f"{path}: data/")
        assert fault in found

    def test_a_devkit_without_its_files_is_refused(self, tmp_path: Path) -> None:
        val, *_ = flat(tmp_path, "")
        (tmp_path / "empty").mkdir()
        assert "expected ImageNet's devkit" in refusal(lambda: samples(val, str(tmp_path / "empty")))
        other = write(tmp_path / "other.tar.gz", gzip.compress(tar([("x", b"")])))
        assert "has no member 'data/ILSVRC2012_validation_ground_truth.txt'" in refusal(lambda: samples(val, other))

    def test_a_list_of_synsets_beside_the_devkit_is_refused(self, tmp_path: Path, devkit: Callable[..., str]) -> None:
        val, _, synsets = flat(tmp_path, "")
        path = devkit()
        assert refusal(lambda: samples(val, path, synsets)) == f"{path}: says what the classes are; remove {synsets}"

    @settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.data())
    def test_a_changed_list_is_refused_or_names_synsets(self, tmp_path: Path, data: st.DataObject) -> None:
        meta = bytearray(meta_mat(SYNSETS, compress=data.draw(st.booleans())))
        for _ in range(data.draw(st.integers(1, 4))):
            meta[data.draw(st.integers(0, len(meta) - 1))] = data.draw(st.integers(0, 255))
        write(tmp_path / "kit/data/meta.mat", bytes(meta))
        try:
            assert all(isinstance(name, str) for name in devkit_synsets(str(tmp_path / "kit")))
        except Mistake as refused:
            assert str(refused).isprintable()


KAGGLE = """ImageId,PredictionString
ILSVRC2012_val_00000003,n02 85 1 499 272
ILSVRC2012_val_00000001,n01 131 0 499 254 n01 1 2 3 4
ILSVRC2012_val_00000002,n02 1 2 3 4
"""


class TestKaggle:
    def test_its_layout_is_read(self, tmp_path: Path) -> None:
        train = write_classes(tmp_path / "ILSVRC/Data/CLS-LOC/train", {"n01": ["n01_1.JPEG"], "n02": ["n02_9.JPEG"]})
        for name in numbered(3):
            write(tmp_path / "ILSVRC/Data/CLS-LOC/val" / name, picture())
        val, truth = str(tmp_path / "ILSVRC/Data/CLS-LOC/val"), write(tmp_path / "LOC_val_solution.csv", KAGGLE)
        assert ImageNetSource(paths=(train,)).classes() == ImageNetSource(paths=(val, truth)).classes()
        assert list(labels(val, truth).values()) == [0, 1, 1]

    def test_its_zip_is_read_as_downloaded(self, tmp_path: Path) -> None:
        folder = "ILSVRC/Data/CLS-LOC"
        images = ["train/n01/n01_1.JPEG", "train/n02/n02_9.JPEG", *(f"val/{name}" for name in numbered(3))]
        members = [("LOC_val_solution.csv", KAGGLE.encode()), *((f"{folder}/{name}", picture()) for name in images)]
        path = write(tmp_path / "challenge.zip", zipped(members))
        paths = f"{path}#{folder}/val", f"{path}#LOC_val_solution.csv"
        assert ImageNetSource(paths=(f"{path}#{folder}/train",)).classes() == ImageNetSource(paths=paths).classes()
        assert list(labels(*paths).values()) == [0, 1, 1]

    @pytest.mark.parametrize(
        ("truth", "fault"),
        [
            (KAGGLE.replace("n01 1 2 3 4", "n02 1 2 3 4"), "solution.csv:3: must have one class"),
            (KAGGLE.replace("n02 85 1 499 272", ""), "solution.csv:2: must have one class"),
            (
                KAGGLE.replace("ImageId,", "ImageId,\r"),
                "solution.csv:1: is not CSV: new-line character seen in unquoted field",
            ),
            (KAGGLE.replace("00000003", "00000001"), "solution.csv:3: 'ILSVRC2012_val_00000001' occurs twice"),
            (KAGGLE.replace("Prediction", "Other"), "solution.csv:1: has no column PredictionString"),
            (KAGGLE.replace("00000003", "00000004"), "ILSVRC2012_val_00000003.JPEG is not in"),
        ],
    )
    def test_a_list_that_does_not_match_is_refused(self, tmp_path: Path, truth: str, fault: str) -> None:
        val, *_ = flat(tmp_path, "")
        path = write(tmp_path / "LOC_val_solution.csv", truth)
        assert fault in refusal(lambda: samples(val, path))

    def test_lines_without_an_image_are_reported(self, tmp_path: Path) -> None:
        val, *_ = flat(tmp_path, "", pictures=2)
        path, dropped = write(tmp_path / "LOC_val_solution.csv", KAGGLE), DropCounter()
        assert len(samples(val, path, drop=dropped)) == 2
        assert dropped.names == {NO_IMAGE: [f"{path}:2"]}


class TestFlatValidation:
    def test_ground_truth_numbers_index_the_synset_list_from_1(self, tmp_path: Path) -> None:
        paths = flat(tmp_path, "3\n1\n3\n", "n03 a cat\nn01 dog, hound\nn02\n")
        one, two, three = numbered(3)
        assert labels(*paths, classes=("n01", "n02", "n03")) == {one: 1, two: 2, three: 1}
        assert ImageNetSource(paths=paths).classes() == ("n02", "n03")

    def test_a_ground_truth_of_names_needs_no_synset_list(self, tmp_path: Path) -> None:
        paths = flat(tmp_path, "n02\nn01\nn02\n", synsets=None)
        assert list(labels(*paths).values()) == [1, 0, 1]

    def test_a_flat_folder_reads_like_the_tar(self, tmp_path: Path) -> None:
        _, truth, synsets = paths = flat(tmp_path, "3\n1\n3\n")
        for name in numbered(3):
            write(tmp_path / "val" / name, picture())
        write(tmp_path / "val/.DS_Store", "?")
        assert labels(str(tmp_path / "val"), truth, synsets) == labels(*paths)

    def test_the_number_in_a_name_selects_the_line(self, tmp_path: Path) -> None:
        _, truth, synsets = flat(tmp_path, "3\n1\n2\n")
        val = write(tmp_path / "val.tar", tar((name, picture()) for name in reversed(numbered(3))))
        assert list(labels(val, truth, synsets).values()) == [1, 0, 2]

    def test_lines_without_an_image_are_reported(self, tmp_path: Path) -> None:
        paths = flat(tmp_path, "3\n1\n2\n1\n", pictures=3)
        dropped = DropCounter()
        assert len(samples(*paths, drop=dropped)) == 3
        assert dropped.names == {NO_IMAGE: [f"{paths[1]}:4"]}

    def test_a_byte_order_mark_carriage_returns_and_blank_last_lines_are_ignored(self, tmp_path: Path) -> None:
        paths = flat(tmp_path, "\ufeff3\r\n1\r\n2\r\n\r\n", "\ufeffn01\r\nn02\r\nn03\r\n\n")
        assert list(labels(*paths).values()) == [2, 0, 1]

    @pytest.mark.parametrize(
        ("truth", "synsets", "said"),
        [
            ("3\n1\n4\n", "n01\nn02\nn03\n", "truth.txt:3: '4' must be a number from 1 to 3"),
            ("3\n0\n1\n", "n01\nn02\nn03\n", "truth.txt:2: '0' must be a number from 1 to 3"),
            ("3\nx\n1\n", "n01\nn02\nn03\n", "truth.txt:2: 'x' must be a number"),
            ("3\n²\n1\n", "n01\nn02\nn03\n", "truth.txt:2: '²' must be a number"),
            (f"{'9' * 5000}\n", "n01\nn02\n", "truth.txt:1: '999"),
            ("3\n\n1\n", "n01\nn02\nn03\n", "truth.txt:2: blank line"),
            ("3\n1\n2\n", "n01\n\nn03\n", "synsets.txt:2: blank line"),
            ("3\n1\n2\n", "n01\nn02\nn01 again\n", "synsets.txt:3: n01 occurs twice"),
            ("", "n01\nn02\n", "truth.txt: empty"),
            ("1\n", "\n\n", "synsets.txt: empty"),
            ("1\n2\n", "n01\nn02\n", "_00000003.JPEG has number 3, but"),
            ("n01\n1\nn02", None, "truth.txt:2: 1 is a number; also name the devkit"),
        ],
    )
    def test_lists_that_do_not_match_are_refused(
        self, tmp_path: Path, truth: str, synsets: str | None, said: str
    ) -> None:
        paths = flat(tmp_path, truth, synsets)
        assert said in refusal(lambda: samples(*paths))

    @pytest.mark.parametrize(
        ("names", "said"),
        [
            (["cat.JPEG"], "has no number at the end of its name"),
            (["val_0.JPEG"], "has number 0"),
            (["val_1.JPEG", "val_01.JPEG"], "val_01.JPEG is another image for"),
            (["n01.tar"], "is a tar inside the tar"),
            ([], "contains no images"),
        ],
    )
    def test_images_without_their_own_line_are_refused(self, tmp_path: Path, names: list[str], said: str) -> None:
        _, truth, synsets = flat(tmp_path, "3\n1\n2\n")
        val = write(tmp_path / "val.tar", tar((name, b"x") for name in names))
        assert said in refusal(lambda: samples(val, truth, synsets))

    def test_an_unknown_class_is_refused(self, tmp_path: Path) -> None:
        paths = flat(tmp_path, "3\n1\n2\n")
        assert "class 'n03' is not among the 2 classes" in refusal(lambda: samples(*paths, classes=("n01", "n02")))

    def test_unused_synsets_may_be_unknown_to_training(self, tmp_path: Path) -> None:
        paths = flat(tmp_path, "2\n1\n2\n")
        assert list(labels(*paths, classes=("n01", "n02")).values()) == [1, 0, 1]

    def test_a_sorted_synset_list_is_refused_with_the_devkits_ground_truth(self, tmp_path: Path) -> None:
        synsets = [f"n{number:08d}" for number in range(1000)]
        truth = "490\n361\n171\n822\n"
        paths = flat(tmp_path, truth, "\n".join(synsets))
        assert "not in the order of the devkit" in refusal(lambda: samples(*paths))
        synsets[489] = "n01751748"
        paths = flat(tmp_path, truth, "\n".join(synsets))
        assert len(samples(*paths)) == 3
