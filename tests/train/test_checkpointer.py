from __future__ import annotations

import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors import SafetensorError

from packtrain.job.job import CheckpointSettings
from packtrain.run.checkpoint import committed
from packtrain.run.records import Point
from packtrain.run.run import Run
from packtrain.store import Store
from packtrain.train.checkpointer import BackgroundCommitter
from packtrain.train.progress import Progress
from packtrain.train.recorder import Recorder
from packtrain.train.state import Description, Snapshot, SnapshotCopier
from parts.faulty import FaultyStore
from parts.runs import a_generation, new_run


def a_snapshot(step: int) -> Snapshot:
    return Snapshot(Description("translate", "pack-1", {}, {}, Progress(step)), SnapshotCopier().begin({}))


class Saving:
    """A committer with a recorder that notes its events, and a gate that every commit has to pass."""

    def __init__(self, run: Run, **settings: int) -> None:
        self.events: list[tuple[str, str]] = []
        self.gate, self.at_gate = threading.Event(), threading.Event()
        self.gate.set()
        self.copier = SnapshotCopier()
        kept = CheckpointSettings.model_validate({"keep_last": 10, **settings})
        directory = Path(tempfile.gettempdir())
        self.committer = BackgroundCommitter(run, 1, kept, self.copier, directory, cast(Recorder, self))

    def flush_points(self) -> None:
        self.at_gate.set()
        assert self.gate.wait(60)

    def event(self, kind: str, text: str) -> None:
        self.events.append((kind, text))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


def steps(run: Run) -> list[int]:
    return [one.step for one in committed(run)]


def test_a_snapshot_is_committed_with_its_score(any_store: Store) -> None:
    run = new_run(any_store)
    saving = Saving(run)
    saving.committer.add(a_snapshot(5), 0.25)
    saving.committer.close()
    assert [(one.step, one.generation, one.score) for one in committed(run)] == [(5, 1, 0.25)]
    assert saving.kinds() == ["checkpoint"]


def test_adding_a_snapshot_does_not_wait_and_closing_does(directory_store: Store) -> None:
    run = new_run(directory_store)
    saving = Saving(run)
    saving.gate.clear()
    saving.committer.add(a_snapshot(1), None)
    assert saving.at_gate.wait(60)
    assert steps(run) == []
    closing = threading.Thread(target=saving.committer.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    saving.gate.set()
    closing.join()
    assert steps(run) == [1]


def test_a_newer_snapshot_replaces_one_that_waits(directory_store: Store) -> None:
    run = new_run(directory_store)
    saving = Saving(run)
    saving.gate.clear()
    saving.committer.add(a_snapshot(1), None)
    assert saving.at_gate.wait(60)
    for step in (2, 3, 4):
        saving.committer.add(a_snapshot(step), None)
    saving.gate.set()
    saving.committer.close()
    assert steps(run) == [1, 4]


def test_the_best_snapshot_that_waits_is_not_replaced(directory_store: Store) -> None:
    run = new_run(directory_store)
    saving = Saving(run, keep_best=1)
    saving.gate.clear()
    saving.committer.add(a_snapshot(1), 0.1)
    assert saving.at_gate.wait(60)
    for step, score in ((2, 0.2), (3, 0.9), (4, None), (5, 0.3), (6, None)):
        saving.committer.add(a_snapshot(step), score)
    saving.gate.set()
    saving.committer.close()
    assert steps(run) == [1, 3, 6]


def test_the_best_snapshot_waits_for_the_store_although_newer_ones_wait(directory_store: Store) -> None:
    store = FaultyStore(directory_store)
    saving = Saving(Run(store, "job-1"), keep_best=1)
    store.refuse("put_file")
    saving.committer.add(a_snapshot(1), 0.9)
    while not saving.events:
        threading.Event().wait(0.01)
    for step in (2, 3):
        saving.committer.add(a_snapshot(step), 0.1)
    store.refuse()
    saving.committer.close()
    assert steps(Run(directory_store, "job-1")) == [1, 3]


def test_metrics_reach_the_store_before_the_checkpoint_of_their_step(directory_store: Store) -> None:
    store = FaultyStore(directory_store)
    run = Run(store, "job-1")
    recorder = Recorder(run, 1, 0)
    committer = BackgroundCommitter(
        run, 1, CheckpointSettings(), SnapshotCopier(), Path(tempfile.gettempdir()), recorder
    )
    recorder.point(Point("train", 1, 1, 0.0, {}))
    committer.add(a_snapshot(1), None)
    committer.close()
    recorder.close()
    changed = [key.split("/")[2] for _, key in store.changes()]
    assert changed.index("metrics") < changed.index("checkpoints")


def test_a_failed_save_is_reported_and_the_next_one_is_made(directory_store: Store) -> None:
    store = FaultyStore(directory_store)
    saving = Saving(Run(store, "job-1"))
    store.refuse("put_file")
    saving.committer.add(a_snapshot(1), None)
    while not saving.events:
        threading.Event().wait(0.01)
    store.refuse()
    saving.committer.add(a_snapshot(2), None)
    saving.committer.close()
    assert steps(Run(directory_store, "job-1")) == [2]
    assert saving.events[0] == ("warning", "step 1 is not saved yet: the store is away")


def test_the_last_snapshot_waits_for_the_store(directory_store: Store) -> None:
    store = FaultyStore(directory_store)
    saving = Saving(Run(store, "job-1"))
    store.refuse("put_file")
    saving.committer.add(a_snapshot(1), None)
    closing = threading.Thread(target=saving.committer.close)
    closing.start()
    while not saving.events:
        threading.Event().wait(0.01)
    assert closing.is_alive()
    store.refuse()
    closing.join(30)
    assert steps(Run(directory_store, "job-1")) == [1]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error: disk full")])
def test_a_full_disk_is_reported_and_later_saves_work(
    directory_store: Store, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    write, run = Snapshot.write, new_run(directory_store)

    def fail_once(snapshot: Snapshot, directory: Path) -> dict[str, Path]:
        if snapshot.step == 1:
            raise error
        return write(snapshot, directory)

    monkeypatch.setattr(Snapshot, "write", fail_once)
    saving = Saving(run)
    saving.committer.add(a_snapshot(1), None)
    while not saving.events:
        threading.Event().wait(0.01)
    saving.committer.add(a_snapshot(2), None)
    saving.committer.close()
    assert steps(run) == [2]
    assert saving.kinds() == ["warning", "checkpoint"]


def test_a_superseded_generation_commits_nothing_and_reports_no_warning(directory_store: Store) -> None:
    run = new_run(directory_store)
    run.propose(a_generation(2))
    saving = Saving(run)
    saving.committer.add(a_snapshot(1), None)
    saving.committer.close()
    assert saving.committer.superseded is not None
    assert steps(run) == []
    assert saving.events == []


def test_checkpoints_beyond_keep_last_and_keep_best_are_deleted(directory_store: Store) -> None:
    run = new_run(directory_store)
    for step, score in ((1, 0.9), (2, 0.1), (3, 0.2), (4, 0.3)):
        saving = Saving(run, keep_last=1, keep_best=1)
        saving.committer.add(replace(a_snapshot(step)), score)
        saving.committer.close()
    assert steps(run) == [1, 4]


def test_an_abandoned_committer_does_not_wait_for_the_store(directory_store: Store) -> None:
    store = FaultyStore(directory_store)
    saving = Saving(Run(store, "job-1"))
    store.refuse("put_file")
    saving.committer.add(a_snapshot(1), None)
    while not saving.events:
        threading.Event().wait(0.01)
    saving.committer.abandon()
    saving.committer.close()
    assert steps(Run(directory_store, "job-1")) == []


def test_the_memory_of_a_committed_snapshot_is_reused(directory_store: Store) -> None:
    saving = Saving(new_run(directory_store))
    weights = {"model": {"weight": torch.arange(4.0)}}
    first = saving.copier.begin(weights)
    saving.committer.add(replace(a_snapshot(1), copies=first), None)
    saving.committer.close()
    assert saving.copier.begin(weights).wait()["model"]["weight"] is first.wait()["model"]["weight"]
