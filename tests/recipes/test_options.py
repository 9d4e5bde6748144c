"""Options of models: every recipe refuses an unknown name or a wrong value with the field of the job."""

from __future__ import annotations

from typing import Any

import pytest

from packtrain.errors import FieldMistake
from packtrain.job.job import Job, ModelSettings, Option
from packtrain.recipes import check_recipe
from packtrain.recipes.caption import SIZES as CAPTION_SIZES
from packtrain.recipes.caption import CaptionerShape, captioner_shape
from packtrain.recipes.chat import SIZES as CHAT_SIZES
from packtrain.recipes.chat import ChatShape
from packtrain.recipes.pairs import TransformerShape, read_shape
from packtrain.recipes.translate import SIZES


def shape(size: str, /, **options: Option) -> TransformerShape:
    return read_shape(ModelSettings(size=size, options=options), SIZES)


def refusal(size: str, /, **options: Option) -> str:
    with pytest.raises(FieldMistake) as refused:
        shape(size, **options)
    return str(refused.value)


def test_base_and_big_have_the_sizes_of_the_paper() -> None:
    assert shape("base") == TransformerShape(512, 8, 2048, 6, 6, 0.1, 0.1)
    assert shape("big") == TransformerShape(1024, 16, 4096, 6, 6, 0.3, 0.1)


def test_full_has_the_published_dialogue_size() -> None:
    full = ChatShape(1024, 16, 4096, 6, 6, 0.1, 0.1, prompt=15, reply=16)
    assert read_shape(ModelSettings(size="full"), CHAT_SIZES) == full
    assert read_shape(ModelSettings(size="full", options={"turns": 1, "prompt": 30}), CHAT_SIZES).prompt == 30


@pytest.mark.parametrize("size", CHAT_SIZES)
def test_every_size_of_chat_is_valid(size: str) -> None:
    assert read_shape(ModelSettings(size=size), CHAT_SIZES) == CHAT_SIZES[size]


@pytest.mark.parametrize("size", SIZES)
def test_every_size_of_translate_is_valid(size: str) -> None:
    assert shape(size) == SIZES[size]


def test_options_change_a_copy_of_the_size() -> None:
    assert shape("base", dropout=0.3, encoder_layers=12) == TransformerShape(512, 8, 2048, 12, 6, 0.3, 0.1)
    assert shape("base", dropout=0) == TransformerShape(512, 8, 2048, 6, 6, 0, 0.1)
    assert SIZES["base"] == TransformerShape(512, 8, 2048, 6, 6, 0.1, 0.1)


def test_an_unknown_size_is_refused_with_the_nearest_name() -> None:
    assert refusal("bass") == "model.size: no size 'bass'; did you mean 'base'?"
    assert refusal("xxl") == "model.size: no size 'xxl'; known: base, big, small, tiny"


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    assert refusal("base", droput=0.3) == "model.droput: unknown option; did you mean 'dropout'?"
    assert refusal("base", size=3).startswith("model.size: unknown option; known: attention_dropout, ")


@pytest.mark.parametrize(
    ("option", "value", "fault"),
    [
        ("width", 0, "must be an integer of at least 1, not 0"),
        ("heads", 0, "must be an integer of at least 1, not 0"),
        ("width", -512, "must be an integer of at least 1, not -512"),
        ("width", 512.0, "must be an integer of at least 1, not 512.0"),
        ("width", "512", "must be an integer of at least 1, not '512'"),
        ("encoder_layers", True, "must be an integer of at least 1, not True"),
        ("dropout", 1, "must be a number of at least 0 and less than 1, not 1"),
        ("dropout", 1.5, "must be a number of at least 0 and less than 1, not 1.5"),
        ("dropout", -0.1, "must be a number of at least 0 and less than 1, not -0.1"),
        ("dropout", False, "must be a number of at least 0 and less than 1, not False"),
    ],
)
def test_an_invalid_option_is_refused_with_its_field(option: str, value: Option, fault: str) -> None:
    assert refusal("base", **{option: value}) == f"model.{option}: {fault}"


@pytest.mark.parametrize("options", [{"width": 500}, {"heads": 7}, {"width": 33, "heads": 3}])
def test_a_width_that_heads_do_not_divide_is_refused(options: dict[str, Option]) -> None:
    assert "must be a multiple of twice model.heads" in refusal("base", **options)


# Captions.


def caption_shape_with(**options: Any) -> CaptionerShape:
    return captioner_shape(ModelSettings.model_validate({"size": "resnet50", **options}))


@pytest.mark.parametrize("size", CAPTION_SIZES)
def test_every_size_of_caption_is_valid(size: str) -> None:
    assert captioner_shape(ModelSettings(size=size)) == CAPTION_SIZES[size]


def test_caption_has_the_published_widths() -> None:
    for size in ("resnet50", "resnet101"):
        shape = CAPTION_SIZES[size]
        assert (shape.width, shape.attention, shape.dropout, shape.penalty) == (500, 500, 0.2, 1.0)


def test_options_change_a_size_of_caption() -> None:
    shape = caption_shape_with(cell="lstm", width=64, dropout=0.5)
    assert (shape.cell, shape.width, shape.dropout, shape.attention) == ("lstm", 64, 0.5, 500)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"widht": 3}, r"model\.widht: unknown option; did you mean 'width'\?"),
        ({"width": 0}, r"model\.width: must be an integer of at least 1, not 0"),
        ({"width": 2.5}, r"model\.width: must be an integer of at least 1, not 2\.5"),
        ({"width": "wide"}, r"model\.width: must be an integer of at least 1, not 'wide'"),
        ({"dropout": 1.0}, r"model\.dropout: must be a number of at least 0 and less than 1, not 1\.0"),
        ({"dropout": -0.1}, r"model\.dropout: must be a number of at least 0 and less than 1, not -0\.1"),
        ({"cell": "rnn"}, r"model\.cell: must be one of gru, lstm, not 'rnn'"),
        ({"weights": True}, r"model\.weights: must be a string, not True"),
        ({"encoder": "vgg"}, r"model\.encoder: must be one of tiny, resnet18, .*, not 'vgg'"),
        ({"frozen_epochs": -1}, r"model\.frozen_epochs: must be an integer of at least 0, not -1"),
        ({"tuned_stages": 5}, r"model\.tuned_stages: resnet50 has 4 stages"),
    ],
)
def test_an_invalid_option_of_caption_is_refused(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(FieldMistake, match=fault):
        caption_shape_with(**options)


def test_an_unknown_size_of_caption_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(FieldMistake, match=r"^model\.size: no size 'resnet5'; did you mean 'resnet50'\?$"):
        captioner_shape(ModelSettings(size="resnet5"))


def test_a_pretrained_encoder_starts_frozen_and_a_random_one_does_not() -> None:
    pretrained = caption_shape_with(weights="r.safetensors", frozen_epochs=2)
    assert [pretrained.is_frozen(epoch) for epoch in range(4)] == [True, True, False, False]
    assert caption_shape_with(weights="r.safetensors", frozen_epochs=2, tuned_stages=0).is_frozen(9)
    assert not caption_shape_with(frozen_epochs=2).is_frozen(0)


@pytest.mark.parametrize(("frozen_epochs", "refused"), [(1, True), (0, False)])
def test_decay_that_would_shrink_a_frozen_encoder_is_refused(frozen_epochs: int, refused: bool) -> None:
    job = Job.model_validate(
        {
            "name": "mine",
            "recipe": "caption",
            "data": {"train": [{"coco": ["a.json", "a"]}]},
            "model": {"size": "resnet50", "weights": "r.safetensors", "frozen_epochs": frozen_epochs},
            "train": {
                "duration": "1 epochs",
                "batch": "4 samples",
                "schedule": {"constant": {"rate": 0.001}},
                "optimizer": {"adamw": {"decay": 0.01}},
            },
        }
    )
    if refused:
        with pytest.raises(FieldMistake, match=r"^train\.optimizer: weight decay would shrink the frozen encoder"):
            check_recipe(job)
    else:
        check_recipe(job)
