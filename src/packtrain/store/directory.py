"""A store in a directory: each object is a file, and no symbolic link in it is followed."""

from __future__ import annotations

import builtins
import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from packtrain.store.base import TEMPORARY, Entry, Store, absent, checked_key, checked_prefix, checked_range, is_key
from packtrain.store.errors import StoreError
from packtrain.store.staging import chunks_of, claim, explained, make_folder, replace, stage, sync

Published = TypeVar("Published")
_ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS}
_FOLDER_TRIES = 100
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
        self._publish(key, lambda: chunks_of(path), replace)

    def find(self, key: str) -> bytes | None:
        with self._explained(key):
            try:
                return self._readable(key).read_bytes()
            except _ABSENT:
                return None

    def get_range(self, key: str, start: int, length: int) -> bytes:
        checked_range(start, length)
        with self._explained(key):
            try:
                with self._readable(key).open("rb", buffering=0) as file:
                    return b"".join(_range_of(file.fileno(), start, length))
            except _ABSENT:
                raise absent(self, key) from None

    def get_file(self, key: str, path: Path) -> None:
        with self._explained(key):
            try:
                source = self._readable(key)
            except _ABSENT:
                raise absent(self, key) from None
            with explained(path):
                replace(stage(path.parent, chunks_of(source)), path)

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
            self._remove_if_empty(path.parent)

    def _publish(
        self, key: str, chunks: Callable[[], Iterable[bytes]], name: Callable[[Path, Path], Published]
    ) -> Published:
        target = self._root / checked_key(key)
        with self._explained(key):
            for tries_left in reversed(range(_FOLDER_TRIES)):
                try:
                    make_folder(target.parent)
                    self._refuse_links(target.parent)
                    staged = stage(target.parent, chunks())
                    break
                except FileNotFoundError:
                    # Somebody deleted the last object of the folder, and so the folder, meanwhile.
                    if not tries_left:
                        raise
            return name(staged, target)

    def _claim(self, staged: Path, target: Path) -> bool:
        try:
            won = claim(staged, target)
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise StoreError(
                    f"{self.url}: this file system has no hard links, which put-if-absent needs: "
                    "use another directory, or a bucket"
                ) from error
            raise
        if not won and target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        return won

    def _readable(self, key: str) -> Path:
        """The file of an object; `FileNotFoundError` where there is none, or only behind a link."""
        path = self._root / checked_key(key)
        if os.path.realpath(path) != str(path) or not path.is_file():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return path

    def _remove_if_empty(self, folder: Path) -> None:
        with suppress(OSError):
            while folder != self._root:
                folder.rmdir()
                folder = folder.parent

    def _refuse_links(self, folder: Path) -> None:
        if os.path.realpath(folder) != str(folder):
            raise StoreError(f"{folder}: leads through a symbolic link, which a store does not follow")

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
    """A writer that was killed leaves its file behind; who meets it a day later takes it away."""
    with suppress(OSError):
        if time.time() - entry.stat(follow_symlinks=False).st_mtime > _ABANDONED_SECONDS:
            Path(entry.path).unlink()


def _range_of(descriptor: int, start: int, length: int) -> Iterator[bytes]:
    while length and (piece := os.pread(descriptor, length, start)):
        yield piece
        start, length = start + len(piece), length - len(piece)
