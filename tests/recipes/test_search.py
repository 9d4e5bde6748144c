from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from packtrain.pack.vocabulary import BOS, EOS, PAD
from packtrain.recipes import Decoding
from packtrain.recipes import search as search_module
from packtrain.recipes.decode import TorchText
from packtrain.recipes.recipe import Hypothesis, Unwanted
from packtrain.recipes.search import length_penalty, penalize_repetition, sample_nucleus
from packtrain.recipes.transformer import Transformer

MakeModel = Callable[..., Transformer]

SOURCES = torch.tensor(
    [
        [5, 6, 7, 8, EOS],
        [9, EOS, PAD, PAD, PAD],
        [10, 11, 12, EOS, PAD],
        [EOS, PAD, PAD, PAD, PAD],
        [13, 14, 15, 16, EOS],
    ]
)

pytestmark = pytest.mark.usefixtures("thorough")


def hypotheses(
    model: Transformer,
    sources: Tensor,
    beam: int,
    longer: int = 50,
    numbers: Sequence[int] | None = None,
    **options: Any,
) -> list[list[Hypothesis]]:
    limits = (sources != PAD).sum(1) + longer
    decoding = Decoding(beam, **options)
    numbers = numbers or range(len(sources))
    return TorchText(model).search(sources.numpy(), limits.numpy(), decoding, numbers)


def search(model: Transformer, sources: Tensor, beam: int, longer: int = 50, **options: Any) -> list[list[int]]:
    """Decode outputs of at most `longer` tokens more than their source."""
    return [best.tokens for best, *_ in hypotheses(model, sources, beam, longer, **options)]


def plain_greedy(model: Transformer, source: Tensor, limit: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < limit:
        token = int(log_probabilities(model, source, tokens)[-1].argmax())
        if token == EOS:
            break
        tokens.append(token)
    return tokens


def log_probabilities(model: Transformer, source: Tensor, tokens: list[int]) -> Tensor:
    """Return those of the first token and of the one after each of `tokens`, without a cache; never PAD or BOS."""
    target = torch.tensor([[BOS, *tokens]])
    with torch.inference_mode():
        logits = model(source[None, source != PAD], target, torch.arange(target.numel()))
        logits[:, [PAD, BOS]] = -torch.inf
        return torch.log_softmax(logits, -1)


def plain_beam(model: Transformer, source: Tensor, beam: int, limit: int) -> list[int]:
    """A beam search without a cache, for one sentence, that never stops early."""
    unfinished: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for length in range(1, limit + 1):
        longer = [
            (total + score, tokens, token)
            for total, tokens in unfinished
            for token, score in enumerate(log_probabilities(model, source, tokens)[-1].tolist())
            if math.isfinite(score)
        ]
        best = sorted(longer, key=lambda one: -one[0])[: 2 * beam]
        ended += [(total / length_penalty(length), tokens) for total, tokens, token in best if token == EOS]
        unfinished = [(total, [*tokens, token]) for total, tokens, token in best if token != EOS][:beam]
    return max(ended, key=lambda one: one[0])[1] if ended else unfinished[0][1]


def penalized(model: Transformer, source: Tensor, tokens: list[int]) -> float:
    """Return the score of a finished hypothesis: its log-probability with the length penalty."""
    scores = log_probabilities(model, source, tokens)[range(len(tokens) + 1), [*tokens, EOS]]
    return float(scores.sum()) / length_penalty(len(tokens) + 1)


def reluctant(model: Transformer, by: float) -> Transformer:
    """Return the model, less likely to write EOS: an untrained model writes it almost at once."""
    spoken = model.logits

    def logits(hidden: Tensor) -> Tensor:
        said = spoken(hidden)
        said[..., EOS] -= by
        return said

    model.logits = logits  # type: ignore[method-assign]
    return model


# Greedy.


def test_greedy_search_equals_a_loop_without_a_cache(make_model: MakeModel) -> None:
    lengths = set()
    for seed in range(4):
        model = make_model(seed)
        found = search(model, SOURCES, 1, longer=12)
        assert found == [plain_greedy(model, source, int((source != PAD).sum()) + 12) for source in SOURCES]
        lengths |= {len(tokens) for tokens in found}
    assert len(lengths) > 3  # some ended early, some late or never: rows did leave the batch at different steps


# Beam search.


def test_an_unlimited_beam_equals_an_exhaustive_search(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "LENGTH_PENALTY", 2.0)  # so that lengths matter although they are short
    source = torch.tensor([[5, EOS]])  # so that there are at most three tokens, the mark of the end among them
    words = [token for token in range(8) if token not in (PAD, BOS, EOS)]
    everything = [list(tokens) for length in range(3) for tokens in product(words, repeat=length)]
    found_lengths = set()
    for seed in range(16):
        model = reluctant(make_model(seed, vocabulary=8), by=0.25 * seed)
        best = max(everything, key=lambda tokens: penalized(model, source[0], tokens))
        assert search(model, source, len(words) ** 3, longer=1) == [best]
        found_lengths.add(len(best))
    assert len(found_lengths) > 1


@pytest.mark.parametrize(("beam", "penalty"), [(2, 0.6), (3, 2.0)])
def test_beam_search_equals_one_without_a_cache(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, beam: int, penalty: float
) -> None:
    monkeypatch.setattr(search_module, "LENGTH_PENALTY", penalty)  # with a stronger one, late hypotheses win more often
    lengths = set()
    for seed in range(8):
        model = reluctant(make_model(seed), by=0.5 * seed)
        found = search(model, SOURCES, beam, longer=4)
        assert found == [plain_beam(model, source, beam, int((source != PAD).sum()) + 4) for source in SOURCES]
        lengths |= {len(tokens) for tokens in found}
    assert len(lengths) > 3


@pytest.mark.parametrize("beam", [2, 4])
def test_no_beam_scores_better_than_an_unlimited_one(make_model: MakeModel, beam: int) -> None:
    source = torch.tensor([[5, EOS]])
    for seed in range(6):
        model = reluctant(make_model(seed, vocabulary=8), by=0.5 * seed)
        [all_of_it] = search(model, source, 125, longer=1)
        [some] = search(model, source, beam, longer=1)
        if len(some) < 3:  # it ended within the limit
            assert penalized(model, source[0], some) <= penalized(model, source[0], all_of_it) + 1e-5


@pytest.mark.parametrize("beam", [1, 2, 5])
def test_an_output_does_not_depend_on_the_rest_of_the_batch(make_model: MakeModel, beam: int) -> None:
    for seed in (1, 2):
        model = reluctant(make_model(seed), by=5.0 * seed)
        alone = [search(model, source[None, source != PAD], beam)[0] for source in SOURCES]
        assert search(model, SOURCES, beam) == alone
        assert search(model, SOURCES.flip(0), beam) == alone[::-1]


def test_the_n_best_are_different_sorted_and_scored_as_the_model_scores_them(make_model: MakeModel) -> None:
    most = 0
    for seed in range(4):
        model = reluctant(make_model(seed), by=1.0 - seed)
        found = hypotheses(model, SOURCES, 4, longer=6, n_best=3)
        assert [one[0].tokens for one in found] == search(model, SOURCES, 4, longer=6)
        for source, own in zip(SOURCES, found, strict=True):
            scores = [one.score for one in own]
            assert scores == sorted(scores, reverse=True)
            assert len({tuple(one.tokens) for one in own}) == len(own) <= 3
            ended = [one for one in own if len(one.tokens) < int((source != PAD).sum()) + 6]
            assert [one.score for one in ended] == pytest.approx(
                [penalized(model, source, one.tokens) for one in ended], abs=1e-4
            )
        most = max(most, *(len(own) for own in found))
    assert most == 3


def test_if_no_output_ends_in_time_the_n_best_are_those_that_did_not(make_model: MakeModel) -> None:
    for own in hypotheses(reluctant(make_model(), by=1e9), SOURCES, 4, longer=3, n_best=3):
        assert len({tuple(one.tokens) for one in own}) == 3
        assert [one.score for one in own] == sorted((one.score for one in own), reverse=True)


def test_beam_search_never_writes_pad_or_bos(make_model: MakeModel) -> None:
    for seed in range(3):
        for tokens in search(make_model(seed), SOURCES, 3):
            assert not {PAD, BOS, EOS} & set(tokens)


# Every search.


@pytest.mark.parametrize("beam", [1, 3])
def test_an_output_respects_its_token_limit(make_model: MakeModel, beam: int) -> None:
    model = reluctant(make_model(), by=1e9)
    lengths = [len(tokens) for tokens in search(model, SOURCES, beam)]
    assert lengths == [int((source != PAD).sum()) + 50 for source in SOURCES]


@pytest.mark.parametrize("beam", [1, 3])
def test_no_sources_have_no_outputs(make_model: MakeModel, beam: int) -> None:
    assert search(make_model(), SOURCES[:0], beam) == []


@pytest.mark.parametrize("options", [{"beam": 1}, {"beam": 3}, {"beam": 1, "nucleus": 0.9}])
def test_a_search_ends_when_nobody_waits_for_it(make_model: MakeModel, options: dict[str, Any]) -> None:
    asked = [True, True, False]
    with pytest.raises(Unwanted):
        hypotheses(reluctant(make_model(), by=1e9), SOURCES, **options, is_wanted=lambda: asked.pop(0))
    assert asked == [], "it was asked before each step"


def test_the_length_penalty_is_that_of_gnmt() -> None:
    assert length_penalty(1) == 1.0
    assert length_penalty(7) == pytest.approx(2**0.6)
    assert length_penalty(20) < length_penalty(21)


# Sampling.


def test_nucleus_sampling_uses_the_most_likely_tokens_that_make_up_the_mass() -> None:
    logits = np.log(np.array([[0.1, 0.5, 0.15, 0.25]], np.float32))
    for share, drawn in [(0.0, {1}), (0.4, {1}), (0.6, {1, 3}), (0.8, {1, 2, 3}), (1.0, {0, 1, 2, 3})]:
        chances = np.linspace(0, 1 - 2**-24, 200, dtype=np.float32)
        assert set(sample_nucleus(logits.repeat(200, 0), share, 1.0, chances).tolist()) == drawn


def test_samples_follow_the_probabilities_and_the_temperature_flattens_them() -> None:
    logits = np.log(np.array([[0.1, 0.6, 0.3]], np.float32))
    chances = ((np.arange(1000) + 0.5) / 1000).astype(np.float32)
    for temperature in (1.0, 4.0):
        expected = np.exp(logits[0] / temperature) / np.exp(logits[0] / temperature).sum()
        drawn = sample_nucleus(logits.repeat(1000, 0), 1.0, temperature, chances)
        assert np.allclose(np.bincount(drawn, minlength=3) / 1000, expected, atol=0.002)


def test_a_sample_depends_on_the_seed_and_its_number_alone(make_model: MakeModel) -> None:
    model = reluctant(make_model(3), by=3.0)
    drawn = search(model, SOURCES, 1, nucleus=0.9, temperature=2.0, seed=5)
    assert drawn == search(model, SOURCES, 1, nucleus=0.9, temperature=2.0, seed=5)
    assert drawn != search(model, SOURCES, 1, nucleus=0.9, temperature=2.0, seed=6)
    for number in (2, 4):
        options: dict[str, Any] = {"nucleus": 0.9, "temperature": 2.0, "seed": 5, "numbers": [number]}
        assert search(model, SOURCES[number : number + 1], 1, **options) == [drawn[number]]


# Repetition.


def test_the_repetition_penalty_lowers_tokens_that_were_written() -> None:
    logits = np.array([[2.0, -1.0, 0.5, 3.0]], np.float32)
    lowered = penalize_repetition(logits, np.array([[0, 1]]), Decoding(repetition=2.0))
    assert lowered.tolist() == [[1.0, -2.0, 0.5, 3.0]]


def test_only_the_token_that_would_complete_an_ngram_again_is_forbidden() -> None:
    written = np.array([[9, 4, 5, 6, 4, 5], [9, 4, 5, 6, 5, 4]])

    def forbidden(written: Any, size: int) -> list[list[int]]:
        logits = np.zeros((len(written), 10), np.float32)
        return np.argwhere(np.isneginf(penalize_repetition(logits, written, Decoding(no_repeat=size)))).tolist()

    assert forbidden(written, 3) == [[0, 6]]
    assert forbidden(written[:1], 2) == [[0, 6]]
    assert forbidden(written[:1], 1) == [[0, 4], [0, 5], [0, 6], [0, 9]]
    assert forbidden(written[:, :2], 3) == []


@pytest.mark.parametrize("options", [{"beam": 1}, {"beam": 3}, {"beam": 1, "nucleus": 0.5}])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_ngram_is_written_twice(make_model: MakeModel, size: int, options: dict[str, Any]) -> None:
    model = reluctant(make_model(2), by=9.0)
    for tokens in search(model, SOURCES, longer=10, no_repeat=size, **options):
        runs = [tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1)]
        assert len(set(runs)) == len(runs)
