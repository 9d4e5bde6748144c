"""Things that nothing uses: what is found, what is spared, and what happens to those who come at the same moment."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from copy import copy
from itertools import count
from pathlib import Path

import pytest

from data.handmade import put_pack
from housekeeping.test_copies import Quiet
from packtrain.data.cache import FileCache
from packtrain.errors import Mistake, NotFound, PacktrainError
from packtrain.files import FileLock
from packtrain.housekeeping import garbage, uses
from packtrain.housekeeping.copies import copy_run
from packtrain.housekeeping.garbage import Unused, delete_from_store, delete_here, unused_here, unused_in_store
from packtrain.housekeeping.removal import remove_run, rename_run
from packtrain.housekeeping.uses import Uses, announced
from packtrain.launch.create import NewRun, create
from packtrain.pack.manifest import PackFile, find_manifest, missing_files, pack_key, read_manifest
from packtrain.run.code import archive, unpacked
from packtrain.run.records import Discarding, JobSource, Result
from packtrain.run.run import Run, add_run, run_names
from packtrain.store import Store, open_store
from packtrain.store.records import encode
from packtrain.system import this_client
from parts.faulty import FaultyStore, Killed
from parts.runs import new_run, program_job, recipe_job

WEEK = 7 * 24 * 3600.0
DIGEST = "a" * 64


def age(store: Store, prefix: str, seconds: float = 2 * WEEK) -> None:
    for entry in store.list(prefix):
        then = time.time() - seconds
        os.utime(Path(store.url) / entry.key, (then, then))


def found(store: Store, older_seconds: float = WEEK) -> dict[str, str]:
    return {one.name: one.kind for one in unused_in_store(store, older_seconds)}


@pytest.fixture
def store(directory_store: Store) -> Store:
    """A store with a pack that a run uses, one that no run uses, one that is unfinished, and two files."""
    for pack in ("used-1", "left-1"):
        directory_store.put(f"packs/{pack}/train-00000.safetensors", b"x" * 100)
        directory_store.put(f"packs/{pack}/manifest.json", b"m" * 20)
    directory_store.put("packs/half-1/making/train-00000.safetensors.json", b"n")
    for key in (DIGEST, "b" * 64):
        directory_store.put(f"files/{key}", b"weights")
    job = recipe_job(model={"size": "tiny", "weights": f"store:files/{DIGEST}"})
    add_run(directory_store, job, archive({"job.yaml": b""}), "used-1")
    return directory_store


def test_what_no_run_uses_is_found_once_it_is_old(store: Store) -> None:
    assert found(store) == {}
    age(store, "")
    assert found(store) == {"packs/left-1": "pack", "packs/half-1": "unfinished pack", f"files/{'b' * 64}": "file"}
    assert {one.name: one.bytes for one in unused_in_store(store, WEEK)}["packs/left-1"] == 120
    store.put("packs/half-1/train-00001.safetensors", b"x")  # somebody is packing
    assert "packs/half-1" not in found(store)


def test_what_killed_commands_left_is_found(store: Store) -> None:
    store.put("runs/copied-1/code.tar.zst", b"code")
    store.put("sweeps/lr/beats/000001.json", b"{}")
    store.put("scratch/time-1", b"")
    age(store, "")
    faulty = FaultyStore(store)
    run = new_run(faulty, program_job("gone"))
    faulty.fault = lambda operation, key: Killed() if (operation, key) == ("delete", run.key("code.tar.zst")) else None
    with pytest.raises(Killed):
        remove_run(run, lambda _: None)
    kinds = {name: kind for name, kind in found(store).items() if not name.startswith(("packs/", "files/"))}
    assert kinds == {
        "runs/copied-1": "unfinished copy", "sweeps/lr": "removed sweep", "scratch/time-1": "scratch",
        "runs/gone-1": "removed run",  # of any age
    }  # fmt: skip


def test_a_deletion_spares_everything_that_is_used(store: Store) -> None:
    age(store, "")
    unused = unused_in_store(store, WEEK)
    assert delete_from_store(store, unused, pytest.fail) == unused
    assert store.folders("packs/") == ["used-1"]
    assert [entry.key for entry in store.list("files/")] == [f"files/{DIGEST}"]
    assert found(store) == {} and announced(store) == []


def test_what_got_a_user_or_a_writer_since_it_was_found_is_kept(store: Store) -> None:
    age(store, "")
    unused = unused_in_store(store, WEEK)
    add_run(store, recipe_job(), archive({"job.yaml": b""}), "left-1")
    store.put("packs/half-1/train-00001.safetensors", b"x")
    said: list[str] = []
    assert [one.kind for one in delete_from_store(store, unused, said.append)] == ["file"]
    assert said == ["kept packs/half-1: it is being written", "kept packs/left-1: a run now uses it"]
    assert len(store.list("packs/left-1")) == 2


def test_a_run_that_starts_during_the_deletion_of_its_pack_is_not_created(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It found the pack before, and would find nothing when it trains."""
    age(store, "")
    other = FaultyStore(store)
    refused: list[str] = []
    new = NewRun(store, program_job("late"), archive({"train.py": b""}), None, JobSource("job.yaml", ""))
    monkeypatch.setattr(NewRun, "pack_name", "left-1")
    monkeypatch.setattr(NewRun, "uses", Uses(packs=frozenset({"left-1"})))

    def start(operation: str, key: str) -> None:
        if (operation, key) == ("delete", "packs/left-1/manifest.json"):
            with pytest.raises(PacktrainError, match="is deleting left-1, which the run needs") as error:
                create(new)
            refused.append(str(error.value))

    other.fault = start
    delete_from_store(other, unused_in_store(other, WEEK), lambda _: None)
    assert len(refused) == 1
    assert run_names(store) == ["job-1"]


# Whoever needs a pack, and a deletion of it: one of them does everything before an operation of the other.


class Crossing:
    """A store with an old pack, an old file and half a copy that nothing uses, and somebody who comes to need them."""

    def __init__(self, directory: Path) -> None:
        self.store = open_store(str(directory / "store"), create=True)
        self.pack = put_pack(self.store, [[1, 2], [3]], 1)
        self.store.put(f"files/{DIGEST}", b"weights")
        self.job = recipe_job(model={"size": "tiny", "weights": f"store:files/{DIGEST}"})
        self.code = archive({"job.yaml": b""})

    def give_up(self) -> None:
        """Make everything old, and look what is unused."""
        age(self.store, "")
        self.unused = unused_in_store(self.store, WEEK)

    def need(self, store: Store) -> None:
        if missing_files(store, read_manifest(store, self.pack.name)):
            raise NotFound("then it would be packed again")
        create(NewRun(store, self.job, self.code, self.pack, JobSource("job.yaml", "")))

    def delete(self, store: Store) -> None:
        delete_from_store(store, self.unused, lambda _: None)

    def runs_that_lack_something(self) -> list[str]:
        lacking = []
        for run in (Run(self.store, name) for name in run_names(self.store)):
            manifest = find_manifest(self.store, self.pack.name)
            is_whole = manifest is not None and missing_files(self.store, manifest) == []
            has_files = self.store.exists(f"files/{DIGEST}") and self.store.exists(run.key("code.tar.zst"))
            lacking += [] if is_whole and has_files else [run.name]
        return lacking


class NewCrossing(Crossing):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.give_up()


class CopyCrossing(Crossing):
    """A killed client had copied everything but the run's job."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        elsewhere = open_store(str(directory / "elsewhere"), create=True)
        self.run = add_run(elsewhere, self.job, self.code, put_pack(elsewhere, [[1, 2], [3]], 1).name)
        elsewhere.put(f"files/{DIGEST}", b"weights")
        self.run.finish(Result("finished", "reached 10 steps", 10, 1.0))
        copy_run(self.run, self.store, Quiet())
        self.store.delete("runs/job-1/job.json")
        self.store.delete("runs/job-1/pack.txt")
        self.give_up()

    def need(self, store: Store) -> None:
        copy_run(self.run, store, Quiet())


class RenameCrossing(Crossing):
    """What the run uses was unused when the deletion looked for it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.give_up()
        super().need(self.store)

    def need(self, store: Store) -> None:
        rename_run(store, "job-1", "renamed", lambda _: None)


def crossings(
    kind: type[Crossing],
    directory: Path,
    outer: Callable[[Crossing, Store], None],
    inner: Callable[[Crossing, Store], None],
) -> Iterator[tuple[str, Crossing, list[PacktrainError]]]:
    """Do everything of one before each operation of the other, each time in a copy of the store."""
    first = kind(directory)
    for number in count():
        crossing = copy(first)
        crossing.store = open_store(str(shutil.copytree(first.store.url, directory / str(number))))
        store, errors, met = FaultyStore(crossing.store), list[PacktrainError](), list[tuple[str, str]]()

        def act(act: Callable[[Crossing, Store], None], store: Store) -> None:
            try:
                act(crossing, store)  # noqa: B023 - called in this turn of the loop
            except PacktrainError as error:
                errors.append(error)  # noqa: B023

        def meet(operation: str, key: str) -> None:
            if len(store.operations) == number + 1:  # noqa: B023
                met.append((operation, key))  # noqa: B023
                act(inner, crossing.store)  # noqa: B023

        store.fault = meet
        act(outer, store)
        if not met:
            return
        yield f"before {met[0]}", crossing, errors


KINDS = [NewCrossing, CopyCrossing, RenameCrossing]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_has_all_it_needs_if_a_deletion_comes_at_any_moment_of_its_creation(
    kind: type[Crossing], tmp_path: Path
) -> None:
    fates = []
    for when, crossing, errors in crossings(kind, tmp_path, kind.need, kind.delete):
        assert crossing.runs_that_lack_something() == [], when
        fates.append((bool(errors), crossing.store.exists(pack_key(crossing.pack.name, "manifest.json"))))
    assert (False, True) in fates, "the deletion spares what it sees in use"
    assert kind is RenameCrossing or (True, False) in fates, "the run is refused"


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_has_all_it_needs_if_it_comes_at_any_moment_of_a_deletion(kind: type[Crossing], tmp_path: Path) -> None:
    fates = []
    for when, crossing, errors in crossings(kind, tmp_path, kind.delete, kind.need):
        assert crossing.runs_that_lack_something() == [], when
        fates.append(bool(errors))
    assert {True, False} == set(fates)


def test_a_second_deletion_does_not_take_the_first_for_killed(tmp_path: Path) -> None:
    def forget_and_need(crossing: Crossing, store: Store) -> None:
        delete_from_store(store, [], lambda _: None)
        crossing.need(store)

    for when, crossing, _ in crossings(NewCrossing, tmp_path, NewCrossing.delete, forget_and_need):
        assert crossing.runs_that_lack_something() == [], when


@pytest.mark.parametrize(
    ("last", "left"),
    [
        ("packs/half-1/making/train-00000.safetensors.json", "packs/left-1/manifest.json"),
        ("packs/left-1/manifest.json", "packs/left-1/train-00000.safetensors"),
    ],
)
def test_a_deletion_ends_when_another_machine_has_taken_it_for_killed(
    last: str, left: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was suspended for a day, in which the same pack may have been made again."""
    age(store, "")
    faulty = FaultyStore(store)

    def wake(operation: str, key: str) -> None:
        if (operation, key) == ("delete", last):
            age(store, "discarding/")
            monkeypatch.setattr(uses, "this_client", lambda: "you@there")
            delete_from_store(store, [], pytest.fail)

    faulty.fault = wake
    with pytest.raises(PacktrainError, match="this deletion was considered killed; run it again"):
        delete_from_store(faulty, unused_in_store(faulty, WEEK), pytest.fail)
    assert store.exists(left)


def test_a_deletion_that_was_killed_is_done_by_the_next_one(store: Store) -> None:
    age(store, "")
    faulty = FaultyStore(store)
    faulty.fault = lambda operation, key: Killed() if operation == "delete" and not key.startswith("scratch/") else None
    with pytest.raises(Killed):
        delete_from_store(faulty, unused_in_store(faulty, WEEK), pytest.fail)
    assert [record.client for _, record in announced(store)] == [this_client()]
    store.put("discarding/other.json", encode(Discarding(time.time(), "you@there", ("x",), (), ())))
    delete_from_store(store, unused_in_store(store, WEEK), pytest.fail)
    assert [record.client for _, record in announced(store)] == ["you@there"], "that one may be alive"
    assert store.folders("packs/") == ["used-1"]


def test_a_bucket_is_tidied_as_well(s3_store: Store) -> None:
    s3_store.put("packs/left-1/manifest.json", b"m")
    assert found(s3_store) == {}
    assert found(s3_store, -60.0) == {"packs/left-1": "pack"}
    delete_from_store(s3_store, unused_in_store(s3_store, -60.0), pytest.fail)
    assert s3_store.list("") == []


def test_an_hour_is_the_least_age(directory_store: Store) -> None:
    garbage.check_age(3600.0)
    with pytest.raises(Mistake, match="--older: at least 1 h"):
        garbage.check_age(3599.0)


# The cache of this machine.


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(mode=0o700)
    return tmp_path / "cache"


def here(monkeypatch: pytest.MonkeyPatch) -> list[Unused]:
    """Return what is unused in eight days from now: the time of a change cannot be set back."""
    now = time.time() + WEEK + 24 * 3600
    monkeypatch.setattr("time.time", lambda: now)
    return unused_here(WEEK)


def test_downloads_scratch_and_code_are_found_and_deleted_once_they_are_old(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "sources/abc/1-train.txt",
        "inputs/def/files/x",
        "copy-1/object",
        f"code/{DIGEST}/train.py",
        "torchinductor/fx/x",
        "sweeps/a.lock",
        "discarding/b.lock",
    ):
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).write_bytes(b"x" * 10)
    assert unused_here(WEEK) == []
    with FileLock(cache / "sweeps/held.lock"):
        unused = here(monkeypatch)
    assert {one.name: one.kind for one in unused} == {
        "sources/abc": "download", "inputs/def": "data of a program", "copy-1": "scratch",
        f"code/{DIGEST}": "code", "torchinductor/fx": "compiled code",
        "sweeps/a.lock": "lock", "discarding/b.lock": "lock",
    }  # fmt: skip
    assert {one.bytes for one in unused} == {10}
    assert delete_here(unused, WEEK) == unused
    assert [path.name for path in cache.rglob("*") if path.is_file()] == ["held.lock"]


def test_data_of_programs_stays_while_a_node_runs_here(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "inputs/def").mkdir(parents=True)
    (cache / "nodes/job-1-a").mkdir(parents=True)
    with FileLock(cache / "nodes/job-1-a/lock"):
        assert here(monkeypatch) == []
    unused = unused_here(WEEK)
    assert [one.name for one in unused] == ["inputs/def"]
    with FileLock(cache / "nodes/job-1-a/lock"):
        assert delete_here(unused, WEEK) == []


def test_code_that_a_process_has_imported_stays(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = unpacked(archive({"own.py": b"x = 1"}))
    unused = here(monkeypatch)
    assert [one.kind for one in unused] == ["code"]
    assert delete_here(unused, WEEK) == [] and (directory / "own.py").exists()


def test_files_of_packs_stay_while_a_process_needs_them(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = "b5bb9d8014a0f9b1d61e21e796d78dccdf1352f23cd32812f4850b878ae4944c"  # of foo and a newline
    store = open_store(str(tmp_path / "store"), create=True)
    store.put("packs/a/x", b"foo\n")
    files = FileCache(cache / "packs")
    files.path_of(store, "packs/a/x", PackFile("x", 4, digest), staged=True)
    assert unused_here(WEEK) == []
    unused = here(monkeypatch)
    assert [(one.name, one.bytes) for one in unused] == [(digest, 4)]
    with files.hold([digest]):
        assert unused_here(WEEK) == [] and delete_here(unused, WEEK) == []
    assert delete_here(unused, WEEK) == unused
    assert not (cache / "packs" / digest).exists()
