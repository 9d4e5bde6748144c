"""Runs and packs in other stores: whole or not at all, checked, and never over another run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
from typer.testing import CliRunner

from data.handmade import put_pack
from packtrain.cli import app
from packtrain.errors import Mistake, NotFound, PacktrainError
from packtrain.housekeeping.copies import CopySummary, copy_pack, copy_run
from packtrain.pack.manifest import pack_key, read_manifest
from packtrain.run.checkpoint import commit, committed, fetch_newest
from packtrain.run.code import archive
from packtrain.run.liveness import state_now
from packtrain.run.records import FleetLaunch, Generation, Result
from packtrain.run.run import Run, add_run, run_names
from packtrain.run.trust import is_remembered, remember
from packtrain.store import Store, open_store
from packtrain.store.directory import DirectoryStore
from parts.runs import a_generation, a_lease, new_run, read_files, recipe_job, write_files

WEIGHTS = {"model.safetensors": b"weights" * 1000, "state.json": b"{}"}
GIVEN = b"pretrained"


class Quiet:
    def say(self, text: str) -> None: ...

    @contextmanager
    def track(self, _what: str, _total_bytes: int) -> Iterator[Callable[[int], None]]:
        yield lambda _: None


class Ending(DirectoryStore):
    """A directory whose client is killed before it puts its n-th object."""

    def __init__(self, root: Path, puts: int | None = None) -> None:
        super().__init__(root)
        self.create()
        self.left, self.put_keys = puts, list[str]()

    def _spend(self, key: str) -> None:
        if self.left is not None:
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
        self.put_keys.append(key)

    def put(self, key: str, data: bytes) -> None:
        self._spend(key)
        super().put(key, data)

    def put_file(self, key: str, path: Path) -> None:
        self._spend(key)
        super().put_file(key, path)


def after_commits(number: int, *nodes: str) -> Generation:
    """A generation that started with what the two of `a_run` before it had committed."""
    return replace(a_generation(number, *nodes), step=5 * min(2, number - 1))


def a_run(store: Store, tmp_path: Path) -> Run:
    """A run that was interrupted, with a pack, a given file, two checkpoints and what an upload left."""
    pack = put_pack(store, [[1, 2], [3], [4, 5]], 2)
    key = f"files/{hashlib.sha256(GIVEN).hexdigest()}"
    store.put(key, GIVEN)
    job = recipe_job(model={"size": "tiny", "weights": f"store:{key}"})
    run = add_run(store, job, archive({"job.yaml": b""}), pack.name)
    run.record_launch(FleetLaunch(1.0, "me@here", {"local": {}}))
    for number in (1, 2):
        run.propose(after_commits(number))
        files = write_files(tmp_path / f"saved-{number}", {**WEIGHTS, "state.json": str(number).encode()})
        commit(run, 5 * number, number, None, files)
    run.renew(a_lease("a", 7))
    run.put_picture(b"a JPEG")
    run.store.put(run.key("checkpoints/000000009-000002-unfinished/files/model.safetensors"), b"half")
    return run


def copied(run: Run, store: Store) -> CopySummary:
    return copy_run(run, store, Quiet())


def contents(store: Store) -> dict[str, bytes]:
    return {entry.key: store.get(entry.key) for entry in store.list()}


@pytest.fixture(autouse=True)
def no_watching(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease of a run is watched for seconds before it is copied."""
    monkeypatch.setattr("packtrain.housekeeping.copies.state_of", lambda _: "interrupted")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return a_run(open_store(str(tmp_path / "here"), create=True), tmp_path)


def test_a_copied_run_has_its_pack_its_files_and_its_checkpoints(run: Run, s3_store: Store, tmp_path: Path) -> None:
    copied(run, s3_store)
    there = Run(s3_store, run.name)
    assert (there.job, there.code) == (run.job, run.code)
    assert there.generations() == run.generations()
    assert committed(there) == committed(run)
    (tmp_path / "fetched").mkdir()
    found = fetch_newest(there, tmp_path / "fetched", pytest.fail)
    assert found is not None
    assert read_files(tmp_path / "fetched") == {**WEIGHTS, "state.json": b"2"}
    assert read_manifest(s3_store, there.pack_name()) == read_manifest(run.store, run.pack_name())
    assert there.picture(hashlib.sha256(b"a JPEG").hexdigest()) == b"a JPEG"
    left_out = {key for key in contents(run.store) if "unfinished" in key}
    assert contents(s3_store).keys() == contents(run.store).keys() - left_out


def test_a_run_comes_back_from_a_bucket_as_it_was(run: Run, s3_store: Store, tmp_path: Path) -> None:
    copied(run, s3_store)
    back = open_store(str(tmp_path / "back"), create=True)
    copied(Run(s3_store, run.name), back)
    assert contents(back) == contents(s3_store)


def test_a_machine_of_a_copied_run_does_not_look_alive(run: Run, s3_store: Store) -> None:
    copied(run, s3_store)
    assert state_now(Run(s3_store, run.name)) == "interrupted"


def test_a_copied_run_does_not_wait_for_machines_however_slowly_its_launches_arrive(run: Run, tmp_path: Path) -> None:
    lease_is_there = Event()

    class SlowLaunches(DirectoryStore):
        def put(self, key: str, data: bytes) -> None:
            if "/launches/" in key:
                lease_is_there.wait(0.2)
            super().put(key, data)
            if "/nodes/" in key:
                lease_is_there.set()

    there = SlowLaunches(tmp_path / "there")
    there.create()
    copied(run, there)
    assert lease_is_there.is_set()
    assert state_now(Run(there, run.name)) == "interrupted"


def test_a_copy_that_ends_at_any_object_is_no_run_and_continues(run: Run, tmp_path: Path) -> None:
    whole = Ending(tmp_path / "whole")
    copied(run, whole)
    for puts in range(len(whole.put_keys)):
        store = Ending(tmp_path / f"ended-{puts}", puts)
        with pytest.raises(KeyboardInterrupt):
            copied(run, store)
        assert run_names(store) == []
        for name in store.folders(run.key("checkpoints/")):  # a manifest only after its files
            manifest = store.find(run.key(f"checkpoints/{name}/manifest.json"))
            assert manifest is None or len(store.list(run.key(f"checkpoints/{name}"))) == 3
        again = Ending(tmp_path / f"ended-{puts}")
        copied(run, again)
        assert contents(again) == contents(whole)
        files = {key for key in store.put_keys if not key.endswith(("manifest.json", "job.json"))}
        assert not files & set(again.put_keys), "what is there is not copied again"


def test_a_second_copy_copies_only_what_is_new(run: Run, tmp_path: Path) -> None:
    store = Ending(tmp_path / "there")
    copied(run, store)
    store.put_keys.clear()
    assert copied(run, store).objects == 0
    assert store.put_keys == [run.key("job.json")]
    run.propose(after_commits(3))
    commit(run, 15, 3, None, write_files(tmp_path / "more", WEIGHTS))
    run.store.delete(run.key(f"checkpoints/{committed(run)[0].name}/manifest.json"))  # as pruning does
    run.finish(Result("finished", "done", 15, 1.0))
    store.put_keys.clear()
    copied(run, store)
    assert len(store.put_keys) == 6  # two files, a manifest, a generation, the result, and the job
    assert committed(Run(store, run.name)) == committed(run)
    assert Run(store, run.name).result() == run.result()


def test_a_file_that_was_cut_or_changed_at_the_destination_is_copied_again(run: Run, tmp_path: Path) -> None:
    store = Ending(tmp_path / "there")
    copied(run, store)
    key = run.key(f"checkpoints/{committed(run)[-1].name}/files/model.safetensors")
    store.put(key, b"short")
    store.delete(run.key(f"checkpoints/{committed(run)[0].name}/manifest.json"))
    other = run.key(f"checkpoints/{committed(run)[0].name}/files/model.safetensors")
    store.put(other, b"WEIGHTS" * 1000)
    copied(run, store)
    assert store.get(key) == store.get(other) == WEIGHTS["model.safetensors"]


def test_a_damaged_original_is_told_and_not_copied(run: Run, tmp_path: Path) -> None:
    key = run.key(f"checkpoints/{committed(run)[-1].name}/files/model.safetensors")
    run.store.put(key, b"WEIGHTS" * 1000)
    store = open_store(str(tmp_path / "there"), create=True)
    with pytest.raises(PacktrainError, match=r"model\.safetensors does not match its digest; it is damaged there"):
        copied(run, store)
    assert run_names(store) == []


def test_a_running_run_is_not_copied(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packtrain.housekeeping.copies.state_of", lambda _: "running")
    with pytest.raises(Mistake, match=r"is running; stop it first \(`packtrain stop job-1 --store .*`\), then copy it"):
        copied(run, open_store(str(tmp_path / "there"), create=True))


def test_another_run_of_the_same_name_is_not_overwritten(run: Run, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "there"), create=True)
    other = new_run(store, run.job)
    other.record_launch(FleetLaunch(2.0, "you@there", {"local": {}}))
    before = contents(store)
    with pytest.raises(Mistake, match="has another run job-1; copy to another prefix or directory"):
        copied(run, store)
    assert contents(store) == before


def test_a_run_that_has_continued_elsewhere_is_not_set_back(run: Run, s3_store: Store) -> None:
    copied(run, s3_store)
    Run(s3_store, run.name).propose(after_commits(3))
    with pytest.raises(Mistake, match=r"job-1 has continued in .* since it was copied; copy it from there"):
        copied(run, s3_store)
    copied(Run(s3_store, run.name), run.store)
    assert len(run.generations()) == 3


def test_a_run_that_was_only_launched_elsewhere_keeps_its_records(run: Run, s3_store: Store) -> None:
    copied(run, s3_store)
    Run(s3_store, run.name).record_launch(FleetLaunch(2.0, "me@there", {"local": {}}))
    before = contents(s3_store)
    with pytest.raises(Mistake, match="has continued in"):
        copied(run, s3_store)
    assert contents(s3_store) == before


def test_a_run_that_has_continued_on_both_sides_is_not_overwritten(run: Run, s3_store: Store) -> None:
    copied(run, s3_store)
    Run(s3_store, run.name).propose(after_commits(3, "there"))
    for number in (3, 4):
        run.propose(after_commits(number, "here"))
    before = contents(s3_store)
    with pytest.raises(Mistake, match=r"has continued in .*; copy it from there, or to another prefix"):
        copied(run, s3_store)
    assert contents(s3_store) == before


def test_a_store_is_not_copied_into_itself(run: Run, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run.store.url)
    before = contents(run.store)
    for url in (run.store.url, str(tmp_path / "link")):
        with pytest.raises(Mistake, match="job-1 is already in"):
            copied(run, open_store(url, create=True))
    assert contents(run.store) == before


def test_a_copy_is_trusted_only_if_the_original_is(run: Run, tmp_path: Path) -> None:
    stores = [open_store(str(tmp_path / name), create=True) for name in ("foreign", "own")]
    copied(run, stores[0])
    assert not is_remembered(Run(stores[0], run.name))
    remember(run)
    copied(run, stores[1])
    assert is_remembered(Run(stores[1], run.name))


def test_code_that_somebody_else_puts_beside_a_copy_is_not_trusted(run: Run, tmp_path: Path) -> None:
    class Shared(DirectoryStore):
        def put(self, key: str, data: bytes) -> None:
            super().put(key, data)
            if key == run.key("job.json"):
                super().put(run.key("code.tar.zst"), archive({"train.py": b"steal()"}))

    store = Shared(tmp_path / "shared")
    store.create()
    remember(run)
    copied(run, store)
    assert not is_remembered(Run(store, run.name))


def test_a_file_of_the_model_that_is_no_object_is_left_out(tmp_path: Path) -> None:
    here, there = (open_store(str(tmp_path / name), create=True) for name in ("here", "there"))
    pack = put_pack(here, [[1, 2], [3], [4, 5]], 2)
    job = recipe_job(model={"size": "tiny", "weights": "store:files/../runs"})
    copied(add_run(here, job, archive({"job.yaml": b""}), pack.name), there)
    assert run_names(there) == ["job-1"]


def test_a_pack_is_copied_alone(run: Run, s3_store: Store) -> None:
    done = copy_pack(run.store, run.pack_name(), s3_store, Quiet())
    assert read_manifest(s3_store, run.pack_name()) == read_manifest(run.store, run.pack_name())
    assert done.objects == 2
    assert s3_store.list("runs") == []
    with pytest.raises(NotFound, match="no pack nothing in"):
        copy_pack(run.store, "nothing", s3_store, Quiet())


def test_the_command_copies_runs_and_packs_by_name_and_says_how_to_go_on(run: Run, s3_location: str) -> None:
    def cp(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["cp", *arguments, "--store", run.store.url])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert cp("job", s3_location).startswith(f"Copied job-1 to {s3_location}: ")
    assert f"packtrain resume job-1 --store {s3_location}" in cp("job-1", s3_location)
    for name in (run.pack_name(), f"packs/{run.pack_name()}"):
        told = cp(name, f"{s3_location}/packs-only")
        first, again = f"Copied {run.pack_name()} to ", f"{run.pack_name()} is complete in "
        assert told.startswith(first if name == run.pack_name() else again)
    assert pack_key(run.pack_name(), "manifest.json") in contents(open_store(f"{s3_location}/packs-only"))
    for name, told in (("packs/nothing", "no pack 'nothing'"), ("nothing", "no run or pack 'nothing'")):
        missing = CliRunner().invoke(app, ["cp", name, s3_location, "--store", run.store.url])
        assert isinstance(missing.exception, NotFound)
        assert told in str(missing.exception)
