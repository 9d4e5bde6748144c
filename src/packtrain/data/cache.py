"""The cache of a machine: files of packs by their SHA-256, fetched once for all processes and runs that want them.

    <sha256>            a file that has that hash
    <sha256>.lock       locked by who fetches or checks it; lists the files that were found to have the hash
    fetching/<sha256>/  what is on its way; belongs to who has the lock
    uses/<id>           hashes that a process needs, locked as long as it lives
    lock                locked by who makes room, and by who says what it needs

All locks are the kernel's (flock): they end with their process, however that ends. A file gets its name when it is
whole and has its hash, so a process can be killed at any moment; what it leaves behind is removed at the next fetch.

A file whose size, time and inode are those of a file that had the hash is not read again to check it: a pack of
100 GB is hashed once on a machine, shard by shard as they are used, and not at every start.
In a store that is a directory, files are used where they are, checked but not copied: the kernel caches them.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from packtrain.errors import PacktrainError
from packtrain.pack.manifest import PackFile
from packtrain.store import Store
from packtrain.store.errors import explained
from packtrain.system import sha256_of

_TRIES = 3
_LIMIT_BYTES = 50 * 10**9
_PART_OF_DISK = 2  # at most half of what the disk has for the cache and all else to come
_REMEMBERED = 8  # places in which a file was found to have its hash
_FORGOTTEN_SECONDS = 30 * 24 * 3600.0
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Lock:
    """A file locked for this process, until it is closed or the process ends."""

    descriptor = -1

    def __init__(self, path: Path, wait: bool = True) -> None:
        """Raises BlockingIOError if somebody has it and `wait` is False."""
        while True:
            self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                if _is_named(self.descriptor, path):
                    return
            except BaseException:
                self.close()
                raise
            self.close()  # who had it before removed it: what is there now, if anything, is another file

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _is_named(descriptor: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


class FileCache:
    """Holds at most `limit_bytes` (default: 50 GB, or half of the disk if that is less), and more only while live
    processes need more: the packs they have open are never removed. The least recently used goes first.
    """

    def __init__(self, directory: Path, limit_bytes: int | None = None) -> None:
        self._directory, self._limit_bytes = directory, limit_bytes
        self._fetching, self._uses = directory / "fetching", directory / "uses"

    def path_of(self, store: Store, key: str, wanted: PackFile) -> Path:
        """A file on this machine that has the wanted hash: fetched, if it has to be."""
        if not _SHA256.fullmatch(wanted.sha256):
            raise PacktrainError(f"{key} in {store.url}: {wanted.sha256!r} is not a hash; pack the data again")
        with explained(self._directory):
            self._make_folders()
            with Lock(self._lock_of(wanted.sha256)) as lock:
                os.utime(lock.descriptor)
                if store.is_directory:
                    return _checked_in_place(store, key, wanted, lock)
                entry = self._directory / wanted.sha256
                if not _has_hash(entry, wanted, lock):
                    self._fetch(store, key, wanted)
                    _remember(entry, lock)
                return entry

    def hold(self, hashes: Iterable[str]) -> Lock:
        """Files with these hashes stay, once they are there, until the lock is closed or this process ends."""
        with explained(self._directory):
            self._make_folders()
            with Lock(self._directory / "lock"):  # so that nobody finds it unlocked, and takes it for a dead one's
                path = self._uses / uuid.uuid4().hex
                hold = Lock(path)
                path.write_text("\n".join(hashes))
                return hold

    def _make_folders(self) -> None:
        for folder in (self._fetching, self._uses):
            folder.mkdir(parents=True, exist_ok=True)

    def _lock_of(self, sha256: str) -> Path:
        return self._directory / f"{sha256}.lock"

    def _fetch(self, store: Store, key: str, wanted: PackFile) -> None:
        self._make_room(wanted.bytes)
        folder = self._fetching / wanted.sha256
        try:
            for _ in range(_TRIES):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                arrived = folder / "file"
                store.get_file(key, arrived)
                if arrived.stat().st_size == wanted.bytes and sha256_of(arrived) == wanted.sha256:
                    arrived.replace(self._directory / wanted.sha256)
                    return
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        raise _damaged(store, key, f" (fetched {_TRIES} times)")

    def _make_room(self, needed_bytes: int) -> None:
        with Lock(self._directory / "lock"):
            self._remove_leftovers()
            entries = {entry.name: entry.stat().st_size for entry in self._entries()}
            surplus = sum(entries.values()) + needed_bytes - self._limit(sum(entries.values()))
            if surplus <= 0:
                return
            kept = self._held()
            for sha256 in sorted(entries.keys() - kept, key=self._last_use):
                if surplus > 0 and self._remove(sha256):
                    surplus -= entries[sha256]

    def _entries(self) -> Iterator[Path]:
        return (path for path in self._directory.iterdir() if _SHA256.fullmatch(path.name))

    def _limit(self, cached_bytes: int) -> int:
        if self._limit_bytes is not None:
            return self._limit_bytes
        free_bytes = shutil.disk_usage(self._directory).free
        return min(_LIMIT_BYTES, (free_bytes + cached_bytes) // _PART_OF_DISK)

    def _held(self) -> set[str]:
        """What live processes need. The lists of dead ones are removed."""
        held: set[str] = set()
        for path in self._uses.iterdir():
            try:
                with Lock(path, wait=False):
                    path.unlink()
            except BlockingIOError:
                held.update(path.read_text().split())
        return held

    def _last_use(self, sha256: str) -> float:
        with suppress(FileNotFoundError):
            return self._lock_of(sha256).stat().st_mtime
        return 0.0

    def _remove(self, sha256: str) -> bool:
        """False: somebody is about to use it."""
        try:
            with Lock(self._lock_of(sha256), wait=False):
                (self._directory / sha256).unlink(missing_ok=True)
                self._lock_of(sha256).unlink()
                return True
        except BlockingIOError:
            return False

    def _remove_leftovers(self) -> None:
        """What killed processes were fetching; what is known of files elsewhere that nobody used for a month."""
        for folder in self._fetching.iterdir():
            with suppress(BlockingIOError), Lock(self._lock_of(folder.name), wait=False):
                shutil.rmtree(folder, ignore_errors=True)
        for path in self._directory.glob("*.lock"):
            if time.time() - self._last_use(path.stem) > _FORGOTTEN_SECONDS and not path.with_suffix("").exists():
                self._remove(path.stem)


def _checked_in_place(store: Store, key: str, wanted: PackFile, lock: Lock) -> Path:
    if store.entry(key) is None:
        raise store.not_found(key)
    path = Path(store.url) / key
    if not _has_hash(path, wanted, lock):
        raise _damaged(store, key)
    return path


def _has_hash(path: Path, wanted: PackFile, lock: Lock) -> bool:
    """Whether the file is what it should be; it is read only if it was not known before, or changed since."""
    try:
        if path.stat().st_size != wanted.bytes:
            return False
        if _fingerprint(path) in _remembered(lock):
            return True
        if sha256_of(path) != wanted.sha256:
            return False
    except FileNotFoundError:
        return False
    _remember(path, lock)
    return True


def _fingerprint(path: Path) -> str:
    status = path.stat()
    return f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns}"


def _remembered(lock: Lock) -> list[str]:
    return os.pread(lock.descriptor, 1 << 16, 0).decode(errors="replace").splitlines()


def _remember(path: Path, lock: Lock) -> None:
    lines = [*_remembered(lock), _fingerprint(path)][-_REMEMBERED:]
    os.ftruncate(lock.descriptor, 0)
    os.pwrite(lock.descriptor, "".join(f"{line}\n" for line in lines).encode(), 0)


def _damaged(store: Store, key: str, tried: str = "") -> PacktrainError:
    if not key.startswith("packs/"):
        return PacktrainError(f"{key} in {store.url} does not have the hash it should{tried}; start its job anew")
    _, pack, name = key.split("/", 2)
    return PacktrainError(
        f"{name} of pack {pack} in {store.url} does not have the hash it should{tried};"
        " delete the pack's manifest.json and pack again"
    )


class Prefetch:
    """Fetches numbered shards in the order of their use, on threads, and stays `ahead` of what was used.

    What cannot be fetched is left alone: who needs it will try again, and be told why.
    """

    def __init__(self, fetch: Callable[[int], object], order: Sequence[int], ahead: int = 8, threads: int = 4) -> None:
        self._fetch, self._left = fetch, iter(dict.fromkeys(order))
        self._room = threading.Semaphore(ahead)
        self._lock = threading.Lock()
        self._used: set[int] = set()
        self._waiting: set[int] = set()
        self._closed = False
        wanted = min(threads, ahead, len(order))
        self._threads = [threading.Thread(target=self._work, name="prefetch", daemon=True) for _ in range(wanted)]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while True:
            self._room.acquire()
            number = self._next()
            if number is None:
                self._room.release()  # for the other threads, which end too
                return
            with suppress(PacktrainError):
                self._fetch(number)

    def _next(self) -> int | None:
        """The next shard that nobody used yet."""
        with self._lock:
            number = None if self._closed else next((one for one in self._left if one not in self._used), None)
            if number is not None:
                self._waiting.add(number)
            return number

    def used(self, number: int) -> None:
        with self._lock:
            self._used.add(number)
            if number in self._waiting:
                self._waiting.remove(number)
                self._room.release()

    def close(self) -> None:
        """Fetches what was begun to its end and nothing else."""
        with self._lock:
            self._closed = True
        self._room.release()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
