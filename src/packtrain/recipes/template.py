"""Job files to start from, as `packtrain init` writes them, and what their toy data sets are made of.

A model learns each toy data set on two CPU cores in about a minute.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from math import cos, pi, sin
from typing import TypeVar

import numpy as np
from PIL import Image, ImageDraw

Files = dict[str, bytes]
"""File names and contents of a toy data set, the same every time."""
Point = tuple[float, float]
Row = TypeVar("Row")

_VALID_EVERY = 10  # every tenth sample is for validation


@dataclass(frozen=True)
class JobTemplate:
    """A job to start from: its file, the `format` of its data, and the `paths` of a split in its toy data.

    `modules` are Python files that are written beside the job file. `example` has arguments of `packtrain predict` to
    try after the first run; `$data` is the directory of the data. `duration` is how long to train on the toy data.
    """

    about: str
    job: Traversable
    format: str = ""
    paths: tuple[str, ...] = ()
    make_data: Callable[[], Files] = dict
    modules: tuple[Traversable, ...] = ()
    example: str = ""
    duration: str = ""


# Texts.


def words_of(text: str) -> list[str]:
    return text.split()


_ENGLISH = words_of(
    "one two three four five six seven eight nine ten"
    " eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
)
_GERMAN = words_of(
    "eins zwei drei vier fünf sechs sieben acht neun zehn"
    " elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn"
)
_ENGLISH_TENS = words_of("twenty thirty forty fifty sixty seventy eighty ninety")
_GERMAN_TENS = words_of("zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig")


def english(number: int) -> str:
    hundreds, below = divmod(number, 100)
    if hundreds:
        return f"{_ENGLISH[hundreds - 1]} hundred" + (f" and {english(below)}" if below else "")
    if below < 20:
        return _ENGLISH[below - 1]
    tens, units = divmod(below, 10)
    return _ENGLISH_TENS[tens - 2] + (f"-{_ENGLISH[units - 1]}" if units else "")


def german(number: int) -> str:
    hundreds, below = divmod(number, 100)
    if hundreds:
        head = "ein" if hundreds == 1 else _GERMAN[hundreds - 1]
        return f"{head}hundert" + (german(below) if below else "")
    if below < 20:
        return _GERMAN[below - 1]
    tens, units = divmod(below, 10)
    head = "" if not units else "einund" if units == 1 else f"{_GERMAN[units - 1]}und"
    return head + _GERMAN_TENS[tens - 2]


def lines(rows: Iterable[str]) -> bytes:
    return "".join(f"{row}\n" for row in rows).encode()


def divided(rows: Sequence[Row]) -> Iterator[tuple[str, Sequence[Row]]]:
    """Divide rows at random, so that neither split has a pattern that the other lacks."""
    chosen = set(np.random.default_rng(len(rows)).permutation(len(rows))[::_VALID_EVERY].tolist())
    yield "train", [row for place, row in enumerate(rows) if place not in chosen]
    yield "valid", [row for place, row in enumerate(rows) if place in chosen]


# Images.


def _star(points: int, depth: float) -> list[Point]:
    """Return corners around the center, every other one closer to it; a depth of 1 gives a polygon."""
    radii = [1.0, depth] * points if depth < 1 else [1.0] * points
    turns = [2 * pi * number / len(radii) for number in range(len(radii))]
    return [(radius * sin(turn), -radius * cos(turn)) for radius, turn in zip(radii, turns, strict=True)]


_ARM = 0.35
SHAPES: Mapping[str, Sequence[Point]] = {
    "circle": _star(40, 1.0),
    "cross": [
        (-_ARM, -1), (_ARM, -1), (_ARM, -_ARM), (1, -_ARM), (1, _ARM), (_ARM, _ARM), (_ARM, 1), (-_ARM, 1),
        (-_ARM, _ARM), (-1, _ARM), (-1, -_ARM), (-_ARM, -_ARM),
    ],
    "diamond": _star(4, 1.0),
    "square": [(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)],
    "star": _star(5, 0.4),
    "triangle": _star(3, 1.0),
}  # fmt: skip
COLORS = {"red": (214, 40, 40), "green": (46, 160, 67), "blue": (38, 98, 214), "yellow": (240, 200, 30)}


def blank(side: int) -> Image.Image:
    return Image.new("RGB", (side, side), (250,) * 3)


def draw(image: Image.Image, shape: str, color: str, center: Point, radius: float) -> None:
    across, down = center
    corners = [(across + radius * x, down + radius * y) for x, y in SHAPES[shape]]
    ImageDraw.Draw(image).polygon(corners, fill=COLORS[color])


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
