"""The dimensions of a Transformer from text to text, and the options of a job that change them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from packtrain.errors import FieldMistake, nearest
from packtrain.job.job import Model


@dataclass(frozen=True)
class Shape:
    width: int
    heads: int
    feedforward: int
    encoder_layers: int
    decoder_layers: int
    dropout: float
    attention_dropout: float


S = TypeVar("S", bound=Shape)


def read_shape(model: Model, sizes: Mapping[str, S]) -> S:
    """The named size with the job's options; refuses what does not fit."""
    if model.size not in sizes:
        raise FieldMistake("model.size", f"no size {model.size!r}; {nearest(model.size, sizes)}")
    shape = sizes[model.size]
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
