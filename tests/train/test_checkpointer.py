from __future__ import annotations

import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors import SafetensorError

from packtrain.job.job import CheckpointSettings
from packtrain.run.checkpoint import CorruptCheckpoint, committed, manifest_key, part_name, remove_uncommitted
from packtrain.run.records import Point
from packtrain.run.run import Run
from packtrain.store import Store
from packtrain.train.checkpointer import BackgroundCommitter, Checkpointer
from packtrain.train.progress import Progress
from packtrain.train.recorder import Recorder
from packtrain.train.state import STATE_FILE, Description, Snapshot, SnapshotCopier, SnapshotPart
from packtrain.train.world import World
from parts.faulty import FaultyStore
from parts.runs import a_generation, new_run


def a_snapshot(step: int) -> Snapshot:
    return Snapshot(Description("translate", "pack-1", {}, {}, Progress(step)), SnapshotCopier().begin({}))


class Saving:
    """A committer with a recorder that notes its events, and a gate that every commit has to pass."""

    def __init__(self, run: Run, world: World | None = None, **settings: int) -> None:
        self.events: list[tuple[str, str]] = []
        self.gate, self.at_gate = threading.Event(), threading.Event()
        self.gate.set()
        self.copier = SnapshotCopier()
        kept = CheckpointSettings.model_validate({"keep_last": 10, **settings})
        directory = Path(tempfile.gettempdir())
        self.committer = BackgroundCommitter(run, 1, kept, self.copier, directory, cast(Recorder, self), world)

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
    saving.committer.add(replace(a_snapshot(1), tensors=first), None)
    saving.committer.close()
    assert saving.copier.begin(weights).result()["model"]["weight"] is first.result()["model"]["weight"]


# Every rank saves a part.


class Rank(World):
    """One of two ranks, which are threads here: what they tell each other is in a dictionary."""

    def __init__(self, rank: int, everything_told: dict[str, str]) -> None:
        super().__init__(rank, 2)
        self._everything_told = everything_told

    def tell(self, subject: str, text: str) -> None:
        self._everything_told[subject] = text

    def heard(self, subject: str) -> bytes | None:
        return self._everything_told[subject].encode() if subject in self._everything_told else None


def two_ranks(run: Run, **settings: int) -> tuple[Saving, Saving]:
    told: dict[str, str] = {}
    return Saving(run, Rank(0, told), **settings), Saving(run, Rank(1, told), **settings)


def a_part(step: int, rank: int) -> Snapshot:
    file = part_name("model.safetensors", rank, 2)
    copies = SnapshotCopier().begin({file: {"weight": torch.full((1, 2), float(rank))}})
    part = SnapshotPart(f"{step:09d}-000001-abc", rank, {file: {"weight": (rank, 2)}})
    return Snapshot(Description("translate", "pack-1", {}, {}, Progress(step)), copies, part)


def close(*ranks: Saving) -> None:
    for one in ranks:
        one.committer.close()


def test_a_checkpoint_is_committed_when_the_parts_of_all_ranks_are_in_the_store(directory_store: Store) -> None:
    run = new_run(directory_store)
    first, second = two_ranks(run)
    first.committer.add(a_part(1, 0), 0.5)
    mine = run.key("checkpoints/000000001-000001-abc/files/model-1-of-2.safetensors")
    while not run.store.exists(mine):
        threading.Event().wait(0.01)
    assert steps(run) == []
    second.committer.add(a_part(1, 1), 0.5)
    close(first, second)
    (checkpoint,) = committed(run)
    assert [file.name for file in checkpoint.files] == [
        "model-1-of-2.safetensors", STATE_FILE, "model-2-of-2.safetensors",
    ]  # fmt: skip
    assert (first.kinds(), second.kinds()) == (["checkpoint"], [])


def test_a_rank_that_dies_before_its_part_is_saved_leaves_no_checkpoint(directory_store: Store) -> None:
    run = new_run(directory_store)
    first, _ = two_ranks(run)
    first.committer.add(a_part(1, 0), None)
    mine = run.key("checkpoints/000000001-000001-abc/files/model-1-of-2.safetensors")
    while not run.store.exists(mine):
        threading.Event().wait(0.01)
    first.committer.abandon()
    close(first)
    assert steps(run) == []
    remove_uncommitted(run, before=2)
    assert list(run.store.list(run.key("checkpoints/"))) == []


def test_a_rank_that_has_to_end_does_not_wait_for_the_part_of_a_dead_one(directory_store: Store) -> None:
    run = new_run(directory_store)
    first, _ = two_ranks(run)
    first.committer.add(a_part(1, 0), None)
    first.committer.close(patience=0.1)
    assert steps(run) == []
    assert "rank 1 has not saved its part" in first.events[0][1]


def test_if_one_rank_cannot_save_none_does_and_the_next_save_works(
    directory_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, run = Snapshot.write, new_run(directory_store)

    def fail_once(snapshot: Snapshot, directory: Path) -> dict[str, Path]:
        assert snapshot.rank_part is not None
        if (snapshot.step, snapshot.rank_part.rank) == (1, 1):
            raise OSError(28, "No space left on device")
        return write(snapshot, directory)

    monkeypatch.setattr(Snapshot, "write", fail_once)
    first, second = two_ranks(run)
    first.committer.add(a_part(1, 0), None)
    second.committer.add(a_part(1, 1), None)
    while not (first.events and second.events):
        threading.Event().wait(0.01)
    assert "rank 1 did not save its part: [Errno 28] No space left on device" in first.events[0][1]
    first.committer.add(a_part(2, 0), None)
    second.committer.add(a_part(2, 1), None)
    close(first, second)
    assert steps(run) == [2]


@pytest.mark.parametrize("slow", [0, 1])
def test_a_state_that_one_rank_replaced_is_given_up_by_the_other(directory_store: Store, slow: int) -> None:
    run = new_run(directory_store)
    ranks = two_ranks(run)
    ranks[slow].gate.clear()
    ranks[slow].committer.add(a_snapshot(1), None)
    assert ranks[slow].at_gate.wait(60)
    ranks[1 - slow].committer.add(a_part(2, 1 - slow), None)
    part = run.key(f"checkpoints/000000002-000001-abc/files/{part_name('model.safetensors', 1 - slow, 2)}")
    while not run.store.exists(part):
        threading.Event().wait(0.01)
    for step in (2, 3):
        ranks[slow].committer.add(a_part(step, slow), None)
    ranks[1 - slow].committer.add(a_part(3, 1 - slow), None)
    ranks[slow].gate.set()
    close(*ranks)
    assert steps(run) == [1, 3]


def test_all_parts_of_a_superfluous_checkpoint_are_deleted(directory_store: Store) -> None:
    run = new_run(directory_store)
    for step in (1, 2):
        ranks = two_ranks(run, keep_last=1)
        for rank, saving in enumerate(ranks):
            saving.committer.add(a_part(step, rank), None)
        close(*ranks)
    (kept,) = committed(run)
    left = {entry.key for entry in run.store.list(run.key("checkpoints/"))}
    assert kept.step == 2
    assert len(left) == 4
    assert manifest_key(run, kept.name) in left


# Restoring.


def test_a_machine_that_does_not_find_what_the_first_one_found_says_so(directory_store: Store, tmp_path: Path) -> None:
    """Its writer withdrew it in between, for example, because its commit came after a newer generation had started."""
    name = "000000005-000001-5a416a96b952"
    second: Any = SimpleNamespace(is_first=False, rank_of_node=0, share=lambda _: name.encode())
    parts: Any = SimpleNamespace()
    checkpointer = Checkpointer(new_run(directory_store), 2, parts, parts, second, parts, tmp_path)
    with pytest.raises(CorruptCheckpoint, match=f"checkpoint {name} was deleted after the first machine found it"):
        checkpointer.restore()
