from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data.handmade import NAME, Remote, put_file, put_pack
from packtrain.data.cache import FileCache, Prefetch
from packtrain.data.pack import Pack
from packtrain.errors import Mistake, NotFound, PacktrainError
from packtrain.files import FileLock
from packtrain.pack.manifest import PackFile, pack_key
from packtrain.store import Store, open_store
from parts.clock import wait_for_tick

PATIENCE_SECONDS = 90
TESTS = Path(__file__).parents[1]

# A process of its own: fetches a file through the cache and prints what it has.
FETCH = """
import sys, time
from pathlib import Path
from data.handmade import NAME, Remote
from packtrain.data.cache import FileCache
from packtrain.pack.manifest import PackFile, pack_key

root, cache, name, size, sha256, pause = sys.argv[1:]

class Slow(Remote):
    def get_file(self, key, path, limit=None):
        (path.parent / ".tmp-half").write_bytes(b"half of it")
        print("fetching", flush=True)
        time.sleep(float(pause))
        super().get_file(key, path, limit)

wanted = PackFile(name, int(size), sha256)
print(FileCache(Path(cache)).path_of(Slow(Path(root)), pack_key(NAME, name), wanted).read_text())
"""


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    return Remote(tmp_path / "store")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def path_of(cache: FileCache, store: Store, file: PackFile) -> Path:
    return cache.path_of(store, pack_key(NAME, file.name), file)


def started(store: Remote, folder: Path, file: PackFile, pause_seconds: float) -> subprocess.Popen[str]:
    arguments = [store.url, str(folder), file.name, str(file.bytes), file.sha256, str(pause_seconds)]
    return subprocess.Popen(
        [sys.executable, "-c", FETCH, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    )


def damage(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def cached(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_file() and path.suffix != ".lock"} - {"lock"}


def waits_for_lock(pid: int) -> bool:
    """True if a process is blocked by the lock of another one."""
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return any(words[1:3] == ["->", "FLOCK"] and words[5] == str(pid) for words in locks)


def leftovers(folder: Path) -> list[Path]:
    return list((folder / "fetching").rglob("*"))


def test_a_file_is_downloaded_once_and_found_by_its_hash(remote: Remote, folder: Path) -> None:
    file, same = put_file(remote, "a", b"apple"), put_file(remote, "b", b"apple")
    for wanted in (file, file, same):
        path = path_of(FileCache(folder), remote, wanted)
        assert path == folder / file.sha256
        assert path.read_bytes() == b"apple"
    assert remote.fetched == ["a"]
    assert leftovers(folder) == []


def test_files_come_from_any_kind_of_store(any_store: Store, folder: Path) -> None:
    file = put_file(any_store, "a", b"apple")
    assert path_of(FileCache(folder), any_store, file).read_bytes() == b"apple"


@pytest.mark.usefixtures("processes")
def test_simultaneous_processes_download_a_file_once(remote: Remote, folder: Path) -> None:
    file = put_file(remote, "a", b"apple")
    racers = [started(remote, folder, file, 0.3) for _ in range(6)]
    outputs = [racer.communicate(timeout=PATIENCE_SECONDS)[0].split() for racer in racers]
    assert sorted(outputs) == [["apple"]] * 5 + [["fetching", "apple"]]
    assert remote.fetched == ["a"]


def test_simultaneous_threads_download_a_file_once(remote: Remote, folder: Path) -> None:
    file = put_file(remote, "a", b"apple")
    cache = FileCache(folder)
    threads = [threading.Thread(target=path_of, args=(cache, remote, file)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert remote.fetched == ["a"]


@pytest.mark.usefixtures("processes")
def test_leftovers_of_a_killed_download_are_never_used_and_are_removed(remote: Remote, folder: Path) -> None:
    file, other = put_file(remote, "a", b"apple"), put_file(remote, "b", b"pear")
    killed = started(remote, folder, file, PATIENCE_SECONDS)
    assert killed.stdout is not None
    with killed.stdout as stdout:
        assert stdout.readline() == "fetching\n"
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    assert leftovers(folder) != []
    assert cached(folder) == set()
    path_of(FileCache(folder), remote, other)
    assert leftovers(folder) == []
    assert path_of(FileCache(folder), remote, file).read_bytes() == b"apple"


@pytest.mark.usefixtures("processes")
def test_a_process_that_waits_for_a_killed_download_downloads_the_file_itself(remote: Remote, folder: Path) -> None:
    file = put_file(remote, "a", b"apple")
    killed = started(remote, folder, file, PATIENCE_SECONDS)
    assert killed.stdout is not None
    with killed.stdout as stdout:
        assert stdout.readline() == "fetching\n"
        waiting = started(remote, folder, file, 0)
        eventually(lambda: waits_for_lock(waiting.pid))
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    assert waiting.communicate(timeout=PATIENCE_SECONDS)[0].split() == ["fetching", "apple"]
    assert leftovers(folder) == []


@pytest.mark.usefixtures("processes")
def test_the_running_download_of_another_process_is_not_removed(remote: Remote, folder: Path) -> None:
    file, other = put_file(remote, "a", b"apple"), put_file(remote, "b", b"pear")
    slow = started(remote, folder, file, 1.0)
    assert slow.stdout is not None
    assert slow.stdout.readline() == "fetching\n"
    path_of(FileCache(folder), remote, other)
    assert len(leftovers(folder)) == 2
    assert slow.communicate(timeout=PATIENCE_SECONDS)[0].split() == ["apple"]


@pytest.mark.parametrize(
    ("data", "how", "downloads"),
    [
        (b"aqple", "wrong hash, in 3 downloads", 3),
        (b"appl", "has 4 B instead of 5 B", 0),
        (b"apple pie", "has 9 B instead of 5 B", 0),
        (b"", "has 0 B instead of 5 B", 0),
    ],
)
def test_a_file_that_is_damaged_in_the_store_is_named(
    remote: Remote, folder: Path, data: bytes, how: str, downloads: int
) -> None:
    file = put_file(remote, "a", b"apple")
    put_file(remote, "a", data)
    with pytest.raises(PacktrainError) as refused:
        path_of(FileCache(folder), remote, file)
    assert str(refused.value) == (
        f"a of pack {NAME} in {remote.url} is damaged ({how}); delete the pack's manifest.json and pack again"
    )
    assert remote.fetched == ["a"] * downloads
    assert cached(folder) == set()
    assert leftovers(folder) == []


def test_a_file_that_arrives_damaged_is_downloaded_again(
    remote: Remote, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = put_file(remote, "a", b"apple")
    get_file = remote.get_file

    def unsteady(key: str, path: Path, limit: int | None = None) -> None:
        get_file(key, path, limit)
        if len(remote.fetched) < 3:
            damage(path)

    monkeypatch.setattr(remote, "get_file", unsteady)
    assert path_of(FileCache(folder), remote, file).read_bytes() == b"apple"
    assert remote.fetched == ["a"] * 3


@pytest.mark.parametrize("harm", [damage, lambda path: path.write_bytes(b""), Path.unlink])
def test_a_file_that_is_damaged_in_the_cache_is_downloaded_again(
    remote: Remote, folder: Path, harm: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    file = put_file(remote, "a", b"apple")
    path = path_of(FileCache(folder), remote, file)
    harm(path)
    told = f"{path} is damaged; downloading packs/{NAME}/a again\n" if path.exists() else ""
    assert path_of(FileCache(folder), remote, file).read_bytes() == b"apple"
    assert remote.fetched == ["a"] * 2
    assert capsys.readouterr().out == told


def test_a_file_missing_from_the_store_is_named(remote: Remote, folder: Path) -> None:
    file = put_file(remote, "a", b"apple")
    remote.delete(pack_key(NAME, "a"))
    with pytest.raises(NotFound, match=f"object 'packs/{NAME}/a' not found"):
        path_of(FileCache(folder), remote, file)
    assert leftovers(folder) == []


@pytest.mark.parametrize("sha256", ["", "../../etc/passwd", "A" * 64, "0" * 63 + "\n"])
def test_an_invalid_hash_is_refused(remote: Remote, folder: Path, sha256: str) -> None:
    with pytest.raises(PacktrainError, match="is not a SHA-256"):
        path_of(FileCache(folder), remote, PackFile("a", 1, sha256))
    assert not folder.exists()


def test_a_cache_that_cannot_be_written_is_an_error_of_one_line(remote: Remote, tmp_path: Path) -> None:
    file = put_file(remote, "a", b"apple")
    (tmp_path / "file").touch()
    with pytest.raises(PacktrainError, match="a part of the path is a file, not a directory"):
        path_of(FileCache(tmp_path / "file"), remote, file)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were read to be checked."""
    names: list[str] = []
    from packtrain.files import sha256_of

    def noted(path: Path) -> str:
        names.append(path.name)
        return sha256_of(path)

    monkeypatch.setattr("packtrain.data.cache.sha256_of", noted)
    return names


def test_files_of_a_directory_store_are_used_in_place(directory_store: Store, folder: Path) -> None:
    file = put_file(directory_store, "a", b"apple")
    path = path_of(FileCache(folder), directory_store, file)
    assert path == Path(directory_store.url) / pack_key(NAME, "a")
    assert cached(folder) == set()


def test_a_file_is_hashed_once_on_a_machine_and_again_after_a_change(
    directory_store: Store, folder: Path, hashed: list[str]
) -> None:
    file = put_file(directory_store, "a", b"apple")
    for _ in range(3):
        path_of(FileCache(folder), directory_store, file)
    assert hashed == ["a"]
    put_file(directory_store, "a", b"apple")
    path_of(FileCache(folder), directory_store, file)
    assert hashed == ["a", "a"]


def test_the_lock_of_a_file_goes_with_it(directory_store: Store, folder: Path) -> None:
    cache = FileCache(folder)
    files = [put_file(directory_store, name, name.encode()) for name in ("one", "two")]
    for file in files:
        path_of(cache, directory_store, file)
    locks = [folder / f"{file.sha256}.lock" for file in files]
    cache.hold([]).close()
    assert [lock.exists() for lock in locks] == [True, True]
    directory_store.delete(pack_key(NAME, "one"))
    cache.hold([]).close()
    assert [lock.exists() for lock in locks] == [False, True]
    os.utime(locks[1], (0, 0))  # not used for a month
    with FileLock(locks[1]):
        cache.hold([]).close()
    assert locks[1].exists(), "a process checks the file at this moment"
    cache.hold([]).close()
    assert not locks[1].exists()


def test_a_damaged_file_of_a_directory_store_is_named(directory_store: Store, folder: Path) -> None:
    file = put_file(directory_store, "a", b"apple")
    damage(path_of(FileCache(folder), directory_store, file))
    with pytest.raises(PacktrainError, match=f"^a of pack {NAME} in .* is damaged \\(wrong hash\\); delete"):
        path_of(FileCache(folder), directory_store, file)


def test_a_file_missing_from_a_directory_store_is_named(directory_store: Store, folder: Path) -> None:
    with pytest.raises(NotFound, match=r"object .* not found"):
        path_of(FileCache(folder), directory_store, PackFile("a", 1, "0" * 64))


def test_the_least_recently_used_file_is_removed_first(remote: Remote, folder: Path) -> None:
    files = [put_file(remote, name, name.encode() * 10) for name in "abcd"]
    cache = FileCache(folder, limit_bytes=30)
    for file in (*files[:3], files[0]):
        path_of(cache, remote, file)
        wait_for_tick(folder)
    path_of(cache, remote, files[3])
    assert cached(folder) == {files[number].sha256 for number in (0, 2, 3)}


def test_many_small_files_are_removed_for_a_large_one(remote: Remote, folder: Path) -> None:
    small = [put_file(remote, name, name.encode() * 10) for name in "abcd"]
    large = put_file(remote, "large", b"x" * 25)
    cache = FileCache(folder, limit_bytes=40)
    for file in (*small, large):
        path_of(cache, remote, file)
        wait_for_tick(folder)
    assert cached(folder) == {small[3].sha256, large.sha256}


def test_files_that_a_live_process_needs_stay_even_beyond_the_limit(remote: Remote, folder: Path) -> None:
    files = [put_file(remote, name, name.encode() * 10) for name in "abc"]
    cache = FileCache(folder, limit_bytes=10)
    with cache.hold(file.sha256 for file in files[:2]):
        for file in files[:2]:
            path_of(cache, remote, file)
        path_of(FileCache(folder, limit_bytes=10), remote, files[2])
        assert cached(folder) == {file.sha256 for file in files}
    path_of(cache, remote, put_file(remote, "d", b"d" * 10))
    assert len(cached(folder)) == 1
    assert list((folder / "uses").iterdir()) == []


@pytest.mark.usefixtures("processes")
def test_files_that_a_killed_process_needed_can_be_removed(remote: Remote, folder: Path) -> None:
    files = [put_file(remote, name, name.encode() * 10) for name in "ab"]
    path_of(FileCache(folder), remote, files[0])
    script = f"import os; from pathlib import Path; from packtrain.data.cache import FileCache\n\
hold = FileCache(Path({str(folder)!r})).hold([{files[0].sha256!r}]); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == -signal.SIGKILL
    path_of(FileCache(folder, limit_bytes=10), remote, files[1])
    assert cached(folder) == {files[1].sha256}


def test_an_open_file_can_be_read_after_it_was_removed(remote: Remote, folder: Path) -> None:
    first, second = put_file(remote, "a", b"apple"), put_file(remote, "b", b"pear")
    with path_of(FileCache(folder), remote, first).open("rb") as file:
        path_of(FileCache(folder, limit_bytes=5), remote, second)
        assert cached(folder) == {second.sha256}
        assert file.read() == b"apple"


def test_processes_that_share_a_small_cache_all_get_their_files(remote: Remote, folder: Path) -> None:
    files = [put_file(remote, f"{number}", str(number).encode() * 50) for number in range(12)]
    wrong: list[str] = []

    def use(first: int) -> None:
        cache = FileCache(folder, limit_bytes=200)
        for number in range(40):
            file = files[(first + number * 5) % len(files)]
            with cache.hold([file.sha256]):
                if path_of(cache, remote, file).stat().st_size != file.bytes:
                    wrong.append(file.name)

    threads = [threading.Thread(target=use, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    path_of(FileCache(folder, limit_bytes=100), remote, put_file(remote, "last", b"last"))
    assert sum((folder / name).stat().st_size for name in cached(folder)) <= 100


@pytest.mark.parametrize("size", [10**30, 10**13, 41])
def test_a_file_larger_than_the_cache_removes_nothing(remote: Remote, folder: Path, size: int) -> None:
    cached_before = [put_file(remote, name, name.encode() * 10) for name in "abc"]
    for file in cached_before:
        path_of(FileCache(folder, limit_bytes=40), remote, file)
    claimed = put_file(remote, "d", b"d" * min(size, 100))
    with pytest.raises(PacktrainError, match=r"d of pack|PACKTRAIN_CACHE"):
        path_of(FileCache(folder, limit_bytes=40), remote, PackFile("d", size, claimed.sha256))
    assert cached(folder) == {file.sha256 for file in cached_before}
    assert remote.fetched == ["a", "b", "c"]


def test_parallel_downloads_of_processes_and_threads_keep_the_limit(remote: Remote, folder: Path) -> None:
    files = [put_file(remote, f"{number}", str(number).encode() * 40) for number in range(8)]
    seen: list[int] = []

    class Watched(Remote):
        def get_file(self, key: str, path: Path, limit: int | None = None) -> None:
            time.sleep(0.05)
            super().get_file(key, path, limit)
            stored = [one.stat().st_size for one in folder.glob("[0-9a-f]*") if len(one.name) == 64]
            seen.append(sum(stored) + sum(one.stat().st_size for one in folder.glob("fetching/*/file")))

    threads = [
        threading.Thread(target=path_of, args=(FileCache(folder, limit_bytes=100), Watched(Path(remote.url)), file))
        for file in files
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8
    assert max(seen) <= 100


@pytest.mark.usefixtures("processes")
def test_a_download_that_is_needed_does_not_wait_for_another(remote: Remote, folder: Path) -> None:
    slow, needed = put_file(remote, "a", b"a" * 40), put_file(remote, "b", b"b" * 40)
    other = started(remote, folder, slow, PATIENCE_SECONDS)
    assert other.stdout is not None
    with other.stdout as stdout:
        assert stdout.readline() == "fetching\n"
        cache = FileCache(folder, limit_bytes=50)
        with cache.hold([needed.sha256]):
            assert path_of(cache, remote, needed).stat().st_size == 40
        other.kill()
        other.wait()


@pytest.mark.usefixtures("processes")
def test_a_download_waits_only_for_those_that_live(
    remote: Remote, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, next_one = put_file(remote, "a", b"a" * 40), put_file(remote, "b", b"b" * 40)
    other = started(remote, folder, slow, PATIENCE_SECONDS)
    assert other.stdout is not None
    with other.stdout as stdout:
        assert stdout.readline() == "fetching\n"
        cache = FileCache(folder, limit_bytes=50)
        waiting = threading.Thread(target=path_of, args=(cache, remote, next_one))
        looks: list[bool] = []
        make_room = cache._make_room

        def look(wanted: PackFile) -> bool:
            looks.append(make_room(wanted))
            return looks[-1]

        monkeypatch.setattr(cache, "_make_room", look)
        waiting.start()
        eventually(lambda: len(looks) >= 3)
        assert not any(looks)
        other.kill()
        other.wait()
    waiting.join(PATIENCE_SECONDS)
    assert cached(folder) == {next_one.sha256}


def test_a_full_disk_names_the_variable_that_moves_the_cache(
    remote: Remote, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(small_disk))
    file = put_file(remote, "a", bytes(2 * 10**6))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10**9))  # others fill it meanwhile
    with pytest.raises(PacktrainError, match="the disk is full; free some space or set PACKTRAIN_CACHE to a directory"):
        path_of(FileCache(small_disk / "packs", limit_bytes=10**7), remote, file)
    assert cached(small_disk / "packs") == set()


def waits_in(threads: list[threading.Thread], function: Callable[..., Any]) -> bool:
    """True if all of these threads are inside of a function that waits."""
    frames = [sys._current_frames().get(thread.ident or 0) for thread in threads]
    return all(
        any(frame.f_code is function.__code__ for frame, _ in traceback.walk_stack(frame)) if frame else False
        for frame in frames
    )


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_shards_are_downloaded_in_order_a_few_ahead_of_their_use() -> None:
    fetched: list[int] = []
    with closing(Prefetch(fetched.append, [5, 3, 9, 1, 7], ahead=2, threads=1)) as prefetch:
        eventually(lambda: len(fetched) >= 2 and waits_in([*prefetch._threads], threading.Semaphore.acquire))
        assert fetched == [5, 3]
        prefetch.used(5)
        eventually(lambda: len(fetched) == 3)
        prefetch.used(1)  # before its turn: it need not be fetched any more
        prefetch.used(3)
        eventually(lambda: len(fetched) == 4)
    assert fetched == [5, 3, 9, 7]


def test_several_shards_are_downloaded_in_parallel() -> None:
    together = threading.Barrier(3)
    with closing(Prefetch(lambda _: together.wait(PATIENCE_SECONDS), range(3), threads=3)):
        pass
    assert not together.broken


def test_a_failed_download_ahead_is_left_to_the_reader() -> None:
    fetched: list[int] = []

    def fetch(number: int) -> None:
        fetched.append(number)
        if number == 1:
            raise PacktrainError("it is damaged")

    with closing(Prefetch(fetch, range(3), threads=1)):
        eventually(lambda: fetched == [0, 1, 2])


@pytest.mark.parametrize("order", [[], [1], list(range(100))])
def test_closing_ends_the_threads(order: list[int]) -> None:
    prefetch = Prefetch(lambda _: None, order, ahead=2)
    prefetch.close()
    prefetch.close()
    assert not any(thread.name == "prefetch" for thread in threading.enumerate())


def test_the_limit_leaves_half_of_a_small_disk(remote: Remote, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [put_file(remote, name, name.encode() * 10) for name in "abc"]

    def small_disk(_: Path) -> object:
        used = sum((folder / name).stat().st_size for name in cached(folder))
        return type("usage", (), {"free": 44 - used})

    monkeypatch.setattr("packtrain.data.cache.shutil.disk_usage", small_disk)
    for file in files:
        path_of(FileCache(folder), remote, file)
        wait_for_tick(folder)
    assert cached(folder) == {file.sha256 for file in files[1:]}
    assert open_store(remote.url).exists(pack_key(NAME, "a"))


# The size of the cache, and packs that are staged.


def test_the_environment_sets_the_size_of_the_cache(
    remote: Remote, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = put_file(remote, "a", b"apple")
    monkeypatch.setenv("PACKTRAIN_CACHE_SIZE", "4 B")
    with pytest.raises(PacktrainError, match=r"a has 5 B, and the cache may take 4 B; set fleet\.cache in the job"):
        path_of(FileCache(folder), remote, file)
    monkeypatch.setenv("PACKTRAIN_CACHE_SIZE", "2 GB")
    assert path_of(FileCache(folder), remote, file).read_bytes() == b"apple"
    monkeypatch.setenv("PACKTRAIN_CACHE_SIZE", "much")
    with pytest.raises(Mistake, match=r"^PACKTRAIN_CACHE_SIZE: .*2 GB"):
        FileCache(folder)


def test_no_size_is_larger_than_the_disk(remote: Remote, small_disk: Path) -> None:
    file = put_file(remote, "a", b"x" * 2_000_000)
    with pytest.raises(PacktrainError, match=r"a has 2\.0 MB, and the cache may take"):
        path_of(FileCache(small_disk / "packs", 10**12), remote, file)


def test_a_staged_pack_is_copied_from_a_directory_as_a_whole_and_read_from_the_copy(
    directory_store: Store, folder: Path
) -> None:
    manifest = put_pack(directory_store, [[1], [2], [3]], 1)
    pack = Pack(directory_store, manifest.name, folder, staged=True)
    staged: list[int] = []
    pack.stage(staged.append, turn=1)
    assert sum(staged) == sum(file.bytes for file in manifest.files())
    for file in manifest.files():
        assert (folder / file.sha256).stat().st_size == file.bytes
        directory_store.delete(pack_key(manifest.name, file.name))
    assert len(pack.split("train").shard(2).ragged["tokens"][0]) == 1


def test_a_pack_that_does_not_fit_is_not_staged(remote: Remote, folder: Path) -> None:
    manifest = put_pack(remote, [[1], [2], [3]], 1)
    largest = max(file.bytes for file in manifest.files())
    with pytest.raises(Mistake, match=r"staging needs .*, and the cache may take .*; set fleet\.cache in the job"):
        Pack(remote, manifest.name, folder, 2 * largest, staged=True).stage(lambda _: None)
    assert remote.fetched == []
