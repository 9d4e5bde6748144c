"""The sizes a captioning model comes in, and the options that change them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from packtrain.errors import FieldMistake, nearest
from packtrain.job.job import Model
from packtrain.recipes.resnet_shape import RESNETS, ResNetShape

CELLS = ("gru", "lstm")

# Tiny is for pictures of about 48 pixels, of which it leaves 6 x 6 places to look at.
ENCODERS: Mapping[str, ResNetShape] = {
    "tiny": ResNetShape("basic", (1, 1), 64, quiet_start=False),
    **RESNETS,
}


@dataclass(frozen=True)
class Shape:
    """The encoder; the width of embedding, state and attention; and how the encoder learns.

    With published `weights` the encoder stays as it is for `frozen_epochs`; then its last `tuned_stages` learn. Without
    them there is nothing to keep, and all of it learns from the start.
    """

    encoder: str
    width: int
    attention: int
    cell: str = "gru"
    dropout: float = 0.2
    penalty: float = 1.0
    weights: str = ""
    frozen_epochs: int = 5
    tuned_stages: int = 1

    @property
    def is_published(self) -> bool:
        return bool(self.weights)

    def is_frozen(self, epoch: int) -> bool:
        return self.is_published and (epoch < self.frozen_epochs or not self.tuned_stages)


SIZES: Mapping[str, Shape] = {
    "tiny": Shape("tiny", 160, 128),
    "resnet18": Shape("resnet18", 500, 500),
    "resnet50": Shape("resnet50", 500, 500),
    "resnet101": Shape("resnet101", 500, 500),
}

_MAY_BE_ZERO = ("dropout", "penalty", "frozen_epochs", "tuned_stages")
_WORDS = {"encoder": tuple(ENCODERS), "cell": CELLS}


def shape_of(model: Model) -> Shape:
    """The named size with the job's options; refuses what does not fit."""
    if model.size not in SIZES:
        raise FieldMistake("model.size", f"no size {model.size!r}; {nearest(model.size, SIZES)}")
    shape = SIZES[model.size]
    known = asdict(shape)
    for option, value in model.options.items():
        if option not in known:
            raise FieldMistake(f"model.{option}", f"unknown option; {nearest(option, known)}")
        fault = _fault(option, known[option], value)
        if fault is not None:
            raise FieldMistake(f"model.{option}", fault)
    changed = replace(shape, **model.options)  # type: ignore[arg-type]
    stages = len(ENCODERS[changed.encoder].depths)
    if changed.tuned_stages > stages:
        raise FieldMistake("model.tuned_stages", f"{changed.encoder} has {stages} stages")
    return changed


def _fault(option: str, default: object, value: object) -> str | None:
    """What is wrong with the value of an option whose default has the right kind."""
    if isinstance(default, str):
        if not isinstance(value, str):
            return f"must be a text, not {value!r}"
        if option in _WORDS and value not in _WORDS[option]:
            return f"{value!r} is not one of {', '.join(_WORDS[option])}"
        return None
    whole = isinstance(default, int)
    if isinstance(value, (bool, str)) or not isinstance(value, int if whole else (int, float)) or value < 0:
        return f"must be a {'whole ' if whole else ''}number of at least 0, not {value!r}"
    if value == 0 and option not in _MAY_BE_ZERO:
        return "must be at least 1"
    if option == "dropout" and value >= 1:
        return "must be less than 1"
    return None
