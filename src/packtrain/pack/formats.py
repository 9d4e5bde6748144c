"""Raw formats by the word that names them in a job file. Adding one is a file here and a line in a dict below."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from packtrain.errors import FieldMistake
from packtrain.job.job import Source
from packtrain.pack.bitext import read_bitext
from packtrain.pack.coco import read_coco
from packtrain.pack.dialogue import read_dialogue
from packtrain.pack.folder import Folder
from packtrain.pack.imagenet import ImageNet
from packtrain.pack.manifest import Kind
from packtrain.pack.raw import Drop, RawImage, TextPair

Paths = tuple[str, ...]


class Labelled(Protocol):
    """A source of images with a class each."""

    def classes(self) -> tuple[str, ...]: ...

    def samples(self, classes: Sequence[str], drop: Drop) -> Iterator[RawImage]: ...


PAIRS: Mapping[str, Callable[[Paths, Drop], Iterator[TextPair]]] = {
    "bitext": lambda paths, _: read_bitext(paths),
    "dialogue": read_dialogue,
    "folder": lambda paths, _: Folder(paths[0]).pairs(),
}
LABELS: Mapping[str, Callable[[Paths], Labelled]] = {
    "imagenet": ImageNet,
    "folder": lambda paths: Folder(paths[0]),
}
CAPTIONS: Mapping[str, Callable[[Paths, Drop, Drop], Iterator[RawImage]]] = {
    "coco": lambda paths, drop, filtered: read_coco(paths[0], paths[1], drop, filtered),
    "vizwiz": lambda paths, drop, filtered: read_coco(paths[0], paths[1], drop, filtered),
    "folder": lambda paths, drop, filtered: Folder(paths[0]).captioned(drop, filtered),
}
_OF_FOLDERS: Mapping[str, Kind] = {"label": "labels", "caption": "captions", "text": "pairs"}


def kind_of(source: Source) -> Kind:
    """What a source has: pairs of texts, images with a class, or images with captions."""
    if source.kind == "folder":
        return _OF_FOLDERS[Folder(source.paths[0]).shape()]
    return "pairs" if source.kind in PAIRS else "labels" if source.kind in LABELS else "captions"


def common_kind(splits: Mapping[str, Sequence[Source]]) -> Kind:
    """The kind of all sources of a job; a mix of kinds cannot be one pack."""
    kinds = {split: [kind_of(source) for source in sources] for split, sources in splits.items()}
    first = kinds["train"][0]
    for split, found in kinds.items():
        for number, kind in enumerate(found):
            if kind != first:
                raise FieldMistake(f"data.{split}.{number}", f"has {kind}, where the first training source has {first}")
    return first
