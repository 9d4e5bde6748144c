from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from pack.rawsets import MANY, class_tars, header, numbered, picture, refusal, tar, write, write_classes
from packtrain.pack.imagenet import EMPTY_CLASS, NO_IMAGE, ImageNetSource
from packtrain.pack.raw import MISSING_FILE, DropCounter, RawImage

ANIMALS = {"n02": ["b.JPEG", "a.JPEG"], "n01": ["c.JPEG"], "n03": ["d.JPEG", "e.JPEG", "f.JPEG"]}


def samples(*paths: str, classes: tuple[str, ...] | None = None, drop: DropCounter | None = None) -> list[RawImage]:
    source = ImageNetSource(paths=paths)
    return list(source.labeled(classes or source.classes(), drop or DropCounter()))


def labels(*paths: str, classes: tuple[str, ...] | None = None) -> dict[str, int | None]:
    return {sample.name: sample.label for sample in samples(*paths, classes=classes)}


def flat(folder: Path, truth: str, synsets: str | None = "n01\nn02\nn03\n", pictures: int = 3) -> tuple[str, ...]:
    """A validation tar with its ground truth and, if there is one, the list of synsets."""
    paths = [
        write(folder / "val.tar", tar((name, picture(shade)) for shade, name in enumerate(numbered(pictures)))),
        write(folder / "truth.txt", truth),
    ]
    return (*paths, write(folder / "synsets.txt", synsets)) if synsets is not None else tuple(paths)


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
        found = ImageNetSource(paths=(val,)).labeled(("n01", "n02"), DropCounter())
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

    def test_hidden_names_loose_files_and_deeper_folders_are_not_samples(self, tmp_path: Path) -> None:
        train = write_classes(tmp_path / "train", {"n01": ["x", ".DS_Store"], "n02": ["y"], ".cache": ["z"]})
        write(tmp_path / "train/README", "hello")
        (tmp_path / "train/n01/deeper").mkdir()
        os.mkfifo(tmp_path / "train/n01/pipe")
        assert labels(train) == {"n01/x": 0, "n02/y": 1}

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
        assert "[images, ground truth, synset list]" in refusal(ImageNetSource(paths=(val,)).classes)

    def test_two_tars_of_a_class_are_refused(self, tmp_path: Path) -> None:
        train = write(tmp_path / "train.tar", tar([("a/n01.tar", tar([])), ("b/n01.tar", tar([]))]))
        assert "two tars of class 'n01'" in refusal(ImageNetSource(paths=(train,)).classes)

    def test_damage_inside_a_class_names_both_tars(self, tmp_path: Path) -> None:
        inner = header("x", b"2", linkname="/etc/passwd") + bytes(1024)
        train = write(tmp_path / "train.tar", tar([("n01.tar", inner), ("n02.tar", tar([]))]))
        said = refusal(lambda: samples(train))
        assert said == f"{train}: n01.tar: member 'x' at byte 0 is a symbolic link"


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
            ("n01\n1\nn02", None, "truth.txt:2: 1 is a number; also name the synset list"),
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
            (["val_1.JPEG", "val_01.JPEG"], "another image with number 1"),
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
