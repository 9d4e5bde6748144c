from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pack.corpus import write_pairs
from packtrain.data.order import block
from packtrain.errors import Mistake
from packtrain.pack.vocabulary import BOS, EOS, PAD
from packtrain.recipes import Decoding, EvaluationRequest, Measurement, Prediction, Recipe, Scores
from packtrain.recipes.chat import Chat, distinct

MakeRecipe = Callable[..., Recipe]

TALK = ["hello", "hello you", "how are you today", "well and you", "very well", "good", "good bye then"]
OTHER_TALK = ["is it cold", "it is not", "why do you say so", "look at the sky"]
PAIRS = [*pairwise(TALK), *pairwise(OTHER_TALK)]
SETTINGS = {"duration": "10 steps", "batch": "64 tokens", "schedule": {"constant": {"rate": 0.001}}}


@pytest.fixture(scope="session")
def make_chat(make_recipe: MakeRecipe, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Chat]:
    def make(**options: Any) -> Chat:
        folder: Path = tmp_path_factory.mktemp("talk")
        said = write_pairs(folder / "talk.tsv", PAIRS)
        model = {"size": "tiny", "width": 32, "feedforward": 64, "encoder_layers": 1, "decoder_layers": 1, **options}
        data = {"train": [{"dialogue": said}], "valid": [{"dialogue": said}], "vocabulary": 300}
        recipe = make_recipe(recipe="chat", data=data, model=model, train=SETTINGS)
        assert isinstance(recipe, Chat)
        return recipe

    return make


@pytest.fixture(scope="session")
def chat(make_chat: Callable[..., Chat]) -> Chat:
    return make_chat(prompt=60, reply=40, turns=3)


def model_of(recipe: Recipe, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return recipe.build_model().eval()


def row_of(recipe: Recipe, side: str, sample: int) -> list[int]:
    row = recipe.batch(np.array([sample]), 0)[side][0].tolist()
    return [token for token in row if token != PAD]


def spelled(recipe: Recipe, text: str) -> list[int]:
    return recipe.pack.vocabulary.encode([text])[0]


# Prompts and replies.


def test_a_prompt_is_the_last_turns_of_its_own_conversation(chat: Chat) -> None:
    said = [[*spelled(chat, text), EOS] for text in TALK]
    assert row_of(chat, "source", 0) == said[0]
    assert row_of(chat, "source", 1) == said[0] + said[1]
    assert row_of(chat, "source", 4) == said[2] + said[3] + said[4]
    assert row_of(chat, "source", len(TALK) - 1) == [*spelled(chat, OTHER_TALK[0]), EOS]
    assert row_of(chat, "target", 4) == [BOS, *said[5]]


def test_with_one_turn_a_prompt_is_the_last_turn_alone(make_chat: Callable[..., Chat]) -> None:
    alone = make_chat(prompt=60, reply=40, turns=1)
    for sample, text in enumerate(TALK[:-1]):
        assert row_of(alone, "source", sample) == [*spelled(alone, text), EOS]


def test_prompts_lose_their_beginning_and_replies_their_end(make_chat: Callable[..., Chat], chat: Chat) -> None:
    short = make_chat(prompt=5, reply=4)
    for sample in range(len(PAIRS)):
        assert row_of(short, "source", sample) == row_of(chat, "source", sample)[-5:]
        assert row_of(short, "target", sample) == row_of(chat, "target", sample)[:5]
    assert short.costs.tolist() == np.minimum(chat.costs, 4).tolist()
    assert max(short.lengths) == 5


def test_notes_say_how_many_prompts_and_replies_are_truncated(make_chat: Callable[..., Chat], chat: Chat) -> None:
    assert chat.notes == []
    prompts = sum(len(row_of(chat, "source", sample)) > 5 for sample in range(len(PAIRS)))  # with their three turns
    assert prompts > sum(len(spelled(chat, one)) + 1 > 5 for one, _ in PAIRS)
    replies = sum(len(spelled(chat, other)) + 1 > 4 for _, other in PAIRS)
    [trained, _] = make_chat(prompt=5, reply=4, turns=3).notes
    assert trained.startswith(
        f"train: of {len(PAIRS)} pairs, {prompts} prompts lose their beginning and {replies} replies their end"
    )


# The loss.


def test_the_loss_is_a_sum_over_real_tokens_without_padding(chat: Chat) -> None:
    model = model_of(chat)
    with torch.no_grad():
        model.get_parameter("output.weight").zero_()
    pieces = len(model.get_parameter("output.weight"))
    for ids in (np.arange(len(PAIRS)), np.arange(1), np.array([2, 5])):
        batch = {name: torch.from_numpy(rows) for name, rows in chat.batch(ids, 0).items()}
        assert chat.loss(model, batch).item() == pytest.approx(chat.costs[ids].sum() * math.log(pieces), rel=1e-5)


# Evaluation.


def measured(recipe: Recipe, model: nn.Module, parts: int) -> Scores:
    ids = np.arange(recipe.count("valid"))
    divided = [ids[list(block(len(ids), part, parts))] for part in range(parts)]
    return recipe.score(
        "valid", ids, [recipe.measure(model, EvaluationRequest("valid", mine, mine, 2, 0)) for mine in divided]
    )


def test_scores_do_not_depend_on_the_number_of_workers(chat: Chat) -> None:
    whole, divided = measured(chat, model_of(chat), 1), measured(chat, model_of(chat), 3)
    assert divided.values == pytest.approx(whole.values, rel=1e-5)
    assert divided.samples == whole.samples


def test_perplexity_is_the_exponential_of_the_loss_and_lower_is_better(chat: Chat) -> None:
    scores = chat.score("valid", np.arange(0), [Measurement({"loss": 30.0, "tokens": 10.0, "samples": 3.0}, [])])
    assert scores.values == {"loss": 3.0, "perplexity": pytest.approx(math.exp(3.0))}
    assert chat.best_metric in chat.lower_is_better


def test_a_huge_loss_has_a_finite_perplexity(chat: Chat) -> None:
    values = chat.score("valid", np.arange(0), [Measurement({"loss": 1e9, "tokens": 1.0, "samples": 5.0}, [])]).values
    assert math.isfinite(values["perplexity"])


def test_samples_show_the_turns_the_reference_and_the_reply(chat: Chat) -> None:
    ids = np.arange(3)
    part = chat.measure(model_of(chat), EvaluationRequest("valid", ids, ids, 1, 0))
    sample = chat.score("valid", ids, [part]).samples[2]
    assert (sample.input, sample.reference) == ("hello / hello you / how are you today", "well and you")
    assert sample.prediction == part.outputs[2]


@pytest.mark.parametrize(
    ("texts", "size", "share"),
    [
        (["a b", "A c"], 1, 3 / 4),
        (["a b c", "a b"], 2, 2 / 3),
        (["a", ""], 2, 0.0),
        ([], 1, 0.0),
        (["好 的", "好吧"], 1, 3 / 4),
    ],
)
def test_distinct_is_the_share_of_different_ngrams(texts: list[str], size: int, share: float) -> None:
    assert distinct(texts, size) == pytest.approx(share)


# Replies.


def replied(chat: Chat, model: nn.Module, turns: Sequence[str], decoding: Decoding) -> Prediction:
    [reply] = chat.reply(model, [turns], decoding)
    return reply


def test_a_reply_depends_on_the_last_turns_only(chat: Chat) -> None:
    model, decoding = model_of(chat, 3), Decoding(1, repetition=1.5)
    for turns in (TALK[:1], TALK[:3], ["something older", *TALK[:3]]):
        assert replied(chat, model, turns, decoding) == replied(chat, model, turns[-3:], decoding)
    assert replied(chat, model, TALK[:1], decoding) == chat.predict(model, TALK[:1], decoding)[0]


def test_earlier_turns_change_the_reply(chat: Chat) -> None:
    decoding = Decoding(1)
    answers = {replied(chat, model_of(chat, 3), [one, "and you"], decoding).text for one in TALK}
    assert len(answers) > 1


def test_a_conversation_of_any_length_gets_a_reply(make_chat: Callable[..., Chat]) -> None:
    short = make_chat(prompt=5, reply=4)
    long, last = ["how are you today"] * 50, ["how are you today"]
    assert replied(short, model_of(short), long, Decoding(2)) == replied(short, model_of(short), last, Decoding(2))
    assert replied(short, model_of(short), ["", "  "], Decoding()).text == ""


@pytest.mark.parametrize("decoding", [Decoding(1), Decoding(4), Decoding(nucleus=0.9, temperature=1.5, seed=7)])
def test_any_prompt_gets_a_reply(make_chat: Callable[..., Chat], decoding: Decoding) -> None:
    short = make_chat(prompt=5, reply=4)
    inputs = ["hm", "", "доброе утро", "a\x00b\x1b", "words " * 30, "<eos>"]
    replies = short.predict(model_of(short), inputs, decoding)
    assert len(replies) == len(inputs)
    assert replies[1].text == ""
    unread = len(spelled(short, inputs[4])) + 1 - 5
    assert (replies[0].note, replies[4].note) == ("", f"its first {unread} tokens were cut off")


@pytest.mark.parametrize(
    ("words", "size"), [(3_000, r"\d+,\d\d\d tokens, more than 1,000"), (10_000, "more than 16,000")]
)
def test_a_prompt_of_thousands_of_words_is_refused(chat: Chat, words: int, size: str) -> None:
    with pytest.raises(Mistake, match=f"the input has {size}"):
        chat.predict(model_of(chat), ["word " * words], Decoding())
