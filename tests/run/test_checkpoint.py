from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.errors import Mistake, PacktrainError
from packtrain.run.checkpoint import (
    FORMAT,
    Checkpoint,
    CorruptCheckpoint,
    Superseded,
    best_first,
    checkpoint_name,
    choice_of,
    commit,
    committed,
    fetch_named,
    fetch_newest,
    generation_of,
    is_scored,
    last_step,
    part_name,
    parts_of,
    prune,
    put_manifest,
    remove_uncommitted,
    superfluous,
    whole_name,
)
from packtrain.run.run import Run
from packtrain.store import Store, StoreError
from parts.faulty import FaultyStore, Killed
from parts.runs import a_generation, new_run, read_files, write_files
from parts.s3 import S3Server
from parts.stores import python


def content(step: int) -> dict[str, bytes]:
    """Files of which every one tells the step, and one is there at odd steps only."""
    files = {"model.bin": b"model %d" % step, "deep/er/state.json": b"state %d" % step}
    return files | ({"odd": b"%d" % step} if step % 2 else {})


def save(run: Run, directory: Path, step: int, generation: int = 1, score: float | None = None) -> Checkpoint:
    return commit(run, step, generation, score, write_files(directory / f"files-{step}", content(step)))


def restore(run: Run, directory: Path) -> tuple[Checkpoint | None, dict[str, bytes], list[str]]:
    directory.mkdir()
    complaints: list[str] = []
    found = fetch_newest(run, directory, complaints.append)
    return found, read_files(directory), complaints


def manifest_key(run: Run, checkpoint: Checkpoint) -> str:
    return run.key(f"checkpoints/{checkpoint.name}/manifest.json")


def change_manifest(run: Run, checkpoint: Checkpoint, **changes: Any) -> None:
    manifest = json.loads(run.store.get(manifest_key(run, checkpoint)))
    run.store.put(manifest_key(run, checkpoint), json.dumps({**manifest, **changes}).encode())


# Committing.


def test_a_checkpoint_is_fetched_as_it_was_committed(any_store: Store, tmp_path: Path) -> None:
    run = new_run(any_store)
    saved = save(run, tmp_path, step=7, score=0.5)
    assert committed(run) == [saved]
    assert restore(run, tmp_path / "back") == (saved, content(7), [])


def test_a_new_run_has_no_checkpoint(any_store: Store, tmp_path: Path) -> None:
    assert restore(new_run(any_store), tmp_path / "back") == (None, {}, [])


def test_the_manifest_is_written_last(directory_store: Store, tmp_path: Path) -> None:
    store = FaultyStore(directory_store)
    saved = save(Run(store, "job-1"), tmp_path, step=1)
    *files, last = store.changes()
    assert last == ("put", f"runs/job-1/checkpoints/{saved.name}/manifest.json")
    assert [operation for operation, _ in files] == ["put_file"] * 3


def test_the_order_is_by_generation_and_step_and_not_by_time(any_store: Store, tmp_path: Path) -> None:
    run = new_run(any_store)
    for generation, step in ((2, 5), (1, 9), (2, 12), (1, 10)):
        save(run, tmp_path, step, generation)
    assert [(one.generation, one.step) for one in committed(run)] == [(1, 9), (1, 10), (2, 5), (2, 12)]


def test_a_file_may_have_the_name_of_a_manifest(any_store: Store, tmp_path: Path) -> None:
    run = new_run(any_store)
    files = {"manifest.json": b"the program's own", "deep/manifest.json": b"and another"}
    saved = commit(run, 1, 1, None, write_files(tmp_path / "files", files))
    assert restore(run, tmp_path / "back") == (saved, files, [])


def test_a_generation_that_was_superseded_commits_nothing(any_store: Store, tmp_path: Path) -> None:
    run = new_run(any_store)
    run.propose(a_generation(1))
    old = save(run, tmp_path, step=1)
    run.propose(replace(a_generation(2), step=1))
    with pytest.raises(Superseded, match="generation 2 has started; not committing step 2 of generation 1"):
        save(run, tmp_path, step=2)
    assert committed(run) == [old]


def test_a_generation_that_is_superseded_during_the_upload_commits_nothing(
    directory_store: Store, tmp_path: Path
) -> None:
    store = FaultyStore(directory_store)
    run = Run(store, "job-1")

    def supersede(operation: str, key: str) -> None:
        if operation == "put_file":
            Run(directory_store, "job-1").propose(a_generation(2))

    store.fault = supersede
    with pytest.raises(Superseded):
        save(run, tmp_path, step=1)
    assert committed(run) == []


def test_a_commit_that_a_newer_generation_started_without_is_withdrawn(directory_store: Store, tmp_path: Path) -> None:
    """Its manifest was on its way when the network was cut."""
    store = FaultyStore(directory_store)
    run = Run(store, "job-1")
    first = save(run, tmp_path, step=1)

    def start_another(operation: str, key: str) -> None:
        if operation == "put" and key.endswith("manifest.json"):
            Run(directory_store, "job-1").propose(replace(a_generation(2), step=1))

    store.fault = start_another
    with pytest.raises(Superseded) as superseded:
        save(run, tmp_path, step=2)
    assert str(superseded.value) == "generation 2 has started without step 2 of generation 1; withdrawn"
    assert committed(run) == [first]


def test_a_commit_that_a_newer_generation_started_with_stays(directory_store: Store, tmp_path: Path) -> None:
    store = FaultyStore(directory_store)
    run = Run(store, "job-1")

    def start_with_it(operation: str, key: str) -> None:
        if operation == "put" and key.endswith("manifest.json"):
            Run(directory_store, "job-1").propose(replace(a_generation(2), step=2))

    store.fault = start_with_it
    saved = save(run, tmp_path, step=2)
    assert committed(run) == [saved]


def test_a_generation_commits_while_it_is_the_latest_also_after_a_step_that_is_lost(directory_store: Store) -> None:
    run = new_run(directory_store)
    run.propose(a_generation(1))
    run.propose(replace(a_generation(2), step=1))
    late = Checkpoint(FORMAT, checkpoint_name(5, 2), 5, 2, None, ())
    put_manifest(run, late)
    assert committed(run) == [late]


def test_the_name_of_a_checkpoint_is_unique_and_has_its_step_and_generation() -> None:
    names = {checkpoint_name(12, 3) for _ in range(9)}
    assert len(names) == 9
    assert {name[:17] for name in names} == {"000000012-000003-"}
    assert {len(name) for name in names} == {29}
    assert {generation_of(name) for name in names} == {3}
    for name in ("odd", "000000012-000003", "000000012-x-abc", "000000012-000003-abc-def", "1-2-3-4"):
        assert generation_of(name) is None


# Parts of files.


def test_every_rank_has_its_part_of_a_file() -> None:
    assert part_name("model.safetensors", 0, 3) == "model-1-of-3.safetensors"
    assert part_name("deep/er.model.bin", 2, 3) == "deep/er.model-3-of-3.bin"
    assert whole_name("deep/er.model-3-of-3.bin") == "deep/er.model.bin"
    for name in ("model.bin", "model-0-of-3.bin", "model-1-of-0.bin", "model-1-of-3", "model-1-of-3.bin.old"):
        assert whole_name(name) == name


def test_the_parts_of_a_file_are_found_in_their_order_and_only_if_all_are_there() -> None:
    parts = [f"model-{number}-of-11.bin" for number in range(1, 12)]
    assert parts_of("model.bin", [*reversed(parts), "other-1-of-2.bin", "state.bin"]) == parts
    assert parts_of("model.bin", parts[:-1]) == []
    assert parts_of("model.bin", [*parts, "model-1-of-2.bin"]) == [], "of two sizes"
    assert parts_of("model.bin", [*parts, "model.bin"]) == ["model.bin"]
    assert parts_of("other.bin", parts) == []


# Every point of the way at which a process can die.


def operations_of(store: Store, tmp_path: Path) -> int:
    counting = FaultyStore(store)
    run = Run(counting, "counting-1")
    save(run, tmp_path, step=1)
    before = len(counting.operations)
    save(run, tmp_path, step=2)
    prune(run, 1, keep_last=1, keep_best=0)
    return len(counting.operations) - before


@pytest.mark.parametrize("answers_get_lost", [False, True], ids=["before", "after"])
def test_a_crash_while_committing_or_pruning_leaves_the_old_or_the_new_checkpoint_whole(
    directory_store: Store, tmp_path: Path, answers_get_lost: bool
) -> None:
    steps = []
    for number in range(operations_of(directory_store, tmp_path)):
        store = FaultyStore(directory_store)
        run = Run(store, f"job-{number}")
        save(run, tmp_path, step=1)
        store.answers_get_lost = answers_get_lost
        store.kill_at(number)
        with pytest.raises(Killed):
            save(run, tmp_path, step=2)
            prune(run, 1, keep_last=1, keep_best=0)
        found, files, complaints = restore(Run(directory_store, run.name), tmp_path / f"back-{number}")
        assert found is not None
        assert files == content(found.step)
        assert complaints == []
        steps.append(found.step)
    assert steps == sorted(steps), "once the new one is there it stays"
    assert set(steps) == {1, 2}


def test_a_checkpoint_loses_its_manifest_before_its_files(directory_store: Store, tmp_path: Path) -> None:
    store = FaultyStore(directory_store)
    run = Run(store, "job-1")
    old, new = save(run, tmp_path, step=1), save(run, tmp_path, step=2)
    store.operations.clear()
    prune(run, 1, keep_last=1, keep_best=0)
    deleted = [key for operation, key in store.changes() if operation == "delete"]
    assert deleted[0] == manifest_key(run, old)
    assert len(deleted) == 1 + len(old.files)
    assert committed(run) == [new]
    assert directory_store.folders("runs/job-1/checkpoints") == [new.name]


def test_nothing_is_deleted_if_the_checkpoints_cannot_be_read_back(directory_store: Store, tmp_path: Path) -> None:
    store = FaultyStore(directory_store)
    run = Run(store, "job-1")
    both = [save(run, tmp_path, step=1), save(run, tmp_path, step=2)]
    store.refuse("find")
    with pytest.raises(StoreError):
        prune(run, 1, keep_last=1, keep_best=0)
    store.refuse()
    assert committed(run) == both


# Damage.


def damage(run: Run, checkpoint: Checkpoint, how: str) -> None:
    key = run.key(f"checkpoints/{checkpoint.name}/files/model.bin")
    if how == "missing":
        run.store.delete(key)
    else:
        data = run.store.get(key)
        run.store.put(key, {"truncated": data[:-1], "corrupt": b"M" + data[1:], "longer": data + b"!"}[how])


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("missing", "checkpoint {}: model.bin is missing; skipped"),
        ("truncated", "checkpoint {}: model.bin does not match its digest; skipped"),
        ("corrupt", "checkpoint {}: model.bin does not match its digest; skipped"),
        ("longer", "checkpoint {}: model.bin is larger than it was; skipped"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_for_the_newest_valid_one(
    any_store: Store, tmp_path: Path, how: str, line: str
) -> None:
    """The damaged one has a file that the other lacks: nothing of it may stay behind."""
    run = new_run(any_store)
    older, damaged = save(run, tmp_path, step=2), save(run, tmp_path, step=3)
    damage(run, damaged, how)
    assert restore(run, tmp_path / "back") == (older, content(2), [line.format(damaged.name)])


def refusing(error: Exception, *refused: int) -> Callable[[Path], None]:
    """A check that refuses the checkpoints of these steps."""

    def check(directory: Path) -> None:
        if int((directory / "model.bin").read_text().split()[1]) in refused:
            raise error

    return check


@pytest.mark.parametrize("error", [CorruptCheckpoint("it is a pickle"), Mistake("it is of another run")])
def test_a_checkpoint_that_its_reader_refuses_is_skipped_too(
    directory_store: Store, tmp_path: Path, error: PacktrainError
) -> None:
    run = new_run(directory_store)
    older, refused = save(run, tmp_path, step=2), save(run, tmp_path, step=3)
    (tmp_path / "back").mkdir()
    complaints: list[str] = []
    assert fetch_newest(run, tmp_path / "back", complaints.append, refusing(error, 3)) == older
    assert read_files(tmp_path / "back") == content(2)
    assert complaints == [f"checkpoint {refused.name}: {error}; skipped"]


def test_if_all_checkpoints_belong_to_another_run_the_run_does_not_start_over(
    directory_store: Store, tmp_path: Path
) -> None:
    run = new_run(directory_store)
    for step in (1, 2):
        save(run, tmp_path, step)
    (tmp_path / "back").mkdir()
    with pytest.raises(Mistake, match="it is of another run"):
        fetch_newest(run, tmp_path / "back", lambda _: None, refusing(Mistake("it is of another run"), 1, 2))


def test_if_all_checkpoints_are_damaged_the_run_does_not_start_over(directory_store: Store, tmp_path: Path) -> None:
    run = new_run(directory_store)
    for step in (1, 2):
        damage(run, save(run, tmp_path, step), "corrupt")
    newest = committed(run)[-1].name
    with pytest.raises(Mistake, match=f"none of the 2 checkpoints of job-1 can be used: checkpoint {newest}"):
        restore(run, tmp_path / "back")
    assert read_files(tmp_path / "back") == {}


def test_if_all_manifests_are_unreadable_the_run_does_not_start_over(directory_store: Store, tmp_path: Path) -> None:
    run = new_run(directory_store)
    directory_store.put(manifest_key(run, save(run, tmp_path, step=1)), b"{")
    with pytest.raises(Mistake, match="none of the 1 checkpoints of job-1 can be used: the manifest of"):
        restore(run, tmp_path / "back")


def test_a_manifest_that_arrives_after_its_files_were_removed_does_not_end_the_run(
    directory_store: Store, tmp_path: Path
) -> None:
    """Its writer died, the next generation started without it and removed its files, and then the network let it go."""
    run = new_run(directory_store)
    late = save(run, tmp_path, step=5)
    for entry in directory_store.list(run.key(f"checkpoints/{late.name}/files/")):
        directory_store.delete(entry.key)
    with pytest.raises(Mistake, match="none of the 1 checkpoints"):
        restore(run, tmp_path / "lost")
    run.propose(a_generation(2))
    assert restore(run, tmp_path / "late") == (
        None,
        {},
        [
            f"checkpoint {late.name}: it was committed after a newer generation had started without it; skipped",
            "job-1 has no other checkpoint; starting from scratch",
        ],
    )


def late_run(store: Store, directory: Path) -> tuple[Run, Checkpoint, Checkpoint]:
    """Generation 2 started at the first checkpoint; then the second one arrived, whose writer died before it saw that.

    Its files are there, since the generation could not clean up. It has the best score.
    """
    run = new_run(store)
    run.propose(a_generation(1))
    first, late = save(run, directory, step=3, score=0.5), save(run, directory, step=5, score=0.9)
    run.propose(replace(a_generation(2), step=3))
    return run, first, late


def test_a_late_commit_with_a_score_displaces_neither_the_best_nor_the_newest(
    directory_store: Store, tmp_path: Path
) -> None:
    run, first, _ = late_run(directory_store, tmp_path)
    second = save(run, tmp_path, step=4, generation=2, score=0.4)
    prune(run, 2, keep_last=1, keep_best=1)
    assert committed(run) == [first, second]
    assert best_first(committed(run))[0] == first
    save(run, tmp_path, step=6, generation=2, score=0.3)
    prune(run, 2, keep_last=2, keep_best=0)
    assert [one.step for one in committed(run)] == [4, 6]


def test_a_late_commit_whose_files_are_there_leaves_no_gap_in_the_history(
    directory_store: Store, tmp_path: Path
) -> None:
    """Generation 2 repeated step 4 and died; whoever resumes at step 5 would have nothing of the step before it."""
    run, first, late = late_run(directory_store, tmp_path)
    assert last_step(run) == 3
    found, files, complaints = restore(run, tmp_path / "back")
    assert (found, files) == (first, content(3))
    assert complaints == [
        f"checkpoint {late.name}: it was committed after a newer generation had started without it; skipped"
    ]
    remove_uncommitted(run, before=2)
    assert directory_store.folders(run.key("checkpoints/")) == [first.name]


def test_a_late_commit_counts_if_its_writer_has_deleted_what_the_newer_generation_started_from(
    directory_store: Store, tmp_path: Path
) -> None:
    """The newer generation was decided on before that commit, and proposed after it."""
    run, first, late = late_run(directory_store, tmp_path)
    directory_store.delete(manifest_key(run, first))
    assert last_step(run) == 5
    remove_uncommitted(run, before=2)
    assert restore(run, tmp_path / "back") == (late, content(5), [])


def test_a_checkpoint_that_is_withdrawn_while_machines_fetch_it_is_named(
    directory_store: Store, tmp_path: Path
) -> None:
    """The first machine has found and fetched it; the others get its name."""
    run, first, late = late_run(directory_store, tmp_path)
    directory_store.delete(manifest_key(run, first))  # so that the late one counts
    found, files, _ = restore(run, tmp_path / "first")
    assert found == late
    fetch_named(run, late.name, tmp_path / "second")
    assert read_files(tmp_path / "second") == files
    directory_store.delete(manifest_key(run, late))  # its writer sees the newer generation
    with pytest.raises(CorruptCheckpoint, match=f"checkpoint {late.name} was deleted after the first machine found"):
        fetch_named(run, late.name, tmp_path / "third")


def test_a_superseded_generation_does_not_delete_what_a_newer_one_fell_back_to(
    directory_store: Store, tmp_path: Path
) -> None:
    """Its committer was cut off between a commit and the deletion of older ones."""
    run = new_run(directory_store)
    run.propose(a_generation(1))
    first, *newer = (save(run, tmp_path, step) for step in (1, 2, 3))
    for checkpoint in newer:
        damage(run, checkpoint, "missing")
    run.propose(replace(a_generation(2), step=3))
    assert restore(run, tmp_path / "newer")[0] == first
    with pytest.raises(Superseded, match="generation 2 has started; not deleting checkpoints of generation 1"):
        prune(run, 1, keep_last=2, keep_best=0)
    assert restore(run, tmp_path / "again")[0] == first


def test_a_generation_that_is_superseded_while_it_deletes_checkpoints_deletes_no_more(
    directory_store: Store, tmp_path: Path
) -> None:
    store = FaultyStore(directory_store)
    run = new_run(store)
    run.propose(a_generation(1))
    first, second, third = (save(run, tmp_path, step) for step in (1, 2, 3))

    def supersede(operation: str, key: str) -> None:
        if operation == "delete" and key == manifest_key(run, first):
            Run(directory_store, run.name).propose(replace(a_generation(2), step=3))

    store.fault = supersede
    with pytest.raises(Superseded):
        prune(run, 1, keep_last=1, keep_best=0)
    assert committed(run) == [second, third]


def test_a_checkpoint_whose_manifest_is_repaired_counts_again(directory_store: Store, tmp_path: Path) -> None:
    """The generation that failed meanwhile, since the run does not start over, is no reason to take it for late."""
    run = new_run(directory_store)
    run.propose(a_generation(1))
    saved = save(run, tmp_path, step=5)
    manifest = directory_store.get(manifest_key(run, saved))
    directory_store.put(manifest_key(run, saved), b"{")
    run.propose(replace(a_generation(2), step=last_step(run)))
    with pytest.raises(Mistake, match="none of the 1 checkpoints"):
        restore(run, tmp_path / "damaged")
    directory_store.put(manifest_key(run, saved), manifest)
    assert restore(run, tmp_path / "repaired")[0] == saved


def test_a_generation_whose_record_is_damaged_makes_no_checkpoint_late(directory_store: Store, tmp_path: Path) -> None:
    run, first, _ = late_run(directory_store, tmp_path)
    directory_store.put(run.key("generations/000003.json"), b"{")
    assert committed(run) == [first]


def test_a_late_commit_of_an_older_generation_is_not_where_the_run_resumes(
    directory_store: Store, tmp_path: Path
) -> None:
    run = new_run(directory_store)
    assert last_step(run) == 0
    newest = save(run, tmp_path, step=3, generation=2)
    save(run, tmp_path, step=5, generation=1)
    assert last_step(run) == 3
    assert restore(run, tmp_path / "back")[0] == newest


@pytest.mark.parametrize("data", [b"", b"{", b'{"format": 3, "parts": []}', b"\xff"])
def test_a_manifest_that_cannot_be_read_is_skipped_with_a_warning(
    directory_store: Store, tmp_path: Path, data: bytes
) -> None:
    run = new_run(directory_store)
    older, damaged = save(run, tmp_path, step=1), save(run, tmp_path, step=2)
    directory_store.put(manifest_key(run, damaged), data)
    line = f"the manifest of checkpoint {damaged.name} cannot be read; skipped"
    assert restore(run, tmp_path / "back") == (older, content(1), [line])


def test_a_foreign_format_is_skipped_with_a_warning(directory_store: Store, tmp_path: Path) -> None:
    run = new_run(directory_store)
    older, foreign = save(run, tmp_path, step=1), save(run, tmp_path, step=2)
    change_manifest(run, foreign, format=3)
    reason = "has format 3, but this version reads 2; use the version of Packtrain that wrote it"
    line = f"checkpoint {foreign.name} {reason}; skipped"
    assert restore(run, tmp_path / "back") == (older, content(1), [line])


def test_checkpoints_of_a_newer_format_are_neither_replaced_nor_deleted(directory_store: Store, tmp_path: Path) -> None:
    run = new_run(directory_store)
    for step in (1, 2, 3):
        change_manifest(run, save(run, tmp_path, step=step), format=3)
    with pytest.raises(Mistake, match="has format 3, but this version reads 2; use the version"):
        restore(run, tmp_path / "back")
    prune(run, 1, keep_last=1, keep_best=0)
    assert [one.step for one in committed(run)] == [1, 2, 3]


def test_a_score_that_is_not_finite_does_not_count(directory_store: Store, tmp_path: Path) -> None:
    run = new_run(directory_store)
    for step, score in enumerate((math.nan, 5.0, 1.0, math.nan), 1):
        save(run, tmp_path, step=step, score=score)
    chosen = best_first(committed(run))[0]
    assert chosen is not None
    assert chosen.step == 2
    prune(run, 1, keep_last=1, keep_best=1)
    assert [one.step for one in committed(run)] == [2, 4]


def test_a_manifest_copied_from_another_checkpoint_is_skipped(directory_store: Store, tmp_path: Path) -> None:
    run = new_run(directory_store)
    older, newer = save(run, tmp_path, step=1), save(run, tmp_path, step=2)
    directory_store.put(manifest_key(run, older), directory_store.get(manifest_key(run, newer)))
    said: list[str] = []
    assert committed(run, said.append) == [newer]
    assert said == [f"the manifest of checkpoint {older.name} belongs to another checkpoint"]


@pytest.mark.parametrize("changes", [{"step": 2}, {"generation": 2}])
def test_a_manifest_whose_step_or_generation_is_not_that_of_its_name_is_skipped(
    directory_store: Store, tmp_path: Path, changes: dict[str, int]
) -> None:
    run = new_run(directory_store)
    change_manifest(run, save(run, tmp_path, step=1), **changes)
    said: list[str] = []
    assert committed(run, said.append) == []
    assert len(said) == 1


@pytest.mark.parametrize("name", ["../../escaped", "/escaped", "a/../../escaped", "a//b", "", ".", "a\0b"])
def test_a_name_that_leaves_the_directory_is_refused(directory_store: Store, tmp_path: Path, name: str) -> None:
    run = new_run(directory_store)
    saved = save(run, tmp_path, step=1)
    change_manifest(run, saved, files=[{"name": name, "bytes": 1, "sha256": "0" * 64}])
    said: list[str] = []
    assert committed(run, said.append) == []
    assert said == [f"the manifest of checkpoint {saved.name} names the invalid file {name!r}"]


def test_a_store_that_is_away_is_not_taken_for_damage(directory_store: Store, tmp_path: Path) -> None:
    run = new_run(directory_store)
    save(run, tmp_path, step=1)
    store = FaultyStore(directory_store)
    store.refuse("get_file")
    with pytest.raises(StoreError, match="the store is away"):
        restore(Run(store, run.name), tmp_path / "back")


# What is kept.


@st.composite
def lines(draw: st.DrawFn) -> list[Checkpoint]:
    """Checkpoints in the order of `committed`; scores are few, so that many are equal."""
    scores = draw(st.lists(st.none() | st.sampled_from([-1.0, 0.0, 0.5, 1.0]), max_size=8))
    return [Checkpoint(FORMAT, f"c{step}", step, 1 + step // 3, score, ()) for step, score in enumerate(scores)]


@settings(deadline=None)
@given(lines(), st.integers(0, 4), st.integers(0, 4))
def test_the_newest_and_the_best_are_never_pruned(
    checkpoints: list[Checkpoint], keep_last: int, keep_best: int
) -> None:
    dropped = superfluous(checkpoints, keep_last, keep_best)
    kept = [one for one in checkpoints if one not in dropped]
    assert kept[-max(1, keep_last) :] == checkpoints[-max(1, keep_last) :]
    assert len(kept) <= max(1, keep_last) + keep_best
    if keep_best and any(one.score is not None for one in checkpoints):
        assert best_first(kept)[0] == best_first(checkpoints)[0]
        best_scores = sorted((one.score for one in checkpoints if one.score is not None), reverse=True)[:keep_best]
        kept_scores = sorted((one.score for one in kept if one.score is not None), reverse=True)
        assert kept_scores[: len(best_scores)] == best_scores


@settings(deadline=None)
@given(lines(), st.integers(1, 3), st.integers(0, 3))
def test_pruning_twice_deletes_nothing_more(checkpoints: list[Checkpoint], keep_last: int, keep_best: int) -> None:
    dropped = superfluous(checkpoints, keep_last, keep_best)
    kept = [one for one in checkpoints if one not in dropped]
    assert superfluous(kept, keep_last, keep_best) == []


def test_the_best_has_the_highest_score_and_without_scores_is_the_newest() -> None:
    made = [Checkpoint(FORMAT, str(step), step, 1, score, ()) for step, score in enumerate([0.1, 0.3, None, 0.2])]
    assert best_first(made)[0] == made[1]
    assert best_first(made) == [made[1], made[3], made[0], made[2]]
    assert best_first(made[2:3]) == made[2:3]
    assert best_first([]) == []


def test_the_newest_of_equal_scores_comes_first_and_a_score_of_minus_infinity_is_none() -> None:
    scores = [(1, 5, 0.5), (2, 4, 0.5), (2, 6, 0.5), (3, 1, -math.inf), (1, 9, -1.0), (1, 8, None), (1, 7, 0.0)]
    made = [Checkpoint(FORMAT, str(step), step, generation, score, ()) for generation, step, score in scores]
    assert [one.step for one in best_first(made)] == [6, 4, 5, 7, 9, 1, 8]
    assert [is_scored(one) for one in made] == [True, True, True, False, True, False, True]


def test_checkpoints_without_a_score_are_not_among_the_best() -> None:
    scores = [None, 0.5, None, 0.1, None]
    made = [Checkpoint(FORMAT, str(step), step, 1, score, ()) for step, score in enumerate(scores)]
    assert superfluous(made, keep_last=1, keep_best=4) == [made[0], made[2]]


def test_of_commits_that_reached_the_same_step_the_newest_are_kept() -> None:
    steps = [None, 10, 10, 10, 20, 20, 20, 5, 20, 20]
    made = [Checkpoint(FORMAT, str(step), step, 1, None, (), reached) for step, reached in enumerate(steps)]
    assert superfluous(made[:7], keep_last=2, keep_best=0) == made[:5]
    assert superfluous(made[:8], keep_last=2, keep_best=0) == made[:5]
    assert superfluous(made, keep_last=2, keep_best=0) == made[:8]


def test_a_late_checkpoint_is_skipped_only_if_a_newer_generation_started_at_an_earlier_step(
    directory_store: Store, tmp_path: Path
) -> None:
    run = new_run(directory_store)
    damage(run, save(run, tmp_path, step=5, generation=2), "missing")
    run.propose(a_generation(1))
    run.propose(a_generation(2))
    run.propose(replace(a_generation(3), step=5))
    with pytest.raises(Mistake, match="none of the 1 checkpoints"):
        restore(run, tmp_path / "back")


# Checkpoints that were begun and never committed.


def test_uncommitted_files_of_older_generations_are_removed(any_store: Store, tmp_path: Path) -> None:
    run = new_run(any_store)
    (tmp_path / "file").write_bytes(b"x")
    commit(run, 10, 1, None, {"f": tmp_path / "file"})
    for name in ("000000020-000001-aaa", "000000030-000002-bbb", "000000040-000003-ccc", "odd"):
        any_store.put(run.key(f"checkpoints/{name}/files/f"), b"x")
    remove_uncommitted(run, 3)
    left = any_store.folders(run.key("checkpoints/"))
    assert [one.step for one in committed(run)] == [10]
    assert left == [committed(run)[0].name, "000000040-000003-ccc", "odd"]


def test_unfinished_files_of_older_generations_are_removed(directory_store: Store) -> None:
    run = new_run(directory_store)
    names = ["000000020-000001-aaa", "000000030-000002-bbb", "000000040-000003-ccc", "odd"]
    unfinished = [Path(directory_store.url, run.key(f"checkpoints/{name}/files/.tmp-1")) for name in names]
    for path in unfinished:
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x")
    store = FaultyStore(directory_store)
    remove_uncommitted(Run(store, run.name), 3)
    assert [path.exists() for path in unfinished] == [False, False, True, True]
    assert [key for operation, key in store.operations if operation == "remove_unfinished"] == [run.key("checkpoints/")]


KILLED_DURING_A_COMMIT = """
import sys
from pathlib import Path
from packtrain.run.checkpoint import commit
from packtrain.run.run import Run
from packtrain.store import open_store
commit(Run(open_store(sys.argv[1]), sys.argv[2]), 20, 1, None, {"a": Path(sys.argv[3]), "b": Path(sys.argv[3])})
"""


def test_nothing_is_left_of_a_commit_that_was_killed_during_its_upload(
    directory_store: Store, s3_store: Store, s3_environment: S3Server, tmp_path: Path
) -> None:
    (tmp_path / "small").write_bytes(b"x")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(400 << 20)

    def unfinished(store: Store) -> list[str]:
        if store.is_directory:
            return [str(path) for path in Path(store.url).rglob(".tmp-*") if path.parent.name == "files"]
        return s3_environment.uploads(store.url)

    for store in (directory_store, s3_store):
        run = new_run(store)
        kept = commit(run, 10, 1, None, {"f": tmp_path / "small"})
        before = [entry.key for entry in store.list()]
        writer = python(KILLED_DURING_A_COMMIT, store.url, run.name, tmp_path / "large")
        while not unfinished(store):
            assert writer.poll() is None
        writer.kill()
        writer.communicate()
        assert len(unfinished(store)) == 1
        remove_uncommitted(run, 1)
        assert len(unfinished(store)) == 1, "its generation may still commit"
        remove_uncommitted(run, 2)
        assert unfinished(store) == []
        assert [entry.key for entry in store.list()] == before
        assert committed(run) == [kept]
        if store.is_directory:
            assert [path.name for path in Path(store.url, run.key("checkpoints")).iterdir()] == [kept.name]


@pytest.mark.parametrize("text", ["", "newest", "-1", "1.5", "\u0661", "9" * 40])
def test_a_choice_of_checkpoint_is_best_last_or_a_step(text: str) -> None:
    assert [choice_of(word) for word in ("best", "last", "0", "1500")] == ["best", "last", 0, 1500]
    with pytest.raises(Mistake, match=r"^--checkpoint: must be best, last or the number of a step"):
        choice_of(text)
