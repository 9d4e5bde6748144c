from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from packtrain.errors import Mistake
from packtrain.job.job import CheckpointSettings
from packtrain.node.metrics import ProgramMetrics
from packtrain.node.program import ProgramCheckpoints, resume_arguments
from packtrain.node.workspace import Workspace
from packtrain.run.checkpoint import Superseded, commit, committed, fetch
from packtrain.run.run import Run
from packtrain.store import Store
from parts.runs import a_generation, new_run, program_job, read_files, write_files


class Told(list[tuple[str, str]]):
    def __call__(self, kind: str, text: str) -> None:
        self.append((kind, text))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self]


def checkpoints(
    run: Run, directory: Path, told: Told | None = None, options: Any = MappingProxyType({}), **settings: object
) -> ProgramCheckpoints:
    checked = CheckpointSettings.model_validate({"keep_best": 0, **settings})
    told = Told() if told is None else told
    workspace = Workspace(run, directory.with_name("code"), told)
    return ProgramCheckpoints(run, directory, checked, told, workspace, ProgramMetrics(run, (), told), **options)


def newest_files(run: Run, scratch: Path) -> dict[str, bytes]:
    scratch.mkdir()
    fetch(run, committed(run)[-1], scratch)
    return read_files(scratch)


def test_a_new_run_starts_with_an_empty_directory(any_store: Store, tmp_path: Path) -> None:
    write_files(tmp_path / "ckpt", {"left over": b"x"})
    told = Told()
    checkpoints(new_run(any_store), tmp_path / "ckpt", told).restore(1, is_first=True)
    assert list((tmp_path / "ckpt").iterdir()) == []
    assert told == []


def test_the_directory_is_restored_as_it_was_committed(any_store: Store, tmp_path: Path) -> None:
    run, told = new_run(any_store), Told()
    files = {"epoch-1.pt": b"1", "deep/manifest.json": b"{}", "manifest.json": b"mine", "empty": b""}
    first = checkpoints(run, tmp_path / "one")
    first.restore(1, is_first=True)
    write_files(tmp_path / "one", files)
    first.commit(generation=1)
    checkpoints(run, tmp_path / "other", told).restore(1, is_first=True)
    assert read_files(tmp_path / "other") == files
    assert told.kinds() == ["restored"]


def test_a_restore_that_a_newer_generation_has_overtaken_changes_nothing(
    directory_store: Store, tmp_path: Path
) -> None:
    """Both have waited for a slow restore before them, and a lock has no order."""
    keeping = checkpoints(new_run(directory_store), tmp_path / "ckpt")
    keeping.restore(3, is_first=True)
    write_files(tmp_path / "ckpt", {"of generation 3": b"x"})
    with pytest.raises(Superseded, match="generation 3 has started; not restoring for 2"):
        keeping.restore(2, is_first=True)
    assert read_files(tmp_path / "ckpt") == {"of generation 3": b"x"}


def test_a_fork_without_its_copy_of_the_checkpoint_does_not_start_from_scratch(
    directory_store: Store, tmp_path: Path
) -> None:
    """Its client may have been killed before it was there."""
    parent = {
        "run": "job-0",
        "store": "./store",
        "step": 8,
        "checkpoint": f"{8:09d}-000001-{0:012x}",
        "sha256": "0" * 64,
    }
    run = new_run(directory_store, program_job(parent={**parent, "takes": "everything"}))
    keeping = checkpoints(run, tmp_path / "ckpt")
    with pytest.raises(Mistake, match="starts from job-0 at step 8, as a fork, but has no copy"):
        keeping.restore(1, is_first=True)
    write_files(tmp_path / "copy", {"a": b"1"})
    commit(run, 8, 0, None, {"a": tmp_path / "copy/a"})
    keeping.restore(1, is_first=True)
    assert read_files(tmp_path / "ckpt") == {"a": b"1"}


def test_files_that_the_program_deleted_stay_deleted(directory_store: Store, tmp_path: Path) -> None:
    run = new_run(directory_store)
    keeping = checkpoints(run, tmp_path / "one")
    keeping.restore(1, is_first=True)
    write_files(tmp_path / "one", {"a": b"1", "b": b"2"})
    keeping.commit(1)
    (tmp_path / "one" / "a").unlink()
    keeping.commit(1)
    assert newest_files(run, tmp_path / "back") == {"b": b"2"}


def test_a_directory_that_did_not_change_is_not_committed_again(directory_store: Store, tmp_path: Path) -> None:
    run = new_run(directory_store)
    keeping = checkpoints(run, tmp_path / "ckpt")
    keeping.restore(1, is_first=True)
    keeping.commit(1)
    assert committed(run) == []
    write_files(tmp_path / "ckpt", {"a": b"1"})
    keeping.commit(1)
    keeping.commit(1)
    assert len(committed(run)) == 1


def test_a_restored_directory_is_not_committed_again(directory_store: Store, tmp_path: Path) -> None:
    run = new_run(directory_store)
    first = checkpoints(run, tmp_path / "one")
    first.restore(1, is_first=True)
    write_files(tmp_path / "one", {"a": b"1"})
    first.commit(1)
    second = checkpoints(run, tmp_path / "other")
    second.restore(1, is_first=True)
    second.commit(2)
    assert len(committed(run)) == 1


def test_a_directory_that_keeps_changing_is_not_committed(
    directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program writes while every copy is made."""
    run, told = new_run(directory_store), Told()
    keeping = checkpoints(run, tmp_path / "ckpt", told)
    keeping.restore(1, is_first=True)
    write_files(tmp_path / "ckpt", {"a": b"1", "b": b"1"})
    copies = []

    def copy(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes())
        copies.append(source)
        write_files(tmp_path / "ckpt", {"b": b"x" * len(copies)})

    monkeypatch.setattr(shutil, "copyfile", copy)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    keeping.commit(1)
    assert committed(run) == []
    assert told.kinds() == ["warning"]


def test_a_directory_that_changes_once_is_committed_as_it_is_then(
    directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(directory_store)
    keeping = checkpoints(run, tmp_path / "ckpt")
    keeping.restore(1, is_first=True)
    write_files(tmp_path / "ckpt", {"a": b"1", "b": b"1"})
    original = shutil.copyfile

    def copy(source: Path, target: Path) -> None:
        original(source, target)
        monkeypatch.setattr(shutil, "copyfile", original)
        write_files(tmp_path / "ckpt", {"a": b"two", "b": b"two"})

    monkeypatch.setattr(shutil, "copyfile", copy)
    keeping.commit(1)
    assert newest_files(run, tmp_path / "back") == {"a": b"two", "b": b"two"}


def test_a_file_that_vanishes_during_the_copy_is_no_error(directory_store: Store, tmp_path: Path) -> None:
    """As programs do that write under a temporary name and rename."""
    run = new_run(directory_store)
    keeping = checkpoints(run, tmp_path / "ckpt")
    keeping.restore(1, is_first=True)
    write_files(tmp_path / "ckpt", {"model.pt": b"0"})
    over = threading.Event()

    def rewrite() -> None:
        for number in range(200):
            (tmp_path / "ckpt" / "model.pt.new").write_bytes(b"%d" % number)
            (tmp_path / "ckpt" / "model.pt.new").rename(tmp_path / "ckpt" / "model.pt")
        over.set()

    thread = threading.Thread(target=rewrite)
    thread.start()
    while not over.is_set():
        keeping.commit(1)
    thread.join()
    keeping.commit(1)
    assert newest_files(run, tmp_path / "back") == {"model.pt": b"199"}


def test_links_and_names_that_no_store_can_hold_are_not_committed(directory_store: Store, tmp_path: Path) -> None:
    run = new_run(directory_store)
    keeping = checkpoints(run, tmp_path / "ckpt")
    keeping.restore(1, is_first=True)
    too_long = "/".join(["x" * 90] * 10)
    write_files(tmp_path / "ckpt", {"a": b"1", ".tmp-half": b"x", "line\nbreak": b"x", too_long: b"x"})
    (tmp_path / "ckpt" / "latest").symlink_to("a")
    keeping.commit(1)
    assert newest_files(run, tmp_path / "back") == {"a": b"1"}


def test_a_commit_is_due_once_the_time_has_passed(directory_store: Store, tmp_path: Path) -> None:
    clock = {"now": 1000.0}
    options = {"clock": lambda: clock["now"]}
    keeping = checkpoints(new_run(directory_store), tmp_path / "ckpt", options=options, every="5 min")
    keeping.restore(1, is_first=True)
    assert not keeping.is_due()
    clock["now"] += 300
    assert keeping.is_due()
    keeping.commit(1)
    assert not keeping.is_due()


def test_only_the_last_few_commits_are_kept_and_numbers_increase(directory_store: Store, tmp_path: Path) -> None:
    run = new_run(directory_store)
    keeping = checkpoints(run, tmp_path / "ckpt", keep_last=2)
    keeping.restore(1, is_first=True)
    for number in range(5):
        write_files(tmp_path / "ckpt", {"a": b"x" * number})
        os.utime(tmp_path / "ckpt" / "a", (number, number))
        keeping.commit(generation=1 + number // 3)
    assert [one.step for one in committed(run)] == [4, 5]


class Logging(ProgramMetrics):
    """A program that has logged steps up to `at`."""

    at: int | None = None

    @property
    def reached(self) -> int | None:
        return self.at


def test_commits_of_a_program_that_started_again_push_out_none_that_is_farther(
    directory_store: Store, tmp_path: Path
) -> None:
    run, directory = new_run(directory_store), tmp_path / "ckpt"
    metrics = Logging(run, [], Told())
    settings = CheckpointSettings.model_validate({"keep_best": 0, "keep_last": 2})

    def at(generation: int, *steps: int) -> list[tuple[int, int | None]]:
        workspace = Workspace(run, directory.with_name("code"), Told())
        keeping = ProgramCheckpoints(run, directory, settings, Told(), workspace, metrics)
        keeping.restore(generation, is_first=True)
        for step in steps:
            metrics.at = step
            write_files(directory, {"a": f"{generation} {step}".encode()})
            keeping.commit(generation)
        return [(one.step, one.reached) for one in committed(run)]

    assert at(1, 100, 200, 300) == [(2, 200), (3, 300)]
    assert at(2, 10, 20, 30) == [(2, 200), (3, 300), (5, 20), (6, 30)]
    assert at(3, 5, 250) == [(3, 300), (7, 5), (8, 250)]
    assert at(4, 310, 320) == [(9, 310), (10, 320)]


def test_what_a_program_without_steps_was_restored_from_stays(directory_store: Store, tmp_path: Path) -> None:
    run, directory = new_run(directory_store), tmp_path / "ckpt"
    for generation, kept in ((1, [2, 3]), (2, [3, 5, 6]), (3, [6, 8, 9])):
        keeping = checkpoints(run, directory, keep_last=2)
        keeping.restore(generation, is_first=True)
        for number in range(3):
            write_files(directory, {"a": f"{generation} {number}".encode()})
            keeping.commit(generation)
        assert [one.step for one in committed(run)] == kept


PLACE = "$PACKTRAIN_CHECKPOINTS"


@pytest.mark.parametrize(
    ("words", "expected", "absent"),
    [
        (["--init_from=resume"], ["--init_from=resume"], None),
        (["--resume", f"{PLACE}/run/last.pt"], ["--resume", "HERE/run/last.pt"], None),
        (["--path=${PACKTRAIN_CHECKPOINTS}/checkpoint-*"], ["--path=HERE/checkpoint-1000"], None),
        ([f"{PLACE}/*/last.pt", PLACE], ["HERE/run/last.pt", PLACE], None),
        (["--resume", f"{PLACE}/none-*.pt"], [], "none-*.pt"),
        (["--resume", f"{PLACE}/**x"], [], "**x"),
        (["$PACKTRAIN_CHECKPOINTS_OLD/x"], ["$PACKTRAIN_CHECKPOINTS_OLD/x"], None),
    ],
)
def test_arguments_to_resume_name_files_of_the_restored_checkpoint(
    tmp_path: Path, words: list[str], expected: list[str], absent: str | None
) -> None:
    names = ("run/last.pt", "checkpoint-900/x", "checkpoint-1000/x", "checkpoint-best/x")
    write_files(tmp_path, dict.fromkeys(names, b""))
    assert resume_arguments(words, tmp_path) == (
        tuple(word.replace("HERE", str(tmp_path)) for word in expected),
        absent,
    )


def test_arguments_to_resume_are_added_only_after_a_restore(directory_store: Store, tmp_path: Path) -> None:
    program = {"command": ["train.py"], "resume": ["--resume", f"{PLACE}/last.pt"]}
    run, told = new_run(directory_store, program_job(program=program)), Told()
    keeping = checkpoints(run, tmp_path / "ckpt", told)
    keeping.restore(1, is_first=True)
    resume = [keeping.resume]
    write_files(tmp_path / "ckpt", {"config": b"c"})
    keeping.commit(1)
    keeping.restore(2, is_first=True)
    resume.append(keeping.resume)
    assert told[-1] == ("warning", "checkpoint 1 has no last.pt; ignoring program.resume")
    write_files(tmp_path / "ckpt", {"last.pt": b"1"})
    keeping.commit(2)
    keeping.restore(3, is_first=True)
    assert [*resume, keeping.resume] == [(), (), ("--resume", str(tmp_path / "ckpt/last.pt"))]
    assert told[-1][1] == f"restored checkpoint 2; starting the program with --resume {PLACE}/last.pt"


def test_a_superseded_generation_commits_nothing(directory_store: Store, tmp_path: Path) -> None:
    run = new_run(directory_store)
    keeping = checkpoints(run, tmp_path / "ckpt")
    keeping.restore(1, is_first=True)
    write_files(tmp_path / "ckpt", {"a": b"1"})
    run.propose(a_generation(2))
    with pytest.raises(Superseded):
        keeping.commit(1)
    assert committed(run) == []
