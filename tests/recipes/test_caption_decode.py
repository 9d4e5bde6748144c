from __future__ import annotations

from itertools import product

import pytest
import torch

from packtrain.pack.vocabulary import BOS, EOS
from packtrain.recipes.caption.model import Captioner, captions, longest_first, places
from packtrain.recipes.caption.shape import Shape
from recipes.captioned import outspoken, pictures

VOCABULARY = 7  # the four special pieces, and three words
WORDS = (3, 4, 5, 6)  # UNKNOWN may be said like any other
LONGEST = 3


def model_of(seed: int, cell: str = "gru") -> Captioner:
    torch.manual_seed(seed)
    return outspoken(Captioner(Shape("tiny", 12, 8, cell), VOCABULARY).eval())


def per_token(model: Captioner, picture: torch.Tensor, said: tuple[int, ...]) -> float:
    """The log-probability per token of a caption with its end, one step after the other."""
    seen = model.see(picture[None])
    state, total = model.start(seen), 0.0
    for before, after in zip((BOS, *said), (*said, EOS), strict=True):
        logits, state, _ = model.step(torch.tensor([before]), state, seen)
        total += float(logits.log_softmax(-1)[0, after])
    return total / (len(said) + 1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_a_wide_beam_finds_what_a_search_through_everything_finds(seed: int, cell: str) -> None:
    model = model_of(seed, cell)
    everything = [said for length in range(LONGEST) for said in product(WORDS, repeat=length)]
    with torch.inference_mode():
        best = [max(everything, key=lambda said: per_token(model, picture, said)) for picture in pictures(3)]
        found = captions(model, model.see(pictures(3)), 100, LONGEST)
    assert [tuple(one) for one in found] == best


@pytest.mark.parametrize("beam", [1, 2, 5])
def test_pictures_do_not_disturb_each_other(beam: int) -> None:
    model = model_of(2)
    with torch.inference_mode():
        together = captions(model, model.see(pictures(6)), beam, 8)
        alone = [captions(model, model.see(picture[None]), beam, 8)[0] for picture in pictures(6)]
    assert together == alone
    assert len({tuple(one) for one in together}) > 1


def test_a_beam_of_one_takes_the_likeliest_token_each_time() -> None:
    model = model_of(4)
    seen = model.see(pictures(1))
    state, said = model.start(seen), [BOS]
    while said[-1] != EOS and len(said) <= 8:
        logits, state, _ = model.step(torch.tensor(said[-1:]), state, seen)
        said.append(int(logits.argmax()))
    assert captions(model, seen, 1, 8)[0] == [token for token in said[1:] if token != EOS]


def test_a_caption_that_never_ends_is_cut_off() -> None:
    model = model_of(1)
    with torch.no_grad():
        model.bias[EOS] = -1000.0
    assert [len(one) for one in captions(model, model.see(pictures(2)), 3, 6)] == [6, 6]


def test_no_pictures_have_no_captions() -> None:
    model = model_of(1)
    assert captions(model, model.see(pictures(1)).select(torch.arange(0)), 3) == []


def test_every_token_has_a_map_of_where_was_looked() -> None:
    model = model_of(1)
    seen = model.see(pictures(1))
    tokens = [4, 5, 6]
    maps = places(model, seen, tokens)
    assert maps.shape == (3, 16)
    assert maps.sum(1).tolist() == pytest.approx([1.0] * 3)
    told = model.tell(seen, longest_first(torch.tensor([[BOS, *tokens]])))
    assert torch.allclose(told.places[0], maps.sum(0), atol=1e-5)
    assert places(model, seen, []).shape == (0, 16)
