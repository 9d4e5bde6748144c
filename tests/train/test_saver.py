from __future__ import annotations

import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from packtrain.job.job import Checkpoint as Settings
from packtrain.run.checkpoint import committed
from packtrain.run.records import Point
from packtrain.run.run import Run
from packtrain.store import Store
from packtrain.train.checkpointer import Saver
from packtrain.train.state import Copier, Description, Progress, Snapshot
from parts.faulty import FaultyStore
from parts.runs import a_generation, new_run


def a_snapshot(step: int) -> Snapshot:
    return Snapshot(Description("translate", "pack-1", {}, {}, Progress(step)), Copier().begin({}))


class Saving:
    """A saver, what it told, and a gate that every commit has to pass."""

    def __init__(self, run: Run, **settings: int) -> None:
        self.told: list[tuple[str, str]] = []
        self.gate, self.at_gate = threading.Event(), threading.Event()
        self.gate.set()
        kept = Settings.model_validate({"keep_last": 10, **settings})
        self.copier = Copier()
        self.saver = Saver(run, 1, kept, self.copier, Path(tempfile.gettempdir()), self._before, self._tell)

    def _before(self) -> None:
        self.at_gate.set()
        assert self.gate.wait(60)

    def _tell(self, kind: str, text: str) -> None:
        self.told.append((kind, text))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.told]


def steps(run: Run) -> list[int]:
    return [one.step for one in committed(run)]


def test_what_is_saved_is_committed_with_its_score(any_store: Store) -> None:
    run = new_run(any_store)
    saving = Saving(run)
    saving.saver.save(a_snapshot(5), 0.25)
    saving.saver.close()
    assert [(one.step, one.generation, one.score) for one in committed(run)] == [(5, 1, 0.25)]
    assert saving.kinds() == ["checkpoint"]


def test_saving_does_not_wait_and_closing_does(directory_store: Store) -> None:
    run = new_run(directory_store)
    saving = Saving(run)
    saving.gate.clear()
    saving.saver.save(a_snapshot(1), None)
    assert saving.at_gate.wait(60)
    assert steps(run) == []
    closing = threading.Thread(target=saving.saver.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    saving.gate.set()
    closing.join()
    assert steps(run) == [1]


def test_the_newest_that_waits_replaces_what_waited_before(directory_store: Store) -> None:
    run = new_run(directory_store)
    saving = Saving(run)
    saving.gate.clear()
    saving.saver.save(a_snapshot(1), None)
    assert saving.at_gate.wait(60)
    for step in (2, 3, 4):
        saving.saver.save(a_snapshot(step), None)
    saving.gate.set()
    saving.saver.close()
    assert steps(run) == [1, 4]


def test_the_best_that_waits_is_not_replaced(directory_store: Store) -> None:
    run = new_run(directory_store)
    saving = Saving(run, keep_best=1)
    saving.gate.clear()
    saving.saver.save(a_snapshot(1), 0.1)
    assert saving.at_gate.wait(60)
    for step, score in ((2, 0.2), (3, 0.9), (4, None), (5, 0.3), (6, None)):
        saving.saver.save(a_snapshot(step), score)
    saving.gate.set()
    saving.saver.close()
    assert steps(run) == [1, 3, 6]


def test_the_best_waits_for_the_store_though_newer_ones_wait_behind_it(directory_store: Store) -> None:
    store = FaultyStore(directory_store)
    saving = Saving(Run(store, "job-1"), keep_best=1)
    store.refuse("put_file")
    saving.saver.save(a_snapshot(1), 0.9)
    while not saving.told:
        threading.Event().wait(0.01)
    for step in (2, 3):
        saving.saver.save(a_snapshot(step), 0.1)
    store.refuse()
    saving.saver.close()
    assert steps(Run(directory_store, "job-1")) == [1, 3]


def test_what_belongs_to_the_steps_is_put_before_they_are_committed(directory_store: Store) -> None:
    store = FaultyStore(directory_store)
    run = Run(store, "job-1")
    points = run.point_writer("rank-0")
    saver = Saver(run, 1, Settings(), Copier(), Path(tempfile.gettempdir()), points.flush, lambda _kind, _text: None)
    points.append(Point("train", 1, 1, 0.0, {}))
    saver.save(a_snapshot(1), None)
    saver.close()
    changed = [key.split("/")[2] for _, key in store.changes()]
    assert changed[0] == "metrics"
    assert changed[-1] == "checkpoints"


def test_a_save_that_fails_is_told_and_the_next_one_is_made(directory_store: Store) -> None:
    store = FaultyStore(directory_store)
    saving = Saving(Run(store, "job-1"))
    store.refuse("put_file")
    saving.saver.save(a_snapshot(1), None)
    while not saving.told:
        threading.Event().wait(0.01)
    store.refuse()
    saving.saver.save(a_snapshot(2), None)
    saving.saver.close()
    assert steps(Run(directory_store, "job-1")) == [2]
    assert saving.told[0] == ("warning", "step 1 is not saved yet: the store is away")


def test_the_last_snapshot_waits_for_the_store(directory_store: Store) -> None:
    store = FaultyStore(directory_store)
    saving = Saving(Run(store, "job-1"))
    store.refuse("put_file")
    saving.saver.save(a_snapshot(1), None)
    closing = threading.Thread(target=saving.saver.close)
    closing.start()
    while not saving.told:
        threading.Event().wait(0.01)
    assert closing.is_alive()
    store.refuse()
    closing.join(30)
    assert steps(Run(directory_store, "job-1")) == [1]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error: disk full")])
def test_a_full_disk_is_told_and_does_not_end_the_saving(
    directory_store: Store, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    write, run = Snapshot.write, new_run(directory_store)

    def fail_once(snapshot: Snapshot, directory: Path) -> dict[str, Path]:
        if snapshot.step == 1:
            raise error
        return write(snapshot, directory)

    monkeypatch.setattr(Snapshot, "write", fail_once)
    saving = Saving(run)
    saving.saver.save(a_snapshot(1), None)
    while not saving.told:
        threading.Event().wait(0.01)
    saving.saver.save(a_snapshot(2), None)
    saving.saver.close()
    assert steps(run) == [2]
    assert saving.kinds() == ["warning", "checkpoint"]


def test_a_superseded_generation_is_remembered_and_not_called_an_error(directory_store: Store) -> None:
    run = new_run(directory_store)
    run.propose(a_generation(2))
    saving = Saving(run)
    saving.saver.save(a_snapshot(1), None)
    saving.saver.close()
    assert saving.saver.superseded is not None
    assert steps(run) == []
    assert saving.told == []


def test_what_the_rules_do_not_keep_is_deleted(directory_store: Store) -> None:
    run = new_run(directory_store)
    for step, score in ((1, 0.9), (2, 0.1), (3, 0.2), (4, 0.3)):
        saving = Saving(run, keep_last=1, keep_best=1)
        saving.saver.save(replace(a_snapshot(step)), score)
        saving.saver.close()
    assert steps(run) == [1, 4]


def test_nothing_waits_for_a_saver_that_is_abandoned(directory_store: Store) -> None:
    store = FaultyStore(directory_store)
    saving = Saving(Run(store, "job-1"))
    store.refuse("put_file")
    saving.saver.save(a_snapshot(1), None)
    while not saving.told:
        threading.Event().wait(0.01)
    saving.saver.abandon()
    saving.saver.close()
    assert steps(Run(directory_store, "job-1")) == []


def test_the_memory_of_a_copy_is_used_again_once_it_is_committed(directory_store: Store) -> None:
    saving = Saving(new_run(directory_store))
    weights = {"model": {"weight": torch.arange(4.0)}}
    first = saving.copier.begin(weights)
    saving.saver.save(replace(a_snapshot(1), copies=first), None)
    saving.saver.close()
    assert saving.copier.begin(weights).wait()["model"]["weight"] is first.wait()["model"]["weight"]
