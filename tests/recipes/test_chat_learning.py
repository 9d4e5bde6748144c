"""Chat learns more from real conversations than the frequencies of words and word pairs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pack.corpus import write_pairs
from packtrain.pack.dialogue import DialogueSource
from packtrain.pack.shard import Ragged
from packtrain.recipes import Decoding, EvaluationRequest, Recipe
from packtrain.recipes.chat import Chat
from recipes.learn import learn
from recipes.ngrams import bigram_perplexity, unigram_perplexity

MakeRecipe = Callable[..., Recipe]

CHITCHAT = Path(__file__).parent.parent.parent / "examples" / "data" / "chitchat"
STEPS = 500


def conversations(split: str, count: int) -> list[tuple[str, str]]:
    pairs = DialogueSource(paths=(str(CHITCHAT / split),)).pairs(lambda *_: None)
    return [(pair.source, pair.target) for pair in itertools.islice(pairs, count)]


def rows_of(column: object) -> list[list[int]]:
    assert isinstance(column, Ragged)
    return [column[row].tolist() for row in range(len(column))]


@pytest.mark.usefixtures("training")
def test_perplexity_is_lower_than_that_of_unigrams_and_bigrams(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    train = write_pairs(tmp_path / "train.tsv", conversations("train", 12_000))
    valid = write_pairs(tmp_path / "valid.tsv", conversations("valid", 400))
    recipe = make_recipe(
        recipe="chat",
        # Short pieces: bigrams of them say little, and a decoder that does not attend to its own text is no better.
        data={"train": [{"dialogue": train}], "valid": [{"dialogue": valid}], "vocabulary": 350},
        model={"size": "tiny", "width": 48, "feedforward": 128, "encoder_layers": 1, "decoder_layers": 1},
        train={
            "duration": f"{STEPS} steps",
            "batch": "400 tokens",
            "optimizer": {"adam": {"betas": [0.9, 0.98]}},
            "schedule": {"noam": {"warmup": "60 steps", "peak": 0.012}},
            "clip": 1.0,
            "ema": 0.95,
        },
    )
    assert isinstance(recipe, Chat)
    model = learn(recipe, STEPS)
    ids = np.arange(recipe.count("valid"))
    scores = recipe.score("valid", ids[::8], [recipe.measure(model, EvaluationRequest("valid", ids, ids[::8], 2, 0))])
    seen, unseen = (rows_of(recipe.pairs[split].target) for split in ("train", "valid"))
    size = len(recipe.pack.vocabulary)
    assert scores.values["perplexity"] < 0.6 * unigram_perplexity(seen, unseen, size)
    assert scores.values["perplexity"] < bigram_perplexity(seen, unseen, size)
    assert 0 < scores.values["distinct_1"] <= scores.values["distinct_2"] <= 1
    replies = [made.text for made in recipe.predict(model, ["hello", "how are you?"], Decoding(nucleus=0.9))]
    assert all(replies)
