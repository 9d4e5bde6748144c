from __future__ import annotations

import pytest
import torch
from torch import Tensor

from packtrain.pack.vocabulary import BOS, EOS, PAD
from packtrain.recipes.caption.model import Captioner
from packtrain.recipes.caption.shape import Shape
from recipes.captioned import outspoken, pictures

VOCABULARY = 21
CELLS = pytest.mark.parametrize("cell", ["gru", "lstm"])


def model_with(seed: int = 1, **options: object) -> Captioner:
    torch.manual_seed(seed)
    settings = {"encoder": "tiny", "width": 16, "attention": 12, "dropout": 0.0, **options}
    return outspoken(Captioner(Shape(**settings), VOCABULARY).eval())  # type: ignore[arg-type]


TOKENS = torch.tensor([[BOS, 5, 6, EOS, PAD, PAD], [BOS, 7, 8, 9, 10, EOS], [BOS, EOS, PAD, PAD, PAD, PAD]])


@CELLS
def test_there_is_a_row_for_every_token_but_the_first(cell: str) -> None:
    told = model_with(cell=cell)(pictures(3), TOKENS)
    assert told.logits.shape == (3 + 5 + 1, 24)  # the vocabulary is padded to a multiple of 8
    assert sorted(told.wanted.tolist()) == sorted([5, 6, EOS, 7, 8, 9, 10, EOS, EOS])
    assert told.places.shape == (3, 16)


@CELLS
def test_looking_is_shared_out_among_the_places_once_for_every_token(cell: str) -> None:
    told = model_with(cell=cell)(pictures(3), TOKENS)
    assert told.places.sum(1).tolist() == pytest.approx([3.0, 5.0, 1.0])
    assert float(told.places.detach().std(1).min()) > 1e-3  # not everywhere alike


@CELLS
def test_neither_padding_nor_neighbours_change_anything(cell: str) -> None:
    model = model_with(cell=cell)
    seen = pictures(3)
    together = model(seen, TOKENS)
    surprise = torch.nn.functional.cross_entropy(together.logits, together.wanted, reduction="sum")
    alone = [model(seen[row : row + 1], TOKENS[row : row + 1, :length]) for row, length in enumerate((4, 6, 2))]
    parts = [torch.nn.functional.cross_entropy(one.logits, one.wanted, reduction="sum") for one in alone]
    assert float(surprise.detach()) == pytest.approx(sum(float(one.detach()) for one in parts), rel=1e-5)
    assert torch.allclose(together.places, torch.cat([one.places for one in alone]), atol=1e-6)


@CELLS
def test_step_by_step_says_the_same_as_all_at_once(cell: str) -> None:
    model = model_with(cell=cell)
    row = TOKENS[1:2]
    told = model(pictures(1), row)
    seen = model.see(pictures(1))
    state, places = model.start(seen), torch.zeros(1, 16)
    for position in range(5):
        logits, state, looked = model.step(row[:, position], state, seen)
        places += looked
        expected = told.logits[position, :VOCABULARY].clone()
        expected[[PAD, BOS]] = -torch.inf
        assert torch.allclose(logits[0], expected, atol=1e-5)
    assert torch.allclose(places, told.places, atol=1e-5)


def test_the_picture_matters_and_so_does_where_it_is_looked_at() -> None:
    model = model_with()
    one, other = pictures(2)
    first, second = model(one[None], TOKENS[1:2]), model(other[None], TOKENS[1:2])
    assert not torch.allclose(first.logits, second.logits, atol=1e-2)


def test_a_picture_of_another_size_has_other_places() -> None:
    assert model_with()(pictures(1, 48, 64), TOKENS[:1]).places.shape == (1, 6 * 8)


def test_the_output_is_tied_to_the_embedding() -> None:
    model = model_with()
    assert {name for name, _ in model.named_parameters() if "encoder" not in name} == {
        "embedding.weight", "bias", "first_state.weight", "first_state.bias", "key.weight", "key.bias", "query.weight",
        "query.bias", "attention.weight", "gate.weight", "gate.bias", "cell.weight_ih", "cell.weight_hh",
        "cell.bias_ih", "cell.bias_hh",
    }  # fmt: skip


# The encoder, random or published.


def gradients(model: Captioner) -> dict[str, Tensor | None]:
    model.zero_grad()
    told = model.train()(pictures(3), TOKENS)
    (told.logits.square().sum() + told.places.square().sum()).backward()  # type: ignore[no-untyped-call]
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_a_random_encoder_learns_from_the_start_in_all_its_parts() -> None:
    assert all(found is not None for found in gradients(model_with()).values())


def test_of_a_published_encoder_only_the_last_stage_is_ever_tuned() -> None:
    found = gradients(model_with(weights="some"))
    moved = {name.split(".")[1] for name, one in found.items() if name.startswith("encoder.") and one is not None}
    assert moved == {"layer2"}
    assert float(found["encoder.layer2.0.bn2.weight"].abs().sum()) > 0  # type: ignore[union-attr]


def test_a_frozen_encoder_has_gradients_of_zero_where_it_will_be_tuned() -> None:
    model = model_with(weights="some")
    model.encoder_is_frozen = True
    found = gradients(model)
    tuned = [one for name, one in found.items() if name.startswith("encoder.layer2")]
    assert all(one is not None and float(one.abs().sum()) == 0.0 for one in tuned)
    assert all(one is not None and float(one.abs().sum()) > 0.0 for name, one in found.items() if "encoder" not in name)


def test_adam_leaves_a_frozen_encoder_as_it_is() -> None:
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


def test_a_frozen_encoder_says_what_it_says_when_it_is_not() -> None:
    model = model_with(weights="some").train()
    free = model(pictures(3), TOKENS)
    model.encoder_is_frozen = True
    frozen = model(pictures(3), TOKENS)
    assert torch.equal(free.logits, frozen.logits)


def test_norms_of_a_published_encoder_keep_their_statistics() -> None:
    for weights, kept in (("some", True), ("", False)):
        model = model_with(weights=weights)
        before = {name: value.clone() for name, value in model.named_buffers()}
        model.train()(pictures(3), TOKENS)
        after = dict(model.named_buffers())
        assert all(torch.equal(value, after[name]) for name, value in before.items()) == kept


def test_no_pictures_have_no_rows_and_gradients_of_zero() -> None:
    model = model_with().train()
    told = model(pictures(0), TOKENS[:0, :1])
    assert [len(one) for one in told] == [0, 0, 0]
    (told.logits.sum() + told.places.sum()).backward()
    assert all(one.grad is not None and float(one.grad.abs().sum()) == 0.0 for one in model.parameters())


def test_no_pictures_leave_the_statistics_of_norms_alone() -> None:
    model = model_with().train()
    before = {name: value.clone() for name, value in model.named_buffers()}
    model(pictures(0), TOKENS[:0, :1])
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
