"""Workers that keep their weights the same, each in its way; without chance, so that numbers can be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from packtrain.run.checkpoint import committed
from train.forking import WorkerForker
from train.tiny import tiny_job, tiny_run
from train.training import Training, assert_close
from train.workers import losses


@pytest.mark.parametrize("exchange", [{"ddp": {}}, {"fsdp": {}}], ids=["ddp", "fsdp"])
def test_losses_are_equal_up_to_rounding_for_any_number_of_workers(
    training: Training, exchange: dict[str, Any]
) -> None:
    """Batches of 5 divide unevenly among 2 and 3."""
    alone = training.run(1, batch="5 samples")
    for ranks in (2, 3):
        assert_close(training.run(ranks, batch="5 samples", exchange=exchange), alone)


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
