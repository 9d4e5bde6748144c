from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from packtrain.pack.vocabulary import BOS, EOS, PAD
from packtrain.recipes.translate import decode
from packtrain.recipes.translate.decode import greedy, length_penalty, translate
from packtrain.recipes.translate.model import Transformer

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


def next_logits(model: Transformer, source: Tensor, tokens: list[int]) -> Tensor:
    """The logits after `tokens`, computed anew from the first of them."""
    target = torch.tensor([[BOS, *tokens]])
    with torch.inference_mode():
        logits: Tensor = model(source[None, source != PAD], target, target >= 0)[-1]
    return logits


def plain_greedy(model: Transformer, source: Tensor, limit: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < limit:
        token = int(log_probabilities(model, source, tokens).argmax())
        if token == EOS:
            break
        tokens.append(token)
    return tokens


def log_probabilities(model: Transformer, source: Tensor, tokens: list[int]) -> Tensor:
    """Of the next token; a search writes neither fillers nor beginnings."""
    logits = next_logits(model, source, tokens).clone()
    logits[[PAD, BOS]] = -torch.inf
    return logits.log_softmax(-1)


def plain_beam(model: Transformer, source: Tensor, beam: int, limit: int) -> list[int]:
    """A beam search that keeps nothing, does one sentence at a time and never stops early."""
    going: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for length in range(1, limit + 1):
        longer = [
            (total + score, tokens, token)
            for total, tokens in going
            for token, score in enumerate(log_probabilities(model, source, tokens).tolist())
            if math.isfinite(score)
        ]
        best = sorted(longer, key=lambda one: -one[0])[: 2 * beam]
        ended += [(total / length_penalty(length), tokens) for total, tokens, token in best if token == EOS]
        going = [(total, [*tokens, token]) for total, tokens, token in best if token != EOS][:beam]
    return max(ended, key=lambda one: one[0])[1] if ended else going[0][1]


def penalised(model: Transformer, source: Tensor, tokens: list[int]) -> float:
    """What a finished hypothesis is worth: its log-probability by its length."""
    scores = [log_probabilities(model, source, tokens[:place])[token] for place, token in enumerate([*tokens, EOS])]
    return float(sum(scores)) / length_penalty(len(tokens) + 1)


def reluctant(model: Transformer, by: float) -> Transformer:
    """The model, less inclined to end; untrained ones like nothing better."""
    spoken = model.logits

    def logits(hidden: Tensor) -> Tensor:
        said = spoken(hidden)
        said[..., EOS] -= by
        return said

    model.logits = logits  # type: ignore[method-assign]
    return model


# Greedy.


def test_greedy_equals_a_loop_that_keeps_nothing(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_LONGER_THAN_SOURCE", 12)
    lengths = set()
    for seed in range(4):
        model = make_model(seed)
        found = greedy(model, SOURCES)
        assert found == [plain_greedy(model, source, int((source != PAD).sum()) + 12) for source in SOURCES]
        lengths |= {len(tokens) for tokens in found}
    assert len(lengths) > 3  # some ended early, some late or never: rows did leave the batch at different steps


def test_a_beam_of_one_is_greedy(make_model: MakeModel) -> None:
    model = make_model(2)
    assert translate(model, SOURCES, 1) == greedy(model, SOURCES)


# Beam search.


def test_a_beam_of_everything_finds_what_an_exhaustive_search_finds(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "_LONGER_THAN_SOURCE", 1)
    monkeypatch.setattr(decode, "_LENGTH_PENALTY", 2.0)  # so that lengths matter, few as they are
    source = torch.tensor([[5, EOS]])  # so that there are at most three tokens, the mark of the end among them
    words = [token for token in range(8) if token not in (PAD, BOS, EOS)]
    everything = [list(tokens) for length in range(3) for tokens in product(words, repeat=length)]
    found_lengths = set()
    for seed in range(16):
        model = reluctant(make_model(seed, vocabulary=8), by=0.25 * seed)
        best = max(everything, key=lambda tokens: penalised(model, source[0], tokens))
        assert translate(model, source, len(words) ** 3) == [best]
        found_lengths.add(len(best))
    assert len(found_lengths) > 1


@pytest.mark.parametrize(("beam", "penalty"), [(2, 0.6), (3, 2.0)])
def test_a_beam_equals_a_search_that_keeps_nothing(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, beam: int, penalty: float
) -> None:
    monkeypatch.setattr(decode, "_LONGER_THAN_SOURCE", 4)
    monkeypatch.setattr(decode, "_LENGTH_PENALTY", penalty)  # with a stronger one, late hypotheses win more often
    lengths = set()
    for seed in range(8):
        model = reluctant(make_model(seed), by=0.5 * seed)
        found = translate(model, SOURCES, beam)
        assert found == [plain_beam(model, source, beam, int((source != PAD).sum()) + 4) for source in SOURCES]
        lengths |= {len(tokens) for tokens in found}
    assert len(lengths) > 3


@pytest.mark.parametrize("beam", [2, 4])
def test_no_beam_finds_more_than_there_is(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, beam: int) -> None:
    monkeypatch.setattr(decode, "_LONGER_THAN_SOURCE", 1)
    source = torch.tensor([[5, EOS]])
    for seed in range(6):
        model = reluctant(make_model(seed, vocabulary=8), by=0.5 * seed)
        [all_of_it] = translate(model, source, 125)
        [some] = translate(model, source, beam)
        if len(some) < 3:  # it ended within the limit
            assert penalised(model, source[0], some) <= penalised(model, source[0], all_of_it) + 1e-5


@pytest.mark.parametrize("beam", [1, 2, 5])
def test_what_else_is_in_the_batch_does_not_change_a_translation(make_model: MakeModel, beam: int) -> None:
    for seed in (1, 2):
        model = reluctant(make_model(seed), by=5.0 * seed)
        alone = [translate(model, source[None, source != PAD], beam)[0] for source in SOURCES]
        assert translate(model, SOURCES, beam) == alone
        assert translate(model, SOURCES.flip(0), beam) == alone[::-1]


def test_a_beam_never_writes_fillers_or_beginnings(make_model: MakeModel) -> None:
    for seed in range(3):
        for tokens in translate(make_model(seed), SOURCES, 3):
            assert not {PAD, BOS, EOS} & set(tokens)


# Both.


@pytest.mark.parametrize("beam", [1, 3])
def test_a_translation_has_at_most_fifty_tokens_more_than_its_source(make_model: MakeModel, beam: int) -> None:
    model = reluctant(make_model(), by=1e9)
    lengths = [len(tokens) for tokens in translate(model, SOURCES, beam)]
    assert lengths == [int((source != PAD).sum()) + 50 for source in SOURCES]


@pytest.mark.parametrize("beam", [1, 3])
def test_no_sentences_have_no_translations(make_model: MakeModel, beam: int) -> None:
    assert translate(make_model(), SOURCES[:0], beam) == []


def test_the_penalty_is_that_of_the_recipe() -> None:
    assert length_penalty(1) == 1.0
    assert length_penalty(7) == pytest.approx(2**0.6)
    assert length_penalty(20) < length_penalty(21)
