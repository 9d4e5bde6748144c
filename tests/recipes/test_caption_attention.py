from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from packtrain.pack.vocabulary import Vocabulary
from packtrain.recipes.caption.attention import WordAttention, attention_by_word, draw_attention, overlay

PIXELS = np.full((48, 48, 3), 200, np.uint8)


def spot(row: int, column: int, side: int = 6) -> np.ndarray:
    places = np.zeros((side, side), np.float32)
    places[row, column] = 1.0
    return places


def test_the_maps_of_a_words_tokens_are_averaged() -> None:
    vocabulary = Vocabulary.fit(["a dog", "a cat"] * 5, 300)
    tokens = vocabulary.encode(["a zebra, größer"])[0]
    maps = np.random.default_rng(1).random((len(tokens), 3, 3)).astype(np.float32)
    maps /= maps.sum((1, 2), keepdims=True)
    found = attention_by_word(vocabulary, tokens, maps)
    assert [one.word for one in found] == ["a", "zebra,", "größer"]
    assert np.allclose(found[0].map, maps[0])
    end = 1 + len(vocabulary.encode(["zebra,"])[0])
    assert np.allclose(found[1].map, maps[1:end].mean(0))
    assert [float(one.map.sum()) for one in found] == pytest.approx([1.0] * 3)


def test_a_caption_without_words_has_no_maps() -> None:
    vocabulary = Vocabulary.fit(["a dog"], 300)
    assert attention_by_word(vocabulary, [], np.zeros((0, 3, 3), np.float32)) == []


def test_the_heat_map_is_brightest_where_the_attention_is() -> None:
    image = Image.fromarray(PIXELS).resize((96, 96))
    hot = np.asarray(overlay(image, spot(0, 5)), int)
    assert hot[4:12, -12:-4].sum() > 1.5 * hot[-12:-4, 4:12].sum()


def test_uniform_attention_is_no_error() -> None:
    image = Image.fromarray(PIXELS)
    even = np.asarray(overlay(image, np.full((6, 6), 1 / 36, np.float32)), int)
    assert even.max() - even.min() < 3 * 255


@pytest.mark.parametrize("count", [0, 1, 4, 5, 17])
def test_there_is_a_panel_for_every_word(count: int) -> None:
    attention = [WordAttention(f"word{number}" * (1 + number), spot(number % 6, number % 5)) for number in range(count)]
    with Image.open(io.BytesIO(draw_attention(PIXELS, " ".join(one.word for one in attention), attention))) as sheet:
        assert sheet.format == "PNG"
        panels = -(-(1 + count) // 5)
        assert sheet.height > panels * 192
        assert sheet.width <= 1200


@pytest.mark.parametrize(("width", "height", "most"), [(400, 100, 48), (100, 400, 192), (1, 900, 192)])
def test_panels_have_the_shape_of_the_image(width: int, height: int, most: int) -> None:
    pixels = np.full((height, width, 3), 255, np.uint8)
    attention = [WordAttention("word", spot(1, 1))] * 9
    with Image.open(io.BytesIO(draw_attention(pixels, "word", attention))) as sheet:
        assert sheet.height < 2 * (most + 60) + 80
        assert sheet.width > 5 * 120


def test_a_white_image_has_an_edge_on_a_white_page() -> None:
    white = np.full((48, 48, 3), 255, np.uint8)
    with Image.open(io.BytesIO(draw_attention(white, "", []))) as sheet:
        below = np.asarray(sheet)[-40:]
    assert (below.min(axis=(1, 2)) < 255).any()
