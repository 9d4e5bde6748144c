"""Stores in a directory: links, races, killed writers, full and forbidden disks."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from packtrain.backoff import Backoff
from packtrain.store import DamagedObject, Store, StoreAway, StoreError, open_store
from parts.clock import wait_for_tick
from parts.mounts import Mounts
from parts.runs import write_files
from parts.stores import MEGABYTE, keys, noise, output_of, python


class unprivileged:  # noqa: N801
    """Root may do anything; for this block the process is nobody."""

    def __enter__(self) -> None:
        self.user = os.geteuid()
        if self.user == 0:
            os.seteuid(65534)

    def __exit__(self, *_: object) -> None:
        os.seteuid(self.user)


def test_files_follow_the_umask(directory_store: Store, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        directory_store.put("a/b", b"")
        directory_store.put_if_absent("a/c", b"")
        directory_store.get_file("a/b", tmp_path / "file")
    finally:
        os.umask(before)
    for path in (tmp_path / "store/a/b", tmp_path / "store/a/c", tmp_path / "file"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_an_object_with_a_huge_hole_is_refused_without_memory_for_it(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    with (tmp_path / "store" / "job.json").open("wb") as file:
        file.truncate(6 << 40)
    with pytest.raises(DamagedObject, match="it has 6597 GB"):
        open_store(str(tmp_path / "store"), create=True).get("job.json")


def test_an_object_cannot_be_put_below_another(directory_store: Store) -> None:
    directory_store.put("a", b"1")
    directory_store.put("folder/b", b"1")
    for put in (directory_store.put, directory_store.put_if_absent):
        with pytest.raises(StoreError, match="an object cannot have others below it"):
            put("a/b", b"2")
        with pytest.raises(StoreError, match="is a directory; there are other objects below this key"):
            put("folder", b"2")
    assert keys(directory_store) == ["a", "folder/b"]


def test_symbolic_links_in_a_store_are_not_followed(directory_store: Store, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_bytes(b"secret")
    directory_store.put("inside", b"1")
    (tmp_path / "store/folder").symlink_to(tmp_path / "outside")
    (tmp_path / "store/file").symlink_to(tmp_path / "outside/secret")
    (tmp_path / "store/loop").symlink_to("loop")
    for key in ("file", "folder/secret", "loop"):
        assert directory_store.find(key) is None
        assert not directory_store.exists(key)
        directory_store.delete(key)
    with pytest.raises(StoreError, match="symbolic link"):
        directory_store.put("folder/new", b"")
    assert keys(directory_store) == ["inside"]
    assert keys(directory_store, "folder") == directory_store.folders("") == []
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["secret"]


def test_a_link_that_appears_between_two_calls_of_the_system_is_not_followed(
    directory_store: Store, tmp_path: Path
) -> None:
    folder, outside, aside = tmp_path / "store/a", tmp_path / "outside", tmp_path / "store/aside"
    outside.mkdir()
    over = threading.Event()

    def swap() -> None:
        while not over.is_set():
            with suppress(OSError):
                folder.rename(aside)
            with suppress(OSError):
                folder.symlink_to(outside)
            with suppress(OSError):
                folder.unlink()
            with suppress(OSError):
                aside.rename(folder)

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        for _ in range(1500):
            use: Callable[[], object]
            for use in (lambda: directory_store.put("a/b", b"1"), lambda: directory_store.delete("a/b")):
                with suppress(StoreError):
                    use()
    finally:
        over.set()
        swapping.join()
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("below", ["", "team/store"])
def test_a_store_whose_mount_is_missing_is_away_and_nothing_is_written_below_the_mount_point(
    mounts: Mounts, below: str
) -> None:
    mounts.mount("disk")
    place = mounts.point / below
    store = open_store(str(place), create=True)
    store.put("runs/a-1/job.json", b"1")
    mounts.unmount()
    for opened in (store, open_store(str(place), identity=store.identity)):
        for use in (
            lambda: opened.put("runs/a-1/b", b"2"),  # noqa: B023
            lambda: opened.put_if_absent("result", b"2"),  # noqa: B023
            lambda: opened.find("runs/a-1/job.json"),  # noqa: B023
            lambda: opened.entry("runs/a-1/job.json"),  # noqa: B023
            lambda: opened.list("runs"),  # noqa: B023
            lambda: opened.folders("runs"),  # noqa: B023
            lambda: opened.delete("runs/a-1/job.json"),  # noqa: B023
        ):
            with pytest.raises(StoreAway, match="; check its mount") as caught:
                use()
            assert caught.value.temporary
    with pytest.raises(StoreAway, match="no store here"):
        open_store(str(place)).list()
    assert list(mounts.point.rglob("*")) == []
    mounts.mount("disk")
    store.put("runs/a-1/b", b"2")
    assert keys(store) == ["runs/a-1/b", "runs/a-1/job.json"]


@pytest.mark.usefixtures("processes")
def test_a_copy_without_the_id_becomes_a_store_by_doctor(tmp_path: Path) -> None:
    write_files(tmp_path / "my copy", {"runs/a-1/job.json": b"{}"})
    place = str(tmp_path / "my copy")
    with pytest.raises(StoreAway, match=f"if it is a copy of a store, run `packtrain doctor --store '{place}'` first"):
        open_store(place).list()
    subprocess.run([sys.executable, "-m", "packtrain", "doctor", "--store", place], check=True)
    assert keys(open_store(place)) == ["runs/a-1/job.json"]


def test_another_store_at_the_same_place_is_not_used(mounts: Mounts) -> None:
    mounts.mount("disk")
    store = open_store(str(mounts.point), create=True)
    store.put("a", b"1")
    mounts.unmount()
    mounts.mount("other")
    open_store(str(mounts.point), create=True).put("b", b"2")
    for opened in (store, open_store(str(mounts.point), identity=store.identity)):
        with pytest.raises(StoreAway, match="another store is here"):
            opened.put("c", b"3")
        with pytest.raises(StoreAway, match="another store is here"):
            opened.find("b")
    assert keys(open_store(str(mounts.point))) == ["b"]


def test_a_store_that_was_deleted_is_not_made_again(directory_store: Store, tmp_path: Path) -> None:
    directory_store.put("a", b"1")
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(StoreAway, match="the store is not there"):
        directory_store.put("a", b"2")
    assert not (tmp_path / "store").exists()


def test_git_ignores_a_new_store_but_not_the_files_beside_which_one_is_created(tmp_path: Path) -> None:
    new = open_store(str(tmp_path / "new"), create=True)
    assert (tmp_path / "new" / ".gitignore").read_text() == "*\n"
    assert new.list() == [], "it is no object"
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").touch()
    open_store(str(tmp_path / "project"), create=True)
    assert not (tmp_path / "project" / ".gitignore").exists()
    (tmp_path / "new" / ".gitignore").unlink()  # somebody keeps the store in a repository
    open_store(str(tmp_path / "new"), create=True)
    assert not (tmp_path / "new" / ".gitignore").exists()


def test_simultaneous_creations_agree_on_the_id_of_a_store(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        opened = list(pool.map(lambda _: open_store(str(tmp_path / "new"), create=True), range(8)))
    for number, store in enumerate(opened):
        store.put(f"{number}", b"")
    assert len({store.identity for store in opened}) == 1
    assert {path.name for path in (tmp_path / "new").glob(".*")} == {".gitignore", ".packtrain-store"}


def test_a_store_may_itself_be_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    store = open_store(str(tmp_path / "link"), create=True)
    store.put("a/b", b"1")
    assert store.get("a/b") == b"1"
    assert keys(store) == ["a/b"]


def test_temporary_files_are_not_listed_and_are_removed_after_a_day(directory_store: Store, tmp_path: Path) -> None:
    directory_store.put("a/b", b"1")
    fresh, abandoned = tmp_path / "store/a/.tmp-1", tmp_path / "store/c/.tmp-2"
    abandoned.parent.mkdir()
    for path in (fresh, abandoned):
        path.write_bytes(b"half")
    os.utime(abandoned, (0, 0))
    assert keys(directory_store) == ["a/b"]
    assert directory_store.folders("") == ["a"]
    assert fresh.exists()
    assert not abandoned.exists()


@pytest.mark.usefixtures("processes")
def test_a_race_of_processes_has_one_winner(tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from packtrain.store import open_store
store, number = open_store(sys.argv[1]), sys.argv[2]
store.put("ready/" + number, b"")
while not store.exists("go"): time.sleep(0.001)
print([store.put_if_absent(f"race/{round}", number.encode()) for round in range(20)])
"""
    store = open_store(str(tmp_path / "store"), create=True)
    racers = [python(code, tmp_path / "store", number) for number in range(16)]
    while len(store.list("ready")) < 16:
        time.sleep(0.01)
        assert all(racer.poll() in (None, 0) for racer in racers)
    store.put("go", b"")
    results = [output_of(racer).strip("[]").split(", ") for racer in racers]
    for number, outcomes in enumerate(zip(*results, strict=True)):
        assert outcomes.count("True") == 1
        assert store.get(f"race/{number}") == str(outcomes.index("True")).encode()


def test_concurrent_puts_and_deletions_in_a_folder_succeed(directory_store: Store) -> None:
    def churn(number: int) -> None:
        for _ in range(100):
            directory_store.put(f"a/b/{number}", b"1")
            assert directory_store.get(f"a/b/{number}") == b"1"
            directory_store.delete(f"a/b/{number}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(churn, range(4)))
    assert keys(directory_store) == directory_store.folders("") == []


@pytest.mark.usefixtures("processes")
def test_a_killed_writer_leaves_only_whole_objects(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from packtrain.store import open_store
store = open_store(sys.argv[1])
source = Path(sys.argv[2])
number = 0
while True:
    data = bytes([number]) * 8_000_000
    source.write_bytes(data)
    store.put("same", data)
    store.put(f"new/{number:06d}", data)
    store.put_if_absent(f"once/{number:06d}", data)
    store.put_file(f"file/{number:06d}", source)
    number = (number + 1) % 5
"""
    store = open_store(str(tmp_path / "store"), create=True)
    for patience in (0.01, 0.03, 0.05, 0.08):
        writer = python(code, tmp_path / "store", tmp_path / "source")
        while not store.exists("file/000000"):
            assert writer.poll() is None
        time.sleep(patience)
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        found = store.list()
        assert len(found) >= 4
        for entry in found:
            data = store.get(entry.key)
            assert data.count(data[:1]) == 8_000_000
        for entry in found:
            store.delete(entry.key)


def test_what_killed_writers_left_is_removed_where_they_are_known_to_be_dead(
    directory_store: Store, tmp_path: Path
) -> None:
    directory_store.put("runs/a/1/whole", b"1")
    for name in ("runs/a/1/.tmp-x", "runs/a/2/files/.tmp-x", "runs/a/3/.tmp-x", "runs/b/.tmp-x"):
        (tmp_path / "store" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "store" / name).write_bytes(b"half")
    directory_store.remove_unfinished("runs/a", lambda name: not name.startswith("runs/a/3/"))
    left = sorted(str(path.relative_to(tmp_path / "store/runs")) for path in (tmp_path / "store/runs").rglob("*"))
    assert left == ["a", "a/1", "a/1/whole", "a/3", "a/3/.tmp-x", "b", "b/.tmp-x"]
    directory_store.remove_unfinished("runs/nothing")


def test_a_writer_that_is_taken_for_dead_starts_over(directory_store: Store, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(noise(40 * MEGABYTE))

    def remove() -> None:
        while not list((tmp_path / "store").rglob(".tmp-*")):
            pass
        directory_store.remove_unfinished("")

    removing = threading.Thread(target=remove)
    removing.start()
    directory_store.put_file("big/file", source)
    removing.join()
    directory_store.get_file("big/file", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == source.read_bytes()
    assert list((tmp_path / "store").rglob(".tmp-*")) == []


def test_a_full_disk_leaves_existing_objects_intact(small_disk: Path) -> None:
    store = open_store(str(small_disk), create=True)
    store.put("good", b"1" * 1000)
    for put in (store.put, store.put_if_absent):
        with pytest.raises(StoreError, match="the disk is full") as caught:
            put("big", b"2" * 2 * MEGABYTE)
        assert caught.value.temporary
    with pytest.raises(StoreError, match="the disk is full"):
        store.put("good", b"2" * 2 * MEGABYTE)
    assert store.get("good") == b"1" * 1000
    assert sorted(path.name for path in small_disk.iterdir()) == [".gitignore", ".packtrain-store", "good"]


def test_a_download_to_a_full_disk_is_not_tried_again_and_leaves_no_partial_file(
    small_disk: Path, any_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    any_store.put("big", b"2" * 2 * MEGABYTE)
    monkeypatch.setattr(Backoff, "wait", lambda _: pytest.fail("it is tried again"))
    with pytest.raises(StoreError, match=f"{small_disk}/file: the disk is full"):
        any_store.get_file("big", small_disk / "file")
    assert list(small_disk.iterdir()) == []


def test_the_error_says_that_the_disk_is_read_only(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(StoreError, match="read-only") as caught:
        open_store(str(small_disk), create=True).put("a/b", b"")
    assert not caught.value.temporary


def test_the_error_says_that_permission_is_denied(directory_store: Store, tmp_path: Path) -> None:
    directory_store.put("a/b", b"1")
    (tmp_path / "store/a").chmod(0)
    with unprivileged():
        for use in (directory_store.get, directory_store.list, directory_store.exists):
            with pytest.raises(StoreError, match="permission denied") as caught:
                use("a/b" if use != directory_store.list else "a")
            assert not caught.value.temporary
        with pytest.raises(StoreError, match="permission denied"):
            directory_store.put("a/c", b"")


def test_a_stamp_changes_with_the_objects_of_a_folder_and_of_those_named_below_it(
    directory_store: Store, tmp_path: Path
) -> None:
    directory_store.put("runs/a/job.json", b"1")
    directory_store.put("runs/b/job.json", b"1")
    directory_store.put("runs/a/nodes/x.json", b"1")
    changes = [
        ("runs/a/job.json", True), ("runs/a/result.json", True), ("runs/a/nodes/x.json", True),
        ("runs/a/other/x.json", True), ("runs/a/other/y.json", False), ("runs/b/job.json", False),
    ]  # fmt: skip
    for key, is_seen in changes:
        before = directory_store.stamps("runs/", ("nodes",))
        wait_for_tick(tmp_path)
        directory_store.put(key, b"2")
        after = directory_store.stamps("runs/", ("nodes",))
        assert before is not None and after is not None
        assert (after["a"] != before["a"]) == is_seen, key
    assert directory_store.stamps("none/") == {}
