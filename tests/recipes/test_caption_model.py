from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from packtrain.pack.vocabulary import BOS, EOS, PAD
from packtrain.recipes.caption import CaptionerShape
from packtrain.recipes.caption.model import Captioner, EncodedImages, TorchCaptioner, sort_captions
from recipes.captioned import random_images, with_larger_weights

VOCABULARY = 21
CELLS = pytest.mark.parametrize("cell", ["gru", "lstm"])


def model_with(seed: int = 1, **options: object) -> Captioner:
    torch.manual_seed(seed)
    settings = {"encoder": "tiny", "width": 16, "attention": 12, "dropout": 0.0, **options}
    return with_larger_weights(Captioner(CaptionerShape(**settings), VOCABULARY).eval())  # type: ignore[arg-type]


TOKENS = torch.tensor([[BOS, 5, 6, EOS, PAD, PAD], [BOS, 7, 8, 9, 10, EOS], [BOS, EOS, PAD, PAD, PAD, PAD]])


@CELLS
def test_there_are_logits_for_every_token_but_the_first(cell: str) -> None:
    forced = model_with(cell=cell)(random_images(3), TOKENS)
    assert forced.logits.shape == (3 + 5 + 1, 24)  # the vocabulary is padded to a multiple of 8
    assert sorted(forced.labels.tolist()) == sorted([5, 6, EOS, 7, 8, 9, 10, EOS, EOS])
    assert forced.attention.shape == (3, 16)


@CELLS
def test_the_attention_of_every_token_sums_to_one(cell: str) -> None:
    forced = model_with(cell=cell)(random_images(3), TOKENS)
    assert forced.attention.sum(1).tolist() == pytest.approx([3.0, 5.0, 1.0])
    assert float(forced.attention.detach().std(1).min()) > 1e-3  # not everywhere alike


@CELLS
def test_neither_padding_nor_the_rest_of_the_batch_changes_anything(cell: str) -> None:
    model = model_with(cell=cell)
    encoded = random_images(3)
    together = model(encoded, TOKENS)
    loss = torch.nn.functional.cross_entropy(together.logits, together.labels, reduction="sum")
    alone = [model(encoded[row : row + 1], TOKENS[row : row + 1, :length]) for row, length in enumerate((4, 6, 2))]
    parts = [torch.nn.functional.cross_entropy(one.logits, one.labels, reduction="sum") for one in alone]
    assert float(loss.detach()) == pytest.approx(sum(float(one.detach()) for one in parts), rel=1e-5)
    assert torch.allclose(together.attention, torch.cat([one.attention for one in alone]), atol=1e-6)


@CELLS
def test_steps_give_the_same_logits_as_teacher_forcing(cell: str) -> None:
    model = model_with(cell=cell)
    row = TOKENS[1:2]
    forced = model(random_images(1), row)
    encoded = model.encode(random_images(1))
    state, attention = model.start(encoded), torch.zeros(1, 16)
    for position in range(5):
        logits, state, attended = model.step(row[:, position], state, encoded)
        attention += attended
        expected = forced.logits[position, :VOCABULARY].clone()
        expected[[PAD, BOS]] = -torch.inf
        assert torch.allclose(logits[0], expected, atol=1e-5)
    assert torch.allclose(attention, forced.attention, atol=1e-5)


def test_the_logits_depend_on_the_image() -> None:
    model = model_with()
    one, other = random_images(2)
    first, second = model(one[None], TOKENS[1:2]), model(other[None], TOKENS[1:2])
    assert not torch.allclose(first.logits, second.logits, atol=1e-2)


def test_an_image_of_another_size_has_another_number_of_positions() -> None:
    assert model_with()(random_images(1, 48, 64), TOKENS[:1]).attention.shape == (1, 6 * 8)


def test_the_output_is_tied_to_the_embedding() -> None:
    model = model_with()
    assert {name for name, _ in model.named_parameters() if "encoder" not in name} == {
        "embedding.weight", "bias", "first_state.weight", "first_state.bias", "key.weight", "key.bias", "query.weight",
        "query.bias", "attention.weight", "gate.weight", "gate.bias", "cell.weight_ih", "cell.weight_hh",
        "cell.bias_ih", "cell.bias_hh",
    }  # fmt: skip


# The encoder, random or pretrained.


def gradients(model: Captioner) -> dict[str, Tensor | None]:
    model.zero_grad()
    forced = model.train()(random_images(3), TOKENS)
    (forced.logits.square().sum() + forced.attention.square().sum()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_a_random_encoder_learns_as_a_whole_from_the_start() -> None:
    assert all(found is not None for found in gradients(model_with()).values())


def test_only_the_last_stage_of_a_pretrained_encoder_is_tuned() -> None:
    found = gradients(model_with(weights="some"))
    moved = {name.split(".")[1] for name, one in found.items() if name.startswith("encoder.") and one is not None}
    assert moved == {"layer2"}
    assert float(found["encoder.layer2.0.bn2.weight"].abs().sum()) > 0  # type: ignore[union-attr]


def test_a_frozen_encoder_has_zero_gradients_where_it_will_be_tuned() -> None:
    model = model_with(weights="some")
    model.encoder_is_frozen = True
    found = gradients(model)
    tuned = [one for name, one in found.items() if name.startswith("encoder.layer2")]
    assert all(one is not None and float(one.abs().sum()) == 0.0 for one in tuned)
    assert all(one is not None and float(one.abs().sum()) > 0.0 for name, one in found.items() if "encoder" not in name)


def test_adam_does_not_change_a_frozen_encoder() -> None:
    model = model_with(weights="some")
    model.encoder_is_frozen = True
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr=0.01)
    for _ in range(3):
        gradients(model)
        optimizer.step()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert not [name for name in changed if name.startswith("encoder.")]


def test_freezing_the_encoder_does_not_change_the_outputs() -> None:
    model = model_with(weights="some").train()
    free = model(random_images(3), TOKENS)
    model.encoder_is_frozen = True
    frozen = model(random_images(3), TOKENS)
    assert torch.equal(free.logits, frozen.logits)


def test_batch_norms_of_a_pretrained_encoder_keep_their_statistics() -> None:
    for weights, kept in (("some", True), ("", False)):
        model = model_with(weights=weights)
        before = {name: value.clone() for name, value in model.named_buffers()}
        model.train()(random_images(3), TOKENS)
        after = dict(model.named_buffers())
        assert all(torch.equal(value, after[name]) for name, value in before.items()) == kept


def test_an_empty_batch_has_no_logits_and_zero_gradients() -> None:
    model = model_with().train()
    forced = model(random_images(0), TOKENS[:0, :1])
    assert [len(one) for one in forced] == [0, 0, 0]
    (forced.logits.sum() + forced.attention.sum()).backward()
    assert all(one.grad is not None and float(one.grad.abs().sum()) == 0.0 for one in model.parameters())


def test_an_empty_batch_does_not_change_batch_norm_statistics() -> None:
    model = model_with().train()
    before = {name: value.clone() for name, value in model.named_buffers()}
    model(random_images(0), TOKENS[:0, :1])
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


# Decoding.


FEW_TOKENS = 7  # four special tokens and three words
WORDS = (3, 4, 5, 6)  # UNKNOWN may be written like any other
LONGEST = 3


def decode_captions(model: Captioner, encoded: EncodedImages, beam: int, longest: int = 50) -> list[list[int]]:
    return [best.tokens for best, *_ in TorchCaptioner(model).search(encoded, beam, longest=longest)]


def small_model(seed: int, cell: str = "gru") -> Captioner:
    torch.manual_seed(seed)
    return with_larger_weights(Captioner(CaptionerShape("tiny", 12, 8, cell), FEW_TOKENS).eval())


def per_token(model: Captioner, image: torch.Tensor, said: tuple[int, ...]) -> float:
    """Return the log-probability per token of a caption with EOS, computed step by step."""
    encoded = model.encode(image[None])
    state, total = model.start(encoded), 0.0
    for before, after in zip((BOS, *said), (*said, EOS), strict=True):
        logits, state, _ = model.step(torch.tensor([before]), state, encoded)
        total += float(logits.log_softmax(-1)[0, after])
    return total / (len(said) + 1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_a_wide_beam_finds_the_best_of_all_captions(seed: int, cell: str) -> None:
    model = small_model(seed, cell)
    everything = [said for length in range(LONGEST) for said in product(WORDS, repeat=length)]
    with torch.inference_mode():
        best = [max(everything, key=lambda said: per_token(model, image, said)) for image in random_images(3)]
        found = decode_captions(model, model.encode(random_images(3)), 100, LONGEST)
    assert [tuple(one) for one in found] == best


@pytest.mark.parametrize("beam", [1, 2, 5])
def test_the_caption_of_an_image_does_not_depend_on_the_batch(beam: int) -> None:
    model = small_model(2)
    with torch.inference_mode():
        together = decode_captions(model, model.encode(random_images(6)), beam, 8)
        alone = [decode_captions(model, model.encode(image[None]), beam, 8)[0] for image in random_images(6)]
    assert together == alone
    assert len({tuple(one) for one in together}) > 1


def test_a_beam_of_one_takes_the_most_likely_token_each_time() -> None:
    model = small_model(4)
    encoded = model.encode(random_images(1))
    state, said = model.start(encoded), [BOS]
    while said[-1] != EOS and len(said) <= 8:
        logits, state, _ = model.step(torch.tensor(said[-1:]), state, encoded)
        said.append(int(logits.argmax()))
    assert decode_captions(model, encoded, 1, 8)[0] == [token for token in said[1:] if token != EOS]


def test_a_caption_that_never_ends_is_cut_off() -> None:
    model = small_model(1)
    with torch.no_grad():
        model.bias[EOS] = -1000.0
    assert [len(one) for one in decode_captions(model, model.encode(random_images(2)), 3, 6)] == [6, 6]


def test_no_images_have_no_captions() -> None:
    model = small_model(1)
    assert decode_captions(model, model.encode(random_images(1)).select(torch.arange(0)), 3) == []


def test_every_token_has_an_attention_map() -> None:
    model = small_model(1)
    encoded = model.encode(random_images(1))
    tokens = [4, 5, 6]
    maps = TorchCaptioner(model).attention(encoded, 0, tokens)
    assert maps.shape == (3, 4, 4)
    assert maps.sum((1, 2)).tolist() == pytest.approx([1.0] * 3)
    forced = model.teacher_force(encoded, sort_captions(torch.tensor([[BOS, *tokens]])))
    assert torch.allclose(forced.attention[0], torch.from_numpy(maps.sum(0)).flatten(), atol=1e-5)
    assert TorchCaptioner(model).attention(encoded, 0, []).shape == (0, 4, 4)
