"""Small sets of captioned images, and recipes that learn from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from packtrain.data.order import Ids
from packtrain.recipes import Batch, Recipe
from packtrain.recipes.caption import Caption
from packtrain.recipes.caption.model import Captioner
from packtrain.recipes.caption.scores import ORDERS, Cider, bleu_counts
from packtrain.recipes.statistics import bleu_statistic, mean

MakeRecipe = Callable[..., Recipe]

COLORS = {"red": (220, 30, 30), "green": (30, 160, 60), "blue": (40, 70, 210), "yellow": (240, 210, 40)}
SHAPES = ("square", "circle")

TRAIN: dict[str, Any] = {
    "duration": "10 steps",
    "batch": "4 samples",
    "schedule": {"constant": {"rate": 0.001}},
    "size": 32,
}


def captions_of(color: str, shape: str) -> list[str]:
    return [f"a {color} {shape}", f"a {shape} that is {color}, on white paper"]


def write_set(folder: Path, things: Sequence[tuple[str, str]], name: str = "set") -> list[str]:
    """Write images of colored shapes in COCO's layout; return the paths for a job."""
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    (folder / name).mkdir(parents=True)
    for number, (color, shape) in enumerate(things):
        image = Image.new("RGB", (40, 36 + number % 3), "white")
        draw = ImageDraw.Draw(image)
        (draw.rectangle if shape == "square" else draw.ellipse)((8, 8, 28, 28), COLORS[color])
        image.save(folder / name / f"{number}.png")
        images.append({"id": number, "file_name": f"{number}.png"})
        for caption in captions_of(color, shape)[: 1 + number % 2]:
            annotations.append({"id": len(annotations), "image_id": number, "caption": caption})
    (folder / f"{name}.json").write_text(json.dumps({"images": images, "annotations": annotations}))
    return [str(folder / f"{name}.json"), str(folder / name)]


THINGS = [(color, shape) for shape in SHAPES for color in COLORS]


def make_caption(make_recipe: MakeRecipe, folder: Path, **changes: Any) -> Caption:
    """Return the recipe on eight images, with a mix of three and two for validation."""
    data = {
        "train": [{"coco": write_set(folder, THINGS, "train")}],
        "valid": [
            {"coco": write_set(folder, THINGS[:3], "valid")},
            {"vizwiz": write_set(folder, THINGS[4:6], "other")},
        ],
        "vocabulary": 300,
    }
    model = {"size": "tiny", "width": 16, "attention": 12}
    sections = {"data": data, "model": model, "train": TRAIN} | changes
    recipe = make_recipe(name="shapes", recipe="caption", **sections)
    assert isinstance(recipe, Caption)
    return recipe


def model_of(recipe: Recipe, seed: int = 1) -> Captioner:
    """Return an untrained model whose attention and outputs are far from uniform."""
    torch.manual_seed(seed)
    model = recipe.build_model().eval()
    assert isinstance(model, Captioner)
    return with_larger_weights(model)


def with_larger_weights(model: Captioner) -> Captioner:
    with torch.no_grad():
        for layer in (model.attention, model.query, model.key, model.first_state):
            layer.weight.mul_(4)
        model.embedding.weight.mul_(6)
    return model


def random_images(count: int, height: int = 32, width: int = 32) -> Tensor:
    """Return images of random color patches."""
    generator = torch.Generator().manual_seed(7)
    patches = torch.randint(0, 256, (count, 2, 2, 3), dtype=torch.uint8, generator=generator)
    return patches.repeat_interleave(height // 2, 1).repeat_interleave(width // 2, 2)


def tensors(recipe: Recipe, ids: Ids, epoch: int = 0) -> Batch:
    return {name: torch.from_numpy(rows) for name, rows in recipe.batch(ids, epoch).items()}


def bleu(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> tuple[float, ...]:
    """Return BLEU-1, 2, 3 and 4 of captions."""
    counts = bleu_counts(outputs, references)
    return tuple(bleu_statistic(counts, order, smooth=False).value for order in range(1, ORDERS + 1))


def mean_cider(cider: Cider, outputs: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    return mean([cider.score_of(*texts) for texts in zip(outputs, references, strict=True)]).value
