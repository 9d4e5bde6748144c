from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from packtrain.run.records import Point
from packtrain.run.run import Run
from packtrain.store import Store, StoreError
from packtrain.train.recorder import TensorBoardWriter
from parts.faulty import FaultyStore
from parts.runs import new_run


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


def test_tensorboard_reads_what_was_written_over_several_files_in_order(any_store: Store, tmp_path: Path) -> None:
    run = new_run(any_store)
    writer = TensorBoardWriter(run, generation=1)
    writer.append(a_point(1, 4.0))
    writer.append(a_point(2, 3.0))
    writer.flush(now=True)
    writer.append(a_point(3, 2.0))
    writer.append(a_point(3, 9.0, kind="valid"))
    writer.flush(now=True)
    assert len(files(run)) == 2
    accumulator = read(run, tmp_path / "events")
    assert set(accumulator.Tags()["scalars"]) == {"train/loss", "train/rate", "valid/loss", "valid/rate"}
    assert scalars(accumulator, "train/loss") == [(1, 4.0, 1001.0), (2, 3.0, 1002.0), (3, 2.0, 1003.0)]
    assert scalars(accumulator, "valid/loss") == [(3, 9.0, 1003.0)]


def test_a_later_generation_takes_over_from_the_step_it_goes_on_from(directory_store: Store, tmp_path: Path) -> None:
    run = new_run(directory_store)
    for generation, steps, loss in ((1, (1, 2, 3), 1.0), (2, (3, 4), 2.0)):
        writer = TensorBoardWriter(run, generation)
        for step in steps:
            writer.append(a_point(step, loss, generation=generation))
        writer.flush(now=True)
    values = {step: value for step, value, _ in scalars(read(run, tmp_path / "events"), "train/loss")}
    assert values == {1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0}


def test_files_are_few_unless_one_is_wanted_now(directory_store: Store) -> None:
    run = new_run(directory_store)
    writer = TensorBoardWriter(run, 1)
    writer.flush(now=True)
    writer.append(a_point(1, 1.0))
    writer.flush()
    assert files(run) == []
    writer.flush(now=True)
    writer.flush(now=True)
    assert len(files(run)) == 1


def test_points_that_could_not_be_put_come_later(directory_store: Store, tmp_path: Path) -> None:
    store = FaultyStore(directory_store)
    run = Run(store, "job-1")
    writer = TensorBoardWriter(run, 1)
    store.refuse("put")
    writer.append(a_point(1, 1.0))
    with pytest.raises(StoreError):
        writer.flush(now=True)
    store.refuse()
    writer.append(a_point(2, 2.0))
    writer.flush(now=True)
    assert [step for step, *_ in scalars(read(run, tmp_path / "events"), "train/loss")] == [1, 2]
