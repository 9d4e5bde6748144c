"""A store in a directory: each object is a file, and no symbolic link in it is followed.

A file appears whole: it is written under a temporary name in the same directory, synced, then renamed.
"""

from __future__ import annotations

import builtins
import errno
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from packtrain.store.base import RECORD_BYTES, TEMPORARY, Entry, Store, checked_key, checked_prefix, is_key
from packtrain.store.errors import StoreError, explained

Published = TypeVar("Published")

CHUNK_BYTES = 8 << 20
_ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS}  # how file systems without hard links fail
_FOLDER_TRIES = 100  # another process may delete the folder between creating it and writing into it
_ABANDONED_SECONDS = 24 * 3600.0


class DirectoryStore(Store):
    is_directory = True

    def __init__(self, root: Path) -> None:
        self.url = str(root.absolute())
        self._root = Path(os.path.realpath(root))

    def put(self, key: str, data: bytes) -> None:
        self._publish(key, lambda: [data], replace)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._publish(key, lambda: [data], self._claim)

    def put_file(self, key: str, path: Path) -> None:
        with explained(path):
            path.open("rb").close()
        self._publish(key, lambda: _chunks_of(path), replace)

    def find(self, key: str, limit: int = RECORD_BYTES) -> bytes | None:
        with self._explained(key):
            try:
                source = self._readable(key)
                self.check_size(key, source.stat().st_size, limit)
                return source.read_bytes()
            except _ABSENT:
                return None

    def get_file(self, key: str, path: Path, limit: int | None = None) -> None:
        with self._explained(key):
            try:
                source = self._readable(key)
                self.check_size(key, source.stat().st_size, limit)
            except _ABSENT:
                raise self.not_found(key) from None
            with explained(path):
                replace(stage(path.parent, _chunks_of(source)), path)

    def list(self, prefix: str = "", after: str | None = None) -> builtins.list[Entry]:
        prefix = checked_prefix(prefix)
        with self._explained(prefix):
            return sorted(self._walk(prefix, after or ""), key=lambda entry: entry.key)

    def folders(self, prefix: str) -> builtins.list[str]:
        prefix = checked_prefix(prefix)
        with self._explained(prefix):
            below = [name for name, entry in self._scan(prefix) if entry.is_dir(follow_symlinks=False)]
            return sorted(Path(folder).name for folder in below if next(self._walk(folder, ""), None) is not None)

    def entry(self, key: str) -> Entry | None:
        with self._explained(key):
            try:
                return _entry(key, self._readable(key).stat())
            except _ABSENT:
                return None

    def delete(self, key: str) -> None:
        with self._explained(key), suppress(*_ABSENT):
            path = self._readable(key)
            path.unlink()
            sync(path.parent)
            # Remove empty folders, too: a bucket has none, and an object may need the name.
            folder = path.parent
            with suppress(OSError):
                while folder != self._root:
                    folder.rmdir()
                    folder = folder.parent

    def _publish(
        self, key: str, chunks: Callable[[], Iterable[bytes]], name: Callable[[Path, Path], Published]
    ) -> Published:
        """Write a new file beside its target, then have `name` give it the target's name."""
        target = self._root / checked_key(key)
        with self._explained(key):
            for tries_left in reversed(range(_FOLDER_TRIES)):
                try:
                    make_folder(target.parent)
                    if os.path.realpath(target.parent) != str(target.parent):
                        raise StoreError(f"{target.parent}: leads through a symbolic link, which stores do not follow")
                    staged = stage(target.parent, chunks())
                    break
                except FileNotFoundError:
                    # Another process deleted the last object of the folder, and so the folder, meanwhile.
                    if not tries_left:
                        raise
            return name(staged, target)

    def _claim(self, staged: Path, target: Path) -> bool:
        """Give a staged file its name if nothing has that name yet; False if something has."""
        try:
            # A hard link, unlike a rename, fails if the name is taken.
            os.link(staged, target)
        except FileExistsError:
            if target.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)) from None
            # Over NFS the answer to a successful link can get lost and the repeated request then fails:
            # the second name of our own file proves that we created it.
            if staged.stat().st_nlink < 2:
                return False
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise StoreError(
                    f"{self.url}: this file system has no hard links, which creating objects atomically needs; "
                    "use another directory or a bucket"
                ) from error
            raise
        finally:
            staged.unlink(missing_ok=True)
        sync(target.parent)
        return True

    def _readable(self, key: str) -> Path:
        """Return the object's file; raise `FileNotFoundError` if there is none, or only behind a link."""
        path = self._root / checked_key(key)
        if os.path.realpath(path) != str(path) or not path.is_file():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return path

    def _scan(self, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        folder = self._root / prefix
        if os.path.realpath(folder) != str(folder):
            return
        with suppress(*_ABSENT), os.scandir(folder) as entries:
            for entry in entries:
                name = f"{prefix}/{entry.name}" if prefix else entry.name
                if is_key(name):
                    yield name, entry
                elif entry.name.startswith(TEMPORARY):
                    _remove_if_abandoned(entry)

    def _walk(self, prefix: str, after: str) -> Iterator[Entry]:
        for name, entry in self._scan(prefix):
            if entry.is_dir(follow_symlinks=False):
                # Skip folders whose keys all sort before `after`.
                if name + "/" >= after or after.startswith(name + "/"):
                    yield from self._walk(name, after)
            elif name > after and entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):
                    yield _entry(name, entry.stat(follow_symlinks=False))

    @contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        with explained(Path(self.url) / key):
            yield


def _entry(key: str, status: os.stat_result) -> Entry:
    return Entry(key, status.st_size, datetime.fromtimestamp(status.st_mtime, UTC))


def _remove_if_abandoned(entry: os.DirEntry[str]) -> None:
    """Remove a temporary file that a killed writer left a day ago or earlier."""
    with suppress(OSError):
        if time.time() - entry.stat(follow_symlinks=False).st_mtime > _ABANDONED_SECONDS:
            Path(entry.path).unlink()


def _chunks_of(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


# Files that appear whole and survive a power cut.


def stage(folder: Path, chunks: Iterable[bytes]) -> Path:
    """Write a new synced file in `folder` under a temporary name, which the caller renames or removes."""
    path = folder / f"{TEMPORARY}{uuid.uuid4().hex}"
    try:
        # Not tempfile: its mode 0600 would keep others on a shared mount from reading.
        with path.open("xb", buffering=0) as file:
            for chunk in chunks:
                view = memoryview(chunk)
                while view:
                    view = view[file.write(view) :]
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


def replace(staged: Path, target: Path) -> None:
    """Rename a staged file to its target, durably."""
    try:
        staged.replace(target)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    sync(target.parent)


def make_folder(folder: Path) -> None:
    """Make a directory and the missing ones above it, durably."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with suppress(FileExistsError):
        folder.mkdir()
    sync(folder.parent)


def sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a directory; there is nothing more to do about that.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
