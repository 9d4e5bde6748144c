from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pack.corpus import GREETINGS, QUESTIONS
from packtrain.data.order import Ids, block, share, sort_keys
from packtrain.errors import Mistake
from packtrain.pack.vocabulary import BOS, EOS, PAD, Vocabulary
from packtrain.recipes import Batch, Decoding, EvaluationRequest, Recipe, Scores
from packtrain.recipes.translate import Translate, bleu_tokenizer

MakeRecipe = Callable[..., Recipe]
EVERYTHING = np.arange(len(GREETINGS))


def settings(**changes: object) -> dict[str, object]:
    schedule = {"constant": {"rate": 0.001}}
    return {"duration": "10 steps", "batch": "64 tokens", "schedule": schedule, **changes}


def model_of(recipe: Recipe, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return recipe.build_model().eval()


def tensors(recipe: Recipe, ids: Ids) -> Batch:
    return {name: torch.from_numpy(rows) for name, rows in recipe.batch(ids, 0).items()}


def gradients(recipe: Recipe, model: nn.Module, shares: list[Ids]) -> tuple[float, list[Tensor]]:
    """Return the sums of the losses and of the gradients of all shares."""
    model.zero_grad()
    total = 0.0
    for ids in shares:
        loss = recipe.loss(model, tensors(recipe, ids))
        loss.backward()
        total += loss.item()
    return total, [torch.zeros(()) if one.grad is None else one.grad.clone() for one in model.parameters()]


# Batches.


def test_a_batch_has_padded_sources_and_targets(recipe: Recipe) -> None:
    batch = recipe.batch(np.array([4, 0]), 0)
    assert batch.keys() == {"source", "target", "predicted"}
    for side in ("source", "target"):
        assert batch[side].shape[0] == 2
        assert batch[side].dtype == np.int64
    vocabulary = recipe.pack.vocabulary
    assert vocabulary.decode(batch["source"].tolist()) == ["hello", "good morning"]
    assert vocabulary.decode(batch["target"].tolist()) == ["hallo", "guten Morgen"]
    assert set(batch["target"][:, 0].tolist()) == {BOS}
    answers = batch["target"][:, 1:]
    assert answers.flatten()[batch["predicted"]].tolist() == answers[answers != PAD].tolist()


def test_a_sample_costs_the_target_tokens_that_are_predicted(recipe: Recipe) -> None:
    rows = recipe.pack.vocabulary.encode([target for _, target in GREETINGS])
    assert recipe.costs.tolist() == [len(row) + 1 for row in rows]


def test_samples_are_sorted_by_their_longer_side_then_by_the_difference(recipe: Recipe) -> None:
    encode = recipe.pack.vocabulary.encode
    lengths = [(len(encode([source])[0]) + 1, len(encode([target])[0]) + 2) for source, target in GREETINGS]
    order = recipe.sort_keys.argsort(kind="stable")
    longer = [max(lengths[sample]) for sample in order]
    assert longer == sorted(longer)
    assert recipe.sort_keys.tolist() == sort_keys(*np.array(lengths).T).tolist()


# The loss.


def test_the_loss_is_a_sum_over_as_many_tokens_as_the_batch_costs(recipe: Recipe) -> None:
    model = model_of(recipe)
    with torch.no_grad():
        model.get_parameter("embedding.weight").zero_()  # every piece is as likely as any other
    pieces = len(model.get_parameter("embedding.weight"))
    for ids in (EVERYTHING, EVERYTHING[:1], EVERYTHING[2:5]):
        loss = recipe.loss(model, tensors(recipe, ids)).item()
        assert loss == pytest.approx(recipe.costs[ids].sum() * math.log(pieces), rel=1e-5)


@pytest.mark.parametrize("num_ranks", [2, 3, len(GREETINGS) + 3])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_and_gradients_of_all_ranks_add_up_to_those_of_the_batch(
    make_recipe: MakeRecipe, num_ranks: int, smoothing: float
) -> None:
    recipe = make_recipe(train=settings(label_smoothing=smoothing))
    model = model_of(recipe)
    whole_loss, whole = gradients(recipe, model, [EVERYTHING])
    loss, added = gradients(recipe, model, [share(EVERYTHING, rank, num_ranks) for rank in range(num_ranks)])
    assert loss == pytest.approx(whole_loss, rel=1e-5)
    for one, other in zip(added, whole, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_rank_without_samples_has_zero_loss_and_zero_gradients(make_recipe: MakeRecipe, smoothing: float) -> None:
    """The gradient sync waits for every weight of every rank, also of a rank without samples."""
    recipe = make_recipe(train=settings(label_smoothing=smoothing))
    model = model_of(recipe).train()
    loss = recipe.loss(model, tensors(recipe, EVERYTHING[:0]))
    loss.backward()
    assert loss.item() == 0.0
    assert [name for name, weights in model.named_parameters() if weights.grad is None] == []
    assert all(float(weights.grad.abs().sum()) == 0.0 for weights in model.parameters() if weights.grad is not None)


def test_label_smoothing_gives_every_token_part_of_the_weight(make_recipe: MakeRecipe) -> None:
    plain, smoothed = make_recipe(train=settings()), make_recipe(train=settings(label_smoothing=0.2))
    model = model_of(plain)
    batch = tensors(plain, EVERYTHING)
    target = batch["target"]
    real = target[:, 1:] != PAD
    surprise = -model(batch["source"], target[:, :-1], real.flatten().nonzero()[:, 0]).log_softmax(-1)
    right = surprise.gather(1, target[:, 1:][real][:, None]).sum()
    assert plain.loss(model, batch).item() == pytest.approx(right.item(), rel=1e-5)
    expected = 0.8 * right + 0.2 * surprise.mean(1).sum()
    assert smoothed.loss(model, batch).item() == pytest.approx(expected.item(), rel=1e-5)


# Evaluation.


def measured(recipe: Recipe, model: nn.Module, parts: int, beam: int = 1) -> Scores:
    ids = np.arange(recipe.count("valid"))
    decoded = ids[::2]
    return recipe.score(
        "valid",
        decoded,
        [
            recipe.measure(
                model,
                EvaluationRequest(
                    "valid",
                    ids[list(block(len(ids), part, parts))],
                    decoded[list(block(len(decoded), part, parts))],
                    beam,
                ),
            )
            for part in range(parts)
        ],
    )


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("parts", [2, 3, 9])
def test_scores_do_not_depend_on_the_number_of_workers(recipe: Recipe, parts: int, beam: int) -> None:
    model = model_of(recipe)
    whole, divided = measured(recipe, model, 1, beam), measured(recipe, model, parts, beam)
    assert divided.values == pytest.approx(whole.values, rel=1e-5)
    assert divided.samples == whole.samples
    assert divided.signatures == whole.signatures


def test_an_evaluation_measures_the_mean_loss_per_token_without_smoothing(make_recipe: MakeRecipe) -> None:
    smoothed = make_recipe(valid=GREETINGS, train=settings(label_smoothing=0.3))
    plain = make_recipe(valid=GREETINGS, train=settings())
    model = model_of(plain)
    mean = plain.loss(model, tensors(plain, EVERYTHING)).item() / float(plain.costs.sum())
    assert measured(smoothed, model, 1).values["loss"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize(
    ("references", "tokenizer"),
    [
        (["Guten Morgen", "GPU 训练"], "13a"),
        (["추운 겨울 아침"], "13a"),
        ([], "13a"),
        (["今天天气很好。", "我们使用 GPU 训练模型"], "zh"),
        (["今日は天気がいいですね。"], "char"),
        (["วันนี้อากาศดี"], "char"),
    ],
)
def test_bleu_splits_references_as_their_script_requires(references: list[str], tokenizer: str) -> None:
    assert bleu_tokenizer(references) == tokenizer


def test_a_partly_right_sentence_without_spaces_has_a_score(recipe: Recipe) -> None:
    assert isinstance(recipe, Translate)
    scores = recipe.grade(1.0, ["今天的天气非常好"], ["今天的天气不太好"])
    assert scores.values["bleu"] > 40
    assert "|tok:zh|" in scores.signatures["bleu"]


def test_bleu_and_chrf_come_with_their_signatures(recipe: Recipe) -> None:
    decoded = np.array([0, 1, 2])
    part = recipe.measure(model_of(recipe), EvaluationRequest("valid", decoded, decoded, 1, 0))
    right = [target for _, target in QUESTIONS[:3]]
    scores = recipe.score("valid", decoded, [type(part)(part.sums, right)])
    assert scores.values["bleu"] == pytest.approx(100.0)
    assert scores.values["chrf"] == pytest.approx(100.0)
    assert "|tok:13a|" in scores.signatures["bleu"]
    assert "|nc:6|nw:0|" in scores.signatures["chrf"]
    assert [(one.input, one.reference, one.prediction) for one in scores.samples] == [
        (source, target, target) for source, target in QUESTIONS[:3]
    ]


def test_without_decoded_samples_there_is_only_a_loss(recipe: Recipe) -> None:
    ids, nothing = np.arange(2), np.arange(0)
    scores = recipe.score(
        "valid", nothing, [recipe.measure(model_of(recipe), EvaluationRequest("valid", ids, nothing, 1, 0))]
    )
    assert scores.values.keys() == {"loss"}
    assert scores.samples == ()


def test_a_missing_split_has_no_samples(recipe: Recipe) -> None:
    assert [recipe.count(split) for split in ("train", "valid", "test")] == [8, 5, 0]


def test_a_validation_set_with_empty_texts_is_measured_as_a_whole(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(valid=[*QUESTIONS, ("", "y"), ("x", "")])
    assert recipe.count("valid") == len(QUESTIONS) + 2
    assert math.isfinite(measured(recipe, model_of(recipe), 1).values["loss"])


# Predictions.


def said(recipe: Recipe, inputs: list[str], beam: int = 1) -> list[str]:
    return [made.text for made in recipe.predict(model_of(recipe), inputs, Decoding(beam))]


@pytest.mark.parametrize("beam", [1, 4])
def test_outputs_are_in_the_order_of_the_inputs(recipe: Recipe, beam: int) -> None:
    inputs = ["good morning", "hello", "see you tomorrow morning", "hello"]
    assert said(recipe, inputs, beam) == [said(recipe, [one], beam)[0] for one in inputs]


@pytest.mark.parametrize("empty", ["", "  ", "\n", "\u3000"])
def test_an_empty_input_has_an_empty_output(recipe: Recipe, empty: str) -> None:
    assert said(recipe, [empty, "hello", empty]) == ["", *said(recipe, ["hello"]), ""]


def test_no_inputs_have_no_outputs(recipe: Recipe) -> None:
    assert said(recipe, []) == []


def test_any_script_is_a_valid_input(recipe: Recipe) -> None:
    inputs = ["доброе утро", "おはよう", "صباح الخير", "😀👨\u200d👩\u200d👧", "a\x00b", "<eos> <pad>"]
    assert len(said(recipe, inputs)) == len(inputs)


@pytest.mark.parametrize("too_long", ["ж" * 600, "word " * 3_000])
def test_an_input_that_is_too_long_is_refused_and_not_cut(recipe: Recipe, too_long: str) -> None:
    with pytest.raises(
        Mistake, match=r"input 2 of 2 has \d+,\d\d\d tokens, more than 1,000; shorten it: '(жжж|word)"
    ) as refused:
        said(recipe, ["hello", too_long])
    assert len(str(refused.value)) < 200


def test_megabytes_are_refused_before_they_are_tokenized(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Vocabulary, "encode", lambda *_: pytest.fail("tokenized"))
    with pytest.raises(Mistake, match=r"input 2 of 2 has more than 16,000 bytes; shorten it: 'word word"):
        said(recipe, ["hello", "word " * 2_000_000])


def test_special_tokens_in_an_output_are_removed(recipe: Recipe) -> None:
    [output] = said(recipe, ["hello"], beam=4)
    assert not any(mark in output for mark in ("<eos>", "<bos>", "<pad>"))
    assert EOS not in recipe.pack.vocabulary.encode([output])[0]


# The job.


def test_separate_vocabularies_for_source_and_target_are_refused(recipe: Recipe) -> None:
    apart = recipe.job.model_copy(update={"data": recipe.job.data.model_copy(update={"joint": False})})
    with pytest.raises(Mistake, match=r"^data\.joint: must be true"):
        type(recipe).check(apart)
