"""Workers that keep their weights the same, each in its way; without chance, so that numbers can be compared."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from packtrain.run.checkpoint import committed, fetch
from packtrain.run.run import Run
from packtrain.store import Store
from packtrain.train.gradient_sync import LocalSync, LocalSyncSettings, fragments_of
from packtrain.train.precision import FIRST_LOSS_SCALE
from packtrain.train.progress import Progress
from packtrain.train.recorder import Clock
from packtrain.train.state import MODEL_FILE, STATE_FILE, load_weights
from packtrain.train.world import World
from train.forking import WorkerForker
from train.tiny import Tiny, TinyModel, tiny_engine, tiny_job, tiny_run
from train.workers import losses


@pytest.fixture
def training(directory_store: Store, forker: WorkerForker, tmp_path: Path) -> Training:
    return Training(directory_store, forker, tmp_path)


class Training:
    def __init__(self, store: Store, forker: WorkerForker, directory: Path) -> None:
        self.store, self._forker, self._directory = store, forker, directory
        self._runs = 0

    def run(self, ranks: int, sections: dict[str, Any] | None = None, **train: Any) -> Run:
        run = tiny_run(self.store, tiny_job(train=train, **(sections or {})))
        self.resume(run, ranks)
        return run

    def resume(self, run: Run, ranks: int, generation: int = 1, **more: Any) -> list[Any]:
        self._runs += 1
        control = str(self._directory / f"control-{self._runs}")
        where = {"store": run.store.url, "run": run.name, "control": control, "generation": generation}
        return self._forker.succeed("train", ranks, **where, recipe="plain", **more)


def assert_close(found: Run, wanted: Run, rel: float = 1e-5) -> None:
    assert losses(found).keys() == losses(wanted).keys()
    assert list(losses(found).values()) == pytest.approx(list(losses(wanted).values()), rel=rel)


@pytest.mark.parametrize("exchange", [{"ddp": {}}, {"fsdp": {}}], ids=["ddp", "fsdp"])
def test_losses_are_equal_up_to_rounding_for_any_number_of_workers(
    training: Training, exchange: dict[str, Any]
) -> None:
    """Batches of 5 divide unevenly among 2 and 3."""
    alone = training.run(1, batch="5 samples")
    for ranks in (2, 3):
        assert_close(training.run(ranks, batch="5 samples", exchange=exchange), alone)


@pytest.mark.parametrize("optimizer", [{"lars": {"trust": 0.1}}, {"lamb": {}}], ids=["lars", "lamb"])
def test_sharded_layers_are_scaled_by_the_norms_of_the_whole_layers(
    training: Training, optimizer: dict[str, Any]
) -> None:
    alone = training.run(1, optimizer=optimizer)
    assert_close(training.run(3, optimizer=optimizer, exchange={"fsdp": {}}), alone, rel=1e-4)


@pytest.mark.parametrize("exchange", [{"ddp": {}}, {"fsdp": {}}], ids=["ddp", "fsdp"])
def test_uneven_micro_batches_do_not_change_the_losses(training: Training, exchange: dict[str, Any]) -> None:
    alone = training.run(1, batch="5 samples")
    assert_close(training.run(2, batch="5 samples", micro_batch="1 samples", exchange=exchange), alone)


@pytest.mark.parametrize("exchange", [{"ddp": {}}, {"fsdp": {}}], ids=["ddp", "fsdp"])
def test_compiled_and_recomputed_blocks_do_not_change_the_losses(training: Training, exchange: dict[str, Any]) -> None:
    alone = training.run(1, batch="6 samples")
    settings: dict[str, Any] = {"compile": True, "compile_backend": "aot_eager", "activation_checkpointing": True}
    assert_close(training.run(2, batch="6 samples", micro_batch="2 samples", exchange=exchange, **settings), alone)


@pytest.mark.parametrize("exchange", [{"ddp": {}}, {"fsdp": {}}], ids=["ddp", "fsdp"])
def test_there_may_be_more_workers_than_samples(training: Training, exchange: dict[str, Any]) -> None:
    assert_close(training.run(3, batch="2 samples", exchange=exchange), training.run(1, batch="2 samples"))


@pytest.mark.parametrize("exchange", [{"ddp": {}}, {"fsdp": {}}], ids=["ddp", "fsdp"])
def test_a_checkpoint_of_two_workers_resumes_on_one_or_three(training: Training, exchange: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"exchange": exchange, "ema": 0.9, "optimizer": {"adamw": {}}}
    straight = training.run(2, **settings)
    for ranks in (1, 3):
        run = tiny_run(straight.store, straight.job)
        training.resume(run, 2, stop_at=5)
        assert run.result() is None
        training.resume(run, ranks, generation=2)
        assert run.result() is not None
        assert_close(run, straight)


@pytest.mark.parametrize("compress", ["fp16", "bf16"])
def test_16_bit_gradients_lead_to_nearly_the_same_losses(training: Training, compress: str) -> None:
    compressed = training.run(2, exchange={"ddp": {"compress": compress}})
    assert_close(compressed, training.run(2), rel=1e-2)


# Sharded weights.


@pytest.mark.parametrize(("precision", "groups"), [("bf16", 4), ("fp16", 4), ("fp32", 3)])
def test_sharded_weights_are_gathered_in_the_precision_that_computes(
    forker: WorkerForker, precision: str, groups: int
) -> None:
    """Norms are the fourth group: they stay in fp32, as do shards and gradients."""
    computes = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}[precision]
    for seen in forker.succeed("watch_sharded", 2, precision=precision, accumulate="whole"):
        assert seen["types"] == {"Linear": computes, "LayerNorm": "torch.float32"}
        assert seen["kept bytes"] == 0, "autocast has no copy of a weight"
        assert seen["shards"] == seen["reduced types"] == ["torch.float32"]
        assert (seen["reduced before"], seen["reduced"]) == ([0, 0, 0], groups), "only with the last micro-batch"
        evaluated = {name: dtype for name, dtype in seen["evaluated"].items() if not name.startswith("norm")}
        assert set(evaluated.values()) == {computes}
        assert seen["evaluated"]["norm.weight"] == "torch.float32"


def test_gradients_can_be_accumulated_in_shards_instead(forker: WorkerForker) -> None:
    for seen in forker.succeed("watch_sharded", 2, precision="fp32", accumulate="sharded"):
        assert (seen["reduced before"], seen["reduced"]) == ([0, 3, 6], 9)


def test_only_the_first_worker_has_memory_for_a_whole_model_and_all_begin_with_its_weights(
    forker: WorkerForker,
) -> None:
    begun = {"model": True, "model is tied": True, "average": True, "average is tied": True}
    ranks = [{"built with memory": is_first, **begun} for is_first in (True, False)]
    assert forker.succeed("begin_sharded", 2) == ranks


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sharded_weights_in_16_bits_lead_to_nearly_the_same_losses(training: Training, precision: str) -> None:
    settings: dict[str, Any] = {"precision": precision, "micro_batch": "1 samples", "ema": 0.9}
    assert_close(training.run(2, **settings, exchange={"fsdp": {}}), training.run(2, **settings), rel=3e-2)


def test_a_gradient_that_overflows_on_one_worker_skips_the_step_of_all_shards(forker: WorkerForker) -> None:
    seen = {"skipped": [True, False], "kept": True, "scale": FIRST_LOSS_SCALE / 2}
    assert forker.succeed("overflow_sharded", 2) == [seen, seen]


def test_every_worker_saves_its_part_of_a_sharded_model(training: Training, tmp_path: Path) -> None:
    sharded, whole = training.run(2, exchange={"fsdp": {}}), training.run(2)
    files = {file.name for file in committed(sharded)[-1].files}
    assert files == {STATE_FILE, *(f"{name}-{n}-of-2.safetensors" for name in ("model", "optimizer") for n in (1, 2))}
    models = []
    for run in (sharded, whole):
        where = tmp_path / run.name
        where.mkdir()
        fetch(run, committed(run)[-1], where)
        models.append(TinyModel(0.0))
        load_weights(models[-1], where, MODEL_FILE)
    first = load_file(tmp_path / sharded.name / "model-1-of-2.safetensors")
    assert first["layers.0.weight"].shape == (2, 3), "half of its rows"
    for name, tensor in models[1].state_dict().items():
        assert torch.allclose(models[0].state_dict()[name], tensor, rtol=1e-4, atol=1e-6), name


# Local steps.


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

    sync = LocalSync(LocalSyncSettings.model_validate({"every": "2 steps"}), TinyModel(0.0), TwoRanks(0, 2), Clock())
    states = sync.own_states({"a": "a", "b": "b"})  # type: ignore[dict-item]
    assert states == [{"a": "a0", "b": "b0"}, {"a": "a1", "b": "b1"}]
    assert seen == ["gather a", "copy a0", "copy a1", "gather b", "copy b0", "copy b1"]


def test_local_steps_evaluate_and_save_only_at_a_sync(training: Training) -> None:
    """Evaluations and saves that fall due between them wait; the last step is one."""
    sections = {"evaluate": {"every": "3 steps"}, "checkpoint": {"every": "1 steps", "keep_last": 10}}
    run = training.run(2, sections, exchange={"local": {"every": "4 steps"}})
    assert [point.step for point in run.metrics() if point.kind == "valid"] == [4, 8, 10]
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
    wanted.load_state_dict(engine.model.state_dict() | engine.gradient_sync.common())
    evaluated = engine.evaluation_model()
    assert torch.equal(evaluated(batch["inputs"]), wanted(batch["inputs"]))
    assert not torch.equal(evaluated(batch["inputs"]), copy.deepcopy(engine.model).eval()(batch["inputs"]))
    assert torch.equal(evaluated.get_buffer("mean"), engine.model.get_buffer("mean"))


def test_weights_that_do_not_learn_are_evaluated_as_they_are() -> None:
    """They may be loaded after the sync was built."""
    model = TinyModel(0.0)
    model.out.requires_grad_(False)
    sync = LocalSync(LocalSyncSettings.model_validate(OVERLAPPED), model, World(), Clock())
    with torch.no_grad():
        model.out.weight.add_(1.0)
    plain = sync.plain(model)
    assert plain is not model
    assert torch.equal(plain.get_parameter("out.weight"), model.out.weight)


def test_evaluations_and_saves_wait_until_an_exchange_is_applied(training: Training) -> None:
    sections = {"evaluate": {"every": "1 steps"}, "checkpoint": {"every": "1 steps", "keep_last": 10}}
    run = training.run(2, sections, exchange={"local": OVERLAPPED}, ema=0.9, duration="11 steps")
    assert [point.step for point in run.metrics() if point.kind == "valid"] == [6, 10, 11]
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


# Numbers that are not.


@pytest.mark.parametrize(("ranks", "worker"), [(1, "train"), (2, "train"), (2, "train_behind")])
@pytest.mark.parametrize("exchange", [{"ddp": {}}, {"fsdp": {}}], ids=["ddp", "fsdp"])
def test_a_bad_sample_is_named_by_every_worker_and_never_saved(
    training: Training, forker: WorkerForker, tmp_path: Path, ranks: int, worker: str, exchange: dict[str, Any]
) -> None:
    save_every = "100 steps" if worker == "train_behind" else "1 steps"  # a save would wait for the step
    run = tiny_run(
        training.store, tiny_job(train={"exchange": exchange}, checkpoint={"every": save_every, "keep_last": 20})
    )
    where = {"store": run.store.url, "run": run.name, "control": str(tmp_path / "control")}
    exited = forker.run(worker, ranks, **where, recipe="poisoned")
    assert [one.code for one in exited] == [1] * ranks
    plain = training.run(1)
    step = max(losses(run), default=0) + 1
    named = "bad samples: 7 of data.train.0"
    for one in exited:
        assert f"NonFinite: the loss of step {step} is not finite; {named}" in one.log
        assert "nothing was updated" in one.log
    assert all(one.step < step for one in committed(run))
    assert list(losses(run).values()) == pytest.approx(list(losses(plain).values())[: step - 1], rel=1e-5)
    assert run.result() is None


@pytest.mark.parametrize(
    ("exchange", "message", "sent"),
    [
        ({"ddp": {}}, 196, 196.0),  # 49 weights of 4 bytes; two ranks send each half twice
        ({"ddp": {"compress": "bf16"}}, 98, 98.0),
        ({"fsdp": {}}, 196, 294.0),
        ({"local": {"every": "4 steps"}}, 196, 49.0),
        ({"local": {"every": "4 steps", "overlap": "3 steps", "compress": "int8"}}, 50, 12.5),
    ],
)
def test_each_exchange_knows_how_much_it_sends(
    forker: WorkerForker, exchange: dict[str, Any], message: int, sent: float
) -> None:
    assert forker.succeed("sync_bytes", 2, exchange=exchange) == [[message, sent]] * 2


def test_a_generation_records_what_explains_the_time_of_its_steps(training: Training) -> None:
    alone, together = (
        next(point for point in training.run(ranks).points().read() if point.kind == "start").values for ranks in (1, 2)
    )
    assert alone == {"workers": 1.0, "gradient_bytes": 196.0, "sent_bytes_per_step": 0.0}
    assert together.pop("link_bytes_per_second") > 0
    assert together == {"workers": 2.0, "gradient_bytes": 196.0, "sent_bytes_per_step": 196.0}
