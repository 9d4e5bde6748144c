"""Captions in COCO's JSON, as COCO 2014 and VizWiz-Captions have them, with the folder, tar or zip of their images.

    {"images": [{"id": 0, "file_name": "a.jpg"}], "annotations": [{"id": 0, "image_id": 0, "caption": "a dog"}]}

VizWiz marks captions that do not describe the image: `is_precanned` (a standard sentence for unrecognizable images) and
`is_rejected`. They are filtered out, and so are images without other captions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from packtrain.errors import Mistake, printable, quoted
from packtrain.job.kinds import Drop
from packtrain.job.part import is_address
from packtrain.pack.archive import Locator, archive_members, composed, split_member
from packtrain.pack.compression import plain_name
from packtrain.pack.raw import (
    EMPTY_CAPTION,
    MISSING_FILE,
    NO_CAPTION,
    ImageSource,
    RawImage,
    check_inside,
    file_inside,
    is_folder_or_archive,
    is_text,
    read_json,
)

PRECANNED, REJECTED = "precanned caption", "rejected caption"
ONLY_FILTERED = "image with precanned or rejected captions only"

Id = int | str
Record = dict[str, object]


class CocoSource(ImageSource):
    """Captions in COCO's JSON, and its images in a folder, tar or zip."""

    contents = frozenset({"captions"})
    path_counts = (2,)
    example = "[captions_train2014.json, train2014]"

    @classmethod
    def recognize(cls, paths: Sequence[str]) -> Sequence[str] | None:
        listing, *images = paths
        if not plain_name(listing).endswith(".json"):
            return None
        if not images and not is_address(listing):
            return listing, str(Path(listing).parent)  # the images are beside their captions
        return paths if len(images) == 1 and is_folder_or_archive(images[0]) else None

    def pack_kind(self) -> str:
        return "captions"

    def captioned(self, drop: Drop, filtered: Drop) -> Iterator[RawImage]:
        """Yield images with their captions, in the order of the file.

        `drop` reports images that should have been samples; `filtered` what the format marks as unsuitable.
        """
        annotations, images = self.paths
        # First: a missing archive is reported before a large JSON is read.
        find = _finder(images, annotations, self.links)
        document = read_json(Path(annotations))
        if not isinstance(document, dict):
            raise Mistake(f'{annotations}: must be an object with "images" and "annotations"')
        names = _names(document, annotations)
        captions, emptied = _captions(document, names, annotations, filtered)
        del document  # hundreds of megabytes, and the iteration may take hours
        for image_id, name in names.items():
            shown = printable(name)
            where = find(name)
            if image_id in captions:
                if where is None:
                    drop(MISSING_FILE, shown)
                else:
                    yield RawImage(shown, where, captions=tuple(captions[image_id]))
            elif image_id in emptied:  # the format itself took its captions away, so this is not a fault of the data
                filtered(ONLY_FILTERED, shown)
            else:
                drop(NO_CAPTION, shown)


class VizWizSource(CocoSource):
    """Captions in VizWiz's JSON, which has the same form, and its images in a folder, tar or zip."""

    example = "[train.json, train]"

    @classmethod
    def recognize(cls, paths: Sequence[str]) -> Sequence[str] | None:  # noqa: ARG003
        return None  # `coco` reads it as well


def _finder(images: str, place: str, links: bool) -> Callable[[str], Locator | None]:
    """Return a function that finds an image by its name in the file `place`."""
    if Path(images).is_dir():

        def in_folder(name: str) -> Locator | None:
            path = file_inside(images, name, place, links)
            return None if path is None else Locator(path)

        return in_folder
    if not Path(split_member(images)[0]).exists():
        raise Mistake(f"{images}: not found; expected a folder, tar or zip of images")
    members = {member.name: member.where for member in archive_members(images)}
    if any(where.is_gzip for where in members.values()):
        raise Mistake(f"{images}: compressed, so its images cannot be found by name; decompress it first (gunzip)")
    below: dict[str, list[Locator]] = {}  # an archive of a folder has the folder's name in front of all others
    for path, where in members.items():
        below.setdefault(path.partition("/")[2], []).append(where)

    def in_archive(name: str) -> Locator | None:
        check_inside(images, name, place)
        name = composed(name)
        places = [members[name]] if name in members else below.get(name, [])
        if len(places) > 1:
            raise Mistake(f"{place}: {quoted(name)} is in several folders of {images}; include the folder in the name")
        return places[0] if places else None

    return in_archive


def _names(document: Record, place: str) -> dict[Id, str]:
    """Return the file name of each image."""
    names: dict[Id, str] = {}
    file_names: set[str] = set()
    for where, record in _records(document, "images", place):
        image_id, name = _id(record, "id", where), _text(record, "file_name", where)
        if image_id in names:
            raise Mistake(f"{where}: id {_shown_id(image_id)} occurs twice")
        if name in file_names:
            raise Mistake(f"{where}: file {quoted(name)} occurs twice; give all its captions to one image")
        file_names.add(name)
        names[image_id] = name
    return names


def _captions(
    document: Record, names: dict[Id, str], place: str, filtered: Drop
) -> tuple[dict[Id, list[str]], set[Id]]:
    """Return the captions of each image that has any, and the images that lost one to the filter."""
    captions: dict[Id, list[str]] = {}
    touched: set[Id] = set()
    caption_ids: set[Id] = set()
    for where, record in _records(document, "annotations", place):
        image_id, caption = _id(record, "image_id", where), _text(record, "caption", where)
        if image_id not in names:
            raise Mistake(f'{where}: image {_shown_id(image_id)} is not among the "images"')
        if "id" in record:
            caption_id = _id(record, "id", where)
            if caption_id in caption_ids:
                raise Mistake(f"{where}: id {_shown_id(caption_id)} occurs twice")
            caption_ids.add(caption_id)
        precanned, rejected = _flag(record, "is_precanned", where), _flag(record, "is_rejected", where)
        if precanned or rejected:
            filtered(PRECANNED if precanned else REJECTED, printable(names[image_id]))
            touched.add(image_id)
        elif not caption.strip():
            filtered(EMPTY_CAPTION, printable(names[image_id]))
        else:
            captions.setdefault(image_id, []).append(caption)
    return captions, touched


def _records(document: Record, key: str, place: str) -> Iterator[tuple[str, Record]]:
    records = document.get(key)
    if not isinstance(records, list):
        raise Mistake(f'{place}: must have a list "{key}"; is this the captions file?')
    if not records:
        raise Mistake(f'{place}: the list "{key}" is empty')
    for number, record in enumerate(records):
        where = f"{place}: {key}[{number}]"
        if not isinstance(record, dict):
            raise Mistake(f"{where}: must be an object, not {_kind(record)}")
        yield where, record


def _id(record: Record, key: str, where: str) -> Id:
    value = record.get(key)
    # COCO numbers its images, and other sets use strings; `true` would be the number 1 in Python.
    if is_text(value) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise Mistake(f"{where}.{key}: must be an integer or a string, not {_kind(value)}")


def _text(record: Record, key: str, where: str) -> str:
    value = record.get(key)
    if not is_text(value):
        raise Mistake(f"{where}.{key}: must be a string, not {_kind(value)}")
    return value


def _flag(record: Record, key: str, where: str) -> bool:
    value = record.get(key, False)
    if not isinstance(value, bool):
        raise Mistake(f"{where}.{key}: must be true or false, not {_kind(value)}")
    return value


def _shown_id(value: Id) -> str:
    return quoted(value) if isinstance(value, str) else repr(value)[:60]


def _kind(value: object) -> str:
    if isinstance(value, str):
        return "invalid Unicode"
    kinds = {dict: "an object", list: "a list", bool: "true or false", int: "a number", float: "a fraction"}
    return kinds.get(type(value), "missing or null")
