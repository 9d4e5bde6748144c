"""ImageNet and data with its layout: a folder for each class, or the ILSVRC2012 tars as downloaded.

A source is one to three paths:

    train/ or val/                     a folder for each class, named after it
    ILSVRC2012_img_train.tar           a tar for each class, named after it
    ILSVRC2012_img_val.tar or val/,    images without classes, with a number at the end of their names,
      truth                            ... a file whose line n is the class of image n,
      or truth, synsets                ... or a file of numbers, and the list that they index, from 1
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from packtrain.errors import Mistake, printable, quoted
from packtrain.job.kinds import Drop, Source
from packtrain.pack.archive import ArchiveMember, Locator, tar_members
from packtrain.pack.manifest import Kind
from packtrain.pack.raw import (
    MISSING_FILE,
    RawImage,
    check_link,
    class_number,
    read_lines,
    sorted_classes,
)

EMPTY_CLASS = "class without images"
NO_IMAGE = "line of the ground truth without an image"

_ADVICE = "For images without classes, name the ground truth too: [images, ground truth, synset list]"
_LAST_NUMBER = re.compile(r"([0-9]+)(\.[^.]*)?\Z")
# The start of the devkit's ground truth, and the class of its first image: synset lists sorted by name do not match it.
_DEVKIT_START, _DEVKIT_FIRST = ("490", "361", "171", "822"), "n01751748"


class ImageNetSource(Source):
    """A folder or a tar with a part for each class; or a flat one with the ground truth and the synset list."""

    contents = frozenset({"labels"})
    path_counts = (1, 2, 3)
    example = "[ILSVRC2012_img_val.tar, ILSVRC2012_validation_ground_truth.txt, synsets.txt]"

    def pack_kind(self) -> Kind:
        return "labels"

    def classes(self) -> tuple[str, ...]:
        """Return the class names, sorted; the index of a class is the label of its images."""
        names = _truth(self.paths) if len(self.paths) > 1 else (name for name, _ in _class_places(self.paths[0]))
        return sorted_classes(names, self.paths[0])

    def labeled(self, classes: Sequence[str], drop: Drop) -> Iterator[RawImage]:
        """Yield images in the order of their names, or of the tar, labeled by the classes of the training data."""
        numbers = {name: number for number, name in enumerate(classes)}
        read = _read_flat if len(self.paths) > 1 else _read_classes
        found = False
        for sample in read(self.paths, numbers, drop):
            found = True
            yield sample
        if not found:
            raise Mistake(f"{self.paths[0]}: contains no images")


def _read_classes(paths: tuple[str, ...], numbers: Mapping[str, int], drop: Drop) -> Iterator[RawImage]:
    [path] = paths
    for name, _ in _class_places(path):  # check all names first: otherwise an unknown class fails hours later
        class_number(name, numbers, path)
    for name, where in _class_places(path):
        label = class_number(name, numbers, path)
        is_empty = True
        for member in _class_members(path, name, where, drop):
            is_empty = False
            yield RawImage(printable(f"{name}/{member.name}"), member.where, label)
        if is_empty:
            drop(EMPTY_CLASS, printable(name))


def _read_flat(paths: tuple[str, ...], numbers: Mapping[str, int], drop: Drop) -> Iterator[RawImage]:
    path, truth_path = paths[:2]
    truth = _truth(paths)
    for name in sorted(set(truth)):  # checked before the images are read, as for class folders
        class_number(name, numbers, truth_path)
    seen = bytearray(len(truth))  # one flag per line, to find duplicate and missing images
    for member in _flat_members(path, drop):
        shown = printable(member.name)
        line = _line_of(member.name, f"{path}: {shown}")
        if not 1 <= line <= len(truth):
            raise Mistake(f"{path}: {shown} has number {line:,}, but {truth_path} has only {len(truth):,} lines")
        if seen[line - 1]:
            raise Mistake(f"{path}: {shown} is another image with number {line:,}; remove one")
        seen[line - 1] = 1
        yield RawImage(shown, member.where, numbers[truth[line - 1]])
    for line, is_there in enumerate(seen, 1):
        if not is_there:
            drop(NO_IMAGE, f"{truth_path}:{line}")


def _class_places(path: str) -> Iterator[tuple[str, Locator]]:
    """Yield each class with its folder or its tar."""
    found = False
    if Path(path).is_dir():
        for entry in _listing(path):
            if _is_there(entry.is_dir):
                found = True
                if entry.is_symlink():
                    check_link(path, entry.path, path)
                yield _class_name(entry.name, path), Locator(entry.path)
    else:
        seen = set()  # a folder cannot have a name twice, but a tar can have it in two directories
        for member in _visible(tar_members(Locator(path))):
            if not member.name.endswith(".tar"):
                raise Mistake(f"{path}: {printable(member.name)} is not the tar of a class. {_ADVICE}")
            found = True
            name = _class_name(Path(member.name).name.removesuffix(".tar"), path)
            if name in seen:
                raise Mistake(f"{path}: two tars of class {quoted(name)}; merge them")
            seen.add(name)
            yield name, member.where
    if not found:
        raise Mistake(f"{path}: contains no class, neither as a folder nor as a tar. {_ADVICE}")


def _class_members(path: str, name: str, where: Locator, drop: Drop) -> Iterator[ArchiveMember]:
    if where.length is None:
        return _files(path, where.path, drop)
    return _visible(tar_members(where, f"{path}: {name}.tar"))


def _flat_members(path: str, drop: Drop) -> Iterator[ArchiveMember]:
    if Path(path).is_dir():
        return _files(path, path, drop)
    return _visible(tar_members(Locator(path)))


def _visible(members: Iterator[ArchiveMember]) -> Iterator[ArchiveMember]:
    """Skip hidden files such as `._x` and `.DS_Store`."""
    return (member for member in members if not member.name.rpartition("/")[2].startswith("."))


def _files(root: str, folder: str, drop: Drop) -> Iterator[ArchiveMember]:
    for entry in _listing(folder):
        if entry.is_symlink():
            check_link(root, entry.path, root)
            if not Path(entry.path).exists():
                drop(MISSING_FILE, printable(entry.path))
        if _is_there(entry.is_file):
            yield ArchiveMember(entry.name, Locator(entry.path))


def _is_there(kind: Callable[[], bool]) -> bool:
    try:
        return kind()
    except OSError:  # a link to itself
        return False


def _listing(folder: str) -> list[os.DirEntry[str]]:
    """Return the visible entries of a folder, sorted: file systems list them in any order."""
    try:
        with os.scandir(folder) as entries:
            visible = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise Mistake(f"{printable(folder)}: {error.strerror or error}") from error
    return sorted(visible, key=lambda entry: os.fsencode(entry.name))


def _class_name(name: str, path: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise Mistake(f"{path}: class name {quoted(name)} is not UTF-8; rename it") from None
    return name


def _line_of(name: str, place: str) -> int:
    """Return the number at the end of an image's name, which is its line in the ground truth."""
    if name.endswith(".tar"):
        raise Mistake(f"{place} is a tar inside the tar; a tar of class tars needs no ground truth")
    match = _LAST_NUMBER.search(name)
    if match is None:
        raise Mistake(f"{place} has no number at the end of its name, as in ILSVRC2012_val_00000001.JPEG")
    return int(match[1])


def _truth(paths: tuple[str, ...]) -> list[str]:
    """Return the class of each image, by its number."""
    path = Path(paths[1])
    rows = _rows(path)
    if len(paths) == 2:
        for line, row in enumerate(rows, 1):
            if row.isdigit():
                raise Mistake(f"{path}:{line}: {row} is a number; also name the synset list that it indexes")
        return rows
    synsets = _synsets(Path(paths[2]))
    if tuple(rows[:4]) == _DEVKIT_START and len(synsets) >= 1000 and synsets[489] != _DEVKIT_FIRST:
        raise Mistake(
            f"{paths[2]}: not in the order of the devkit (meta.mat, by ILSVRC2012_ID), which {path} uses:"
            f" line 490 must be {_DEVKIT_FIRST}"
        )
    classes = []
    for line, row in enumerate(rows, 1):
        if not re.fullmatch("[0-9]{1,9}", row) or not 1 <= int(row) <= len(synsets):
            most = f"{len(synsets):,}, the lines of {paths[2]}"
            raise Mistake(f"{path}:{line}: {quoted(row)} must be a number from 1 to {most}")
        classes.append(synsets[int(row) - 1])
    return classes


def _synsets(path: Path) -> list[str]:
    names = [row.split()[0] for row in _rows(path)]
    seen: set[str] = set()
    for line, name in enumerate(names, 1):
        if name in seen:
            raise Mistake(f"{path}:{line}: {printable(name)} occurs twice")
        seen.add(name)
    return names


def _rows(path: Path) -> list[str]:
    """Return the lines; only the last ones may be blank, since a blank line in between would shift the numbers."""
    rows = [line.strip() for line in read_lines(path)]
    while rows and not rows[-1]:
        rows.pop()
    if not rows:
        raise Mistake(f"{path}: empty; expected a line for each class or image")
    if "" in rows:
        raise Mistake(f"{path}:{rows.index('') + 1}: blank line; fill in or remove it")
    return rows
