from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from packtrain.pack.vocabulary import BOS, EOS, PAD
from packtrain.recipes.chat import SIZES, ChatShape
from packtrain.recipes.chat.model import DialogueTransformer


def model_of(**options: int) -> DialogueTransformer:
    torch.manual_seed(1)
    return DialogueTransformer(ChatShape(32, 4, 64, 1, 1, 0.0, 0.0, **options), 24).eval()


def logits(model: nn.Module, source: list[int], target: list[int]) -> Tensor:
    row = torch.tensor([target])
    with torch.inference_mode():
        found: Tensor = model(torch.tensor([source]), row, (row[0] != PAD).nonzero()[:, 0])
    return found


def test_the_final_residual_adds_the_embedding_to_the_normed_states() -> None:
    model = model_of()
    captured: dict[str, Tensor] = {}
    model.output.register_forward_pre_hook(lambda _, inputs: captured.update(hidden=inputs[0]))
    model.decoder_norm.register_forward_hook(lambda _, __, output: captured.update(normed=output))
    logits(model, [5, 6, EOS], [BOS, 7, 8])
    with torch.inference_mode():
        embedded = model.embed_target(torch.tensor([[BOS, 7, 8]]))[0]
    assert torch.allclose(captured["hidden"], embedded + captured["normed"], atol=1e-6)


def test_the_encoder_has_the_final_residual_too() -> None:
    model, source = model_of(), torch.tensor([[5, 6, 7, EOS]])
    with torch.inference_mode():
        memory, _ = model.encode(source)
        embedded = model.embed_source(source)
    normed = memory - embedded
    assert torch.allclose(normed.mean(-1), torch.zeros(1, 4), atol=1e-5)
    assert torch.allclose(normed.var(-1, unbiased=False), torch.ones(1, 4), atol=1e-2)


def test_positions_are_learned() -> None:
    model = model_of(prompt=6, reply=5)
    shapes = {name: tuple(weights.shape) for name, weights in model.named_parameters() if "positions" in name}
    assert shapes == {"prompt_positions.weight": (6, 32), "reply_positions.weight": (5, 32)}
    target = torch.tensor([[BOS, 7]])
    model(torch.tensor([[5, 6, EOS]]), target, torch.arange(target.numel())).sum().backward()
    for positions, used in ((model.prompt_positions, 3), (model.reply_positions, 2)):
        assert positions.weight.grad is not None
        moved = positions.weight.grad.abs().sum(1).gt(0).tolist()
        assert moved == [True] * used + [False] * (len(moved) - used)


@pytest.mark.parametrize("side", ["source", "target"])
def test_padding_changes_nothing(side: str) -> None:
    model = model_of()
    short = logits(model, [5, 6, EOS], [BOS, 7])
    long = (
        logits(model, [5, 6, EOS, PAD, PAD], [BOS, 7])
        if side == "source"
        else logits(model, [5, 6, EOS], [BOS, 7, PAD, PAD])
    )
    assert torch.allclose(short, long, atol=1e-5)


def test_full_has_the_expected_number_of_parameters() -> None:
    shape, vocabulary = SIZES["full"], 8000
    with torch.device("meta"):
        counted = sum(weights.numel() for weights in DialogueTransformer(shape, vocabulary).parameters())
    d, f = 1024, 4096
    attention, feedforward, norm = 4 * (d * d + d), 2 * d * f + d + f, 2 * d
    layers = 6 * (3 * attention + 2 * feedforward + 5 * norm)
    words = 2 * vocabulary * d + vocabulary + (15 + 16) * d
    assert counted == layers + words + 2 * norm
