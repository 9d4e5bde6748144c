from __future__ import annotations

import pytest
import torch
from torch import nn

from packtrain.train.engine import Average


def test_the_average_follows_the_weights_and_does_not_change_them() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    average = Average(model, decay=0.5)
    nn.init.ones_(model.weight)
    averages = []
    for step in range(1000, 1003):
        average.update(step)
        averages.append(average.model.weight.item())
    assert averages == [0.5, 0.75, 0.875]
    assert model.weight.item() == 1.0


def test_early_steps_forget_faster() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    average = Average(model, decay=0.999)
    nn.init.ones_(model.weight)
    average.update(0)
    assert average.model.weight.item() == pytest.approx(1 - 1 / 10)


def test_the_average_is_the_formula_over_many_steps() -> None:
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    average = Average(model, decay=0.9)
    wanted = model.weight.detach().clone()
    for step in range(50):
        nn.init.normal_(model.weight)
        average.update(step)
        decay = min(0.9, (step + 1) / (step + 10))
        wanted = decay * wanted + (1 - decay) * model.weight.detach()
    assert torch.allclose(average.model.weight, wanted, atol=1e-6)


def test_the_average_is_no_part_of_training() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    average = Average(model, decay=0.9)
    assert not average.model.training
    assert model.training
    assert not any(parameter.requires_grad for parameter in average.model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_several_steps_at_once_forget_as_much_as_one_after_the_other() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    single, several = Average(model, decay=0.5), Average(model, decay=0.5)
    nn.init.ones_(model.weight)
    for step in range(1000, 1003):
        single.update(step)
    several.update(1002, steps=3)
    assert several.model.weight.item() == pytest.approx(single.model.weight.item())


def test_statistics_of_norms_are_taken_over_as_they_are() -> None:
    model = nn.BatchNorm1d(2)
    average = Average(model, decay=0.9)
    model(torch.randn(8, 2))
    average.update(5)
    assert torch.equal(average.model.running_mean, model.running_mean)
    assert average.model.num_batches_tracked == 1
