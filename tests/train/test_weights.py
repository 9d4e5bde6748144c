"""Weights of another run: a tensor is taken as it is, or by the names of its rows, or not at all."""

from __future__ import annotations

import pytest

from packtrain.errors import Mistake
from packtrain.train.weights import fit, fit_of

OWN: dict[str, tuple[int, ...]] = {"body": (4, 4), "head": (3, 4)}


def test_rows_of_the_same_name_are_taken_wherever_they_are() -> None:
    found = fit(OWN, {**OWN, "head": (8, 4)}, {"head": ("cat", "dog", "elk")}, {"head": ("ant", "elk", "cat")})
    assert found.as_they_are == ("body",)
    assert found.rows == {"head": [(0, 2), (2, 1)]}
    assert found.in_words == "1 tensor, 2 of 3 rows of head"


def test_a_tensor_of_which_no_row_is_known_starts_anew() -> None:
    found = fit(OWN, OWN, {"head": ("cat", "dog", "elk")}, {"head": ("a", "b", "c")})
    assert found.rows == {"head": []}
    assert found.in_words == "1 tensor; new: head"


def test_equal_rows_are_taken_with_their_padding() -> None:
    names = {"head": ("cat", "dog")}
    assert fit(OWN, OWN, names, names).as_they_are == ("body", "head")


ROWS = {"head": ("cat", "dog", "elk")}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"body": (4, 4)}, "1 tensor; new: head"),
        ({**OWN, "neck": (1,)}, "1 tensor, 3 of 3 rows of head; left out: neck"),
        ({**OWN, "head": (3, 5)}, "1 tensor; new: head"),
    ],
)
def test_what_is_new_starts_anew_and_what_has_no_place_is_left_out(
    found: dict[str, tuple[int, ...]], words: str
) -> None:
    assert fit(OWN, found, ROWS, {"head": ("elk", "dog", "cat")}).in_words == words


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        ({**OWN, "body": (4, 5)}, "body is 4 x 5, not 4 x 4; use"),
        ({}, "body is not there; head is not there; use"),
        ({"body.0": (4, 4), "head": (3, 4)}, "body is not there; use"),
    ],
)
def test_weights_that_give_less_than_half_of_a_model_are_those_of_another_one(
    found: dict[str, tuple[int, ...]], fault: str
) -> None:
    with pytest.raises(Mistake) as refused:
        fit(OWN, found, ROWS, {"head": ("elk", "dog", "cat")})
    assert str(refused.value).startswith(f"the weights are those of another model: {fault}")


def test_of_many_new_tensors_the_modules_are_listed() -> None:
    own: dict[str, tuple[int, ...]] = {f"encoder.{number}": (4,) for number in range(9)}
    own |= {"decoder.0": (1,), "head": (1,)}
    found = {name: shape for name, shape in own.items() if name not in ("decoder.0", "head")}
    assert fit(own, found, {}, {}).in_words == "9 tensors; new: decoder.0, head"
    more = {**own, **{f"decoder.{number}": (1,) for number in range(1, 4)}}
    assert fit(more, found, {}, {}).in_words == "9 tensors; new: decoder (4 tensors), head"


def test_counters_of_norms_are_not_new() -> None:
    own = ["conv.weight", "norm.weight", "norm.num_batches_tracked", "fc.bias"]
    assert fit_of(own, ["conv.weight", "norm.weight"]).in_words == "2 tensors; new: fc.bias"


def test_an_error_names_the_first_few_of_many() -> None:
    with pytest.raises(Mistake, match="t0 is not there; t1 is not there; t2 is not there and 7 more"):
        fit({f"t{number}": (1,) for number in range(10)}, {}, {}, {})
