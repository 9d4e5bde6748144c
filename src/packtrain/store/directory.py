"""A store in a directory: each object is a file, and no symbolic link in it is followed.

A file appears whole: it is written under a temporary name in the same directory, synced, then renamed.

A directory may be a mount, which comes and goes. Every operation opens the store's directory anew, compares its id
(`.packtrain-store`) with the one that was there before, and reaches everything else from that descriptor. So nothing
can be written below an empty mount point, and nobody can put a link in the way between a check and its use. The
descriptor is not kept: it would keep the mount busy, and would not see the store again after it was mounted anew.
"""

from __future__ import annotations

import builtins
import errno
import os
import re
import shlex
import stat
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from packtrain.store.base import (
    GITIGNORE,
    IDENTITY,
    RECORD_BYTES,
    TEMPORARY,
    Entry,
    Store,
    checked_key,
    checked_prefix,
    is_key,
)
from packtrain.store.errors import StoreAway, StoreError, explained
from packtrain.store.mounts import missing_mount, remember_mount

Published = TypeVar("Published")

CHUNK_BYTES = 8 << 20
_ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_LINK = {errno.ELOOP, errno.EMLINK}  # how systems refuse to open a symbolic link
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS}  # how file systems without hard links fail
# How a mount fails that is gone, or whose server is.
_AWAY = {
    errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ENOTCONN, errno.EIO, errno.ENODEV, errno.ENXIO, errno.EHOSTDOWN,
    errno.ETIMEDOUT,
}  # fmt: skip
_FOLDER_TRIES = 100  # another process may delete the folder between creating it and writing into it
_ABANDONED_SECONDS = 24 * 3600.0
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC  # without waiting for the writer of a pipe
_ID = re.compile(r"[0-9a-f]{32}")


class DirectoryStore(Store):
    """`identity` is the id of the only store to accept; without one, the first that is seen is kept to."""

    is_directory = True

    def __init__(self, root: Path, identity: str | None = None) -> None:
        self.url = str(root.absolute())
        self.identity = identity
        self._fingerprint: tuple[int, ...] = ()  # the file with the id, as it was last read

    def create(self) -> None:
        """Make the directory a store, unless it is one; never below a mount point whose mount is missing."""
        with self._explained(""):
            place = Path(self.url)
            if not (place / IDENTITY).exists() and (missing := missing_mount(place)) is not None:
                point, named_by = missing
                fault = f"{point} is not mounted, but {named_by} says it should be"
                raise StoreError(f"{place}: {fault}; mount it, or use another store")
            make_folder(place)
            with opened_folder(place) as root:
                with os.scandir(root) as entries:
                    is_empty = not any(entries)  # a directory with other files may be a repository
                if is_empty:
                    self._claim(root, stage(root, [b"*\n"]), GITIGNORE)
                if _read_identity(root) is None:
                    self._claim(root, stage(root, [f"{uuid.uuid4().hex}\n".encode()]), IDENTITY)
            remember_mount(place)

    def put(self, key: str, data: bytes) -> None:
        self._publish(key, lambda: [data], replace)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._publish(key, lambda: [data], self._claim)

    def put_file(self, key: str, path: Path) -> None:
        with explained(path):
            path.open("rb").close()
        self._publish(key, lambda: _chunks_of(path), replace)

    def copy(self, key: str, target: str) -> None:
        """Give the file a second name: no object is ever changed in place, and its time stays the same."""
        source, _, name = checked_key(key).rpartition("/")
        above, _, last = checked_key(target).rpartition("/")
        with self._explained(target):
            try:
                with self._object(key), self._folder(source) as original, self._folder(above, make=True) as folder:
                    staged = f"{TEMPORARY}{uuid.uuid4().hex}"
                    os.link(name, staged, src_dir_fd=original, dst_dir_fd=folder, follow_symlinks=False)
                    replace(folder, staged, last)
            except _ABSENT:
                raise self.not_found(key) from None

    def find(self, key: str, limit: int = RECORD_BYTES) -> bytes | None:
        data = bytearray()
        with self._explained(key):
            try:
                with self._object(key) as file:
                    self.check_size(key, os.fstat(file).st_size, limit)
                    for chunk in _chunks(file):
                        data += chunk
                        self.check_size(key, len(data), limit)  # not an object of ours, if it grew
            except _ABSENT:
                return None
        return bytes(data)

    def get_file(self, key: str, path: Path, limit: int | None = None) -> None:
        with self._explained(key):
            try:
                with self._object(key) as file, explained(path), opened_folder(path.parent) as folder:
                    self.check_size(key, os.fstat(file).st_size, limit)
                    replace(folder, stage(folder, _chunks(file)), path.name)
            except _ABSENT:
                raise self.not_found(key) from None

    def list(self, prefix: str = "", after: str | None = None) -> builtins.list[Entry]:
        prefix = checked_prefix(prefix)
        with self._explained(prefix), suppress(*_ABSENT), self._folder(prefix) as folder:
            return sorted(_walk(folder, prefix, after or ""), key=lambda entry: entry.key)
        return []

    def folders(self, prefix: str) -> builtins.list[str]:
        prefix = checked_prefix(prefix)
        with self._explained(prefix), suppress(*_ABSENT), self._folder(prefix) as folder:
            below = [entry.name for _, entry in _scan(folder, prefix) if entry.is_dir(follow_symlinks=False)]
            return sorted(name for name in below if _has_objects(folder, name))
        return []

    def stamps(self, prefix: str, below: Sequence[str] = ()) -> dict[str, tuple[int, ...]] | None:
        prefix = checked_prefix(prefix)
        with self._explained(prefix), suppress(*_ABSENT), self._folder(prefix) as folder:
            names = [entry.name for _, entry in _scan(folder, prefix) if entry.is_dir(follow_symlinks=False)]
            paths = {name: (name, *(f"{name}/{inner}" for inner in below)) for name in names}
            return {name: tuple(_changed(folder, path) for path in paths[name]) for name in names}
        return {}

    def entry(self, key: str) -> Entry | None:
        above, _, name = checked_key(key).rpartition("/")
        with self._explained(key), suppress(*_ABSENT), self._folder(above) as folder:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            return _entry(key, status) if stat.S_ISREG(status.st_mode) else None
        return None

    def delete(self, key: str) -> None:
        above, _, name = checked_key(key).rpartition("/")
        with self._explained(key), suppress(*_ABSENT):
            with self._folder(above) as folder:
                if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                    return
                os.unlink(name, dir_fd=folder)
                sync(folder)
            # Remove empty folders, too: a bucket has none, and an object may need the name.
            with suppress(OSError):
                while above:
                    above, _, name = above.rpartition("/")
                    with self._folder(above) as folder:
                        os.rmdir(name, dir_fd=folder)

    def remove_unfinished(self, prefix: str, is_dead: Callable[[str], bool] = lambda _: True) -> None:
        prefix = checked_prefix(prefix)
        with self._explained(prefix), suppress(*_ABSENT), self._folder(prefix) as folder:
            _remove_unfinished(folder, prefix, is_dead)

    def _publish(
        self, key: str, chunks: Callable[[], Iterable[bytes]], give_name: Callable[[int, str, str], Published]
    ) -> Published:
        """Write a new file beside its target, then have `give_name` give it the target's name."""
        above, _, name = checked_key(key).rpartition("/")
        with self._explained(key):
            for tries_left in reversed(range(_FOLDER_TRIES)):
                try:
                    with self._folder(above, make=True) as folder:
                        return give_name(folder, stage(folder, chunks()), name)
                except FileNotFoundError:
                    # Another process deleted the last object of the folder, and so the folder, meanwhile; or the
                    # temporary file, because it considered this writer dead.
                    if not tries_left:
                        raise
        raise AssertionError

    def _claim(self, folder: int, staged: str, target: str) -> bool:
        """Give a staged file its name if nothing has that name yet; False if something has."""
        try:
            # A hard link, unlike a rename, fails if the name is taken.
            os.link(staged, target, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            if stat.S_ISDIR(os.stat(target, dir_fd=folder, follow_symlinks=False).st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)) from None
            # Over NFS the answer to a successful link can get lost and the repeated request then fails:
            # the second name of our own file proves that we created it.
            if os.stat(staged, dir_fd=folder, follow_symlinks=False).st_nlink < 2:
                return False
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise StoreError(
                    f"{self.url}: this file system has no hard links, which creating objects atomically needs; "
                    "use another directory or a bucket"
                ) from error
            raise
        finally:
            _unlink(folder, staged)
        sync(folder)
        return True

    @contextmanager
    def _object(self, key: str) -> Iterator[int]:
        """Open the object's file; raise `FileNotFoundError` if there is none, or only a link."""
        above, _, name = checked_key(key).rpartition("/")
        with self._folder(above) as folder:
            try:
                file = os.open(name, _FILE, dir_fd=folder)
            except OSError as error:
                raise _absent() if error.errno in _LINK else error from None
        with _closing(file):
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise _absent()
            yield file

    @contextmanager
    def _folder(self, name: str, make: bool = False) -> Iterator[int]:
        """Open the folder of that name, from the store's own directory on; the empty name is that directory."""
        folder = self._open_root()
        try:
            for step in name.split("/") if name else ():
                try:
                    below = _open_below(folder, step)
                except FileNotFoundError:
                    if not make:
                        raise
                    with suppress(FileExistsError):
                        os.mkdir(step, dir_fd=folder)
                    sync(folder)
                    below = _open_below(folder, step)
                except NotADirectoryError:
                    if make and stat.S_ISLNK(os.stat(step, dir_fd=folder, follow_symlinks=False).st_mode):
                        raise StoreError(
                            f"{self.url}/{name}: leads through a symbolic link, which stores do not follow"
                        ) from None
                    raise
                os.close(folder)
                folder = below
            yield folder
        finally:
            os.close(folder)

    def _open_root(self) -> int:
        """Open the store's directory, if it is still the one that it was."""
        try:
            root = os.open(self.url, _FOLDER)
        except OSError as error:
            if error.errno not in _AWAY:
                raise
            raise self._away("no store here" if self.identity is None else "the store is not there") from error
        try:
            self._identify(root)
        except BaseException:
            os.close(root)
            raise
        return root

    def _identify(self, root: int) -> None:
        # Not the directory's own device and inode: both may be the same after another file system was mounted there.
        with self._explained(IDENTITY):
            fingerprint = _fingerprint(root)
            if fingerprint and fingerprint == self._fingerprint:
                return
            identity = _read_identity(root) if fingerprint else None
            if identity is None:
                # What was copied from a bucket, or with `cp store/*`, has objects but no id; an empty mount point has
                # neither.
                is_copy = "runs" in os.listdir(root)
                raise self._away(f"no store here: the directory has no {IDENTITY}", is_copy)
        if self.identity not in (None, identity):
            raise self._away("another store is here")
        self.identity, self._fingerprint = identity, fingerprint

    def _away(self, text: str, is_copy: bool = False) -> StoreAway:
        if is_copy and self.identity is None:
            advice = f"if it is a copy of a store, run `packtrain doctor --store {shlex.quote(self.url)}` first"
        elif self.identity is None:
            advice = "check the path and its mount; `packtrain run` and `packtrain pack` create a store"
        else:
            advice = "check its mount"
        return StoreAway(f"{self.url}: {text}; {advice}", was_there=self.identity is not None)

    def _explained(self, key: str) -> AbstractContextManager[None]:
        return explained(f"{self.url}/{key}" if key else self.url)


def _fingerprint(root: int) -> tuple[int, ...]:
    """Return what changes when the file with the id is another one; empty if there is none."""
    try:
        status = os.stat(IDENTITY, dir_fd=root, follow_symlinks=False)
    except FileNotFoundError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _read_identity(root: int) -> str | None:
    try:
        file = os.open(IDENTITY, _FILE, dir_fd=root)
    except FileNotFoundError:
        return None
    with _closing(file):
        text = os.read(file, 100).decode(errors="replace").strip()
    return text if _ID.fullmatch(text) else None


def _open_below(folder: int, name: str) -> int:
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        if error.errno in _LINK:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
        raise


def _absent() -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def _scan(folder: int, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the key and the entry of everything in a folder that can be an object, or have objects below it."""
    with os.scandir(folder) as entries:
        for entry in entries:
            name = f"{prefix}/{entry.name}" if prefix else entry.name
            if is_key(name):
                yield name, entry
            elif entry.name.startswith(TEMPORARY):
                with suppress(OSError):  # a killed writer may have left it, a day ago or earlier
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > _ABANDONED_SECONDS:
                        os.unlink(entry.name, dir_fd=folder)


def _walk(folder: int, prefix: str, after: str) -> Generator[Entry]:
    for name, entry in _scan(folder, prefix):
        if entry.is_dir(follow_symlinks=False):
            # Skip folders whose keys all sort before `after`.
            if name + "/" >= after or after.startswith(name + "/"):
                with suppress(*_ABSENT), _closing(_open_below(folder, entry.name)) as below:
                    yield from _walk(below, name, after)
        elif name > after and entry.is_file(follow_symlinks=False):
            with suppress(FileNotFoundError):
                yield _entry(name, entry.stat(follow_symlinks=False))


def _changed(folder: int, path: str) -> int:
    """Return when names in a folder last changed, as they do when a file is replaced; 0 without a folder."""
    try:
        return os.stat(path, dir_fd=folder, follow_symlinks=False).st_mtime_ns
    except _ABSENT:
        return 0


def _has_objects(folder: int, name: str) -> bool:
    with suppress(*_ABSENT), _closing(_open_below(folder, name)) as below, closing(_walk(below, name, "")) as entries:
        return next(entries, None) is not None
    return False


def _entry(key: str, status: os.stat_result) -> Entry:
    return Entry(key, status.st_size, datetime.fromtimestamp(status.st_mtime, UTC))


def _remove_unfinished(folder: int, prefix: str, is_dead: Callable[[str], bool]) -> None:
    with os.scandir(folder) as entries:
        listed = list(entries)
    for entry in listed:
        name = f"{prefix}/{entry.name}" if prefix else entry.name
        if entry.is_dir(follow_symlinks=False):
            with suppress(*_ABSENT), _closing(_open_below(folder, entry.name)) as below:
                _remove_unfinished(below, name, is_dead)
            if is_dead(f"{name}/"):
                with suppress(OSError):  # it has objects
                    os.rmdir(entry.name, dir_fd=folder)
        elif entry.name.startswith(TEMPORARY) and is_dead(name):
            _unlink(folder, entry.name)


def _chunks(file: int) -> Iterator[bytes]:
    while chunk := os.read(file, CHUNK_BYTES):
        yield chunk


def _chunks_of(path: Path) -> Iterator[bytes]:
    with _closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as file:
        yield from _chunks(file)


# Files that appear whole and survive a power cut.


def stage(folder: int, chunks: Iterable[bytes]) -> str:
    """Write a new synced file in `folder` under a temporary name, which the caller renames or removes."""
    name = f"{TEMPORARY}{uuid.uuid4().hex}"
    try:
        # Not tempfile: its mode 0600 would keep others on a shared mount from reading.
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder)
        with _closing(file):
            for chunk in chunks:
                view = memoryview(chunk)
                while view:
                    view = view[os.write(file, view) :]
            os.fsync(file)
    except BaseException:
        _unlink(folder, name)
        raise
    return name


def replace(folder: int, staged: str, target: str) -> None:
    """Rename a staged file to its target, durably."""
    try:
        os.rename(staged, target, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        _unlink(folder, staged)
        raise
    sync(folder)


def make_folder(folder: Path) -> None:
    """Make a directory and the missing ones above it, durably."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with suppress(FileExistsError):
        folder.mkdir()
    with opened_folder(folder.parent) as above:
        sync(above)


@contextmanager
def opened_folder(folder: Path) -> Iterator[int]:
    with _closing(os.open(folder, _FOLDER)) as opened:
        yield opened


def sync(folder: int) -> None:
    try:
        os.fsync(folder)
    except OSError as error:
        # Some network file systems cannot sync a directory; there is nothing more to do about that.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def _unlink(folder: int, name: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


@contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)
