from __future__ import annotations

import pytest

from packtrain.errors import FieldMistake
from packtrain.job.job import Model, Option
from packtrain.recipes.chat.shape import SIZES as CHAT_SIZES
from packtrain.recipes.chat.shape import ChatShape
from packtrain.recipes.shapes import Shape, read_shape
from packtrain.recipes.translate.shape import SIZES


def shape(size: str, /, **options: Option) -> Shape:
    return read_shape(Model(size=size, options=options), SIZES)


def refusal(size: str, /, **options: Option) -> str:
    with pytest.raises(FieldMistake) as refused:
        shape(size, **options)
    return str(refused.value)


def test_base_and_big_are_those_of_the_paper() -> None:
    assert shape("base") == Shape(512, 8, 2048, 6, 6, 0.1, 0.1)
    assert shape("big") == Shape(1024, 16, 4096, 6, 6, 0.3, 0.1)


def test_full_is_that_of_the_dialogue_recipe() -> None:
    full = ChatShape(1024, 16, 4096, 6, 6, 0.1, 0.1, prompt=15, reply=16)
    assert read_shape(Model(size="full"), CHAT_SIZES) == full
    assert read_shape(Model(size="full", options={"turns": 1, "prompt": 30}), CHAT_SIZES).prompt == 30


@pytest.mark.parametrize("size", CHAT_SIZES)
def test_every_size_of_a_dialogue_model_is_possible(size: str) -> None:
    assert read_shape(Model(size=size), CHAT_SIZES) == CHAT_SIZES[size]


@pytest.mark.parametrize("size", SIZES)
def test_every_size_is_possible(size: str) -> None:
    assert shape(size) == SIZES[size]


def test_options_change_a_size_and_nothing_else() -> None:
    assert shape("base", dropout=0.3, encoder_layers=12) == Shape(512, 8, 2048, 12, 6, 0.3, 0.1)
    assert shape("base", dropout=0) == Shape(512, 8, 2048, 6, 6, 0, 0.1)
    assert SIZES["base"] == Shape(512, 8, 2048, 6, 6, 0.1, 0.1)


def test_an_unknown_size_is_refused_with_the_nearest_word() -> None:
    assert refusal("bass") == "model.size: no size 'bass'; did you mean 'base'?"
    assert refusal("xxl") == "model.size: no size 'xxl'; known: base, big, small, tiny"


def test_an_unknown_option_is_refused_with_the_nearest_word() -> None:
    assert refusal("base", droput=0.3) == "model.droput: unknown option; did you mean 'dropout'?"
    assert refusal("base", size=3).startswith("model.size: unknown option; known: attention_dropout, ")


@pytest.mark.parametrize(
    ("option", "value", "fault"),
    [
        ("width", 0, "must be at least 1"),
        ("heads", 0, "must be at least 1"),
        ("width", -512, "must be a whole number of at least 0, not -512"),
        ("width", 512.0, "must be a whole number of at least 0, not 512.0"),
        ("width", "512", "must be a whole number of at least 0, not '512'"),
        ("encoder_layers", True, "must be a whole number of at least 0, not True"),
        ("dropout", 1, "must be less than 1"),
        ("dropout", 1.5, "must be less than 1"),
        ("dropout", -0.1, "must be a number of at least 0, not -0.1"),
        ("dropout", False, "must be a number of at least 0, not False"),
    ],
)
def test_an_impossible_option_is_refused_with_its_field(option: str, value: Option, fault: str) -> None:
    assert refusal("base", **{option: value}) == f"model.{option}: {fault}"


@pytest.mark.parametrize("options", [{"width": 500}, {"heads": 7}, {"width": 33, "heads": 3}])
def test_a_width_that_the_heads_cannot_share_is_refused(options: dict[str, Option]) -> None:
    assert "must be a multiple of twice model.heads" in refusal("base", **options)
