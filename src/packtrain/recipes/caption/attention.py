"""Attention maps: the part of the image that the model attended to for each word, drawn over the image."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from packtrain.pack.vocabulary import Vocabulary
from packtrain.pack.words import split_words

Map = NDArray[np.float32]
Pixels = NDArray[np.uint8]

_MAX_GRID_SIDE = 16  # of a recorded map: the larger ones of large images would be most of a run's metrics
_PANEL = 192
_MIN_PANEL = 120  # so that a word fits above it
_CORNER = 6
_GAP = 14
_MARGIN = 22
_TITLE = 28
_HEADING = 24
_COLUMNS = 5
_PAPER, _INK, _PALE, _EDGE = (255, 255, 255), (30, 34, 42), (112, 118, 130), (218, 221, 227)
# From no attention to full attention: dark violet, red, orange, light yellow.
_HEAT = np.array([(24, 12, 60), (120, 28, 109), (212, 72, 66), (251, 155, 6), (252, 245, 160)], np.float64)
_MAX_ALPHA, _MIN_ALPHA = 0.62, 0.35  # opacity of the heat map where attention is lowest, and where it is highest


@dataclass(frozen=True)
class WordAttention:
    """A word and its attention over the positions of the image, which sums to 1."""

    word: str
    map: Map


def attention_by_word(vocabulary: Vocabulary, tokens: Sequence[int], maps: Map) -> list[WordAttention]:
    """Average the maps of the tokens of each word. A space belongs to the word after it."""
    texts = vocabulary.decode([tokens[: end + 1] for end in range(len(tokens))])
    pieces = vocabulary.decode([[token] for token in tokens])
    numbers = [max(1, len(split_words(text))) for text in texts]
    for at in reversed(range(len(tokens) - 1)):
        if not pieces[at]:
            numbers[at] = numbers[at + 1]
    word_numbers = np.array(numbers, np.int64)
    words = split_words(texts[-1]) if texts else []
    return [
        WordAttention(word, maps[word_numbers == number].mean(0))
        for number, word in enumerate(words, 1)
        if (word_numbers == number).any()
    ]


def grid_of(attention: Map) -> Pixels:
    """Return a map as bytes: 255 is its most attention, 0 is none. A large map is averaged to one of few cells."""
    attention = np.nan_to_num(attention)  # of a model that diverged
    height, width = (min(side, _MAX_GRID_SIDE) for side in attention.shape)
    if attention.shape != (height, width):
        attention = np.asarray(Image.fromarray(attention).resize((width, height), Image.Resampling.BOX))
    scaled: Pixels = (attention * (255 / max(float(attention.max()), 1e-9))).round().astype(np.uint8)
    return scaled


def draw_attention(pixels: Pixels, caption: str, attention: Sequence[WordAttention]) -> bytes:
    """Return a PNG with the image and a panel for every word."""
    panels = 1 + len(attention)
    columns = min(_COLUMNS, panels)
    rows = -(-panels // columns)
    image = _fitted(pixels)
    across, down = max(_MIN_PANEL, image.width) + _GAP, _TITLE + image.height + _GAP
    width = 2 * _MARGIN + columns * across - _GAP
    heading = _font(_HEADING)
    lines = _wrapped(caption, heading, width - 2 * _MARGIN)
    top = _MARGIN + len(lines) * (_HEADING + 8) + 8
    height = top + rows * down - _GAP + _MARGIN
    sheet = Image.new("RGB", (width, height), _PAPER)
    draw = ImageDraw.Draw(sheet)
    for number, line in enumerate(lines):
        draw.text((_MARGIN, _MARGIN + number * (_HEADING + 8)), line, _INK, heading)
    titles = [("image", _PALE), *((word.word, _INK) for word in attention)]
    shown = [image, *(overlay(image, word.map) for word in attention)]
    for number, ((title, color), panel) in enumerate(zip(titles, shown, strict=True)):
        across_at, upper = _MARGIN + number % columns * across, top + number // columns * down
        font = _font(17)
        draw.text((across_at, upper + 2), _shortened(title, font, across - _GAP), color, font)
        sheet.paste(panel, (across_at, upper + _TITLE), _rounded(panel.size))
        if number == 0:  # a white image would have no visible edge on white
            right, lower = across_at + panel.width - 1, upper + _TITLE + panel.height - 1
            draw.rounded_rectangle((across_at, upper + _TITLE, right, lower), _CORNER, outline=_EDGE)
    file = io.BytesIO()
    sheet.save(file, "PNG", optimize=True)
    return file.getvalue()


def _fitted(pixels: Pixels) -> Image.Image:
    """Resize an image to the width of a panel, in its own shape."""
    height, width = pixels.shape[:2]
    scale = _PANEL / max(width, height)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS)


def overlay(image: Image.Image, attention: Map) -> Image.Image:
    """Return the image in gray under a heat map; the brightest color marks the most attention of this map."""
    lowest, highest = float(attention.min()), float(attention.max())
    scaled = (attention - lowest) / max(highest - lowest, 1e-9)
    heat = Image.fromarray(scaled.astype(np.float32)).resize(image.size, Image.Resampling.BICUBIC)
    share = np.clip(np.asarray(heat, np.float64), 0, 1)
    at = share * (len(_HEAT) - 1)
    below = np.minimum(at.astype(np.int64), len(_HEAT) - 2)
    fraction = (at - below)[..., None]
    colors = _HEAT[below] * (1 - fraction) + _HEAT[below + 1] * fraction
    gray = np.asarray(image.convert("L").convert("RGB"), np.float64)
    density = (_MAX_ALPHA + (_MIN_ALPHA - _MAX_ALPHA) * share)[..., None]
    return Image.fromarray((gray * (1 - density) + colors * density).round().astype(np.uint8))


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _rounded(size: tuple[int, int]) -> Image.Image:
    mask = Image.new("L", (size[0] * 4, size[1] * 4), 0)
    ImageDraw.Draw(mask).rounded_rectangle((0, 0, mask.width - 1, mask.height - 1), 4 * _CORNER, 255)
    return mask.resize(size, Image.Resampling.LANCZOS)


def _wrapped(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> list[str]:
    lines: list[str] = []
    for word in text.split():
        if lines and font.getlength(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(_shortened(word, font, width))
    return lines or ["(empty)"]


def _shortened(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text + "..."
