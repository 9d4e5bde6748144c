"""ImageNet and data with its layout: a folder for each class, or the ILSVRC2012 files as downloaded.

A source is one to three paths:

    train/ or val/                     a folder for each class, named after it; images may be in folders below it
    train.zip, train.tar, train.tgz    the same in an archive, or in a folder of one: data.zip#data/train
    ILSVRC2012_img_train.tar           a tar for each class, named after it
    ILSVRC2012_img_val.tar or val/,    images without classes, in a folder or an archive
      ILSVRC2012_devkit_t12.tar.gz     ... and the devkit, or the folder that it unpacks to
      LOC_val_solution.csv             ... or Kaggle's list of images and their classes
      truth                            ... or a file whose line n is the class of the image with number n
      truth, synsets                   ... or a file of numbers, and the list that they index, from 1
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from packtrain.errors import Mistake, printable, quoted
from packtrain.job.kinds import Drop
from packtrain.pack.archive import (
    MAX_MEMBERS,
    ArchiveMember,
    Locator,
    archive_members,
    composed,
    is_archive,
    tar_members,
)
from packtrain.pack.compression import faults_as_mistakes
from packtrain.pack.devkit import META, TRUTH, devkit_synsets, devkit_truth
from packtrain.pack.picture import MAX_BYTES
from packtrain.pack.raw import (
    HIDDEN,
    MISSING_FILE,
    NO_PICTURE,
    ImageSource,
    RawImage,
    check_link,
    class_number,
    is_folder_or_archive,
    is_hidden,
    is_text_file,
    may_be_picture,
    read_lines,
    sorted_classes,
)

EMPTY_CLASS = "class without images"
NO_IMAGE = "line of the ground truth without an image"
NO_CLASS = "file outside of the class folders"
NO_FILE = "neither a file nor a folder"
CIRCLE = "link to a folder above it"

_ADVICE = "For images without classes, name the ground truth too: [images, devkit]"
_LAST_NUMBER = re.compile(r"([0-9]+)(\.[^.]*)?\Z")
# The start of the devkit's ground truth, and the class of its first image: synset lists sorted by name do not match it.
_DEVKIT_START, _DEVKIT_FIRST = ("490", "361", "171", "822"), "n01751748"
_SPLITS = {"train", "training", "val", "valid", "validation", "test", "testing"}
_KAGGLE_IMAGE, _KAGGLE_BOXES = "ImageId", "PredictionString"
_BOX_WORDS = 5  # a class and four numbers


class ImageNetSource(ImageSource):
    """A folder or an archive with a part for each class; or a flat one with its ground truth."""

    contents = frozenset({"labels"})
    path_counts = (1, 2, 3)
    example = "[ILSVRC2012_img_val.tar, ILSVRC2012_devkit_t12.tar.gz]"

    @classmethod
    def recognize(cls, paths: Sequence[str]) -> Sequence[str] | None:
        images, *truth = paths
        # A second folder is one of images, too, unless it is the devkit.
        is_truth = all(is_text_file(path) or "devkit" in Path(path).name.lower() for path in truth)
        return paths if is_folder_or_archive(images) and is_truth and len(paths) in cls.path_counts else None

    def pack_kind(self) -> str:
        return "labels"

    def classes(self) -> tuple[str, ...]:
        """Return the class names, sorted; the index of a class is the label of its images."""
        names = _ground_truth(self.paths).classes if len(self.paths) > 1 else _class_names(self.paths[0], self.links)
        return sorted_classes(names, self.paths[0])

    def labeled(self, classes: Sequence[str], drop: Drop, filtered: Drop) -> Iterator[RawImage]:
        """Yield images in the order of their names, or of the archive, labeled by the classes of the training data."""
        numbers = {name: number for number, name in enumerate(classes)}
        read = _read_classes if len(self.paths) == 1 else _read_flat
        is_empty = True
        for sample in read(self.paths, numbers, _Look(self.links, drop, filtered)):
            is_empty = False
            yield sample
        if is_empty:
            raise Mistake(f"{self.paths[0]}: contains no images")


class _Look(NamedTuple):
    """How to look for images: whether links may lead outside, and where to report what is left out."""

    links: bool
    drop: Drop
    filtered: Drop


def _read_classes(paths: tuple[str, ...], numbers: Mapping[str, int], look: _Look) -> Iterator[RawImage]:
    [path] = paths
    names = _class_names(path, look.links)
    for name in names:  # check all names first: otherwise an unknown class fails hours later
        class_number(name, numbers, path)
    classes_with_images: set[str] = set()
    for name, member in _classed(path, look):
        classes_with_images.add(name)
        yield RawImage(printable(f"{name}/{member.name}"), member.where, class_number(name, numbers, path))
    for name in names:
        if name not in classes_with_images:
            look.drop(EMPTY_CLASS, printable(name))


def _read_flat(paths: tuple[str, ...], numbers: Mapping[str, int], look: _Look) -> Iterator[RawImage]:
    path = paths[0]
    truth = _ground_truth(paths)
    for name in sorted(set(truth.classes)):  # checked before the images are read, as for class folders
        class_number(name, numbers, truth.place)
    has_image = bytearray(len(truth.classes))  # one flag per line, to find duplicate and missing images
    members = _files(path, path, look) if Path(path).is_dir() else _visible(archive_members(path, MAX_BYTES), look)
    for member in members:
        shown = printable(member.name)
        index = truth.index_of(member.name, f"{path}: {shown}")
        if has_image[index]:
            raise Mistake(f"{path}: {shown} is another image for {truth.line(index)}; remove one")
        has_image[index] = 1
        yield RawImage(shown, member.where, class_number(truth.classes[index], numbers, truth.place))
    for index, is_there in enumerate(has_image):
        if not is_there:
            look.drop(NO_IMAGE, truth.line(index))


# Classes: folders, folders in an archive, or tars in a tar.


def _class_names(path: str, links: bool) -> list[str]:
    if Path(path).is_dir():
        names, inside = [_class_name(entry.name, path) for entry in _class_folders(path, links)], f"{path}/"
    elif (tars := _class_tars(path)) is not None:
        names, inside = list(tars), ""
    else:
        root, names = _class_folders_in(path)
        inside = f"{path}{'/' if '#' in path else '#'}{root}"
    if not names:
        raise Mistake(f"{path}: contains no class, neither as a folder nor as a tar. {_ADVICE}")
    if len(names) > 1 and _SPLITS.issuperset(name.lower() for name in names):
        raise Mistake(f"{path}: {' and '.join(names)} are splits, not classes; name one of them: {inside}{names[0]}")
    return names


def _classed(path: str, look: _Look) -> Iterator[tuple[str, ArchiveMember]]:
    """Yield each image with its class."""
    if Path(path).is_dir():
        for entry in _listing(path, look):
            if not _is_there(entry.is_dir):
                look.filtered(NO_CLASS, printable(entry.name))
        for entry in _class_folders(path, look.links):
            for member in _files(path, entry.path, look):
                yield composed(entry.name), member
    elif (tars := _class_tars(path)) is not None:
        for name, where in tars.items():
            for member in _visible(tar_members(where, f"{path}: {name}.tar"), look):
                yield name, member
    else:
        root, _ = _class_folders_in(path)
        for member in _visible(archive_members(path, MAX_BYTES), look):
            name, is_inside, image_name = member.name[len(root) :].partition("/")
            if is_inside and member.name.startswith(root):
                yield name, ArchiveMember(image_name, member.where)
            else:
                look.filtered(NO_CLASS, printable(member.name))


def _class_folders(path: str, links: bool) -> Iterator[os.DirEntry[str]]:
    for entry in _listing(path):
        if _is_there(entry.is_dir):
            if entry.is_symlink() and not links:
                check_link(path, entry.path, path)
            yield entry


def _class_tars(path: str) -> dict[str, Locator] | None:
    """Return the tar of each class; None if the archive does not start with one."""
    tars: dict[str, Locator] = {}
    for member in _visible(archive_members(path)):
        if not member.name.endswith(".tar"):
            if not tars:
                return None
            raise Mistake(f"{path}: {printable(member.name)} is not the tar of a class. {_ADVICE}")
        if member.where.is_gzip or member.where.inflated is not None:
            raise Mistake(f"{path}: compressed, so the tars in it cannot be read in place; decompress it first")
        name = _class_name(member.name.rpartition("/")[2].removesuffix(".tar"), path)
        if name in tars:
            raise Mistake(f"{path}: two tars of class {quoted(name)}; merge them")
        tars[name] = member.where
    return tars


def _class_folders_in(path: str) -> tuple[str, list[str]]:
    """Return the folder of an archive that has the class folders, ending with a slash, and the names of the classes.

    Archives are often made of a folder, or of several in each other.
    """
    folders = {member.name.rpartition("/")[0]: None for member in _visible(archive_members(path))}  # keeps the order
    inside = [folder for folder in folders if folder]
    root = ""
    while True:
        names = list(dict.fromkeys(folder[len(root) :].partition("/")[0] for folder in inside))
        deeper = [folder for folder in inside if "/" in folder[len(root) :]]
        if len(names) != 1 or not deeper:
            return root, [_class_name(name, path) for name in names]
        root, inside = f"{root}{names[0]}/", deeper


def _visible(members: Iterator[ArchiveMember], look: _Look | None = None) -> Iterator[ArchiveMember]:
    """Skip hidden files, those in hidden folders, and what is no picture by its name."""
    for member in members:
        components = member.name.split("/")
        reason = HIDDEN if any(map(is_hidden, components)) else None if may_be_picture(components[-1]) else NO_PICTURE
        if reason is None:
            yield member
        elif look is not None:
            look.filtered(reason, printable(member.name))


def _files(root: str, folder: str, look: _Look) -> Iterator[ArchiveMember]:
    """Yield the files of a folder, then those of the folders below it."""
    waiting = [(folder, "", frozenset({os.path.realpath(folder)}))]
    while waiting:
        folder, prefix, above = waiting.pop()
        deeper = []
        for entry in _listing(folder, look):
            name = prefix + entry.name
            if not may_be_picture(entry.name) and not _is_there(entry.is_dir):
                look.filtered(NO_PICTURE, printable(entry.path))
                continue
            if entry.is_symlink():
                if not look.links:
                    check_link(root, entry.path, root)
                if not Path(entry.path).exists():
                    look.drop(MISSING_FILE, printable(entry.path))
                    continue
            if _is_there(entry.is_file):
                yield ArchiveMember(name, Locator(entry.path))
            elif not _is_there(entry.is_dir):
                look.filtered(NO_FILE, printable(entry.path))
            elif (real := os.path.realpath(entry.path)) in above:
                look.filtered(CIRCLE, printable(entry.path))
            else:
                deeper.append((entry.path, f"{name}/", above | {real}))
        waiting += reversed(deeper)  # the last is the next


def _is_there(kind: Callable[[], bool]) -> bool:
    try:
        return kind()
    except OSError:  # a link to itself
        return False


def _listing(folder: str, look: _Look | None = None) -> list[os.DirEntry[str]]:
    """Return the visible entries of a folder, sorted: file systems list them in any order."""
    with faults_as_mistakes(printable(folder)), os.scandir(folder) as entries:
        sorted_entries = sorted(entries, key=lambda entry: os.fsencode(entry.name))
    if look is not None:
        for entry in sorted_entries:
            if is_hidden(entry.name):
                look.filtered(HIDDEN, printable(entry.path))
    return [entry for entry in sorted_entries if not is_hidden(entry.name)]


def _class_name(name: str, path: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise Mistake(f"{path}: class name {quoted(name)} is not UTF-8; rename it") from None
    return composed(name)


# The ground truth of images without classes.


class GroundTruth(NamedTuple):
    """The class of each image: of the image with number n, or of the images in `indexes`, by name."""

    place: str
    classes: list[str]
    indexes: dict[str, int] | None = None

    def line(self, index: int) -> str:
        heading_lines = 0 if self.indexes is None else 1
        return f"{self.place}:{heading_lines + index + 1}"

    def index_of(self, name: str, shown: str) -> int:
        """Return the place of an image among the classes."""
        if name.endswith(".tar"):
            raise Mistake(f"{shown} is a tar inside the tar; a tar of class tars needs no ground truth")
        if self.indexes is not None:
            index = self.indexes.get(composed(name.rpartition("/")[2].rpartition(".")[0]))
            if index is None:
                raise Mistake(f"{shown} is not in {self.place}")
            return index
        match = _LAST_NUMBER.search(name)
        if match is None:
            raise Mistake(f"{shown} has no number at the end of its name, as in ILSVRC2012_val_00000001.JPEG")
        number = int(match[1])
        if not 1 <= number <= len(self.classes):
            raise Mistake(f"{shown} has number {number:,}, but {self.place} has only {len(self.classes):,} lines")
        return number - 1


def _ground_truth(paths: tuple[str, ...]) -> GroundTruth:
    path = paths[1]
    if Path(path).is_dir() or is_archive(path):
        _refuse_synsets(paths)
        truth, meta = f"{path}: {TRUTH}", f"{path}: {META}"
        return GroundTruth(truth, _numbered(_rows(devkit_truth(path), truth), truth, devkit_synsets(path), meta))
    rows = _rows(read_lines(Path(path)), path)
    if _KAGGLE_IMAGE in rows[0].split(","):
        _refuse_synsets(paths)
        return _kaggle_truth(rows, path)
    if len(paths) == 2:
        for line, row in enumerate(rows, 1):
            if row.isdigit():
                raise Mistake(f"{path}:{line}: {row} is a number; also name the devkit, or the list that it indexes")
        return GroundTruth(path, rows)
    synsets = [row.split()[0] for row in _rows(read_lines(Path(paths[2])), paths[2])]
    lines: dict[str, int] = {}
    for line, name in enumerate(synsets, 1):
        if lines.setdefault(name, line) != line:
            raise Mistake(f"{paths[2]}:{line}: {printable(name)} occurs twice")
    if tuple(rows[:4]) == _DEVKIT_START and len(synsets) >= 1000 and synsets[489] != _DEVKIT_FIRST:
        raise Mistake(
            f"{paths[2]}: not in the order of the devkit (meta.mat, by ILSVRC2012_ID), which {path} uses:"
            f" line 490 must be {_DEVKIT_FIRST}; name the devkit itself: [images, ILSVRC2012_devkit_t12.tar.gz]"
        )
    return GroundTruth(path, _numbered(rows, path, synsets, paths[2]))


def _refuse_synsets(paths: tuple[str, ...]) -> None:
    if len(paths) > 2:
        raise Mistake(f"{paths[1]}: says what the classes are; remove {paths[2]}")


def _numbered(rows: list[str], place: str, synsets: list[str], listed: str) -> list[str]:
    classes = []
    for line, row in enumerate(rows, 1):
        if not re.fullmatch("[0-9]{1,9}", row) or not 1 <= int(row) <= len(synsets):
            highest = f"{len(synsets):,}, the synsets of {listed}"
            raise Mistake(f"{place}:{line}: {quoted(row)} must be a number from 1 to {highest}")
        classes.append(synsets[int(row) - 1])
    return classes


def _kaggle_truth(rows: list[str], place: str) -> GroundTruth:
    """Read `ImageId,PredictionString`, whose second column has a class and four numbers for each box."""
    reader = csv.reader(rows)
    try:
        heading, *records = reader
    except csv.Error as error:
        raise Mistake(f"{place}:{reader.line_num}: is not CSV: {error}") from None
    if _KAGGLE_BOXES not in heading:
        raise Mistake(f"{place}:1: has no column {_KAGGLE_BOXES}")
    image, boxes = heading.index(_KAGGLE_IMAGE), heading.index(_KAGGLE_BOXES)
    classes: list[str] = []
    indexes: dict[str, int] = {}
    for line, record in enumerate(records, 2):
        words = record[boxes].split() if len(record) == len(heading) else []
        if not words or len(set(words[::_BOX_WORDS])) > 1:
            raise Mistake(f"{place}:{line}: must have one class")
        name = composed(record[image])
        if name in indexes:
            raise Mistake(f"{place}:{line}: {quoted(name)} occurs twice")
        indexes[name] = len(classes)
        classes.append(words[0])
    return GroundTruth(place, classes, indexes)


def _rows(lines: Iterable[str], place: str) -> list[str]:
    """Return the lines; only the last ones may be blank, since a blank line in between would shift the numbers."""
    rows = [line.strip() for line in islice(lines, MAX_MEMBERS + 1)]
    if len(rows) > MAX_MEMBERS:
        raise Mistake(f"{place}: more than {MAX_MEMBERS:,} lines; expected a line for each class or image")
    while rows and not rows[-1]:
        rows.pop()
    if not rows:
        raise Mistake(f"{place}: empty; expected a line for each class or image")
    if "" in rows:
        raise Mistake(f"{place}:{rows.index('') + 1}: blank line; fill in or remove it")
    return rows
