"""Workers that keep their weights the same, each in its way; without chance, so that numbers can be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lives import losses
from nursery import Nursery
from tiny import tiny_job, tiny_run

from packtrain.run.checkpoint import committed
from packtrain.run.run import Run
from packtrain.store import Store


@pytest.fixture
def live(directory_store: Store, nursery: Nursery, tmp_path: Path) -> Live:
    return Live(directory_store, nursery, tmp_path)


class Live:
    def __init__(self, store: Store, nursery: Nursery, directory: Path) -> None:
        self._store, self._nursery, self._directory = store, nursery, directory
        self._lives = 0

    def run(self, ranks: int, sections: dict[str, Any] | None = None, **train: Any) -> Run:
        run = tiny_run(self._store, tiny_job(train=train, **(sections or {})))
        self.go_on(run, ranks)
        return run

    def go_on(self, run: Run, ranks: int, generation: int = 1, **more: Any) -> list[Any]:
        self._lives += 1
        control = str(self._directory / f"control-{self._lives}")
        where = {"store": run.store.url, "run": run.name, "control": control, "generation": generation}
        return self._nursery.succeed("train", ranks, **where, recipe="plain", **more)


def assert_close(found: Run, wanted: Run, rel: float = 1e-5) -> None:
    assert losses(found).keys() == losses(wanted).keys()
    assert list(losses(found).values()) == pytest.approx(list(losses(wanted).values()), rel=rel)


@pytest.mark.parametrize("exchange", [{"ddp": {}}, {"fsdp": {}}], ids=["ddp", "fsdp"])
def test_however_many_workers_there_are_the_losses_are_the_same_to_rounding(
    live: Live, exchange: dict[str, Any]
) -> None:
    """Batches of 5 divide unevenly among 2 and 3."""
    alone = live.run(1, batch="5 samples")
    for ranks in (2, 3):
        assert_close(live.run(ranks, batch="5 samples", exchange=exchange), alone)


@pytest.mark.parametrize("exchange", [{"ddp": {}}, {"fsdp": {}}], ids=["ddp", "fsdp"])
def test_pieces_that_are_not_alike_on_all_workers_change_nothing(live: Live, exchange: dict[str, Any]) -> None:
    alone = live.run(1, batch="5 samples")
    assert_close(live.run(2, batch="5 samples", micro_batch="1 samples", exchange=exchange), alone)


@pytest.mark.parametrize("exchange", [{"ddp": {}}, {"fsdp": {}}], ids=["ddp", "fsdp"])
def test_more_workers_than_samples_are_no_trouble(live: Live, exchange: dict[str, Any]) -> None:
    assert_close(live.run(3, batch="2 samples", exchange=exchange), live.run(1, batch="2 samples"))


@pytest.mark.parametrize("exchange", [{"ddp": {}}, {"fsdp": {}}], ids=["ddp", "fsdp"])
def test_a_checkpoint_of_two_workers_goes_on_with_one_or_three(live: Live, exchange: dict[str, Any]) -> None:
    settings = {"exchange": exchange, "ema": 0.9, "optimizer": {"adamw": {}}}
    straight = live.run(2, **settings)
    for ranks in (1, 3):
        run = tiny_run(straight.store, straight.job)
        live.go_on(run, 2, stop_at=5)
        assert run.result() is None
        live.go_on(run, ranks, generation=2)
        assert run.result() is not None
        assert_close(run, straight)


@pytest.mark.parametrize("compress", ["fp16", "bf16"])
def test_gradients_in_16_bits_lead_nearly_where_whole_ones_do(live: Live, compress: str) -> None:
    compressed = live.run(2, exchange={"ddp": {"compress": compress}})
    assert_close(compressed, live.run(2), rel=1e-2)


# Local steps.


def test_with_local_steps_all_is_done_at_meetings(live: Live) -> None:
    """Evaluations and saves that fall due between them wait; the last step is one."""
    sections = {"evaluate": {"every": "3 steps"}, "checkpoint": {"every": "1 steps", "keep_last": 10}}
    run = live.run(2, sections, exchange={"local": {"every": "4 steps"}})
    assert [point.step for point in run.metrics() if point.kind == "valid"] == [4, 8, 10]
    assert {one.step for one in committed(run)} <= {4, 8, 10}
    assert committed(run)[-1].step == 10


def test_at_a_meeting_all_workers_have_the_same_weights_and_between_them_not(live: Live, nursery: Nursery) -> None:
    first, second = nursery.succeed("weights_by_step", 2, every=3, steps=7)
    assert [one == other for one, other in zip(first, second, strict=True)] == [
        False, False, True, False, False, True, True,
    ]  # fmt: skip


def test_a_meeting_after_every_step_without_momentum_is_an_average_of_gradients(live: Live) -> None:
    """With plain SGD and shares of the same size, averaging weights and averaging gradients are the same."""
    settings: dict[str, Any] = {"optimizer": {"sgd": {"momentum": 0.0}}, "batch": "4 samples"}
    local = {"local": {"every": "1 steps", "rate": 1.0, "momentum": 0.0}}
    assert_close(live.run(2, **settings, exchange=local), live.run(2, **settings), rel=1e-4)


def test_the_outer_step_is_nesterovs(nursery: Nursery) -> None:
    for before, inner, after, momentum_before, momentum_after in nursery.succeed("meetings", 2)[0]:
        change = before - inner
        momentum = 0.9 * momentum_before + change
        assert momentum_after == pytest.approx(momentum, rel=1e-5, abs=1e-7)
        assert after == pytest.approx(before - 0.7 * (change + 0.9 * momentum), rel=1e-5, abs=1e-7)


def test_a_state_of_two_goes_on_with_three_where_each_worker_has_its_own(live: Live) -> None:
    run = tiny_run(live._store, tiny_job(train={"exchange": {"local": {"every": "2 steps"}}}))
    live.go_on(run, 2, stop_at=4)
    assert {file.name for file in committed(run)[-1].files} >= {"optimizer.safetensors", "optimizer-1.safetensors"}
    live.go_on(run, 3, generation=2)
    assert list(losses(run)) == list(range(1, 11))


# Numbers that are not.


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("exchange", [{"ddp": {}}, {"fsdp": {}}], ids=["ddp", "fsdp"])
def test_a_sample_that_is_not_a_number_is_named_by_every_worker_and_never_saved(
    live: Live, nursery: Nursery, tmp_path: Path, ranks: int, exchange: dict[str, Any]
) -> None:
    run = tiny_run(
        live._store, tiny_job(train={"exchange": exchange}, checkpoint={"every": "1 steps", "keep_last": 20})
    )
    where = {"store": run.store.url, "run": run.name, "control": str(tmp_path / "control")}
    lived = nursery.live("train", ranks, **where, recipe="poisoned")
    assert [one.code for one in lived] == [1] * ranks
    plain = live.run(1)
    step = max(losses(run), default=0) + 1
    named = "bad samples: 7 of data.train.0"
    for one in lived:
        assert f"NonFinite: the loss of step {step} is not finite; {named}" in one.log
        assert "nothing was updated" in one.log
    assert all(one.step < step for one in committed(run))
    assert list(losses(run).values()) == pytest.approx(list(losses(plain).values())[: step - 1], rel=1e-5)
    assert run.result() is None
