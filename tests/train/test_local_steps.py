"""Workers that step by themselves, and average what they have learned at intervals."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from packtrain.observe.history import read_points
from packtrain.run.checkpoint import committed
from packtrain.train.gradient_sync import SyncedModel
from packtrain.train.local_steps import LocalStepsSettings, LocalStepsSync, fragments_of
from packtrain.train.progress import Progress
from packtrain.train.recorder import Clock
from packtrain.train.world import World
from train.forking import WorkerForker
from train.tiny import Tiny, TinyModel, tiny_engine, tiny_job, tiny_run
from train.training import Training, assert_close
from train.workers import losses


def test_optimizer_states_of_other_workers_leave_the_device_as_they_arrive() -> None:
    seen: list[str] = []

    class Row:
        def __init__(self, name: str) -> None:
            self._name = name

        def cpu(self) -> str:
            seen.append(f"copy {self._name}")
            return self._name

    class TwoRanks(World):
        def new_channel(self) -> None:
            """None: nothing is sent."""

        def gather_tensor(self, values: Any) -> list[Any]:
            seen.append(f"gather {values}")
            return [Row(f"{values}{rank}") for rank in range(2)]

    synced = SyncedModel(TinyModel(0.0), TwoRanks(0, 2), Clock(), torch.float32)
    sync = LocalStepsSync(LocalStepsSettings.model_validate({"every": "2 steps"}), synced)
    states = sync.states_of_ranks({"a": "a", "b": "b"})  # type: ignore[dict-item]
    assert states == [{"a": "a0", "b": "b0"}, {"a": "a1", "b": "b1"}]
    assert seen == ["gather a", "copy a0", "copy a1", "gather b", "copy b0", "copy b1"]


def test_local_steps_evaluate_and_save_only_at_a_sync(training: Training) -> None:
    """Evaluations and saves that fall due between them wait; the last step is one."""
    sections = {"evaluate": {"every": "3 steps"}, "checkpoint": {"every": "1 steps", "keep_last": 10}}
    run = training.run(2, sections, exchange={"local": {"every": "4 steps"}})
    assert [point.step for point in read_points(run) if point.kind == "valid"] == [4, 8, 10]
    assert {one.step for one in committed(run)} <= {4, 8, 10}
    assert committed(run)[-1].step == 10


def test_local_steps_have_equal_weights_only_at_a_sync(training: Training, forker: WorkerForker) -> None:
    first, second = forker.succeed("weights_by_step", 2, every=3, steps=7)
    assert [one == other for one, other in zip(first, second, strict=True)] == [
        False, False, True, False, False, True, True,
    ]  # fmt: skip


def test_syncing_local_steps_every_step_without_momentum_equals_ddp(training: Training) -> None:
    """With plain SGD and shares of the same size, averaging weights and averaging gradients are the same."""
    settings: dict[str, Any] = {"optimizer": {"sgd": {"momentum": 0.0}}, "batch": "4 samples"}
    local = {"local": {"every": "1 steps", "rate": 1.0, "momentum": 0.0}}
    assert_close(training.run(2, **settings, exchange=local), training.run(2, **settings), rel=1e-4)


def test_the_outer_step_of_local_steps_uses_nesterov_momentum(forker: WorkerForker) -> None:
    for before, inner, after, momentum_before, momentum_after in forker.succeed("sync_values", 2)[0]:
        change = before - inner
        momentum = 0.9 * momentum_before + change
        assert momentum_after == pytest.approx(momentum, rel=1e-5, abs=1e-7)
        assert after == pytest.approx(before - 0.7 * (change + 0.9 * momentum), rel=1e-5, abs=1e-7)


OVERLAPPED: dict[str, Any] = {"every": "4 steps", "overlap": "2 steps", "rate": 1.0, "momentum": 0.0}


def test_steps_beside_an_exchange_count_once_and_after_it(forker: WorkerForker) -> None:
    """Step 6 has the mean of steps 1 to 4, and this rank's steps 5 and 6 on top of it; the last step has the rest."""
    first, second = forker.succeed("overlapped_values", 2, settings=OVERLAPPED, steps=7)
    assert first["common"] == second["common"] == first["evaluated"]
    for rank, own in ((first, first["own"]), (second, second["own"])):
        mean_of_four = (first["own"][3] + second["own"][3]) / 2
        assert rank["common"][3:6] == pytest.approx([first["common"][0]] * 2 + [mean_of_four])
        assert own[5] - rank["before"][5] == pytest.approx(mean_of_four - own[3], abs=1e-6)
        assert rank["common"][6] == own[6] == pytest.approx((first["before"][6] + second["before"][6]) / 2)


@pytest.mark.parametrize("settings", [{}, {"activation_checkpointing": True}], ids=["plain", "recomputed"])
def test_the_common_weights_are_evaluated_beside_an_exchange(settings: dict[str, Any]) -> None:
    """Blocks that are recomputed for the backward pass know the model that they belong to."""
    engine = tiny_engine(tiny_job(train={"exchange": {"local": OVERLAPPED}, **settings}))
    recipe = Tiny(tiny_job())
    batch = {name: torch.from_numpy(array) for name, array in recipe.batch(np.arange(4), 0).items()}
    for step in range(5):
        engine.step(Progress(step, 0.0), [batch], 4, 4)
    wanted = TinyModel(0.0).eval()
    wanted.load_state_dict(engine.model.state_dict() | engine.gradient_sync.common_weights())
    evaluated = engine.evaluation_model()
    assert torch.equal(evaluated(batch["inputs"]), wanted(batch["inputs"]))
    assert not torch.equal(evaluated(batch["inputs"]), copy.deepcopy(engine.model).eval()(batch["inputs"]))
    assert torch.equal(evaluated.get_buffer("mean"), engine.model.get_buffer("mean"))


def test_weights_that_do_not_learn_are_evaluated_as_they_are() -> None:
    """They may be loaded after the sync was built."""
    model = TinyModel(0.0)
    model.out.requires_grad_(False)
    synced = SyncedModel(model, World(), Clock(), torch.float32)
    sync = LocalStepsSync(LocalStepsSettings.model_validate(OVERLAPPED), synced)
    with torch.no_grad():
        model.out.weight.add_(1.0)
    plain = sync.plain(model)
    assert plain is not model
    assert torch.equal(plain.get_parameter("out.weight"), model.out.weight)


def test_evaluations_and_saves_wait_until_an_exchange_is_applied(training: Training) -> None:
    sections = {"evaluate": {"every": "1 steps"}, "checkpoint": {"every": "1 steps", "keep_last": 10}}
    run = training.run(2, sections, exchange={"local": OVERLAPPED}, ema=0.9, duration="11 steps")
    assert [point.step for point in read_points(run) if point.kind == "valid"] == [6, 10, 11]
    saved = committed(run)[-1]
    assert {"worker.safetensors", "worker-1.safetensors"} <= {file.name for file in saved.files}


def test_fragments_are_as_equal_as_tensors_allow() -> None:
    assert fragments_of([5, 1, 9, 3, 4], 2) == [(2, 3), (0, 1, 4)]
    assert fragments_of([7], 3) == [(0,), (), ()]


def test_per_worker_optimizer_state_of_two_workers_resumes_on_three(training: Training) -> None:
    exchange = {"local": {"every": "2 steps", "overlap": "1 steps", "compress": "int8"}}
    run = tiny_run(training.store, tiny_job(train={"exchange": exchange}))
    training.resume(run, 2, stop_at=4)
    assert {file.name for file in committed(run)[-1].files} >= {"optimizer.safetensors", "optimizer-1.safetensors"}
    training.resume(run, 3, generation=2)
    assert list(losses(run)) == list(range(1, 11))
