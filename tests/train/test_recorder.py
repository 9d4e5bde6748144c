"""Where the time goes: every moment is somewhere, on every rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from packtrain.observe.history import read_points
from packtrain.observe.spans import RECORDED
from packtrain.run.records import Point, TimeSpent
from packtrain.run.run import Run
from packtrain.store import Store, StoreError
from packtrain.train.control import Control
from packtrain.train.recorder import Clock, Recorder, TensorBoardWriter
from packtrain.train.trainer import Trainer
from packtrain.train.world import StepTotals, World
from parts.faulty import FaultyStore
from parts.runs import new_run
from train.forking import WorkerForker
from train.tiny import tiny_job, tiny_run
from train.workers import Slow, SlowOtherRanks


def test_clock_marks_leave_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 10.5, 10.75, 11.75, 12.0])
    monkeypatch.setattr("packtrain.train.recorder.time", SimpleNamespace(perf_counter=lambda: next(times)))
    clock = Clock()
    for span in ("data", "forward", "data", "backward"):
        clock.mark(span)
    assert clock.take() == {"data": 1.5, "forward": 0.25, "backward": 0.25}
    assert clock.take() == {}


def test_taking_resets_the_clock_and_earlier_time_can_be_added() -> None:
    clock = Clock()
    clock.add("start", 2.0)
    assert clock.spent("start") == 2.0
    assert clock.take() == {"start": 2.0}
    assert clock.spent("start") == 0.0


def test_a_record_of_time_has_the_most_memory_of_the_gpu(
    directory_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(run := tiny_run(directory_store), 1, 0)
    recorder.time_spent(1, {"forward": 1.0}, at_once=True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 8)
    recorder.time_spent(2, {"forward": 1.0}, at_once=True)
    recorder.close()
    found = [(one.step, one.gpu_allocated_bytes, one.gpu_reserved_bytes) for one in run.time_spent().read()]
    assert found == [(1, 0, 0), (2, 5, 8)]


def test_waiting_for_the_slowest_rank_is_told_from_communication() -> None:
    """All are done at once: what the slowest took is the exchange, and what others took more they waited."""
    outcome = StepTotals(0.0, False, False, False, 0.0, (0.5, 0.125, 0.25))
    assert [outcome.waited(rank) for rank in range(3)] == [0.375, 0.0, 0.125]


def summed(records: list[TimeSpent]) -> dict[str, float]:
    total: dict[str, float] = {}
    for record in records:
        for span, seconds in record.seconds.items():
            total[span] = total.get(span, 0.0) + seconds
    return total


class Timed(Clock):
    """Knows when it was made, and the last mark of what was taken."""

    def __init__(self) -> None:
        super().__init__()
        self.began = self.last_taken = self._last

    def take(self) -> dict[str, float]:
        self.last_taken = self._last
        return super().take()


SLOW = tiny_job(evaluate={"every": "4 steps"}, checkpoint={"every": "5 steps"})


def test_the_spans_of_a_run_add_up_to_its_time(directory_store: Store, control: Control) -> None:
    run = tiny_run(directory_store, SLOW)
    clock = Timed()
    Trainer(run, Slow(run.job), World(), 1, control, clock=clock).train()
    elapsed = clock.last_taken - clock.began
    total = summed(run.time_spent().read())
    assert total.keys() <= set(RECORDED)
    assert sum(total.values()) == pytest.approx(elapsed)
    assert total["forward"] >= 10 * Slow.forward_seconds
    assert total["data"] >= Slow.data_seconds
    assert total["evaluation"] >= 4 * Slow.evaluation_seconds
    assert min(total.values()) >= 0


def test_every_step_records_where_its_time_went(directory_store: Store, control: Control) -> None:
    run = tiny_run(directory_store, SLOW)
    Trainer(run, Slow(run.job), World(), 1, control).train()
    for point in read_points(run):
        if point.kind == "train":
            spans = [value for name, value in point.values.items() if name.removesuffix("_seconds") in RECORDED]
            assert point.values["step_seconds"] == pytest.approx(sum(spans))
            assert point.values["forward_seconds"] >= Slow.forward_seconds


def test_every_rank_records_its_time_and_what_it_waited_for(
    directory_store: Store, forker: WorkerForker, tmp_path: Path
) -> None:
    """The second rank is the slow one: the first waits for it at every step, and it for nobody."""
    run = tiny_run(directory_store, tiny_job())
    forker.succeed("train", 2, store=run.store.url, run=run.name, control=str(tmp_path / "control"), recipe="lame")
    spent = of_rank(run)
    assert spent.keys() == {0, 1}
    assert spent[0]["wait"] > 5 * SlowOtherRanks.seconds
    assert spent[1]["forward"] > 10 * SlowOtherRanks.seconds
    assert spent[1]["wait"] < spent[0]["wait"] / 2
    assert all(seconds >= 0 for spans in spent.values() for seconds in spans.values())


def of_rank(run: Run) -> dict[int, dict[str, float]]:
    records = run.time_spent().read()
    return {rank: summed([one for one in records if one.rank == rank]) for rank in {one.rank for one in records}}


def a_point(step: int, loss: float, kind: str = "train", generation: int = 1) -> Point:
    return Point(kind, generation, step, 1000.0 + step, {"loss": loss, "rate": 0.5})  # type: ignore[arg-type]


def files(run: Run) -> list[str]:
    return [entry.key.rpartition("/")[2] for entry in run.store.list(run.key("tensorboard"))]


def read(run: Run, directory: Path) -> EventAccumulator:
    """By TensorBoard itself."""
    directory.mkdir()
    for name in files(run):
        run.store.get_file(run.key(f"tensorboard/{name}"), directory / name)
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return accumulator


def scalars(accumulator: EventAccumulator, tag: str) -> list[tuple[int, float, float]]:
    return [(one.step, one.value, one.wall_time) for one in accumulator.Scalars(tag)]


def test_tensorboard_reads_several_event_files_in_order(any_store: Store, tmp_path: Path) -> None:
    run = new_run(any_store)
    writer = TensorBoardWriter(run, generation=1)
    writer.append(a_point(1, 4.0))
    writer.append(a_point(2, 3.0))
    writer.flush(at_once=True)
    writer.append(a_point(3, 2.0))
    writer.append(a_point(3, 9.0, kind="valid"))
    writer.flush(at_once=True)
    assert len(files(run)) == 2
    accumulator = read(run, tmp_path / "events")
    assert set(accumulator.Tags()["scalars"]) == {"train/loss", "train/rate", "valid/loss", "valid/rate"}
    assert scalars(accumulator, "train/loss") == [(1, 4.0, 1001.0), (2, 3.0, 1002.0), (3, 2.0, 1003.0)]
    assert scalars(accumulator, "valid/loss") == [(3, 9.0, 1003.0)]


def test_tensorboard_shows_a_later_generation_from_its_first_step_on(directory_store: Store, tmp_path: Path) -> None:
    run = new_run(directory_store)
    for generation, steps, loss in ((1, (1, 2, 3), 1.0), (2, (3, 4), 2.0)):
        writer = TensorBoardWriter(run, generation)
        for step in steps:
            writer.append(a_point(step, loss, generation=generation))
        writer.flush(at_once=True)
    values = {step: value for step, value, _ in scalars(read(run, tmp_path / "events"), "train/loss")}
    assert values == {1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0}


def test_event_files_are_written_rarely_unless_requested_now(directory_store: Store) -> None:
    run = new_run(directory_store)
    writer = TensorBoardWriter(run, 1)
    writer.flush(at_once=True)
    writer.append(a_point(1, 1.0))
    writer.flush()
    assert files(run) == []
    writer.flush(at_once=True)
    writer.flush(at_once=True)
    assert len(files(run)) == 1


def test_points_that_could_not_be_put_are_put_later(directory_store: Store, tmp_path: Path) -> None:
    store = FaultyStore(directory_store)
    run = Run(store, "job-1")
    writer = TensorBoardWriter(run, 1)
    store.refuse("put")
    writer.append(a_point(1, 1.0))
    with pytest.raises(StoreError):
        writer.flush(at_once=True)
    store.refuse()
    writer.append(a_point(2, 2.0))
    writer.flush(at_once=True)
    assert [step for step, *_ in scalars(read(run, tmp_path / "events"), "train/loss")] == [1, 2]
