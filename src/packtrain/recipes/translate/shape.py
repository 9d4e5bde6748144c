"""The sizes a translation model comes in, and the options that change them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from packtrain.errors import FieldMistake, nearest
from packtrain.job import Model


@dataclass(frozen=True)
class Shape:
    """The dimensions of a model."""

    width: int
    heads: int
    feedforward: int
    encoder_layers: int
    decoder_layers: int
    dropout: float
    attention_dropout: float


# Tiny learns in minutes on two CPU cores; there it sees its data once or twice, and dropout only slows it.
SIZES: Mapping[str, Shape] = {
    "tiny": Shape(128, 4, 512, 3, 2, 0.0, 0.0),
    "small": Shape(256, 4, 1024, 3, 3, 0.1, 0.0),
    "base": Shape(512, 8, 2048, 6, 6, 0.1, 0.1),
    "big": Shape(1024, 16, 4096, 6, 6, 0.3, 0.1),
}


def shape_of(model: Model) -> Shape:
    """The named size with the job's options; refuses what does not fit."""
    if model.size not in SIZES:
        raise FieldMistake("model.size", f"no size {model.size!r}; {nearest(model.size, SIZES)}")
    shape = SIZES[model.size]
    known = asdict(shape)
    for option, value in model.options.items():
        if option not in known:
            raise FieldMistake(f"model.{option}", f"unknown option; {nearest(option, known)}")
        whole = isinstance(known[option], int)
        if isinstance(value, (bool, str)) or (whole and not isinstance(value, int)) or value < 0:
            raise FieldMistake(
                f"model.{option}", f"must be a {'whole ' if whole else ''}number of at least 0, not {value!r}"
            )
        if whole and value == 0:
            raise FieldMistake(f"model.{option}", "must be at least 1")
        if not whole and value >= 1:
            raise FieldMistake(f"model.{option}", "must be less than 1")
    changed = replace(shape, **model.options)  # type: ignore[arg-type]
    if changed.width % (2 * changed.heads):
        raise FieldMistake("model.width", f"{changed.width} must be a multiple of twice model.heads ({changed.heads})")
    return changed
