"""Captions learn to describe emoji better than the most common caption does."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from packtrain.launch.load import load
from packtrain.recipes import EvaluationRequest
from packtrain.recipes.caption import Caption
from recipes.captioned import MakeRecipe, bleu, mean_cider
from recipes.learn import learn

EXAMPLES = Path(__file__).parents[2] / "examples"
EMOJI = EXAMPLES / "data" / "emoji"
STEPS = 120  # two epochs


def most_common(recipe: Caption) -> list[str]:
    """Return the most frequent captions of the training data."""
    counts = Counter(text for texts in recipe.references("train").texts for text in texts)
    return [text for text, count in counts.items() if count == max(counts.values())]


@pytest.mark.usefixtures("training")
def test_emoji_are_described_better_than_by_the_most_common_caption(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(
        name="emoji",
        recipe="caption",
        data={
            "train": [{"coco": [str(EMOJI / "emoji-train.json"), str(EMOJI / "train")]}],
            "valid": [{"coco": [str(EMOJI / "emoji-valid.json"), str(EMOJI / "valid")]}],
            "vocabulary": 1000,
        },
        model={"size": "tiny"},
        train={
            "duration": f"{STEPS} steps",
            "batch": "32 samples",
            "size": 32,
            "min_scale": 0.6,
            "optimizer": {"adam": {"betas": [0.9, 0.98]}},
            "schedule": {"cosine": {"peak": 0.003, "warmup": "20 steps"}},
            "clip": 1.0,
            "ema": 0.95,
        },
    )
    assert isinstance(recipe, Caption)
    model = learn(recipe, STEPS)
    ids = np.arange(recipe.count("valid"))
    scores = recipe.score("valid", ids, [recipe.measure(model, EvaluationRequest("valid", ids, ids, 5, 0))]).values
    references, cider = recipe.references("valid").texts, recipe.references("valid").cider
    always = [[text] * len(ids) for text in most_common(recipe)]
    assert scores["bleu4"] > max(bleu(said, references)[3] for said in always) > 5
    assert scores["cider"] > 1.5 * max(mean_cider(cider, said, references) for said in always) > 15


def test_the_small_example_is_a_valid_job() -> None:
    job = load(EXAMPLES / "caption.yaml").job
    for source in (*job.data.train, *job.data.valid):
        assert all(Path(path).exists() for path in source.paths)
