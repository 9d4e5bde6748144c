"""Toy data sets for first runs: a model learns each of them on two CPU cores in about a minute.

Each is a mapping from file names to contents, the same every time.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import cos, pi, sin
from typing import TypeVar

import numpy as np
from PIL import Image, ImageDraw

Files = dict[str, bytes]
Rows = list[tuple[str, str]]
Point = tuple[float, float]
Row = TypeVar("Row")

_MAX_NUMBER = 1000
_VALID_EVERY = 10  # every tenth sample is for validation


def _words(text: str) -> list[str]:
    return text.split()


_ENGLISH = _words(
    "one two three four five six seven eight nine ten"
    " eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
)
_GERMAN = _words(
    "eins zwei drei vier fünf sechs sieben acht neun zehn"
    " elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn"
)
_ENGLISH_TENS = _words("twenty thirty forty fifty sixty seventy eighty ninety")
_GERMAN_TENS = _words("zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig")

_DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_NAMES = _words("Anna Ben Clara David Emma Felix Grace Hugo Ida Jonas Karla Leo Mia Noah Olga Paul Rosa Sam Tara")
_FRAMES = [
    ("I see", ".", "Ich sehe", "."),
    ("we need", ".", "Wir brauchen", "."),
    ("there are", " here.", "Hier sind", "."),
    ("who has", "?", "Wer hat", "?"),
]
_THINGS = [("apples", "Äpfel"), ("books", "Bücher"), ("cats", "Katzen"), ("chairs", "Stühle"), ("stars", "Sterne")]
_COLORS = {"red": (214, 40, 40), "green": (46, 160, 67), "blue": (38, 98, 214), "yellow": (240, 200, 30)}
_WHITE = 250


# Texts.


def english(number: int) -> str:
    hundreds, rest = divmod(number, 100)
    if hundreds:
        return f"{_ENGLISH[hundreds - 1]} hundred" + (f" and {english(rest)}" if rest else "")
    if rest < 20:
        return _ENGLISH[rest - 1]
    tens, ones = divmod(rest, 10)
    return _ENGLISH_TENS[tens - 2] + (f"-{_ENGLISH[ones - 1]}" if ones else "")


def german(number: int) -> str:
    hundreds, rest = divmod(number, 100)
    if hundreds:
        head = "ein" if hundreds == 1 else _GERMAN[hundreds - 1]
        return f"{head}hundert" + (german(rest) if rest else "")
    if rest < 20:
        return _GERMAN[rest - 1]
    tens, ones = divmod(rest, 10)
    head = "" if not ones else "einund" if ones == 1 else f"{_GERMAN[ones - 1]}und"
    return head + _GERMAN_TENS[tens - 2]


def counting() -> Files:
    """Return sentences with numbers in English and German."""
    random = np.random.default_rng(4)
    rows: Rows = []
    for number in range(2, _MAX_NUMBER):
        for place in random.choice(len(_FRAMES) * len(_THINGS), 2, replace=False):
            before, after, davor, danach = _FRAMES[place // len(_THINGS)]
            thing, ding = _THINGS[place % len(_THINGS)]
            rows.append((f"{before} {english(number)} {thing}{after}", f"{davor} {german(number)} {ding}{danach}"))
    files: Files = {}
    for split, part in _splits(rows):
        files[f"{split}.en"] = _lines(source for source, _ in part)
        files[f"{split}.de"] = _lines(target for _, target in part)
    return files


def languages() -> Files:
    """Return number words with their language."""
    files: Files = {}
    for split, numbers in _splits(range(1, _MAX_NUMBER)):
        rows = [row for number in numbers for row in ((english(number), "English"), (german(number), "German"))]
        texts = [json.dumps({"source": text, "target": name}, ensure_ascii=False) for text, name in rows]
        files[f"{split}.jsonl"] = _lines(texts)
    return files


def small_talk() -> Files:
    """Return questions with one answer, and greetings."""
    rows: Rows = []
    for first in range(1, 10):
        for second in range(1, 10):
            total = english(first + second)
            rows.append((f"what is {english(first)} plus {english(second)}?", f"{total}."))
            rows.append((f"how much is {english(first)} and {english(second)}?", f"it is {total}."))
    for day, following in zip(_DAYS, _DAYS[1:] + _DAYS[:1], strict=True):
        rows += [(f"what comes after {day}?", f"{following}."), (f"which day is before {following}?", f"{day}.")]
        rows += [(f"today is {day}.", f"then tomorrow is {following}."), (f"is {day} a day?", f"yes, {day} is a day.")]
    for name in _NAMES:
        rows += [(f"my name is {name}.", f"nice to meet you, {name}."), (f"I am {name}.", f"hello, {name}!")]
        rows += [(f"do you know {name}?", f"no, who is {name}?"), (f"this is {name}.", f"hello, {name}!")]
    for greeting in ("hello", "hi", "good morning"):
        rows += [(f"{greeting}{mark}", f"{greeting}!") for mark in ("", "!", ".")]
    order = np.random.default_rng(1).permutation(len(rows))
    return {
        f"{split}.tsv": _lines("\t".join(row) for row in part)
        for split, part in _splits([rows[place] for place in order])
    }


def _lines(rows: Iterable[str]) -> bytes:
    return "".join(f"{row}\n" for row in rows).encode()


def _splits(rows: Sequence[Row]) -> Iterator[tuple[str, Sequence[Row]]]:
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
_SHAPES: Mapping[str, Sequence[Point]] = {
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


def _draw(image: Image.Image, shape: str, color: str, center: Point, radius: float) -> None:
    across, down = center
    corners = [(across + radius * x, down + radius * y) for x, y in _SHAPES[shape]]
    ImageDraw.Draw(image).polygon(corners, fill=_COLORS[color])


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def shapes() -> Files:
    """Return images of one shape each, in a folder per shape."""
    random = np.random.default_rng(2)
    drawn: Files = {}
    seen: set[bytes] = set()
    for shape in _SHAPES:
        for split, count in (("train", 90), ("valid", 10)):
            for number in range(count):
                file = _shape(random, shape)
                while file in seen:  # an image must not be in both splits
                    file = _shape(random, shape)
                seen.add(file)
                drawn[f"{split}/{shape}/{number:02d}.png"] = file
    return drawn


def _shape(random: np.random.Generator, shape: str) -> bytes:
    image = Image.new("RGB", (40, 40), (_WHITE,) * 3)
    color = list(_COLORS)[random.integers(len(_COLORS))]
    radius = random.uniform(9, 15)
    across, down = random.uniform(radius + 2, 38 - radius, 2)
    _draw(image, shape, color, (across, down), radius)
    return _png(image)


def scenes() -> Files:
    """Return images of two shapes, with two captions each that say which shapes are where."""
    random = np.random.default_rng(3)
    files: Files = {}
    for split, count in (("train", 900), ("valid", 100)):
        images, annotations = [], []
        for number in range(count):
            first, second = (list(_SHAPES)[place] for place in random.choice(len(_SHAPES), 2, replace=False))
            one, other = (list(_COLORS)[place] for place in random.integers(len(_COLORS), size=2))
            upright = bool(random.integers(2))
            image = Image.new("RGB", (48, 48), (_WHITE,) * 3)
            for shape, color, place in ((first, one, 12.0), (second, other, 36.0)):
                aside = random.uniform(20, 28)
                _draw(image, shape, color, (aside, place) if upright else (place, aside), random.uniform(8, 11))
            files[f"{split}/{number:03d}.png"] = _png(image)
            a, b = f"a {one} {first}", f"a {other} {second}"
            captions = [f"{a} above {b}", f"{b} below {a}"] if upright else [f"{a} left of {b}", f"{b} right of {a}"]
            images.append({"id": number, "file_name": f"{number:03d}.png"})
            annotations += [{"image_id": number, "caption": text} for text in captions]
        files[f"{split}.json"] = json.dumps({"images": images, "annotations": annotations}).encode()
    return files
