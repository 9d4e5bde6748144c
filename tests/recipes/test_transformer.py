from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from packtrain.pack.vocabulary import BOS, EOS, PAD
from packtrain.recipes.pairs import TransformerShape
from packtrain.recipes.transformer import Transformer, sinusoids
from packtrain.recipes.translate import SIZES

MakeModel = Callable[..., Transformer]

SOURCES = [[5, 6, 7, 8, EOS], [9, EOS], [10, 11, 12, EOS]]
SAID = [1, *range(3, 20)]  # all tokens that may follow
TARGETS = [[BOS, 4, 5], [BOS, 6, 7, 8, 9, 10], [BOS]]


def padded(rows: list[list[int]]) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])


def places(mask: Tensor) -> Tensor:
    """Return where the mask is true, counted through all rows."""
    return mask.flatten().nonzero()[:, 0]


def logits(model: Transformer, sources: list[list[int]], targets: list[list[int]]) -> list[Tensor]:
    """Return the logits after every target token, for each sentence."""
    target = padded(targets)
    with torch.inference_mode():
        flat = model(padded(sources), target, places(target != PAD))
    return list(flat.split([len(row) for row in targets]))


def close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, atol=1e-4)


def test_there_is_one_row_of_logits_for_every_predicted_position(make_model: MakeModel) -> None:
    model = make_model(vocabulary=21)
    target = padded(TARGETS)
    assert model(padded(SOURCES), target, places(target != PAD)).shape == (10, 24)
    assert model(padded(SOURCES), target, places(target == 7)).shape == (1, 24)
    assert model(padded(SOURCES), target, places(target == 99)).shape == (0, 24)


@pytest.mark.parametrize(("vocabulary", "rows"), [(24, 24), (25, 32), (4000, 4000)])
def test_the_vocabulary_is_padded_to_a_multiple_of_8(make_model: MakeModel, vocabulary: int, rows: int) -> None:
    assert make_model(vocabulary=vocabulary).embedding.weight.shape == (rows, 32)


def test_a_sentence_alone_equals_the_sentence_in_a_padded_batch(make_model: MakeModel) -> None:
    model = make_model()
    together = logits(model, SOURCES, TARGETS)
    for source, target, found in zip(SOURCES, TARGETS, together, strict=True):
        [alone] = logits(model, [source], [target])
        assert close(found, alone)


def test_a_sentence_does_not_depend_on_the_rest_of_the_batch(make_model: MakeModel) -> None:
    model = make_model()
    before = logits(model, SOURCES, TARGETS)[0]
    after = logits(model, [SOURCES[0], [20] * 9, [21, 22]], [TARGETS[0], [BOS] + [13] * 8, [BOS, 14]])[0]
    assert close(before, after)


def test_a_later_target_token_changes_no_earlier_logits(make_model: MakeModel) -> None:
    model = make_model()
    [before] = logits(model, [SOURCES[0]], [[BOS, 4, 5, 6, 7]])
    [after] = logits(model, [SOURCES[0]], [[BOS, 4, 5, 15, 16]])
    assert close(before[:3], after[:3])
    assert not close(before[3:], after[3:])


def test_every_source_token_and_its_position_change_the_logits(make_model: MakeModel) -> None:
    model = make_model()
    [base] = logits(model, [[5, 6, 7, EOS]], [[BOS]])
    for source in ([15, 6, 7, EOS], [5, 6, 15, EOS], [6, 5, 7, EOS], [5, 6, 7, 8, EOS]):
        assert not close(base, logits(model, [source], [[BOS]])[0])


def test_pad_and_bos_never_follow(make_model: MakeModel) -> None:
    model = make_model()
    with torch.inference_mode():
        memory, mask = model.encode(padded(SOURCES))
        stepped = model.step(torch.full((3,), BOS), 0, model.start(memory), mask)
    assert stepped.shape[1] == model.vocabulary
    assert bool(stepped[:, [PAD, BOS]].isneginf().all())
    assert bool(stepped[:, SAID].isfinite().all())


def test_steps_with_a_cache_equal_the_whole_at_once(make_model: MakeModel) -> None:
    model = make_model()
    targets = [[BOS, 4, 5, 6], [BOS, 7, 8, 9], [BOS, 10, 11, 12]]
    whole = torch.stack(logits(model, SOURCES, targets))
    with torch.inference_mode():
        memory, mask = model.encode(padded(SOURCES))
        caches = model.start(memory)
        for position in range(4):
            stepped = model.step(torch.tensor(targets)[:, position], position, caches, mask)
            assert close(stepped[:, SAID], whole[:, position][:, SAID])


def test_a_cache_follows_the_rows_that_are_selected(make_model: MakeModel) -> None:
    model = make_model()
    targets = [[BOS, 4, 5], [BOS, 7, 8], [BOS, 10, 11]]
    whole = torch.stack(logits(model, SOURCES, targets))
    order = torch.tensor([2, 0, 0])
    with torch.inference_mode():
        memory, mask = model.encode(padded(SOURCES))
        caches = model.start(memory)
        for position in range(2):
            model.step(torch.tensor(targets)[:, position], position, caches, mask)
        for cache in caches:
            cache.select(order, order)
        stepped = model.step(torch.tensor(targets)[order, 2], 2, caches, mask[order])
    assert close(stepped[:, SAID], whole[order, 2][:, SAID])


def test_one_embedding_serves_the_source_the_target_and_the_softmax() -> None:
    model = Transformer(TransformerShape(32, 4, 64, 2, 2, 0.0, 0.0), 24)
    wide = [name for name, weights in model.named_parameters() if 24 in weights.shape]
    assert wide == ["embedding.weight"]
    hidden = torch.randn(2, 32)
    assert close(model.logits(hidden), hidden @ model.embedding.weight.T)


def test_base_has_as_many_parameters_as_the_papers() -> None:
    """The paper has 65 million with 37,000 tokens: one embedding, and the layers as computed here by hand."""
    with torch.device("meta"):
        counted = sum(weights.numel() for weights in Transformer(SIZES["base"], 37_000).parameters())
    d, f = 512, 2048
    attention, feedforward, norm = 4 * (d * d + d), 2 * d * f + d + f, 2 * d
    encoder, decoder = attention + feedforward + 2 * norm, 2 * attention + feedforward + 3 * norm
    assert counted == 37_000 * d + 6 * (encoder + decoder) + 2 * norm
    assert 62e6 < counted < 66e6


def test_dropout_is_for_training_only(make_model: MakeModel) -> None:
    model = make_model(dropout=0.5)
    assert close(logits(model, SOURCES, TARGETS)[0], logits(model, SOURCES, TARGETS)[0])
    model.train()
    assert not close(logits(model, SOURCES, TARGETS)[0], logits(model, SOURCES, TARGETS)[0])


def test_the_same_seed_builds_the_same_model(make_model: MakeModel) -> None:
    one, same, other = make_model(seed=3), make_model(seed=3), make_model(seed=4)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.embedding.weight, other.embedding.weight)


def test_the_position_table_may_start_anywhere() -> None:
    table = sinusoids(torch.arange(20), 16)
    assert torch.equal(sinusoids(torch.arange(7, 12), 16), table[7:12])
    assert table[0].tolist() == [0.0] * 8 + [1.0] * 8
    assert len({tuple(row) for row in table.tolist()}) == 20


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_same_in_parts_whose_logits_are_not_kept(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, smoothing: float
) -> None:
    target = padded(TARGETS)
    at, network = places(target != PAD), make_model()
    labels = torch.arange(3, 3 + len(at))
    vocabulary = network.embedding.weight.shape[0]

    def results() -> tuple[Tensor, list[Tensor], int]:
        kept = 0

        def keep(tensor: Tensor) -> Tensor:
            nonlocal kept
            kept += tensor.numel() if tensor.shape[-1:] == (vocabulary,) else 0
            return tensor

        network.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = network(padded(SOURCES), target, at, labels, smoothing)
        loss.backward()
        return loss.detach(), [one.grad.clone() for one in network.parameters() if one.grad is not None], kept

    whole, gradients, kept = results()
    logits = network(padded(SOURCES), target, at)
    assert torch.allclose(whole, cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum"))
    assert kept >= logits.numel()
    monkeypatch.setattr("packtrain.recipes.transformer.LOGIT_BYTES", 3 * 4 * vocabulary)  # three positions at a time
    in_parts, others, kept = results()
    assert torch.allclose(in_parts, whole)
    assert all(map(close, others, gradients))
    assert kept == 0
