"""A program's directory: what it finds there, what is kept of what it writes, and what is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from packtrain.errors import Mistake
from packtrain.node.workspace import Workspace, visible
from packtrain.run.code import snapshot
from packtrain.run.outputs import chosen, fetch_file, kept_files
from packtrain.run.run import Run, create_run
from packtrain.store import Store
from parts.runs import new_run, program_job, read_files, write_files


class Told(list[str]):
    def __call__(self, kind: str, text: str) -> None:
        self.append(f"{kind}: {text}")


def workspace(run: Run, directory: Path, told: Told | None = None) -> Workspace:
    directory.mkdir(parents=True)
    made = Workspace(run, directory, Told() if told is None else told)
    made.prepare()
    made.restore_outputs()
    return made


def started_from(source: Path, store: Store, **fields: Any) -> Run:
    origin = {"directory": str(source), "inode": source.stat().st_ino}
    return create_run(store, program_job(origin=origin, **fields), snapshot(source).archive, None)


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
    first.keep_outputs()
    (tmp_path / "one/out/old").unlink()
    write_files(tmp_path / "one", {"deep/log.txt": b"one two"})
    first.keep_outputs()
    assert kept_files(run).keys() == {"out/a/1.txt", "deep/log.txt"}
    workspace(run, tmp_path / "two")
    assert read_files(tmp_path / "two") == {"train.py": b"", "out/a/1.txt": b"1", "deep/log.txt": b"one two"}


@pytest.mark.usefixtures("processes")
def test_outputs_never_go_through_a_link_into_the_persons_own_directory(directory_store: Store, tmp_path: Path) -> None:
    source = tmp_path / "mine"
    write_files(source, {"train.py": b"", ".gitignore": b"res/\n", "res/out/old": b"", "res/base.bin": b"b"})
    run = started_from(source, directory_store, outputs=["res/out"])
    made = workspace(run, tmp_path / "code")
    assert (tmp_path / "code/res/base.bin").read_bytes() == b"b"
    write_files(tmp_path / "code", {"res/out/new": b"n"})
    made.keep_outputs()
    assert kept_files(run).keys() == {"res/out/new"}
    assert [path.name for path in (source / "res/out").iterdir()] == ["old"]


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


# What a person brings home.


def test_files_are_brought_home_by_name_or_folder(directory_store: Store, tmp_path: Path) -> None:
    run = new_run(directory_store, program_job(outputs=["out"]))
    made = workspace(run, tmp_path / "code")
    write_files(tmp_path / "code", {"out/a.txt": b"a", "out/deep/b.txt": b"b", "out/deeper": b"c"})
    made.keep_outputs()
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
