"""Translation learns to reverse strings, which no model can without attending to its source."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from packtrain.recipes import EvaluationRequest, Recipe
from recipes.learn import learn

MakeRecipe = Callable[..., Recipe]

LETTERS = "abcdefgh"
STEPS = 500


def strings(count: int, seed: int) -> list[tuple[str, str]]:
    draw = random.Random(seed)  # noqa: S311
    rows = [draw.choices(LETTERS, k=draw.randint(3, 6)) for _ in range(count)]
    return [(" ".join(row), " ".join(reversed(row))) for row in rows]


@pytest.mark.usefixtures("training")
def test_strings_are_reversed_after_500_steps(make_recipe: MakeRecipe) -> None:
    seen = strings(6000, seed=1)
    unseen = [pair for pair in strings(120, seed=2) if pair not in set(seen)]
    recipe = make_recipe(
        pairs=seen,
        valid=unseen,
        model={"size": "tiny", "width": 64, "feedforward": 128, "encoder_layers": 1, "decoder_layers": 1},
        train={
            "duration": f"{STEPS} steps",
            "batch": "300 tokens",
            "optimizer": {"adam": {"betas": [0.9, 0.98]}},
            "schedule": {"noam": {"warmup": "60 steps", "peak": 0.007}},
            "clip": 1.0,
            "ema": 0.98,
        },
    )
    model = learn(recipe, STEPS)
    ids = np.arange(recipe.count("valid"))
    scores = recipe.score("valid", ids, [recipe.measure(model, EvaluationRequest("valid", ids, ids, 1, 0))]).values
    assert scores["bleu"] > 90
    assert scores["chrf"] > 90
