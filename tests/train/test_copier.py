"""Copies made beside the work that goes on."""

from __future__ import annotations

import torch

from packtrain.train.state import Copier


def test_what_is_copied_at_once_may_change_the_next_moment() -> None:
    statistic, weight = torch.zeros(3), torch.ones(3)
    copies = Copier().begin({"model": {"statistic": statistic, "weight": weight}}, {("model", "statistic")})
    statistic += 1
    copied = copies.wait()["model"]
    weight += 1
    assert copied["statistic"].tolist() == [0, 0, 0]
    assert copied["weight"].tolist() == [1, 1, 1]


def test_memory_that_is_given_back_is_used_again_and_no_other() -> None:
    copier, weights = Copier(), {"model": {"weight": torch.arange(4.0)}}
    first = copier.begin(weights)
    copier.give_back(first)
    weights["model"]["weight"] += 1
    second, third = copier.begin(weights).wait(), copier.begin(weights).wait()
    assert second["model"]["weight"] is first.wait()["model"]["weight"]
    assert third["model"]["weight"] is not second["model"]["weight"]
    assert second["model"]["weight"].tolist() == [1, 2, 3, 4]


def test_what_does_not_fit_a_copy_gets_memory_of_its_own() -> None:
    copier = Copier()
    copier.give_back(copier.begin({"model": {"weight": torch.zeros(4)}}))
    files = {"model": {"weight": torch.ones(5), "bias": torch.ones(1)}, "other": {"x": torch.ones(2)}}
    copied = copier.begin(files).wait()
    assert {name: len(it) for part in copied.values() for name, it in part.items()} == {"weight": 5, "bias": 1, "x": 2}


def test_numbers_keep_their_kind_and_need_no_gradient() -> None:
    tensors = {
        "half": torch.ones(2, dtype=torch.float16),
        "count": torch.tensor(3),
        "weight": torch.nn.Parameter(torch.ones(2)),
    }
    copied = Copier().begin({"model": tensors}).wait()["model"]
    assert [tensor.dtype for tensor in copied.values()] == [torch.float16, torch.int64, torch.float32]
    assert not copied["weight"].requires_grad
