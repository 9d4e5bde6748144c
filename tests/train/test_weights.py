"""Weights of another run: a tensor is taken as it is, or by the names of its rows, or not at all."""

from __future__ import annotations

import pytest

from packtrain.errors import Mistake
from packtrain.train.weights import fit

OWN = {"body": (4, 4), "head": (3, 4)}


def test_rows_of_the_same_name_are_taken_wherever_they_are() -> None:
    found = fit(OWN, {**OWN, "head": (8, 4)}, {"head": ("cat", "dog", "elk")}, {"head": ("ant", "elk", "cat")})
    assert found.whole == ("body",)
    assert found.rows == {"head": [(0, 2), (2, 1)]}
    assert found.in_words == "1 tensor, 2 of 3 rows of head"


def test_a_tensor_of_which_no_row_is_known_starts_anew() -> None:
    found = fit(OWN, OWN, {"head": ("cat", "dog", "elk")}, {"head": ("a", "b", "c")})
    assert found.rows == {"head": []}
    assert found.in_words == "1 tensor; new: head"


def test_equal_rows_are_taken_with_their_padding() -> None:
    names = {"head": ("cat", "dog")}
    assert fit(OWN, OWN, names, names).whole == ("body", "head")


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        ({"body": (4, 4)}, "head is not there"),
        ({**OWN, "body": (4, 5)}, "body is 4 x 5, not 4 x 4"),
        ({**OWN, "neck": (1,)}, "neck has no place"),
        ({**OWN, "head": (3, 5)}, "head is 3 x 5, not 3 x 4"),
        ({}, "body is not there; head is not there; use"),
    ],
)
def test_weights_of_another_model_are_refused_by_name(found: dict[str, tuple[int, ...]], fault: str) -> None:
    with pytest.raises(Mistake) as refused:
        fit(OWN, found, {"head": ("cat", "dog", "elk")}, {"head": ("elk", "dog", "cat")})
    assert str(refused.value).startswith(f"the weights are those of another model: {fault}")


def test_an_error_names_the_first_few_of_many() -> None:
    with pytest.raises(Mistake, match="t0 is not there; t1 is not there; t2 is not there and 7 more"):
        fit({f"t{number}": (1,) for number in range(10)}, {}, {}, {})
