"""Your own data: a file of JSON lines with the samples; images are beside or below it.

    {"image": "cats/1.jpg", "label": "cat"}
    {"image": "1.jpg", "caption": "a cat"}             or a list of captions
    {"source": "good morning", "target": "guten Morgen"}

All lines of a file have the shape of the first one. Other keys are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from packtrain.errors import Mistake, nearest, printable, quoted
from packtrain.job.kinds import Drop
from packtrain.pack.archive import Locator, split_member
from packtrain.pack.compression import plain_name
from packtrain.pack.raw import (
    EMPTY_CAPTION,
    MISSING_FILE,
    NO_CAPTION,
    ImageSource,
    RawImage,
    TextPair,
    class_number,
    file_inside,
    is_text,
    parse_json,
    read_lines,
    sorted_classes,
)

Shape = Literal["label", "caption", "text"]

_KEYS: dict[Shape, tuple[str, str]] = {
    "label": ("image", "label"),
    "caption": ("image", "caption"),
    "text": ("source", "target"),
}
_PACK_KINDS: dict[Shape, str] = {"label": "labels", "caption": "captions", "text": "pairs"}


class FolderSource(ImageSource):
    """JSON lines: an image with its label or captions, or a source with its target."""

    contents = frozenset({"pairs", "labels", "captions"})
    path_counts = (1,)
    example = "samples.jsonl"

    @classmethod
    def recognize(cls, paths: Sequence[str]) -> Sequence[str] | None:
        return paths if len(paths) == 1 and plain_name(paths[0]).endswith(".jsonl") else None

    @property
    def path(self) -> str:
        return self.paths[0]

    def pack_kind(self) -> str:
        for place, record in self._records():  # the first line decides; `_rows` checks the others against it
            return _PACK_KINDS[_shape(record, place)]
        raise Mistake(f"{self.path}: empty; it must have a JSON object on each line")

    def named_files(self) -> Iterator[tuple[str, str | None]]:
        for place, record in self._records():
            if "image" not in record:
                return  # pairs of texts: all lines have the shape of the first, and there may be many
            name = record["image"]
            if is_text(name):
                yield name, self._path_of(name, place)

    def classes(self) -> tuple[str, ...]:
        """Return the labels, sorted; the index of a label is its number."""
        return sorted_classes((_text(row, "label", place) for place, row in self._rows("label")), self.path)

    def labeled(self, classes: Sequence[str], drop: Drop, filtered: Drop) -> Iterator[RawImage]:  # noqa: ARG002
        """Yield images with the numbers of their labels among the classes of the training data."""
        numbers = {name: number for number, name in enumerate(classes)}
        for place, name, row in self._images("label"):
            label = class_number(_text(row, "label", place), numbers, place)
            yield from self._image(place, name, label, (), drop)

    def captioned(self, drop: Drop, filtered: Drop) -> Iterator[RawImage]:
        """Yield images with their captions. `drop` reports images, `filtered` captions that are left out."""
        for place, name, row in self._images("caption"):
            written = row["caption"]
            captions: list[str] = []
            for caption in written if isinstance(written, list) else [written]:
                if not is_text(caption):
                    raise Mistake(f'{place}: "caption" must be a string or a list of strings')
                if caption.strip():
                    captions.append(caption)
                else:
                    filtered(EMPTY_CAPTION, printable(name))
            if captions:
                yield from self._image(place, name, None, tuple(captions), drop)
            else:
                drop(NO_CAPTION, printable(name))

    def pairs(self, drop: Drop) -> Iterator[TextPair]:  # noqa: ARG002
        for place, row in self._rows("text"):
            line = int(place.rpartition(":")[2])  # blank lines are not pairs
            yield TextPair(_text(row, "source", place), _text(row, "target", place), line)

    def _image(
        self, place: str, name: str, label: int | None, captions: tuple[str, ...], drop: Drop
    ) -> Iterator[RawImage]:
        path = self._path_of(name, place)
        if path is None:
            drop(MISSING_FILE, printable(name))
        else:
            yield RawImage(printable(name), Locator(path), label, captions)

    def _path_of(self, name: str, place: str) -> str | None:
        archive, member = split_member(self.path)
        if member:
            raise Mistake(
                f"{printable(archive)}: the images that {member} names cannot be read inside; unpack it first"
            )
        return file_inside(str(Path(self.path).parent), name, place, self.links)

    def _images(self, shape: Shape) -> Iterator[tuple[str, str, dict[str, object]]]:
        names: set[str] = set()
        for place, row in self._rows(shape):
            name = _text(row, "image", place)
            if name in names:
                raise Mistake(f"{place}: image {quoted(name)} occurs twice; merge the lines")
            names.add(name)
            yield place, name, row

    def _rows(self, shape: Shape) -> Iterator[tuple[str, dict[str, object]]]:
        for place, record in self._records():
            its_shape = _shape(record, place)
            if its_shape != shape:
                raise Mistake(
                    f"{place}: has {_shown_keys(its_shape)}, expected {_shown_keys(shape)};"
                    " all lines of a file must have the same keys"
                )
            yield place, record

    def _records(self) -> Iterator[tuple[str, dict[str, object]]]:
        for number, line in enumerate(read_lines(Path(self.path)), 1):
            if line.strip():
                place = f"{self.path}:{number}"
                record = parse_json(line, place)
                if not isinstance(record, dict):
                    raise Mistake(f"{place}: must be a JSON object in braces")
                yield place, record


def _shape(record: dict[str, object], place: str) -> Shape:
    fitting: list[Shape] = [shape for shape, keys in _KEYS.items() if all(key in record for key in keys)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise Mistake(f"{place}: has both {' and '.join(map(_shown_keys, fitting))}; remove one")
    keys_of_shapes = {key for keys in _KEYS.values() for key in keys}
    strange = next((key for key in record if key not in keys_of_shapes), None)
    hint = "" if strange is None else f"; {quoted(strange)}: {nearest(strange[:40], keys_of_shapes)}"
    raise Mistake(f"{place}: must have {', or '.join(map(_shown_keys, _KEYS))}{hint}")


def _shown_keys(shape: Shape) -> str:
    return " and ".join(f'"{key}"' for key in _KEYS[shape])


def _text(record: dict[str, object], key: str, place: str) -> str:
    value = record[key]
    if not is_text(value):
        raise Mistake(f'{place}: "{key}" must be a string')
    if key == "label" and not value.strip():
        raise Mistake(f'{place}: "label" is empty')
    return value
