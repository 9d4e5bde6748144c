"""The sizes a classifier comes in, and the options that change them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from packtrain.errors import FieldMistake, nearest
from packtrain.job.job import Model
from packtrain.recipes.resnet_shape import RESNETS, ResNetShape

# Tiny learns pictures of about 32 pixels in minutes on two CPU cores; a quiet start would take the first of them.
SIZES: Mapping[str, ResNetShape] = {
    "tiny": ResNetShape("basic", (1, 1, 1, 1), 32, "small", quiet_start=False),
    **RESNETS,
}

_OPTIONS = ("width", "stem", "weights", "words")
_STEMS = ("large", "small")


@dataclass(frozen=True)
class Classifier:
    """A network, the file of its first weights, and that with the classes' names in words."""

    shape: ResNetShape
    weights: str | None = None
    words: str | None = None


def classifier_of(model: Model) -> Classifier:
    """The named size with the job's options; refuses what does not fit."""
    if model.size not in SIZES:
        raise FieldMistake("model.size", f"no size {model.size!r}; {nearest(model.size, SIZES)}")
    for option in model.options:
        if option not in _OPTIONS:
            raise FieldMistake(f"model.{option}", f"unknown option; {nearest(option, _OPTIONS)}")
    shape, options = SIZES[model.size], model.options
    width, stem = options.get("width", shape.width), options.get("stem", shape.stem)
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise FieldMistake("model.width", f"must be a whole number of at least 1, not {width!r}")
    if stem not in _STEMS:
        raise FieldMistake("model.stem", f"must be large or small, not {stem!r}")
    files = {option: options.get(option) for option in ("weights", "words")}
    for option, path in files.items():
        if path is not None and not isinstance(path, str):
            raise FieldMistake(f"model.{option}", f"must be a path or an address, not {path!r}")
    return Classifier(replace(shape, width=width, stem=stem), **files)  # type: ignore[arg-type]
