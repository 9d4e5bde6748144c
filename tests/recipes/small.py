"""The smallest job of each recipe, for the tests that all recipes share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pack.corpus import GREETINGS, write_pairs
from pack.pictures import photo, saved
from packtrain.recipes import Recipe
from recipes.captioned import THINGS, make_caption

MakeRecipe = Callable[..., Recipe]
Small = Callable[[MakeRecipe, Path], Recipe]

TEXT = {"size": "tiny", "width": 32, "feedforward": 64, "encoder_layers": 1, "decoder_layers": 1}
CONSTANT: dict[str, Any] = {"duration": "10 steps", "schedule": {"constant": {"rate": 0.003}}}
TOKENS, SAMPLES = {**CONSTANT, "batch": "64 tokens"}, {**CONSTANT, "batch": "8 samples", "size": 32}
CLASSES = ("cat", "dog", "elk")


def translate(make: MakeRecipe, _folder: Path) -> Recipe:
    return make(model=TEXT, train=TOKENS)


def chat(make: MakeRecipe, folder: Path) -> Recipe:
    said = write_pairs(folder / "talk.tsv", GREETINGS)
    data = {"train": [{"dialogue": said}], "valid": [{"dialogue": said}], "vocabulary": 300}
    return make(recipe="chat", data=data, model=TEXT, train=TOKENS)


def classify(make: MakeRecipe, folder: Path) -> Recipe:
    for number in range(12):
        path = folder / "photos" / CLASSES[number % 3] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(saved(photo(40 + number, 60 - number, seed=number), "JPEG"))
    source = [{"imagenet": str(folder / "photos")}]
    return make(
        recipe="classify", data={"train": source, "valid": source}, model={"size": "tiny", "width": 8}, train=SAMPLES
    )


def caption(make: MakeRecipe, folder: Path) -> Recipe:
    assert len(THINGS) == 8
    return make_caption(make, folder, train=SAMPLES)


SMALL: Mapping[str, Small] = {"translate": translate, "chat": chat, "classify": classify, "caption": caption}
