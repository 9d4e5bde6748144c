"""One step: what it does to the weights, in pieces or at once, and when it refuses to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from packtrain.recipes import Batch
from packtrain.train.engine import Ema, Engine, NonFinite, StepResult
from packtrain.train.numerics import CLEAN_STEPS_TO_DOUBLE, FIRST_LOSS_SCALE
from packtrain.train.optimizer import optimizer_tensors
from packtrain.train.progress import Progress
from packtrain.train.world import StepSync, World
from parts.host_reads import HostReads
from train.tiny import SAMPLES, Tiny, tiny_job
from train.workers import Plain, engine_weights


def engine_of(recipe: type[Tiny] = Plain, **train: Any) -> Engine:
    job = tiny_job(train={"optimizer": {"sgd": {"momentum": 0.0}}, **train})
    return Engine(recipe(job), job.train, World())


def batch(ids: Sequence[int]) -> Batch:
    arrays = Plain(tiny_job()).batch(np.array(ids, np.int64) % SAMPLES, 0)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def step(engine: Engine, *pieces: Sequence[int], number: int = 0) -> StepResult:
    cost = sum(len(ids) for ids in pieces)
    return engine.step(Progress(number, 0.0), [batch(ids) for ids in pieces], cost, cost)


def same(first: Engine, second: Engine) -> bool:
    return all(torch.equal(it, engine_weights(second)[name]) for name, it in engine_weights(first).items())


# In pieces.


@pytest.mark.parametrize("pieces", [[range(6), range(6, 8)], [[0], range(1, 8)], [[one] for one in range(8)]])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_batch_in_uneven_micro_batches_makes_the_same_step(pieces: list[Sequence[int]], precision: str) -> None:
    whole, divided = engine_of(precision=precision), engine_of(precision=precision)
    for engine in (whole, divided):
        engine.precision.scale.value = min(engine.precision.scale.value, 2.0**8)
    at_once, in_pieces = step(whole, range(8)), step(divided, *pieces)
    close = 1e-5 if precision == "fp32" else 2e-2
    assert float(in_pieces.loss) == pytest.approx(float(at_once.loss), rel=close)
    assert in_pieces.gradient_norm == pytest.approx(at_once.gradient_norm, rel=close)
    for name, tensor in whole.model.named_parameters():
        assert torch.allclose(tensor, divided.model.get_parameter(name), atol=1e-6 if precision == "fp32" else 1e-3)


def test_the_gradient_is_that_of_the_mean_loss() -> None:
    engine = engine_of()
    recipe, model = Plain(tiny_job()), Plain(tiny_job()).build_model()
    model.load_state_dict(engine.model.state_dict())
    (recipe.loss(model, batch(range(5))) / 5).backward()
    norm = torch.nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])
    stepped = step(engine, range(5))
    assert stepped.gradient_norm == pytest.approx(float(norm), rel=1e-6)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        wanted = parameter.detach() - 0.01 * parameter.grad
        assert torch.allclose(engine.model.get_parameter(name), wanted, atol=1e-7)


def test_an_empty_micro_batch_changes_nothing() -> None:
    whole, padded = engine_of(), engine_of()
    assert float(step(whole, range(4)).loss) == float(step(padded, range(4), []).loss)
    assert all(torch.equal(it, padded.model.get_parameter(name)) for name, it in whole.model.named_parameters())


def test_clipping_bounds_the_gradient_and_returns_its_norm() -> None:
    free, clipped = engine_of(), engine_of(clip=0.01)
    before = {name: parameter.detach().clone() for name, parameter in clipped.model.named_parameters()}
    assert step(clipped, range(8)).gradient_norm == step(free, range(8)).gradient_norm > 0.01
    moved = [parameter.detach() - before[name] for name, parameter in clipped.model.named_parameters()]
    assert float(torch.nn.utils.get_total_norm(moved)) == pytest.approx(0.01 * 0.01, rel=1e-3)


def test_the_random_numbers_of_a_step_depend_on_its_number_alone() -> None:
    first, second = engine_of(Tiny), engine_of(Tiny)
    step(first, range(8), number=3)
    torch.manual_seed(99)
    step(second, range(8), number=3)
    assert same(first, second)
    other = engine_of(Tiny)
    step(other, range(8), number=4)
    assert not same(first, other)


def test_the_ema_is_evaluated_if_there_is_one() -> None:
    engine = engine_of(ema=0.9)
    step(engine, range(8))
    assert engine.ema is not None
    assert engine.evaluation_model() is engine.ema.model
    assert not engine.evaluation_model().training
    assert engine_of().evaluation_model().training is False


# On a device that runs behind the host.


@pytest.fixture
def runs_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are made as on a GPU: the host asks for them and does not look at what comes out."""
    monkeypatch.setattr("packtrain.train.engine.is_queued", lambda _device: True)


def begin_sync(result: StepResult) -> StepSync:
    return StepSync(World(), result.loss, False, False, False, 1.0, 0.0)


@pytest.mark.parametrize("optimizer", [{"adam": {}}, {"adamw": {}}, {"sgd": {"momentum": 0.9}}])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.usefixtures("runs_behind")
def test_no_step_makes_the_host_wait_for_the_device(optimizer: dict[str, Any], precision: str) -> None:
    engine = engine_of(Tiny, optimizer=optimizer, precision=precision, clip=0.1, ema=0.9)
    with HostReads() as reads:
        for number in range(3):
            begin_sync(step(engine, range(5), range(5, 8), number=number))
    assert reads.found == []


@pytest.mark.usefixtures("runs_behind")
def test_a_step_in_fp16_makes_the_host_wait_once_for_its_scale() -> None:
    engine = engine_of(precision="fp16")
    engine.precision.scale.value = 2.0**8  # fits
    with HostReads() as reads:
        begin_sync(step(engine, range(8)))
    assert reads.found == ["_local_scalar_dense"]


@pytest.mark.parametrize("optimizer", [{"adam": {}}, {"adamw": {}}, {"sgd": {"momentum": 0.9}}])
@pytest.mark.parametrize("clip", [None, 0.01, 1000.0])
def test_steps_that_nobody_waits_for_make_the_same_weights(
    optimizer: dict[str, Any], clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines, norms = [], []
    for behind in (False, True):
        monkeypatch.setattr("packtrain.train.engine.is_queued", lambda _device, behind=behind: behind)
        engines.append(engine_of(Tiny, optimizer=optimizer, clip=clip, ema=0.9))
        norms.append([step(engines[-1], range(8), number=number).gradient_norm for number in range(4)])
    assert norms[0] == norms[1]
    assert same(*engines)


@pytest.mark.parametrize("how", ["loss", "gradient"])
@pytest.mark.parametrize("optimizer", [{"adam": {}}, {"sgd": {"momentum": 0.9}}])
@pytest.mark.usefixtures("runs_behind")
def test_nothing_is_updated_from_a_bad_step_on_until_the_host_knows(how: str, optimizer: dict[str, Any]) -> None:
    recipe: type[Spoilt] = type("Spoilt", (Spoilt,), {"how": "no"})
    engine = engine_of(recipe, optimizer=optimizer, clip=0.1)
    engine.confirm(5, step(engine, range(8), number=4))
    before = {name: parameter.detach().clone() for name, parameter in engine.model.named_parameters()}
    state = {name: tensor.clone() for name, tensor in optimizer_tensors(engine.optimizer, engine.model).items()}
    recipe.how = how
    bad = step(engine, range(8), number=5)
    recipe.how = "no"
    step(engine, range(8), number=6)
    assert all(torch.equal(it, engine.model.get_parameter(name)) for name, it in before.items())
    assert all(torch.equal(it, state[name]) for name, it in optimizer_tensors(engine.optimizer, engine.model).items())
    with pytest.raises(NonFinite, match=f"^the {how} of step 6 is not finite$"):
        engine.confirm(6, bad)


# Numbers that are not.


class Spoilt(Plain):
    """A loss, or only its gradient, that is not finite from a step on."""

    how, skipped = "loss", 0

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss = super().loss(model, batch)
        if self.how in ("loss", "infinite loss"):
            return loss * float("nan" if self.how == "loss" else "inf")
        if self.how == "gradient":
            return loss + (loss * 0).sqrt() * 0
        return loss * 1e4 if self.how == "overflow" else loss


def spoilt(how: str, **train: Any) -> Engine:
    return engine_of(type("Spoilt", (Spoilt,), {"how": how}), **train)


@pytest.mark.parametrize("how", ["loss", "gradient"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_that_is_not_finite_fails_before_the_weights_change(how: str, precision: str) -> None:
    engine = spoilt(how, precision=precision, ema=0.9)
    before = {name: parameter.detach().clone() for name, parameter in engine.model.named_parameters()}
    with pytest.raises(NonFinite, match=f"^the {how} of step 6 is not finite$"):
        step(engine, range(8), number=5)
    assert all(torch.equal(it, engine.model.get_parameter(name)) for name, it in before.items())
    assert not engine.optimizer.state


@pytest.mark.parametrize("how", ["overflow", "infinite loss"])
def test_a_step_that_overflows_in_fp16_is_skipped_and_halves_the_scale(how: str) -> None:
    engine = spoilt(how, precision="fp16")
    before = {name: parameter.detach().clone() for name, parameter in engine.model.named_parameters()}
    stepped = step(engine, range(8))
    assert stepped.skipped
    assert engine.precision.scale.value == FIRST_LOSS_SCALE / 2
    assert all(torch.equal(it, engine.model.get_parameter(name)) for name, it in before.items())


def test_the_scale_halves_until_the_gradient_fits() -> None:
    engine = spoilt("overflow", precision="fp16")
    for number in range(27):
        stepped = step(engine, range(8), number=number)
        if not stepped.skipped:
            break
    assert number > 0
    assert engine.precision.scale.value == FIRST_LOSS_SCALE / 2**number
    assert 0 < stepped.gradient_norm < math.inf


def test_after_two_thousand_clean_steps_the_scale_doubles() -> None:
    engine = engine_of(precision="fp16")
    engine.precision.scale.value, engine.precision.scale.clean_steps = 2.0**8, CLEAN_STEPS_TO_DOUBLE - 2
    step(engine, range(8), number=0)
    assert engine.precision.scale.value == 2**8
    step(engine, range(8), number=1)
    assert engine.precision.scale.value == 2**9


def test_a_nan_loss_stops_fp16_too() -> None:
    with pytest.raises(NonFinite, match=r"^the loss of step 1 is not finite$"):
        step(spoilt("loss", precision="fp16"), range(8))


@pytest.mark.parametrize(("how", "named"), [("gradient", "gradient"), ("infinite loss", "loss")])
def test_what_overflows_at_any_scale_stops_fp16(how: str, named: str) -> None:
    engine = spoilt(how, precision="fp16")
    with pytest.raises(NonFinite, match=rf"^the {named} of step \d+ is not finite$"):
        for number in range(40):
            step(engine, range(8), number=number)
    assert engine.precision.scale.exhausted


def test_the_ema_follows_the_weights_and_does_not_change_them() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    average = Ema(model, decay=0.5)
    nn.init.ones_(model.weight)
    averages = []
    for step in range(1000, 1003):
        average.update(step)
        averages.append(average.model.get_parameter("weight").item())
    assert averages == [0.5, 0.75, 0.875]
    assert model.weight.item() == 1.0


def test_the_decay_of_the_ema_is_smaller_in_early_steps() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    average = Ema(model, decay=0.999)
    nn.init.ones_(model.weight)
    average.update(0)
    assert average.model.get_parameter("weight").item() == pytest.approx(1 - 1 / 10)


def test_the_ema_follows_its_formula_over_many_steps() -> None:
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    average = Ema(model, decay=0.9)
    wanted = model.weight.detach().clone()
    for step in range(50):
        nn.init.normal_(model.weight)
        average.update(step)
        decay = min(0.9, (step + 1) / (step + 10))
        wanted = decay * wanted + (1 - decay) * model.weight.detach()
    assert torch.allclose(average.model.get_parameter("weight"), wanted, atol=1e-6)


def test_the_ema_needs_no_gradient_and_does_not_train() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    average = Ema(model, decay=0.9)
    assert not average.model.training
    assert model.training
    assert not any(parameter.requires_grad for parameter in average.model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_several_ema_steps_at_once_equal_single_ones() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    single, several = Ema(model, decay=0.5), Ema(model, decay=0.5)
    nn.init.ones_(model.weight)
    for step in range(1000, 1003):
        single.update(step)
    several.update(1002, steps=3)
    assert several.model.get_parameter("weight").item() == pytest.approx(single.model.get_parameter("weight").item())


def test_the_ema_copies_norm_statistics() -> None:
    model = nn.BatchNorm1d(2)
    average = Ema(model, decay=0.9)
    model(torch.randn(8, 2))
    average.update(5)
    assert model.running_mean is not None
    assert torch.equal(average.model.get_buffer("running_mean"), model.running_mean)
    assert average.model.num_batches_tracked == 1
