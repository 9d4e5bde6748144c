"""One test for everything that comes in kinds: stopped in the middle and resumed, a run ends as if it had not been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lives import history, losses, weights
from nursery import Nursery
from test_schedule import EXAMPLES
from tiny import tiny_job, tiny_run

from packtrain.job.kinds import EXCHANGES, OPTIMIZERS, SCHEDULES
from packtrain.run.checkpoint import committed
from packtrain.run.run import Run
from packtrain.store import Store

WAYS_TO_EXCHANGE: dict[str, list[dict[str, Any]]] = {
    "ddp": [{}, {"compress": "fp16"}, {"compress": "bf16"}],
    "local": [{"every": "4 steps"}],
    "fsdp": [{}],
}
KINDS: dict[str, dict[str, Any]] = {
    **{f"schedule-{kind}": {"schedule": {kind: EXAMPLES[kind]}} for kind in SCHEDULES},
    **{f"optimizer-{kind}": {"optimizer": {kind: {"decay": 0.01}}} for kind in OPTIMIZERS},
    **{f"precision-{name}": {"precision": name} for name in ("fp32", "bf16", "fp16")},
    "in-pieces": {"micro_batch": "1 samples"},
    "averaged": {"ema": 0.9},
    "clipped": {"clip": 0.5},
    "averaged-in-fp16-pieces": {"ema": 0.9, "precision": "fp16", "micro_batch": "3 samples"},
}
SHARED: dict[str, dict[str, Any]] = {
    f"{kind}-{number}": {"exchange": {kind: way}, "ema": 0.9, "micro_batch": "1 samples"}
    for kind in EXCHANGES
    for number, way in enumerate(WAYS_TO_EXCHANGE[kind])
} | {"ddp-fp16": {"precision": "fp16"}, "fsdp-bf16": {"exchange": {"fsdp": {}}, "precision": "bf16"}}
SHARED |= {f"fsdp-{kind}": {"exchange": {"fsdp": {}}, "optimizer": {kind: {"decay": 0.01}}} for kind in OPTIMIZERS}


class Lines:
    """Two runs of the same job: one straight to its end, and one that is stopped and goes on."""

    def __init__(self, store: Store, nursery: Nursery, directory: Path, train: dict[str, Any]) -> None:
        job = tiny_job(train=train, evaluate={"every": "3 steps"}, checkpoint={"every": "4 steps"})
        self.straight, self.stopped = tiny_run(store, job), tiny_run(store, job)
        self._nursery, self._directory = nursery, directory

    def live(self, run: Run, generation: int = 1, ranks: int = 1, **more: Any) -> None:
        control = str(self._directory / f"{run.name}-{generation}")
        where = {"store": run.store.url, "run": run.name, "control": control, "generation": generation}
        self._nursery.succeed("train", ranks, **where, **more)

    def compare(self, ranks: int = 1, stop_at: int = 5, recipe: str = "tiny") -> None:
        self.live(self.straight, ranks=ranks, recipe=recipe)
        self.live(self.stopped, ranks=ranks, stop_at=stop_at, recipe=recipe)
        assert self.stopped.result() is None
        assert stop_at <= committed(self.stopped)[-1].step < 10
        self.live(self.stopped, 2, ranks, recipe=recipe)
        assert self.stopped.result() is not None
        assert list(losses(self.stopped)) == list(range(1, 11))
        assert history(self.stopped) == history(self.straight)
        assert weights(self.stopped) == weights(self.straight)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_goes_on_bit_for_bit(directory_store: Store, nursery: Nursery, tmp_path: Path, kind: str) -> None:
    Lines(directory_store, nursery, tmp_path, KINDS[kind]).compare()


@pytest.mark.parametrize("kind", SHARED)
def test_every_exchange_goes_on_bit_for_bit_on_three_workers(
    directory_store: Store, nursery: Nursery, tmp_path: Path, kind: str
) -> None:
    """Two would not do: of two numbers the sum is the same in any order."""
    Lines(directory_store, nursery, tmp_path, SHARED[kind]).compare(ranks=3)


@pytest.mark.parametrize("recipe", ["sparing", "normed", "looking"])
@pytest.mark.parametrize("kind", EXCHANGES)
def test_weights_without_gradients_statistics_and_channels_last_go_on_bit_for_bit(
    directory_store: Store, nursery: Nursery, tmp_path: Path, kind: str, recipe: str
) -> None:
    settings = {"exchange": {kind: WAYS_TO_EXCHANGE[kind][0]}}
    Lines(directory_store, nursery, tmp_path, settings).compare(ranks=2, recipe=recipe)


@pytest.mark.parametrize("recipe", ["sparing", "looking"])
def test_weights_without_gradient_and_channels_last_go_on_bit_for_bit_on_one_worker(
    directory_store: Store, nursery: Nursery, tmp_path: Path, recipe: str
) -> None:
    Lines(directory_store, nursery, tmp_path, {}).compare(recipe=recipe)


def test_a_worker_that_is_killed_takes_the_others_along_and_the_run_goes_on_bit_for_bit(
    directory_store: Store, nursery: Nursery, tmp_path: Path
) -> None:
    lines = Lines(directory_store, nursery, tmp_path, {})
    lines.live(lines.straight, ranks=2)
    run = lines.stopped
    lived = nursery.live("train", 2, store=run.store.url, run=run.name, control=str(tmp_path / "killed"), die_at=7)
    assert [one.code for one in lived][1] == -9
    assert lived[0].code != 0
    assert run.result() is None
    lines.live(run, 2, ranks=2)
    assert history(run) == history(lines.straight)
    assert weights(run) == weights(lines.straight)


@pytest.mark.parametrize(("kind", "told"), [*((kind, "cut-off") for kind in EXCHANGES), ("ddp", "cut-off-first-told")])
def test_a_stop_is_heard_while_one_of_three_workers_has_no_data_and_the_run_goes_on_bit_for_bit(
    directory_store: Store, nursery: Nursery, tmp_path: Path, kind: str, told: str
) -> None:
    lines = Lines(directory_store, nursery, tmp_path, {"exchange": {kind: WAYS_TO_EXCHANGE[kind][0]}})
    lines.live(lines.straight, ranks=3, recipe="plain")
    lines.live(lines.stopped, ranks=3, recipe=told)
    assert [one.step for one in committed(lines.stopped)].count(4) == 1, "what was saved is not saved again"
    assert committed(lines.stopped)[-1].step == 4
    lines.live(lines.stopped, 2, ranks=3, recipe="plain")
    assert lines.stopped.result() is not None
    assert history(lines.stopped) == history(lines.straight)
    assert weights(lines.stopped) == weights(lines.straight)


def test_between_meetings_workers_without_data_wait_for_it_also_when_they_are_to_stop(
    directory_store: Store, nursery: Nursery, tmp_path: Path
) -> None:
    """Their weights differ there: there is nothing that all of them could go on from."""
    lines = Lines(directory_store, nursery, tmp_path, {"exchange": {"local": {"every": "3 steps"}}})
    lines.live(lines.stopped, ranks=2, recipe="cut-off-shortly")
    assert committed(lines.stopped)[-1].step == 6


def test_a_signal_to_one_worker_in_an_evaluation_takes_all_along_and_the_run_goes_on_bit_for_bit(
    directory_store: Store, nursery: Nursery, tmp_path: Path
) -> None:
    lines = Lines(directory_store, nursery, tmp_path, {})
    run = lines.stopped
    lines.live(run, ranks=2, recipe="called")
    assert run.result() is None
    assert committed(run)[-1].step == 3
    assert not [point for point in run.metrics() if point.kind == "valid"]
    lines.live(run, 2, ranks=2)
    lines.live(lines.straight, ranks=2)
    assert history(run) == history(lines.straight)
    assert weights(run) == weights(lines.straight)
