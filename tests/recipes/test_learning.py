"""Whether the recipe learns at all: to turn strings around, which no model can without looking at its source."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import islice

import numpy as np
import torch

from packtrain.data.loader import Order, Position, parts
from packtrain.recipes import Recipe
from packtrain.train.engine import Engine
from packtrain.train.world import World

MakeRecipe = Callable[..., Recipe]

LETTERS = "abcdefgh"
STEPS = 300


def strings(count: int, seed: int) -> list[tuple[str, str]]:
    draw = random.Random(seed)  # noqa: S311
    rows = [draw.choices(LETTERS, k=draw.randint(3, 8)) for _ in range(count)]
    return [(" ".join(row), " ".join(reversed(row))) for row in rows]


def test_the_recipe_learns_to_turn_strings_around(make_recipe: MakeRecipe) -> None:
    seen = strings(4000, seed=1)
    unseen = [pair for pair in strings(120, seed=2) if pair not in set(seen)]
    recipe = make_recipe(
        pairs=seen,
        valid=unseen,
        model={"size": "tiny", "width": 64, "feedforward": 128, "encoder_layers": 1, "decoder_layers": 1},
        train={
            "duration": f"{STEPS} steps",
            "batch": "500 tokens",
            "optimizer": {"adam": {"betas": [0.9, 0.98]}},
            "schedule": {"noam": {"warmup": "50 steps", "peak": 0.005}},
            "clip": 1.0,
        },
    )
    train = recipe.job.train
    engine = Engine(recipe, train, World())
    order = Order(recipe.costs, recipe.likeness, train.batch.value, train.seed)
    for number, loaded in enumerate(islice(parts(order, recipe.batch, Position(), 0, 1), STEPS)):
        batch = {name: torch.from_numpy(rows) for name, rows in loaded.arrays.items()}
        engine.step(number, batch, loaded.cost)

    ids = np.arange(recipe.count("valid"))
    measured = recipe.measure(engine.model.eval(), "valid", ids, ids, 1)
    loss = recipe.score("valid", ids, [measured]).values["loss"]
    letters = sum(len(target.split()) for _, target in unseen)
    blind = letters * math.log(len(LETTERS)) / (letters + len(unseen))  # a guess at each letter, all ends known
    assert blind > 1.5
    assert loss < 0.4 * blind
    right = sum(output == target for output, (_, target) in zip(measured.outputs, unseen, strict=True))
    assert right / len(unseen) > 0.3
