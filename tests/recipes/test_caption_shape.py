from __future__ import annotations

from typing import Any

import pytest

from packtrain.errors import FieldMistake
from packtrain.job.job import Job, Model
from packtrain.recipes import check_recipe
from packtrain.recipes.caption.shape import SIZES, shape_of


def shape_with(**options: Any) -> Any:
    return shape_of(Model.model_validate({"size": "resnet50", **options}))


@pytest.mark.parametrize("size", SIZES)
def test_every_size_is_found_by_its_name(size: str) -> None:
    assert shape_of(Model(size=size)) == SIZES[size]


def test_the_full_sizes_have_the_published_widths() -> None:
    for size in ("resnet50", "resnet101"):
        shape = SIZES[size]
        assert (shape.width, shape.attention, shape.dropout, shape.penalty) == (500, 500, 0.2, 1.0)


def test_options_change_a_size() -> None:
    shape = shape_with(cell="lstm", width=64, dropout=0.5)
    assert (shape.cell, shape.width, shape.dropout, shape.attention) == ("lstm", 64, 0.5, 500)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"widht": 3}, r"model\.widht: unknown option; did you mean 'width'\?"),
        ({"width": 0}, r"model\.width: must be at least 1"),
        ({"width": 2.5}, r"model\.width: must be a whole number of at least 0, not 2\.5"),
        ({"width": "wide"}, r"model\.width: must be a whole number of at least 0, not 'wide'"),
        ({"dropout": 1.0}, r"model\.dropout: must be less than 1"),
        ({"dropout": -0.1}, r"model\.dropout: must be a number of at least 0, not -0\.1"),
        ({"cell": "rnn"}, r"model\.cell: 'rnn' is not one of gru, lstm"),
        ({"weights": True}, r"model\.weights: must be a text, not True"),
        ({"encoder": "vgg"}, r"model\.encoder: 'vgg' is not one of tiny, resnet18"),
        ({"tuned_stages": 5}, r"model\.tuned_stages: resnet50 has 4 stages"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(FieldMistake, match=fault):
        shape_with(**options)


def test_an_unknown_size_is_refused_with_the_nearest() -> None:
    with pytest.raises(FieldMistake, match=r"^model\.size: no size 'resnet5'; did you mean 'resnet50'\?$"):
        shape_of(Model(size="resnet5"))


def test_a_published_encoder_is_frozen_at_first_and_a_random_one_never() -> None:
    published = shape_with(weights="r.safetensors", frozen_epochs=2)
    assert [published.is_frozen(epoch) for epoch in range(4)] == [True, True, False, False]
    assert shape_with(weights="r.safetensors", frozen_epochs=2, tuned_stages=0).is_frozen(9)
    assert not shape_with(frozen_epochs=2).is_frozen(0)


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
        with pytest.raises(FieldMistake, match=r"^train\.optimizer: its decay would shrink the frozen encoder"):
            check_recipe(job)
    else:
        check_recipe(job)
