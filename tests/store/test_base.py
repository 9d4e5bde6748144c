"""Every kind of store keeps the same promises: a directory, a quick S3 server (moto) and a strict one (Ceph), Google
Cloud Storage, and Azure Blob Storage (Azurite)."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from packtrain.errors import EXIT_FAILED, EXIT_NOT_FOUND, NotFound
from packtrain.store import RECORD_BYTES, DamagedObject, Store, StoreError
from packtrain.store.base import is_key
from parts.s3 import MOTO_PAGE
from parts.stores import MEGABYTE, keys, noise


@pytest.fixture(
    params=[
        "directory_store",
        pytest.param("s3_store", marks=pytest.mark.local),
        pytest.param("google_store", marks=pytest.mark.local),
        pytest.param("ceph_store", marks=pytest.mark.system),
        pytest.param("azure_store", marks=pytest.mark.system),
    ]
)
def store(request: pytest.FixtureRequest) -> Store:
    made: Store = request.getfixturevalue(request.param)
    return made


def test_an_object_is_read_as_it_was_last_put(store: Store) -> None:
    store.put("a/b", b"first")
    store.put("a/b", b"second")
    assert store.get("a/b") == store.find("a/b") == b"second"
    assert store.exists("a/b")


def test_a_copy_has_the_contents_of_the_original_and_outlives_it(store: Store) -> None:
    store.put("a/b", b"first")
    store.put("c/d", b"replaced")
    store.copy("a/b", "c/d")
    store.copy("a/b", "a/c/e")
    store.put("a/b", b"second")
    store.delete("a/b")
    assert store.get("c/d") == store.get("a/c/e") == b"first"
    assert keys(store) == ["a/c/e", "c/d"]
    with pytest.raises(NotFound):
        store.copy("a/b", "c/d")
    assert store.get("c/d") == b"first"


def test_an_object_may_be_empty(store: Store, tmp_path: Path) -> None:
    store.put("empty", b"")
    store.get_file("empty", tmp_path / "empty")
    assert store.get("empty") == (tmp_path / "empty").read_bytes() == b""
    assert [entry.size for entry in store.list()] == [0]


def test_a_missing_object_is_reported_by_every_way_to_read_it(store: Store, tmp_path: Path) -> None:
    store.put("folder/object", b"")
    for key in ("nothing", "folder", "folder/object/below"):
        assert store.find(key) is None
        assert not store.exists(key)
        for read in (
            lambda: store.get(key),  # noqa: B023
            lambda: store.get_file(key, tmp_path / "file"),  # noqa: B023
        ):
            with pytest.raises(NotFound, match=f"object '{key}' not found") as caught:
                read()
            assert isinstance(caught.value, StoreError)
            assert caught.value.exit_code == EXIT_NOT_FOUND
            assert not caught.value.temporary
    assert not (tmp_path / "file").exists()


def test_an_object_of_an_absurd_size_is_refused_before_it_is_read(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "source"
    with source.open("wb") as file:
        file.truncate(RECORD_BYTES + 1)
    store.put_file("runs/a-1/job.json", source)
    for read in (store.get, store.find):
        with pytest.raises(DamagedObject, match=r"object 'runs/a-1/job.json' is damaged: it has 16.8 MB, .* delete it"):
            read("runs/a-1/job.json")
    with pytest.raises(DamagedObject, match="at most 10 B are expected") as caught:
        store.get_file("runs/a-1/job.json", tmp_path / "file", limit=10)
    assert caught.value.exit_code == EXIT_FAILED
    assert not caught.value.temporary
    assert not (tmp_path / "file").exists()
    assert len(store.get("runs/a-1/job.json", limit=RECORD_BYTES + 1)) == RECORD_BYTES + 1


def test_an_object_can_be_deleted_twice_and_its_empty_folder_disappears(store: Store) -> None:
    store.put("a/b/c", b"1")
    store.put("a/d", b"2")
    store.delete("a/b/c")
    store.delete("a/b/c")
    store.delete("a")
    store.delete("never/was")
    assert keys(store) == ["a/d"]
    assert store.folders("a") == []


def test_a_key_can_be_used_once_everything_below_it_is_deleted(store: Store) -> None:
    store.put("a/b/c", b"1")
    store.delete("a/b/c")
    store.put("a", b"2")
    assert keys(store) == ["a"]


def test_a_listing_is_recursive_sorted_and_starts_after_a_key(store: Store) -> None:
    for key in ("b", "a/2", "a/10", "a/1/x", "a-b/c", "ab", "a/1/é"):
        store.put(key, key.encode())
    assert keys(store) == ["a-b/c", "a/1/x", "a/1/é", "a/10", "a/2", "ab", "b"]
    assert keys(store, "a") == keys(store, "a/") == ["a/1/x", "a/1/é", "a/10", "a/2"]
    assert keys(store, "a", after="a/1/x") == ["a/1/é", "a/10", "a/2"]
    assert keys(store, after="a/1") == ["a/1/x", "a/1/é", "a/10", "a/2", "ab", "b"]
    assert keys(store, "a", after="a/2") == keys(store, "nothing") == keys(store, "b") == []
    assert [entry.size for entry in store.list("a")] == [5, 6, 4, 3]


def test_a_listing_shows_when_an_object_was_put(store: Store) -> None:
    store.put("object", b"")
    (entry,) = store.list()
    assert abs(entry.modified - datetime.now(UTC)) < timedelta(seconds=60)


def test_folders_are_the_names_one_level_below_a_prefix(store: Store) -> None:
    for key in ("runs/b/x/y", "runs/a/x", "runs/file", "packs/c/x"):
        store.put(key, b"")
    assert store.folders("") == ["packs", "runs"]
    assert store.folders("runs") == store.folders("runs/") == ["a", "b"]
    assert store.folders("runs/a") == store.folders("nothing") == []


def test_a_listing_has_more_objects_than_fit_one_page(store: Store, request: pytest.FixtureRequest) -> None:
    page = 1000 if request.node.get_closest_marker("system") else MOTO_PAGE
    expected = [f"many/{number:05d}" for number in range(page + 5)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, b"x"), expected))
    assert keys(store, "many") == expected
    assert keys(store, "many", after=expected[page // 2]) == expected[page // 2 + 1 :]


def test_unusual_but_valid_keys_work(store: Store) -> None:
    odd = sorted(["ü/%20", "a b", "x#y?z", "a+b=c&d", "~", "*[]{}|^`\"<>'", ".hidden", "...", "日本"])
    for key in odd:
        store.put(key, key.encode())
    assert keys(store) == odd
    assert [store.get(key) for key in odd] == [key.encode() for key in odd]


@pytest.mark.parametrize(
    "key",
    [
        *("", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "./a", "a/.", ".tmp-1", "a/.tmp-/b"),
        *("a\0b", "a\nb", "\x7f", "\ud800", "x" * 1025, "é" * 513),
    ],
)
def test_an_invalid_key_is_refused_by_every_method(directory_store: Store, s3_store: Store, key: str) -> None:
    assert not is_key(key)
    for store in (directory_store, s3_store):
        for use in (store.get, store.exists, store.delete, lambda key: store.put(key, b"")):  # noqa: B023
            with pytest.raises(ValueError, match="invalid key"):
                use(key)
        if key:
            with pytest.raises(ValueError, match="invalid key"):
                store.list(key + "/")


def test_a_file_is_uploaded_and_downloaded_whole(store: Store, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(noise(20 * MEGABYTE + 1))
    target.write_bytes(b"old")
    store.put_file("files/big", source)
    store.get_file("files/big", target)
    assert target.read_bytes() == source.read_bytes()
    assert store.list()[0].size == source.stat().st_size
    assert sorted(tmp_path.glob(".tmp-*")) == []


def test_the_error_names_the_missing_local_file(store: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nowhere: no such file"):
        store.put_file("key", tmp_path / "nowhere")
    assert keys(store) == []
    store.put("key", b"1")
    with pytest.raises(StoreError, match="nowhere/file: no such file or directory"):
        store.get_file("key", tmp_path / "nowhere" / "file")


def test_put_if_absent_creates_an_object_once(store: Store) -> None:
    assert store.put_if_absent("generations/1", b"same")
    assert not store.put_if_absent("generations/1", b"same")
    assert not store.put_if_absent("generations/1", b"other")
    assert store.get("generations/1") == b"same"


def test_a_race_of_put_if_absent_has_one_winner(store: Store) -> None:
    start = threading.Barrier(16)

    def propose(number: int) -> bool:
        start.wait()
        return store.put_if_absent("race", b"%d" % number)

    for _ in range(3):
        with ThreadPoolExecutor(16) as pool:
            won = list(pool.map(propose, range(16)))
        assert won.count(True) == 1
        assert store.get("race") == b"%d" % won.index(True)
        store.delete("race")


def test_the_trial_of_put_if_absent_succeeds_and_leaves_nothing_behind(store: Store) -> None:
    assert store.supports_put_if_absent()
    assert keys(store) == []
