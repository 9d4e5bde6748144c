"""A store keeps what it is given, whole, whatever it is made of and whatever happens to it."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from packtrain.errors import EXIT_NOT_FOUND, Mistake, NotFound
from packtrain.store import Store, StoreError, open_store
from packtrain.store.base import is_key
from packtrain.store.errors import explain_server, explain_system
from parts import proxy as make
from parts.loopback import free_port
from parts.presence import need
from parts.proxy import Proxy
from parts.s3 import BUCKET, S3Server, fresh_location

MEGABYTE = 1 << 20


@pytest.fixture(params=["directory_store", "s3_store", "ceph_store"])
def store(request: pytest.FixtureRequest) -> Store:
    made: Store = request.getfixturevalue(request.param)
    return made


def keys(store: Store, prefix: str = "", after: str | None = None) -> list[str]:
    return [entry.key for entry in store.list(prefix, after)]


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)  # noqa: S311


def python(code: str, *arguments: object, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*before, sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_of(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return output.strip()


class TestEveryStore:
    def test_gives_back_what_was_put(self, store: Store) -> None:
        store.put("a/b", b"first")
        store.put("a/b", b"second")
        assert store.get("a/b") == store.find("a/b") == b"second"
        assert store.exists("a/b")

    def test_keeps_an_empty_object(self, store: Store, tmp_path: Path) -> None:
        store.put("empty", b"")
        store.get_file("empty", tmp_path / "empty")
        assert store.get("empty") == (tmp_path / "empty").read_bytes() == b""
        assert [entry.size for entry in store.list()] == [0]

    def test_says_what_is_absent(self, store: Store, tmp_path: Path) -> None:
        store.put("folder/object", b"")
        for key in ("nothing", "folder", "folder/object/below"):
            assert store.find(key) is None
            assert not store.exists(key)
            for read in (
                lambda: store.get(key),  # noqa: B023
                lambda: store.get_range(key, 0, 1),  # noqa: B023
                lambda: store.get_file(key, tmp_path / "file"),  # noqa: B023
            ):
                with pytest.raises(NotFound, match=f"no object '{key}'") as caught:
                    read()
                assert isinstance(caught.value, StoreError)
                assert caught.value.exit_code == EXIT_NOT_FOUND
                assert not caught.value.temporary
        assert not (tmp_path / "file").exists()

    def test_deletes_once_or_twice(self, store: Store) -> None:
        store.put("a/b/c", b"1")
        store.put("a/d", b"2")
        store.delete("a/b/c")
        store.delete("a/b/c")
        store.delete("a")
        store.delete("never/was")
        assert keys(store) == ["a/d"]
        assert store.folders("a") == []

    def test_a_key_is_free_again_when_all_below_it_is_deleted(self, store: Store) -> None:
        store.put("a/b/c", b"1")
        store.delete("a/b/c")
        store.put("a", b"2")
        assert keys(store) == ["a"]

    def test_reads_a_range_as_a_slice_would(self, store: Store) -> None:
        data = bytes(range(100))
        store.put("object", data)
        for start, length in [(0, 100), (10, 5), (99, 1), (90, 50), (100, 1), (500, 7), (3, 0)]:
            assert store.get_range("object", start, length) == data[start : start + length]
        for start, length in [(-1, 5), (0, -5)]:
            with pytest.raises(ValueError, match="no range"):
                store.get_range("object", start, length)

    def test_lists_recursively_sorted_and_after(self, store: Store) -> None:
        for key in ("b", "a/2", "a/10", "a/1/x", "a-b/c", "ab", "a/1/é"):
            store.put(key, key.encode())
        assert keys(store) == ["a-b/c", "a/1/x", "a/1/é", "a/10", "a/2", "ab", "b"]
        assert keys(store, "a") == keys(store, "a/") == ["a/1/x", "a/1/é", "a/10", "a/2"]
        assert keys(store, "a", after="a/1/x") == ["a/1/é", "a/10", "a/2"]
        assert keys(store, after="a/1") == ["a/1/x", "a/1/é", "a/10", "a/2", "ab", "b"]
        assert keys(store, "a", after="a/2") == keys(store, "nothing") == keys(store, "b") == []
        assert [entry.size for entry in store.list("a")] == [5, 6, 4, 3]

    def test_knows_when_an_object_was_put(self, store: Store) -> None:
        store.put("object", b"")
        (entry,) = store.list()
        assert abs(entry.modified - datetime.now(UTC)) < timedelta(seconds=60)

    def test_names_the_folders_one_level_below(self, store: Store) -> None:
        for key in ("runs/b/x/y", "runs/a/x", "runs/file", "packs/c/x"):
            store.put(key, b"")
        assert store.folders("") == ["packs", "runs"]
        assert store.folders("runs") == store.folders("runs/") == ["a", "b"]
        assert store.folders("runs/a") == store.folders("nothing") == []

    def test_lists_more_than_a_page(self, store: Store) -> None:
        expected = [f"many/{number:05d}" for number in range(1005)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: store.put(key, b"x"), expected))
        assert keys(store, "many") == expected
        assert keys(store, "many", after="many/00500") == expected[501:]

    def test_takes_odd_but_possible_keys(self, store: Store) -> None:
        odd = sorted(["ü/%20", "a b", "x#y?z", "a+b=c&d", "~", "*[]{}|^`\"<>\\'", ".hidden", "...", "日本"])
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
    def test_refuses_impossible_keys(self, directory_store: Store, s3_store: Store, key: str) -> None:
        assert not is_key(key)
        for store in (directory_store, s3_store):
            for use in (store.get, store.exists, store.delete, lambda key: store.put(key, b"")):  # noqa: B023
                with pytest.raises(ValueError, match="not a key"):
                    use(key)
            if key:
                with pytest.raises(ValueError, match="not a key"):
                    store.list(key + "/")

    def test_carries_files_both_ways(self, store: Store, tmp_path: Path) -> None:
        source, target = tmp_path / "source", tmp_path / "target"
        source.write_bytes(noise(20 * MEGABYTE + 1))
        target.write_bytes(b"old")
        store.put_file("files/big", source)
        store.get_file("files/big", target)
        assert target.read_bytes() == source.read_bytes()
        assert store.list()[0].size == source.stat().st_size
        assert sorted(tmp_path.glob(".tmp-*")) == []

    def test_says_which_local_file_is_missing(self, store: Store, tmp_path: Path) -> None:
        with pytest.raises(StoreError, match="nowhere: there is no such file"):
            store.put_file("key", tmp_path / "nowhere")
        assert keys(store) == []
        store.put("key", b"1")
        with pytest.raises(StoreError, match="nowhere/file: there is no such file or directory"):
            store.get_file("key", tmp_path / "nowhere" / "file")

    def test_puts_once_what_must_be_put_once(self, store: Store) -> None:
        assert store.put_if_absent("generations/1", b"same")
        assert not store.put_if_absent("generations/1", b"same")
        assert not store.put_if_absent("generations/1", b"other")
        assert store.get("generations/1") == b"same"

    def test_a_race_has_one_winner(self, store: Store) -> None:
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

    def test_holds_put_if_absent_and_leaves_no_trace_of_the_trial(self, store: Store) -> None:
        assert store.holds_put_if_absent()
        assert keys(store) == []


class TestLocation:
    def test_a_directory_is_absolute_and_made_by_the_first_put(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        store = open_store("new/store")
        assert store.is_directory
        assert store.url == str(tmp_path / "new/store")
        assert store.list() == []
        assert store.folders("") == []
        assert not (tmp_path / "new").exists()
        store.put("a", b"1")
        assert open_store(f"file://{tmp_path}/new/store").get("a") == b"1"
        assert open_store((tmp_path / "new/store").as_uri().replace("new", "%6eew")).get("a") == b"1"

    @pytest.mark.usefixtures("s3_environment")
    def test_a_bucket_keeps_its_address(self) -> None:
        store = open_store(f"s3://{BUCKET}/some/prefix/")
        assert not store.is_directory
        assert store.url == f"s3://{BUCKET}/some/prefix"

    def test_stores_with_different_prefixes_are_apart(self, s3_location: str) -> None:
        one, other = open_store(s3_location + "/one"), open_store(s3_location + "/one-more")
        one.put("a", b"1")
        assert keys(other) == []
        assert keys(open_store(s3_location)) == ["one/a"]

    @pytest.mark.parametrize(
        ("location", "advice"),
        [
            ("", "no name"),
            ("gs://bucket", "a directory or s3://bucket/prefix"),
            ("http://127.0.0.1:9000/bucket", "AWS_ENDPOINT_URL"),
            ("file://host/path", "three slashes"),
            ("s3://", "cannot be a bucket's name"),
            ("s3://B/prefix", "cannot be a bucket's name"),
            ("s3://bucket/a//b", "cannot be a prefix"),
            ("s3://bucket/../b", "cannot be a prefix"),
        ],
    )
    @pytest.mark.usefixtures("s3_environment")
    def test_refuses_what_is_no_store_with_advice(self, location: str, advice: str) -> None:
        with pytest.raises(Mistake, match=advice):
            open_store(location)

    def test_refuses_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(Mistake, match="file is a file: a store is a directory"):
            open_store(str(tmp_path / "file"))

    @pytest.mark.parametrize("location", ["s3://AK:canary@bucket/x", "file://u:canary@h/x", "s3://b?key=canary"])
    def test_refuses_keys_in_an_address_without_repeating_them(self, location: str) -> None:
        with pytest.raises(Mistake, match="holds no keys") as caught:
            open_store(location)
        assert "canary" not in str(caught.value)

    @pytest.mark.parametrize("endpoint", ["http://u:canary@127.0.0.1", "127.0.0.1:9000", "ftp://host", "http://h:x"])
    @pytest.mark.usefixtures("s3_environment")
    def test_refuses_a_broken_endpoint(self, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
        with pytest.raises(Mistake, match="AWS_ENDPOINT_URL must be") as caught:
            open_store("s3://bucket")
        assert "canary" not in str(caught.value)

    def test_the_endpoint_for_s3_goes_before_the_general_one(
        self, s3_location: str, s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_environment.endpoint)
        open_store(s3_location).put("a", b"1")
        assert open_store(s3_location).get("a") == b"1"

    @pytest.mark.usefixtures("no_aws")
    def test_without_keys_says_so_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        begin = time.monotonic()
        with pytest.raises(Mistake, match="no keys for the store: set AWS_ACCESS_KEY_ID"):
            open_store("s3://bucket")
        monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_port()}")
        with pytest.raises(Mistake, match="no keys for the store"):
            open_store("s3://bucket")
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        with pytest.raises(Mistake, match="no keys for the store"):
            open_store("s3://bucket")
        assert time.monotonic() - begin < 3

    @pytest.mark.usefixtures("no_aws")
    def test_a_machine_with_a_role_needs_no_keys(self, moto_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", moto_server.endpoint)
        assert open_store("s3://bucket").url == "s3://bucket"

    @pytest.mark.usefixtures("no_aws")
    def test_half_of_the_keys_is_not_enough(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary")
        with pytest.raises(Mistake, match="set AWS_ACCESS_KEY_ID too") as caught:
            open_store("s3://bucket")
        assert "canary" not in str(caught.value)

    def test_the_client_starts_without_obstore(self) -> None:
        code = "import sys, packtrain.store; print('obstore' in sys.modules)"
        assert output_of(python(code)) == "False"


class TestDirectory:
    def test_files_follow_the_umask(self, directory_store: Store, tmp_path: Path) -> None:
        before = os.umask(0o027)
        try:
            directory_store.put("a/b", b"")
            directory_store.put_if_absent("a/c", b"")
            directory_store.get_file("a/b", tmp_path / "file")
        finally:
            os.umask(before)
        for path in (tmp_path / "store/a/b", tmp_path / "store/a/c", tmp_path / "file"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o640

    def test_an_object_cannot_lie_below_another(self, directory_store: Store) -> None:
        directory_store.put("a", b"1")
        directory_store.put("folder/b", b"1")
        for put in (directory_store.put, directory_store.put_if_absent):
            with pytest.raises(StoreError, match="an object cannot lie below another"):
                put("a/b", b"2")
            with pytest.raises(StoreError, match="other objects lie below this key"):
                put("folder", b"2")
        assert keys(directory_store) == ["a", "folder/b"]

    def test_links_are_not_followed(self, directory_store: Store, tmp_path: Path) -> None:
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

    def test_may_itself_be_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to("real")
        store = open_store(str(tmp_path / "link"))
        store.put("a/b", b"1")
        assert store.get("a/b") == b"1"
        assert keys(store) == ["a/b"]

    def test_temporary_files_are_not_objects_and_go_when_abandoned(
        self, directory_store: Store, tmp_path: Path
    ) -> None:
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

    def test_processes_race_with_one_winner(self, tmp_path: Path) -> None:
        code = """
import sys, time
from pathlib import Path
from packtrain.store import open_store
store, number = open_store(sys.argv[1]), sys.argv[2]
store.put("ready/" + number, b"")
while not store.exists("go"): time.sleep(0.001)
print([store.put_if_absent(f"race/{round}", number.encode()) for round in range(20)])
"""
        store = open_store(str(tmp_path / "store"))
        racers = [python(code, tmp_path / "store", number) for number in range(16)]
        while len(store.list("ready")) < 16:
            time.sleep(0.01)
            assert all(racer.poll() in (None, 0) for racer in racers)
        store.put("go", b"")
        results = [output_of(racer).strip("[]").split(", ") for racer in racers]
        for number, outcomes in enumerate(zip(*results, strict=True)):
            assert outcomes.count("True") == 1
            assert store.get(f"race/{number}") == str(outcomes.index("True")).encode()

    def test_puts_and_deletions_of_a_folder_do_not_disturb_each_other(self, directory_store: Store) -> None:
        def churn(number: int) -> None:
            for _ in range(100):
                directory_store.put(f"a/b/{number}", b"1")
                assert directory_store.get(f"a/b/{number}") == b"1"
                directory_store.delete(f"a/b/{number}")

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(churn, range(4)))
        assert keys(directory_store) == directory_store.folders("") == []

    def test_a_killed_writer_leaves_only_whole_objects(self, tmp_path: Path) -> None:
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
        store = open_store(str(tmp_path / "store"))
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

    def test_a_full_disk_keeps_what_was_there(self, small_disk: Path) -> None:
        store = open_store(str(small_disk))
        store.put("good", b"1" * 1000)
        for put in (store.put, store.put_if_absent):
            with pytest.raises(StoreError, match="the disk is full") as caught:
                put("big", b"2" * 2 * MEGABYTE)
            assert caught.value.temporary
        with pytest.raises(StoreError, match="the disk is full"):
            store.put("good", b"2" * 2 * MEGABYTE)
        assert store.get("good") == b"1" * 1000
        assert [path.name for path in small_disk.iterdir()] == ["good"]

    def test_a_full_disk_keeps_no_half_of_a_file_that_was_fetched(self, small_disk: Path, any_store: Store) -> None:
        any_store.put("big", b"2" * 2 * MEGABYTE)
        begin = time.monotonic()
        with pytest.raises(StoreError, match=f"{small_disk}/file: the disk is full"):
            any_store.get_file("big", small_disk / "file")
        assert time.monotonic() - begin < 5
        assert list(small_disk.iterdir()) == []

    def test_a_read_only_disk_is_named(self, small_disk: Path) -> None:
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
        with pytest.raises(StoreError, match="read-only") as caught:
            open_store(str(small_disk)).put("a/b", b"")
        assert not caught.value.temporary

    def test_a_forbidden_directory_is_named(self, directory_store: Store, tmp_path: Path) -> None:
        directory_store.put("a/b", b"1")
        (tmp_path / "store/a").chmod(0)
        with unprivileged():
            for use in (directory_store.get, directory_store.list, directory_store.exists):
                with pytest.raises(StoreError, match="this user may not do that") as caught:
                    use("a/b" if use != directory_store.list else "a")
                assert not caught.value.temporary
            with pytest.raises(StoreError, match="this user may not do that"):
                directory_store.put("a/c", b"")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    need(os.geteuid() == 0, "only root can mount a small disk")
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    need(subprocess.run(mount, capture_output=True).returncode == 0, "this machine mounts no tmpfs")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


class unprivileged:  # noqa: N801
    """Root may do anything; for this block the process is nobody."""

    def __enter__(self) -> None:
        self.user = os.geteuid()
        if self.user == 0:
            os.seteuid(65534)

    def __exit__(self, *_: object) -> None:
        os.seteuid(self.user)


def patient(location: str, *, outage_seconds: float = 10.0, answer_seconds: float = 0.2) -> Store:
    return open_store(location, outage_seconds=outage_seconds, answer_seconds=answer_seconds)


class TestBucketInTrouble:
    @pytest.mark.parametrize("trouble", [make.REFUSE, make.BUSY, make.LOSE_ANSWER, make.DROP, make.HANG, make.CUT])
    def test_every_call_survives_one_failure(
        self, trouble: str, s3_proxy: Proxy, s3_location: str, tmp_path: Path
    ) -> None:
        store = patient(s3_location)
        s3_proxy.hang_seconds = 0.6

        def after_trouble(action: Callable[[], object]) -> object:
            s3_proxy.first(trouble)
            return action()

        after_trouble(lambda: store.put("a/b", b"data"))
        assert after_trouble(lambda: store.get("a/b")) == b"data"
        assert after_trouble(lambda: store.get_range("a/b", 1, 2)) == b"at"
        assert after_trouble(lambda: store.exists("a/b")) is True
        assert after_trouble(lambda: keys(store)) == ["a/b"]
        assert after_trouble(lambda: store.folders("")) == ["a"]
        assert after_trouble(lambda: store.put_if_absent("new", b"1")) is True
        assert after_trouble(lambda: store.put_if_absent("new", b"1")) is False
        after_trouble(lambda: store.get_file("a/b", tmp_path / "file"))
        assert (tmp_path / "file").read_bytes() == b"data"
        after_trouble(lambda: store.delete("a/b"))
        assert keys(store) == ["new"]

    @pytest.mark.parametrize("trouble", [make.REFUSE, make.LOSE_ANSWER, make.DROP, make.CUT])
    @pytest.mark.parametrize("request_of_upload", ["uploads=", "partNumber=2", "uploadId="])
    def test_an_upload_in_parts_survives_a_failure_of_any_of_its_requests(
        self, trouble: str, request_of_upload: str, s3_proxy: Proxy, s3_location: str, tmp_path: Path
    ) -> None:
        source = tmp_path / "source"
        source.write_bytes(noise(9 * MEGABYTE))
        left = [trouble]

        def once(method: str, path: str) -> str:
            query = path.partition("?")[2]
            hit = query.startswith(request_of_upload) and (method == "POST" or "partNumber" in query)
            return left.pop() if hit and left else make.SOUND

        s3_proxy.trouble = once
        store = patient(s3_location, answer_seconds=5)
        store.put_file("big", source)
        assert left == []
        assert store.get("big") == source.read_bytes()

    def test_a_fifth_of_all_requests_may_fail(self, s3_proxy: Proxy, s3_location: str) -> None:
        dice = random.Random(3)  # noqa: S311
        troubles = [make.REFUSE, make.BUSY, make.LOSE_ANSWER, make.DROP, make.CUT]
        s3_proxy.trouble = lambda *_: dice.choice(troubles) if dice.random() < 0.2 else make.SOUND
        store = patient(s3_location)
        for number in range(12):
            key = f"{number:03d}"
            assert store.put_if_absent(key, key.encode())
            assert not store.put_if_absent(key, b"other")
            assert store.get(key) == key.encode()
        assert keys(store) == [f"{number:03d}" for number in range(12)]
        assert sum(trouble != make.SOUND for _, _, trouble in s3_proxy.requests) > 5

    def test_a_large_file_passes_a_server_that_often_fails(
        self, s3_proxy: Proxy, s3_location: str, tmp_path: Path
    ) -> None:
        source, target = tmp_path / "source", tmp_path / "target"
        source.write_bytes(noise(40 * MEGABYTE))
        count = itertools.count(1)
        s3_proxy.trouble = lambda *_: make.REFUSE if next(count) % 3 == 0 else make.SOUND
        store = patient(s3_location)
        store.put_file("big", source)
        store.get_file("big", target)
        assert target.read_bytes() == source.read_bytes()

    def test_a_put_whose_answer_got_lost_is_not_taken_for_somebody_elses(
        self, s3_proxy: Proxy, s3_location: str
    ) -> None:
        store, other = patient(s3_location), patient(s3_location)
        s3_proxy.first(make.LOSE_ANSWER, make.DROP, make.LOSE_ANSWER)
        assert store.put_if_absent("generation", b"same bytes")
        assert not other.put_if_absent("generation", b"same bytes")

    def test_somebody_elses_put_is_not_taken_for_ours_though_it_has_our_bytes(
        self, s3_proxy: Proxy, s3_location: str, s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = patient(s3_location)
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3_environment.endpoint)
        other = patient(s3_location)

        def overtaken(method: str, path: str) -> str:
            s3_proxy.first()
            assert other.put_if_absent("generation", b"same bytes")
            return make.REFUSE

        s3_proxy.trouble = overtaken
        assert not store.put_if_absent("generation", b"same bytes")

    @pytest.mark.parametrize("trouble", [make.REFUSE, make.BUSY, make.DROP, make.HANG])
    def test_an_outage_ends_in_a_temporary_error_in_time(self, trouble: str, s3_proxy: Proxy, s3_location: str) -> None:
        s3_proxy.trouble = lambda *_: trouble
        s3_proxy.hang_seconds = 0.6
        store = patient(s3_location, outage_seconds=0.5, answer_seconds=0.2)
        for use in (
            lambda: store.put("a", b""),
            lambda: store.put_if_absent("a", b""),
            lambda: store.get("a"),
        ):
            begin = time.monotonic()
            with pytest.raises(StoreError, match="try again later") as caught:
                use()
            assert caught.value.temporary
            assert 0.5 <= time.monotonic() - begin < 3

    def test_an_outage_can_be_interrupted(self, s3_proxy: Proxy, s3_location: str) -> None:
        s3_proxy.trouble = lambda *_: make.REFUSE
        code = "import sys; from packtrain.store import open_store; open_store(sys.argv[1]).get('a')"
        waiting = python(code, s3_location)
        while not s3_proxy.requests:
            assert waiting.poll() is None
        waiting.send_signal(signal.SIGINT)
        begin = time.monotonic()
        _, errors = waiting.communicate()
        assert time.monotonic() - begin < 3
        assert "KeyboardInterrupt" in errors

    def test_an_unreachable_server_is_named(self, s3_location: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
        with pytest.raises(StoreError, match="cannot be reached: check AWS_ENDPOINT_URL") as caught:
            patient(s3_location, outage_seconds=0.3).get("a")
        assert caught.value.temporary

    def test_a_server_that_ignores_put_if_absent_is_found_out(
        self, rclone_server: S3Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rclone_server.enter(monkeypatch)
        store = open_store(fresh_location())
        assert not store.holds_put_if_absent()
        assert keys(store) == []
        store.put("a", b"1")
        assert store.get("a") == b"1"

    def test_files_of_any_size_pass_through_little_memory(self, s3_location: str, tmp_path: Path) -> None:
        code = """
import sys
from pathlib import Path
from packtrain.store import open_store
def peak(): return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024
source, target = Path(sys.argv[2]), Path(sys.argv[3])
for location in sys.argv[1].split(","):
    store = open_store(location)
    store.put("small", b"1"), store.get("small")
    before = peak()
    store.put_file("big", source)
    store.get_file("big", target)
    print(peak() - before)
"""
        source, target = tmp_path / "source", tmp_path / "target"
        source.write_bytes(noise(MEGABYTE) * 80)
        output = output_of(python(code, f"{tmp_path}/store,{s3_location}", source, target))
        megabytes = [int(line) for line in output.splitlines()]
        assert target.read_bytes() == source.read_bytes()
        assert max(megabytes) < 64, megabytes

    def test_a_forked_process_is_told_instead_of_hanging(self, s3_location: str) -> None:
        code = """
import os, sys
from packtrain.store import StoreError, open_store
store = open_store(sys.argv[1])
store.put("a", b"1")
if os.fork() == 0:
    try:
        store.get("a")
    except StoreError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
"""
        assert "start workers with spawn or forkserver" in output_of(python(code, s3_location))


class TestBucketThatRefuses:
    @pytest.mark.parametrize("kind", ["moto_server", "ceph_server"])
    def test_a_missing_bucket_is_not_a_missing_object(
        self, kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        server: S3Server = request.getfixturevalue(kind)
        server.enter(monkeypatch)
        store = open_store("s3://no-such-bucket/prefix")
        (tmp_path / "big").write_bytes(b"1" * 9 * MEGABYTE)
        for use in (
            lambda: store.exists("a"),
            lambda: store.find("a"),
            lambda: store.get_file("a", tmp_path / "a"),
            lambda: store.put("a", b""),
            lambda: store.put_if_absent("a", b""),
            lambda: store.put_file("a", tmp_path / "big"),
            lambda: store.delete("a"),
            store.list,
            lambda: store.folders(""),
        ):
            with pytest.raises(StoreError, match="the bucket does not exist: create it") as caught:
                use()
            assert not caught.value.temporary

    @pytest.mark.parametrize(
        ("name", "value", "advice"),
        [
            ("AWS_ACCESS_KEY_ID", "AKUNKNOWN", "does not know the key: check AWS_ACCESS_KEY_ID"),
            ("AWS_SECRET_ACCESS_KEY", "canary", "refused the secret key: check AWS_SECRET_ACCESS_KEY"),
        ],
    )
    def test_refused_keys_are_told_apart_and_never_shown(
        self, ceph_server: S3Server, monkeypatch: pytest.MonkeyPatch, name: str, value: str, advice: str
    ) -> None:
        ceph_server.enter(monkeypatch)
        monkeypatch.setenv(name, value)
        store = open_store(fresh_location())
        for use in (lambda: store.put("a", b""), lambda: store.get("a"), store.list):
            with pytest.raises(StoreError, match=advice) as caught:
                use()
            assert not caught.value.temporary
            assert "canary" not in str(caught.value)
            assert ceph_server.secret_key not in str(caught.value)
        with pytest.raises(StoreError, match="the server refused: check the keys"):
            store.exists("a")
        assert "canary" not in repr(vars(store))

    def test_a_clock_that_is_off_is_named(self, ceph_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        need(shutil.which("faketime"), "faketime is not installed: run tests/parts/install")
        ceph_server.enter(monkeypatch)
        code = """
import sys
from packtrain.store import StoreError, open_store
try:
    open_store(sys.argv[1]).get("a")
except StoreError as error:
    print(error.temporary, error)
"""
        output = output_of(python(code, fresh_location(), before=("faketime", "-f", "+1h")))
        assert output.startswith("False")
        assert "this machine's clock is off: set it" in output


class TestExplanations:
    @pytest.mark.parametrize(
        ("said", "advice", "temporary"),
        [
            ("status code: 403 Forbidden: <Code>AccessDenied</Code>", "refused the keys", False),
            ("status code: 400 Bad Request: <Code>ExpiredToken</Code>", "renew the keys", False),
            ("status code: 301 Moved: <Code>PermanentRedirect</Code>", "set AWS_REGION", False),
            ("Received redirect without LOCATION, this normally indicates", "set AWS_REGION", False),
            ("status code: 400 Bad Request: <Code>RequestTimeout</Code>", "try again later", True),
            ("status code: 403 Forbidden: <Code>QuotaExceeded</Code>", "quota is used up", True),
            ("status code: 409 Conflict: <Code>ConditionalRequestConflict</Code>", "try again later", True),
            ("status code: 503 Slow Down: <Code>SlowDown</Code>", "try again later (503 SlowDown)", True),
            ("status code: 400 Bad Request: <Code>Odd</Code>", "the server refused (400 Odd)", False),
            ("HTTP error: kind: Connect invalid peer certificate", "certificate is not trusted", False),
            ("HTTP error: kind: Connect dns error", "the server's name is unknown here", True),
            ("PUT http://169.254.169.254/latest/api/token", "attach an instance role", True),
            ("Something new\n\nDebug source: Secrets {}", "the request failed: Something new", False),
        ],
    )
    def test_what_a_server_says_becomes_one_line_of_advice(self, said: str, advice: str, temporary: bool) -> None:
        error = explain_server(said, "s3://bucket")
        assert str(error).startswith("s3://bucket: ")
        assert advice in str(error)
        assert "\n" not in str(error)
        assert "Debug" not in str(error)
        assert error.temporary is temporary

    @pytest.mark.parametrize(
        ("number", "advice", "temporary"),
        [
            (errno.EDQUOT, "quota is used up", True),
            (errno.ESTALE, "mount it again", True),
            (errno.EIO, "the disk or the network mount failed", True),
            (errno.EXDEV, os.strerror(errno.EXDEV), False),
        ],
    )
    def test_what_the_system_says_becomes_one_line_of_advice(self, number: int, advice: str, temporary: bool) -> None:
        error = explain_system(OSError(number, "canary"), "/data")
        assert str(error).startswith("/data: ")
        assert advice in str(error)
        assert error.temporary is temporary
