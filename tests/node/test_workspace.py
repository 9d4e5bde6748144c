"""A program's directory: what it finds there, what is kept of what it writes, and what is named."""

from __future__ import annotations

import errno
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from packtrain.errors import Mistake
from packtrain.node.metrics import ProgramMetrics
from packtrain.node.program import ProgramCheckpoints
from packtrain.node.workspace import Workspace, visible
from packtrain.run.checkpoint import Superseded, commit
from packtrain.run.code import archive, snapshot
from packtrain.run.outputs import OutputList, chosen, fetch_file, kept_files, newest_list, output_sizes, put_list
from packtrain.run.run import Run, add_run
from packtrain.store import Store, StoreError
from parts.faulty import CHANGES, FaultyStore, Killed
from parts.runs import a_generation, new_run, program_job, read_files, write_files


class Told(list[str]):
    def __call__(self, kind: str, text: str) -> None:
        self.append(f"{kind}: {text}")


def workspace(
    run: Run, directory: Path, told: Told | None = None, generation: int = 1, is_first: bool = True
) -> Workspace:
    directory.mkdir(parents=True)
    prepared = Workspace(run, directory, Told() if told is None else told)
    prepared.prepare()
    prepared.restore_outputs(generation, is_first)
    return prepared


@pytest.fixture
def faulty(directory_store: Store) -> FaultyStore:
    return FaultyStore(directory_store)


@pytest.fixture
def faulty_run(faulty: FaultyStore) -> Run:
    return new_run(faulty, program_job(outputs=["out"]))


def kept(run: Run) -> dict[str, bytes]:
    """What a person gets of a run's outputs."""
    return {name: run.store.get(file.key) for name, file in kept_files(run).items()}


def started_from(source: Path, store: Store, **fields: Any) -> Run:
    origin = {"directory": str(source), "inode": source.stat().st_ino}
    return add_run(store, program_job(origin=origin, **fields), snapshot(source).archive, None)


# What it finds.


@pytest.mark.usefixtures("processes")
def test_files_that_the_snapshot_leaves_out_are_found_by_their_relative_paths(
    directory_store: Store, tmp_path: Path
) -> None:
    source = tmp_path / "mine"
    files = {"train.py": b"", ".gitignore": b"data/\n*.bin\n", "data/x.txt": b"x", "lib/a.py": b"", "lib/b.bin": b"b"}
    write_files(source, {**files, "lib/__pycache__/a.pyc": b""})
    workspace(started_from(source, directory_store), tmp_path / "node/code")
    code = tmp_path / "node/code"
    assert {name: (code / name).read_bytes() for name in files} == files
    assert [str(path.relative_to(code)) for path in sorted(code.rglob("*")) if path.is_symlink()] == [
        "data", "lib/b.bin",
    ]  # fmt: skip
    assert not (code / "lib/__pycache__").exists()


@pytest.mark.usefixtures("processes")
def test_the_code_is_that_of_the_snapshot_whatever_changed_since(directory_store: Store, tmp_path: Path) -> None:
    source = tmp_path / "mine"
    write_files(source, {"train.py": b"old"})
    run = started_from(source, directory_store)
    write_files(source, {"train.py": b"new"})
    workspace(run, tmp_path / "code")
    assert (tmp_path / "code/train.py").read_bytes() == b"old"


@pytest.mark.usefixtures("processes")
def test_another_directory_of_the_same_name_is_not_taken_for_the_one_that_the_run_came_from(
    directory_store: Store, tmp_path: Path
) -> None:
    source = tmp_path / "mine"
    write_files(source, {"train.py": b"", ".gitignore": b"x.bin\n", "x.bin": b"mine"})
    run = started_from(source, directory_store)
    source.rename(tmp_path / "moved")
    assert visible(run.job.origin) is None
    write_files(source, {"x.bin": b"of somebody else"})
    workspace(run, tmp_path / "code")
    assert not (tmp_path / "code/x.bin").exists()


# What is kept.


def test_outputs_are_kept_and_are_there_again_on_the_next_machine(any_store: Store, tmp_path: Path) -> None:
    run = new_run(any_store, program_job(outputs=["out/", "deep/log.txt"]))
    first = workspace(run, tmp_path / "one")
    write_files(tmp_path / "one", {"out/a/1.txt": b"1", "out/old": b"", "deep/log.txt": b"one", "other.txt": b"x"})
    first.keep_outputs(1)
    (tmp_path / "one/out/old").unlink()
    write_files(tmp_path / "one", {"deep/log.txt": b"one two"})
    first.keep_outputs(1)
    assert kept_files(run).keys() == {"out/a/1.txt", "deep/log.txt"}
    workspace(run, tmp_path / "two", generation=2)
    assert read_files(tmp_path / "two") == {"train.py": b"", "out/a/1.txt": b"1", "deep/log.txt": b"one two"}


@pytest.mark.usefixtures("processes")
def test_outputs_never_go_through_a_link_into_the_persons_own_directory(directory_store: Store, tmp_path: Path) -> None:
    source = tmp_path / "mine"
    write_files(source, {"train.py": b"", ".gitignore": b"res/\n", "res/out/old": b"", "res/base.bin": b"b"})
    run = started_from(source, directory_store, outputs=["res/out"])
    made = workspace(run, tmp_path / "code")
    assert (tmp_path / "code/res/base.bin").read_bytes() == b"b"
    write_files(tmp_path / "code", {"res/out/new": b"n"})
    made.keep_outputs(1)
    assert kept_files(run).keys() == {"res/out/new"}
    assert [path.name for path in (source / "res/out").iterdir()] == ["old"]


def test_a_name_that_no_store_can_hold_keeps_no_other_output_back(any_store: Store, tmp_path: Path) -> None:
    run = add_run(any_store, program_job("j" * 60, outputs=["out"]), archive({}), None)
    made = workspace(run, tmp_path / "code")
    longest, too_long = ("out/" + "/".join([*["x" * 99] * 8, "x" * length]) for length in (99, 150))
    write_files(tmp_path / "code", {longest: b"1", too_long: b"2"})
    made.keep_outputs(1)
    assert kept(run) == {longest: b"1"}


def test_what_nothing_keeps_is_named_once(directory_store: Store, tmp_path: Path) -> None:
    told = Told()
    made = workspace(new_run(directory_store, program_job(outputs=["out"])), tmp_path / "code", told)
    made.warn_of_the_rest()
    assert told == []
    write_files(tmp_path / "code", {"out/a": b"", "logs/a": b"1", "logs/b": b"2", "x.txt": b"", "__pycache__/y": b""})
    write_files(tmp_path / "code", {"train.py": b"changed"})
    made.warn_of_the_rest()
    made.warn_of_the_rest()
    assert told == [
        "warning: not kept: logs/ (2 files, 2 B), train.py (1 file, 7 B), x.txt (1 file, 0 B);"
        " add `outputs: [logs/, train.py, x.txt]` to the job to keep it"
    ]


def test_what_is_not_kept_is_named_as_the_program_sees_it(directory_store: Store, tmp_path: Path) -> None:
    run, told = new_run(directory_store, program_job(directory="project", outputs=["project/out"])), Told()
    made = workspace(run, tmp_path / "code", told)
    write_files(
        tmp_path / "code", {"project/out/a": b"", "project/logs/a": b"1", "project/b": b"", "data/cache": b"12"}
    )
    made.warn_of_the_rest()
    write_files(tmp_path / "code", {"other/c": b""})
    made.warn_of_the_rest()
    assert told == [
        "warning: not kept: ../data/ (1 file, 2 B), b (1 file, 0 B), logs/ (1 file, 1 B);"
        " add `outputs: [b, logs/]` to the job to keep it",
        "warning: not kept: ../other/ (1 file, 0 B)",
    ]


# Several machines.


@pytest.fixture
def run(directory_store: Store) -> Run:
    return new_run(directory_store, program_job(outputs=["out"]))


def test_a_machine_that_becomes_the_first_has_the_outputs_of_the_one_before(run: Run, tmp_path: Path) -> None:
    first = workspace(run, tmp_path / "first")
    second = workspace(run, tmp_path / "second", is_first=False)
    write_files(tmp_path / "first", {"out/log": b"1", "out/deep/model": b"m", "out/gone": b"", "out/kind": b"file"})
    write_files(tmp_path / "second", {"out/log": b"of rank 1", "out/rank-1": b"", "out/kind/is": b"a folder"})
    first.keep_outputs(1)
    (tmp_path / "first/out/gone").unlink()
    first.keep_outputs(1)
    second.restore_outputs(1, is_first=False)
    assert (tmp_path / "second/out/rank-1").exists(), "a machine that is not the first one may have files of its own"
    assert (tmp_path / "second/out/log").read_bytes() == b"1"
    second.restore_outputs(2, is_first=True)
    now = {"out/log": b"1", "out/deep/model": b"m", "out/kind": b"file"}
    assert read_files(tmp_path / "second") == {"train.py": b"", **now}
    write_files(tmp_path / "second", {"out/log": b"1 2"})
    second.keep_outputs(2)
    assert kept(run) == {**now, "out/log": b"1 2"}
    first.restore_outputs(3, is_first=True)
    assert read_files(tmp_path / "first") == {"train.py": b"", **now, "out/log": b"1 2"}


def test_a_machine_that_stays_the_first_keeps_what_is_not_in_the_store_yet(run: Run, tmp_path: Path) -> None:
    first = workspace(run, tmp_path / "code")
    write_files(tmp_path / "code", {"out/log": b"1"})
    first.keep_outputs(1)
    write_files(tmp_path / "code", {"out/log": b"1 2", "out/new": b"n"})
    first.restore_outputs(2, is_first=True)
    first.keep_outputs(2)
    assert kept(run) == {"out/log": b"1 2", "out/new": b"n"}


def test_a_restore_of_outputs_that_is_tried_again_removes_nothing(
    faulty: FaultyStore, faulty_run: Run, tmp_path: Path
) -> None:
    first = workspace(faulty_run, tmp_path / "code")
    write_files(tmp_path / "code", {"out/log": b"1"})
    first.keep_outputs(1)
    write_files(tmp_path / "code", {"out/log": b"1 2"})
    for lost in (False, True):
        faulty.answers_get_lost = lost
        faulty.refuse("put")
        with pytest.raises(StoreError):
            first.restore_outputs(2, is_first=True)
    faulty.refuse()
    first.restore_outputs(2, is_first=True)
    assert read_files(tmp_path / "code") == {"train.py": b"", "out/log": b"1 2"}


def lose_answers_of_lists(store: FaultyStore) -> None:
    """Each list is put, and the machine never learns that."""
    away = StoreError("the store is away", temporary=True)
    store.fault = lambda operation, key: away if operation == "put" and "/lists/" in key else None
    store.answers_get_lost = True


def test_a_machine_that_stays_the_first_keeps_its_files_though_it_does_not_know_that_its_list_has_arrived(
    faulty: FaultyStore, faulty_run: Run, tmp_path: Path
) -> None:
    first = workspace(faulty_run, tmp_path / "code")
    write_files(tmp_path / "code", {"out/log": b"1"})
    lose_answers_of_lists(faulty)
    with pytest.raises(StoreError):
        first.keep_outputs(1)
    faulty.refuse()
    files = {"out/log": b"1 2", "out/new": b"n"}
    write_files(tmp_path / "code", files)
    first.restore_outputs(2, is_first=True)
    first.keep_outputs(2)
    assert kept(faulty_run) == files


def test_a_file_that_the_program_removed_stays_removed_though_a_list_with_it_arrives_late(
    faulty: FaultyStore, faulty_run: Run, tmp_path: Path
) -> None:
    first = workspace(faulty_run, tmp_path / "code")
    write_files(tmp_path / "code", {"out/log": b"1"})
    first.keep_outputs(1)
    write_files(tmp_path / "code", {"out/part": b"p"})
    lose_answers_of_lists(faulty)
    with pytest.raises(StoreError):
        first.keep_outputs(1)
    faulty.refuse()
    (tmp_path / "code/out/part").unlink()
    first.keep_outputs(1)
    assert kept(faulty_run) == {"out/log": b"1"}


def test_a_machine_that_takes_over_again_keeps_nothing_of_its_own_though_its_restore_is_tried_twice(
    faulty: FaultyStore, faulty_run: Run, directory_store: Store, tmp_path: Path
) -> None:
    first = workspace(faulty_run, tmp_path / "first")
    write_files(tmp_path / "first", {"out/log": b"1"})
    first.keep_outputs(1)
    write_files(tmp_path / "first", {"out/log": b"1, cut off", "out/more": b""})
    workspace(Run(directory_store, faulty_run.name), tmp_path / "second", generation=2)
    faulty.refuse("get_file")
    with pytest.raises(StoreError):
        first.restore_outputs(3, is_first=True)
    faulty.refuse()
    first.restore_outputs(3, is_first=True)
    assert read_files(tmp_path / "first") == {"train.py": b"", "out/log": b"1"}


def test_a_machine_that_becomes_the_first_has_the_files_of_the_code_among_the_outputs(
    directory_store: Store, tmp_path: Path
) -> None:
    code = {"train.py": b"", "out/table.csv": b"a,b", "out/list": b"1", "out/kept": b"c", "out/latest": b"none"}
    run = add_run(directory_store, program_job(outputs=["out"]), archive(code), None)
    first, second = workspace(run, tmp_path / "first"), workspace(run, tmp_path / "second", is_first=False)
    write_files(tmp_path / "first", {"out/kept": b"of rank 0"})
    first.keep_outputs(1)
    (tmp_path / "second/out/list").unlink()
    write_files(tmp_path / "second", {"out/table.csv": b"of rank 1", "out/list/is": b"a folder", "out/kept": b"x"})
    (tmp_path / "mine").write_bytes(b"of this person")
    (tmp_path / "second/out/latest").unlink()
    (tmp_path / "second/out/latest").symlink_to(tmp_path / "mine")
    second.restore_outputs(2, is_first=True)
    assert (tmp_path / "mine").read_bytes() == b"of this person"
    assert {name: (tmp_path / "second" / name).read_bytes() for name in code} == {**code, "out/kept": b"of rank 0"}
    second.keep_outputs(2)
    assert kept(run) == {"out/kept": b"of rank 0"}, "every machine has the code"


def test_an_output_that_one_machine_could_not_read_stays_in_the_store(run: Run, tmp_path: Path) -> None:
    first = workspace(run, tmp_path / "first")
    write_files(tmp_path / "first", {"out/a": b"a", "out/b": b"b"})
    first.keep_outputs(1)
    keys = {name: file.key for name, file in kept_files(run).items()}
    for key in keys.values():
        run.store.put(key, b"x")
    second = workspace(run, tmp_path / "second", generation=2)
    write_files(tmp_path / "second", {"out/b": b"new"})
    second.keep_outputs(2)
    run.store.put(keys["out/a"], b"a")
    assert kept(run) == {"out/a": b"a", "out/b": b"new"}
    (tmp_path / "second/out/b").unlink()
    second.keep_outputs(2)
    assert kept(run) == {"out/a": b"a"}


def test_an_output_that_is_damaged_in_the_store_is_named_and_left_out(run: Run, tmp_path: Path) -> None:
    first = workspace(run, tmp_path / "first")
    write_files(tmp_path / "first", {"out/a": b"a", "out/b": b"b", "out/c": b"c", "out/d": b"d"})
    first.keep_outputs(1)
    files = kept_files(run)
    run.store.put(files["out/a"].key, b"x")
    run.store.put(files["out/b"].key, b"too large")
    run.store.delete(files["out/c"].key)
    told = Told()
    workspace(run, tmp_path / "second", told, generation=2)
    assert read_files(tmp_path / "second") == {"train.py": b"", "out/d": b"d"}
    assert [text.partition(" not restored")[0] for text in told] == [f"warning: output out/{name}" for name in "abc"]


def test_outputs_that_arrive_after_another_machine_has_taken_over_are_not_served(
    any_store: Store, tmp_path: Path
) -> None:
    run = new_run(any_store, program_job(outputs=["out"]))
    first = workspace(run, tmp_path / "first")
    write_files(tmp_path / "first", {"out/log": b"1", "out/old": b"old"})
    first.keep_outputs(1)
    run.propose(a_generation(2, "second"))
    write_files(tmp_path / "first", {"out/log": b"1 late", "out/more": b"late"})
    (tmp_path / "first/out/old").unlink()
    with pytest.raises(Superseded, match="generation 2 has started"):
        first.keep_outputs(1)
    assert kept(run) == {"out/log": b"1", "out/old": b"old"}
    second = workspace(run, tmp_path / "second", generation=2)
    with pytest.raises(Superseded):
        first.keep_outputs(1)
    write_files(tmp_path / "second", {"out/log": b"1 2"})
    second.keep_outputs(2)
    assert kept(run) == {"out/log": b"1 2", "out/old": b"old"}
    assert len(run.store.list(run.key("outputs"))) == 3, "two files and the list"


@pytest.mark.parametrize("is_dead", [False, True])
@pytest.mark.parametrize("number", range(5))
def test_a_machine_that_is_cut_off_at_any_moment_of_an_upload_replaces_nothing(
    directory_store: Store, tmp_path: Path, number: int, is_dead: bool
) -> None:
    """One of its requests arrives only after the next machine has put outputs: two files, the list, two deletions."""
    slow = FaultyStore(directory_store)
    job = program_job(outputs=["out"])
    run = new_run(slow, job)
    here = Run(directory_store, run.name)
    first = workspace(run, tmp_path / "first")
    write_files(tmp_path / "first", {"out/log": b"1", "out/same": b"same"})
    first.keep_outputs(1)
    changes: list[str] = []

    def take_over(operation: str, key: str) -> BaseException | None:
        if operation in CHANGES:
            changes.append(key)
        if len(changes) != number + 1:
            return None
        changes.append("the other machine")
        here.propose(a_generation(2, "second"))
        second = workspace(here, tmp_path / "second", generation=2)
        write_files(tmp_path / "second", {"out/log": b"1 2"})
        second.keep_outputs(2)
        slow.answers_get_lost = True
        return Killed() if is_dead else None

    slow.fault = take_over
    write_files(tmp_path / "first", {"out/log": b"1 late", "out/more": b"late"})
    is_in_time = number > 2
    with suppress(Killed) if is_dead or is_in_time else pytest.raises(Superseded):
        first.keep_outputs(1)
    more = {"out/more": b"late"} if is_in_time else {}
    assert kept(here) == {"out/log": b"1 2", "out/same": b"same", **more}
    assert "the other machine" in changes


def test_the_files_of_a_list_outlive_a_machine_that_replaces_it_too_late(
    directory_store: Store, tmp_path: Path
) -> None:
    """The next machine has read the list, and not yet put its own, when a newer one arrives."""
    slow = FaultyStore(directory_store)
    run, here = new_run(slow, program_job(outputs=["out"])), None
    first = workspace(run, tmp_path / "first")
    write_files(tmp_path / "first", {"out/log": b"1"})
    first.keep_outputs(1)
    here = Run(directory_store, run.name)
    read = newest_list(here)
    assert read is not None

    def take_over(operation: str, key: str) -> None:
        if operation == "put" and "/lists/" in key:
            here.propose(a_generation(2, "second"))

    slow.fault = take_over
    write_files(tmp_path / "first", {"out/log": b"late"})
    with pytest.raises(Superseded):
        first.keep_outputs(1)
    put_list(here, OutputList(2, 0, read.files))
    assert kept(here) == {"out/log": b"1"}


def test_a_list_whose_upload_failed_is_put_again(directory_store: Store, tmp_path: Path) -> None:
    slow = FaultyStore(directory_store)
    run = new_run(slow, program_job(outputs=["out"]))
    first = workspace(run, tmp_path / "first")
    write_files(tmp_path / "first", {"out/log": b"1"})
    for lost in (False, True):
        slow.answers_get_lost = lost
        slow.refuse("put")
        with pytest.raises(StoreError):
            first.keep_outputs(1)
    slow.refuse()
    first.keep_outputs(1)
    assert kept(run) == {"out/log": b"1"}
    assert len(run.store.list(run.key("outputs"))) == 2


def test_a_checkpoint_is_committed_though_an_output_finds_the_disk_full(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code").mkdir()
    made = Workspace(run, tmp_path / "code", Told())
    metrics = ProgramMetrics(run, (), Told())
    checkpoints = ProgramCheckpoints(run, tmp_path / "ckpt", run.job.checkpoint, Told(), made, metrics)
    checkpoints.restore(1, is_first=True)
    write_files(tmp_path, {"code/out/large": b"too large", "ckpt/model": b"m"})
    copy = shutil.copyfile

    def full(source: Path, target: Path) -> None:
        if source.name == "large":
            raise OSError(errno.ENOSPC, "No space left on device")
        copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.commit(1)
    assert kept_files(run).keys() == {"checkpoints/model"}
    monkeypatch.setattr(shutil, "copyfile", copy)
    checkpoints.commit(1)
    assert kept_files(run).keys() == {"checkpoints/model", "out/large"}


def test_a_file_that_is_replaced_while_a_person_fetches_it_is_fetched_as_it_is_now(run: Run, tmp_path: Path) -> None:
    made = workspace(run, tmp_path / "code")
    write_files(tmp_path / "code", {"out/log": b"1"})
    made.keep_outputs(1)
    listed = kept_files(run)
    write_files(tmp_path / "code", {"out/log": b"1 2"})
    made.keep_outputs(1)
    fetch_file(run, "out/log", listed["out/log"], tmp_path / "home")
    assert read_files(tmp_path / "home") == {"out/log": b"1 2"}


def test_outputs_may_have_the_name_under_which_a_person_gets_checkpoints(
    directory_store: Store, tmp_path: Path
) -> None:
    run = new_run(directory_store, program_job(outputs=["checkpoints"]))
    made = workspace(run, tmp_path / "code")
    write_files(tmp_path / "code", {"checkpoints/best.pt": b"1"})
    made.keep_outputs(1)
    commit(run, 1, 1, None, write_files(tmp_path, {"state": b"state"}))
    assert output_sizes(run) == {"checkpoints/": [1]}
    listed = kept_files(run)
    write_files(tmp_path / "code", {"checkpoints/best.pt": b"1 2"})
    made.keep_outputs(1)
    for name, file in listed.items():
        fetch_file(run, name, file, tmp_path / "home")
    assert read_files(tmp_path / "home") == {"checkpoints/best.pt": b"1 2", "checkpoints/state": b"state"}


def test_outputs_that_the_job_no_longer_names_stay(directory_store: Store, tmp_path: Path) -> None:
    run = new_run(directory_store, program_job(outputs=["out", "logs"]))
    made = workspace(run, tmp_path / "code")
    write_files(tmp_path / "code", {"out/a": b"a", "logs/b": b"b"})
    made.keep_outputs(1)
    changed = run.changed(program_job(outputs=["out"]))
    changed.put_job()
    second = workspace(changed, tmp_path / "second", generation=2)
    write_files(tmp_path / "second", {"out/a": b"a 2"})
    second.keep_outputs(2)
    assert kept(changed) == {"out/a": b"a 2", "logs/b": b"b"}


# What a person brings home.


def test_files_are_brought_home_by_name_or_folder(directory_store: Store, tmp_path: Path) -> None:
    run = new_run(directory_store, program_job(outputs=["out"]))
    made = workspace(run, tmp_path / "code")
    write_files(tmp_path / "code", {"out/a.txt": b"a", "out/deep/b.txt": b"b", "out/deeper": b"c"})
    made.keep_outputs(1)
    files = kept_files(run)
    assert chosen(run, files, ["out/deep/"]).keys() == {"out/deep/b.txt"}
    assert chosen(run, files, ["."]).keys() == files.keys()
    for name, file in chosen(run, files, ["out"]).items():
        fetch_file(run, name, file, tmp_path / "home")
    assert read_files(tmp_path / "home") == {"out/a.txt": b"a", "out/deep/b.txt": b"b", "out/deeper": b"c"}
    fetch_file(run, "out/a.txt", files["out/a.txt"], tmp_path / "home")  # again: nothing to do
    write_files(tmp_path / "home", {"out/a.txt": b"mine"})
    with pytest.raises(Mistake, match="is there and differs"):
        fetch_file(run, "out/a.txt", files["out/a.txt"], tmp_path / "home")
    (tmp_path / "home/out2").symlink_to(tmp_path)
    with pytest.raises(Mistake, match="through a link"):
        fetch_file(run, "out2/a.txt", files["out/a.txt"], tmp_path / "home")
