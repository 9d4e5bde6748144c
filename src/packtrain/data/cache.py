"""The file cache of a machine: files of packs by their SHA-256, downloaded once for all processes and runs.

    <sha256>                    a file with that hash
    <sha256>.lock               locked while the file is downloaded or checked; lists files known to have the hash, and
                                goes with the last of them
    fetching/<sha256>-<bytes>/  the unfinished download, and the room that it will take; of the holder of the lock
    uses/<id>                   hashes that a process needs, locked as long as the process lives
    lock                        locked while room is made, and while a process declares what it needs

All locks are the kernel's (flock): they end with their process, however that ends. A file gets its name only when it is
complete and checked, so a process can be killed at any moment; the next download removes its leftovers.

A file whose size, time and inode are known to belong to the hash is not read again to check it: a pack of 100 GB is
hashed once on a machine, shard by shard on first use, and not at every start. In a directory store, files are used in
place, checked but not copied: the kernel caches them. Only a pack that is staged is copied from there, too.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from packtrain.errors import Mistake, PacktrainError
from packtrain.files import FileLock, sha256_of
from packtrain.pack.manifest import PackFile
from packtrain.process import say
from packtrain.store import DamagedObject, Store
from packtrain.store.errors import explained
from packtrain.units import parse_bytes, show_bytes

_TRIES = 3
_POLL_SECONDS = 0.1  # between two looks whether another download is complete
_LIMIT_BYTES = 50 * 10**9
SIZE_VARIABLE = "PACKTRAIN_CACHE_SIZE"
_ADVICE = f"set fleet.cache in the job, or PACKTRAIN_CACHE and {SIZE_VARIABLE}, to a larger disk or size"
_PART_OF_DISK = 2  # the cache takes at most half of what is free or already in the cache
_NUMBERS = 4  # of a file, which come before its path in what is remembered
_REMEMBERED = 8  # files known to have the hash: the same pack may be in several stores
_FORGOTTEN_SECONDS = 30 * 24 * 3600.0
_DOWNLOAD = re.compile("-([0-9]{1,18})$")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class FileCache:
    """Files in `directory`, at most `limit_bytes` of them (default: what PACKTRAIN_CACHE_SIZE says, or else 50 GB, or
    half of the disk if that is less).

    It exceeds the limit only while live processes need more: files of the packs they have open are never removed.
    The least recently used file is removed first. Downloads count from their start on.
    """

    def __init__(self, directory: Path, limit_bytes: int | None = None) -> None:
        self._directory = directory
        text = os.environ.get(SIZE_VARIABLE)
        if limit_bytes is None and text:
            try:
                limit_bytes = parse_bytes(text)
            except ValueError as error:
                raise Mistake(f"{SIZE_VARIABLE}: {error}") from None
        self._limit_bytes = limit_bytes
        self._fetching, self._uses = directory / "fetching", directory / "uses"

    def path_of(
        self, store: Store, key: str, file: PackFile, *, is_suspect: bool = False, staged: bool = False
    ) -> Path:
        """Return a local file with the wanted hash, downloading it if needed; `staged` copies it from a directory, too.

        A suspect file, one that could not be read as what it should be, is hashed again.
        """
        # The hash becomes a file name, and it comes from the store.
        if not _SHA256.fullmatch(file.sha256):
            raise PacktrainError(f"{key} in {store.url}: {file.sha256!r} is not a SHA-256; pack the data again")
        with explained(self._directory):
            self._make_folders()
            with FileLock(self._lock_of(file.sha256)) as lock:
                os.utime(lock.fileno())  # the time of last use, which decides what is removed first
                if is_suspect:
                    os.ftruncate(lock.fileno(), 0)
                if store.is_directory and not staged:
                    return _checked_in_place(store, key, file, lock)
                entry = self._directory / file.sha256
                if not _has_hash(entry, file, lock):
                    if entry.exists():
                        say(f"{entry} is damaged; downloading {key} again")
                        entry.unlink()
                    self._fetch(store, key, file)
                    _remember(entry, lock)
                return entry

    def hold(self, hashes: Iterable[str]) -> FileLock:
        """Keep files with these hashes in the cache until the lock is closed or this process ends."""
        with explained(self._directory):
            self._make_folders()
            # Under the lock: between creating and locking it, the list would look like that of a dead process.
            with FileLock(self._directory / "lock"):
                self._forget()
                path = self._uses / uuid.uuid4().hex
                hold = FileLock(path)
                path.write_text("\n".join(hashes), "utf-8")
                return hold

    def unused(self, older_seconds: float) -> list[tuple[str, int, float]]:
        """Return hash, size and age of the files that no live process needs, and that none has used for so long."""
        if not self._uses.is_dir():
            return []
        with explained(self._directory), FileLock(self._directory / "lock"):
            held, now_seconds = self._held(), time.time()
            unheld = ((sha256, size) for sha256, size in self._sizes().items() if sha256 not in held)
            ages = [(sha256, size, now_seconds - self._last_use(sha256)) for sha256, size in unheld]
            return sorted(entry for entry in ages if entry[2] >= older_seconds)

    def remove_unused(self, sha256: str, older_seconds: float) -> bool:
        """Remove a file if it is still unused; True if it is gone."""
        with explained(self._directory), FileLock(self._directory / "lock"):
            if sha256 in self._held() or time.time() - self._last_use(sha256) < older_seconds:
                return False
            return self._remove(sha256)

    def check_room(self, files: Iterable[PackFile]) -> None:
        """Refuse files that this machine cannot have in its cache all at the same time."""
        with explained(self._directory):
            self._make_folders()
            needed = sum({file.sha256: file.bytes for file in files}.values())
            limit = self._limit(sum(self._sizes().values()))
        if needed > limit:
            raise Mistake(
                f"{self._directory}: staging needs {show_bytes(needed)}, and the cache may take {show_bytes(limit)}; "
                f"{_ADVICE}"
            )

    def _make_folders(self) -> None:
        for folder in (self._fetching, self._uses):
            folder.mkdir(parents=True, exist_ok=True)

    def _lock_of(self, sha256: str) -> Path:
        return self._directory / f"{sha256}.lock"

    def _fetch(self, store: Store, key: str, file: PackFile) -> None:
        entry = store.entry(key)
        if entry is None:
            raise store.not_found(key)
        # Before room is made: a manifest may claim any size, and nothing is removed for a file that is not there.
        if entry.size != file.bytes:
            raise _damaged(store, key, f"has {show_bytes(entry.size)} instead of {show_bytes(file.bytes)}")
        folder = self._reserve(file)  # before the download, so that the disk does not fill up
        try:
            for _ in range(_TRIES):
                arrived = folder / "file"
                with suppress(DamagedObject):
                    store.get_file(key, arrived, limit=file.bytes)
                if arrived.exists() and arrived.stat().st_size == file.bytes and sha256_of(arrived) == file.sha256:
                    arrived.replace(self._directory / file.sha256)
                    return
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        raise _damaged(store, key, f"wrong hash, in {_TRIES} downloads")

    def _reserve(self, file: PackFile) -> Path:
        """Make room for a download, and its folder, which takes the room from now on."""
        folder = self._fetching / f"{file.sha256}-{file.bytes}"
        while True:
            with FileLock(self._directory / "lock"):
                self._remove_leftovers(file.sha256)
                if self._make_room(file):
                    folder.mkdir()
                    return folder
            time.sleep(_POLL_SECONDS)

    def _make_room(self, file: PackFile) -> bool:
        """Remove files until the wanted one fits.

        False if other downloads take the room and nobody has declared a need for the file: when one of them is
        complete, it can be removed.
        """
        sizes = self._sizes()
        cached = sum(sizes.values())
        limit = self._limit(cached)
        if file.bytes > limit:
            raise PacktrainError(
                f"{self._directory}: {file.name} has {show_bytes(file.bytes)}, and the cache may take"
                f" {show_bytes(limit)}; {_ADVICE}"
            )
        downloads = [int(match[1]) for path in self._fetching.iterdir() if (match := _DOWNLOAD.search(path.name))]
        surplus = cached + sum(downloads) + file.bytes - limit
        if surplus <= 0:
            return True
        held = self._held()  # under the cache's lock, so that no process can declare a need meanwhile
        for sha256 in sorted(sizes.keys() - held, key=self._last_use):
            if surplus > 0 and self._remove(sha256):
                surplus -= sizes[sha256]
        return surplus <= 0 or not downloads or file.sha256 in held

    def _sizes(self) -> dict[str, int]:
        """Return the bytes of every file in the cache, by its hash."""
        return {path.name: path.stat().st_size for path in self._directory.iterdir() if _SHA256.fullmatch(path.name)}

    def _limit(self, cached_bytes: int) -> int:
        free_bytes = shutil.disk_usage(self._directory).free
        if self._limit_bytes is not None:  # more than the disk has would fill it up
            return min(self._limit_bytes, free_bytes + cached_bytes)
        return min(_LIMIT_BYTES, (free_bytes + cached_bytes) // _PART_OF_DISK)

    def _held(self) -> set[str]:
        """Return what live processes need, and remove the lists of dead ones."""
        held: set[str] = set()
        for path in self._uses.iterdir():
            try:
                with FileLock(path, wait=False):  # free, so its process has ended
                    path.unlink()
            except BlockingIOError:
                held.update(path.read_text("utf-8").split())
        return held

    def _last_use(self, sha256: str) -> float:
        with suppress(FileNotFoundError):
            return self._lock_of(sha256).stat().st_mtime
        return 0.0

    def _remove(self, sha256: str) -> bool:
        """Remove a file; return False if a process is about to use it."""
        try:
            with FileLock(self._lock_of(sha256), wait=False):
                (self._directory / sha256).unlink(missing_ok=True)
                self._lock_of(sha256).unlink()
                return True
        except BlockingIOError:
            return False

    def _remove_leftovers(self, locked_sha256: str) -> None:
        """Remove downloads that killed processes left; the caller holds the lock of one of the files."""
        for folder in self._fetching.iterdir():
            sha256 = folder.name.partition("-")[0]
            if sha256 == locked_sha256:
                shutil.rmtree(folder, ignore_errors=True)
                continue
            with suppress(BlockingIOError), FileLock(self._lock_of(sha256), wait=False):
                shutil.rmtree(folder, ignore_errors=True)

    def _forget(self) -> None:
        """Remove the locks of files that are nowhere, and of files elsewhere that were unused for a month."""
        for path in self._directory.glob("*.lock"):
            with suppress(BlockingIOError), FileLock(path, wait=False) as lock:
                is_old = time.time() - self._last_use(path.stem) > _FORGOTTEN_SECONDS
                paths = [line.split(" ", _NUMBERS)[-1] for line in _remembered(lock)]
                # Not by Path, which raises an error where a mount has gone.
                is_needed = path.with_suffix("").exists() or (not is_old and any(map(os.path.exists, paths)))
                if not is_needed:
                    path.unlink()


def _checked_in_place(store: Store, key: str, file: PackFile, lock: FileLock) -> Path:
    if store.entry(key) is None:
        raise store.not_found(key)
    path = Path(store.url) / key
    if not _has_hash(path, file, lock):
        # Again: the store may have been unmounted just now, and then this raises an error that says so.
        if store.entry(key) is None:
            raise store.not_found(key)
        raise _damaged(store, key)
    return path


def _has_hash(path: Path, file: PackFile, lock: FileLock) -> bool:
    """True if the file has the wanted hash; it is read only if it is new or has changed."""
    try:
        if path.stat().st_size != file.bytes:
            return False
        if any(line.startswith(f"{_fingerprint(path)} ") for line in _remembered(lock)):
            return True
        if sha256_of(path) != file.sha256:
            return False
    except FileNotFoundError:
        return False
    _remember(path, lock)
    return True


def _fingerprint(path: Path) -> str:
    status = path.stat()
    return f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns}"


def _remembered(lock: FileLock) -> list[str]:
    return os.pread(lock.fileno(), 1 << 16, 0).decode(errors="replace").splitlines()


def _remember(path: Path, lock: FileLock) -> None:
    lines = [*_remembered(lock), f"{_fingerprint(path)} {path}"][-_REMEMBERED:]
    os.ftruncate(lock.fileno(), 0)
    os.pwrite(lock.fileno(), "".join(f"{line}\n" for line in lines).encode(), 0)


def _damaged(store: Store, key: str, how: str = "wrong hash") -> PacktrainError:
    if not key.startswith("packs/"):
        return PacktrainError(f"{key} in {store.url} is damaged ({how}); start the job again")
    _, pack, name = key.split("/", 2)
    return PacktrainError(
        f"{name} of pack {pack} in {store.url} is damaged ({how}); delete the pack's manifest.json and pack again"
    )


class Prefetch:
    """Threads that download numbered shards in the order of their use, `ahead` of the shards used so far.

    A shard that cannot be downloaded is skipped: its reader will try again, and get the error.
    """

    def __init__(self, fetch: Callable[[int], object], order: Sequence[int], ahead: int = 8, threads: int = 4) -> None:
        self._fetch, self._left = fetch, iter(dict.fromkeys(order))
        self._room = threading.Semaphore(ahead)
        self._lock = threading.Lock()
        self._used: set[int] = set()
        self._waiting: set[int] = set()
        self._closed = False
        count = min(threads, ahead, len(order))
        self._threads = [threading.Thread(target=self._work, name="prefetch", daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while True:
            self._room.acquire()
            with self._lock:
                unused = (shard for shard in self._left if shard not in self._used)
                number = None if self._closed else next(unused, None)
                if number is not None:
                    self._waiting.add(number)
            if number is None:
                self._room.release()  # wakes the next thread, which then ends too
                return
            with suppress(PacktrainError):
                self._fetch(number)

    def used(self, number: int) -> None:
        with self._lock:
            self._used.add(number)
            if number in self._waiting:
                self._waiting.remove(number)
                self._room.release()

    def close(self) -> None:
        """Wait for the downloads that have started; start no others."""
        with self._lock:
            self._closed = True
        self._room.release()
        for thread in self._threads:
            thread.join()
