"""An exported model goes where it is needed: a folder, a board that ssh reaches, or a bucket.

    look      what an earlier try has left there; refuse a place that holds anything but a model
    send      files that are missing, from where they stopped; model.json last
    commit    compare all digests there, then show the files as one folder

Files arrive beside their folder under a hidden name, and a rename shows them, so nobody sees half a model. A bucket
knows no rename: there, model.json is deleted first and put last.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packtrain.backoff import Backoff
from packtrain.errors import Mistake, PacktrainError, printable, quoted
from packtrain.export.model import MANIFEST, MAX_MANIFEST_BYTES, decode_manifest, read_manifest
from packtrain.files import sha256_of
from packtrain.run.checkpoint import StoredFile
from packtrain.store import DamagedObject, ObjectNotFound, Store, open_store
from packtrain.system import cache_directory, expanded
from packtrain.units import counted, show_bytes

CHUNK_BYTES = 1 << 20
SPARE_BYTES = 4 << 20  # a disk that a model fills to the last byte is of no use
AGAIN = "then run the same command again"
_TIMES_ALTERED = 2
_BOARD = re.compile(r"((?:[^@/:\s]+@)?(?:\[[^]/\s]+\]|[^]/:@\s[]+)):(.*)", re.DOTALL)

Track = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Shows a bar for something of so many bytes; the block calls what it gets with the bytes that have gone."""


class ConnectionLost(PacktrainError):
    """The same call may succeed in a moment."""


@dataclass(frozen=True)
class Staged:
    """A file that an earlier try has left at the destination, maybe only its beginning."""

    bytes: int
    sha256: str


class Destination(ABC):
    """A place for one model."""

    where: str

    @abstractmethod
    def look(self, files: Sequence[StoredFile]) -> Mapping[str, Staged] | None:
        """Make the place ready, and return what is staged there; None if the whole model is already there."""

    @abstractmethod
    def send(self, file: StoredFile, path: Path, start: int, moved: Callable[[int], None]) -> None:
        """Stage a file, or what follows after its first `start` bytes."""

    @abstractmethod
    def commit(self, files: Sequence[StoredFile]) -> list[str]:
        """Show the staged files as the model; if any differ from what was sent, only return their names."""

    def check_replaced(self, data: bytes | None, names: Collection[str]) -> None:
        """Refuse a folder that is not a model and nothing else; `data` is its manifest."""
        if data is None:
            raise Mistake(f"{self.where}: has files but is not a model; choose another directory")
        try:
            model_files = {MANIFEST, *(file.name for file in decode_manifest(data, self.where).files)}
        except Mistake:
            raise Mistake(f"{self.where}: its {MANIFEST} is not that of a model; choose another directory") from None
        if foreign := sorted(set(names) - model_files):
            and_more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
            fault = f"{printable(foreign[0], 80)}{and_more} there does not belong to the model that would be replaced"
            raise Mistake(f"{self.where}: {fault}; move it away, or choose another directory")


@contextmanager
def untracked(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:  # noqa: ARG001
    yield lambda _: None


def deliver(
    folder: Path,
    where: str,
    say: Callable[[str], None],
    track: Track = untracked,
    pauses: Backoff | None = None,
) -> int:
    """Bring the model in `folder` to `where`, and return how many bytes had to be sent."""
    manifest_file = folder / MANIFEST
    model_files = read_manifest(folder).files
    data = manifest_file.read_bytes()
    files = [*model_files, StoredFile(MANIFEST, len(data), hashlib.sha256(data).hexdigest())]
    destination = destination_of(where)
    pauses = pauses or Backoff(1.0, 15.0, limit_seconds=120.0)
    delivery = _Delivery(folder, destination, files, say, track)
    while True:
        try:
            delivery.run()
        except ConnectionLost as lost:
            say(str(lost))
            if delivery.is_ahead():
                pauses.reset()
            if not pauses.wait():
                raise PacktrainError(f"{lost}; run the same command again to continue") from None
            continue
        return delivery.sent


@dataclass
class _Delivery:
    """One call of `deliver`, however many connections it takes."""

    folder: Path
    destination: Destination
    files: Sequence[StoredFile]
    say: Callable[[str], None]
    track: Track
    sent: int = 0
    arrived: int = 0
    arrived_before: int = 0

    def is_ahead(self) -> bool:
        """True if more has arrived than at the last call; what has been sent may be lost on its way."""
        before, self.arrived_before = self.arrived_before, self.arrived
        return self.arrived > before

    def run(self) -> None:
        where = self.destination.where
        for _ in range(_TIMES_ALTERED):
            staged = self.destination.look(self.files)
            if staged is None:
                self.say(f"the model is complete at {where}")
                return
            self._send(staged)
            altered = self.destination.commit(self.files)
            if not altered:
                return
            self.say(f"{where}: {altered[0]} is not as it was sent; sending it again")
        fault = f"{where}: {altered[0]} arrives altered, {_TIMES_ALTERED} times"
        raise PacktrainError(f"{fault}; check the disk and the memory there, {AGAIN}")

    def _send(self, staged: Mapping[str, Staged]) -> None:
        starts = {file.name: _start(self.folder / file.name, file, staged.get(file.name)) for file in self.files}
        missing = [file for file in self.files if starts[file.name] is None or starts[file.name] != file.bytes]
        total = sum(file.bytes - (starts[file.name] or 0) for file in missing)
        if not missing:
            return
        self.arrived = sum(start or 0 for start in starts.values())
        already = f"; {show_bytes(self.arrived)} are there" if self.arrived else ""
        amount = f"{counted(len(missing), 'file')}, {show_bytes(total)}"
        self.say(f"sending {amount} to {self.destination.where}{already}")
        with self.track("model", total) as advance:

            def moved(count: int) -> None:
                self.sent += count
                advance(count)

            for file in missing:
                self.destination.send(file, self.folder / file.name, starts[file.name] or 0, moved)


def _start(path: Path, file: StoredFile, staged: Staged | None) -> int | None:
    """Return how many bytes of the file need not be sent; None if there is no such file there."""
    if staged is None or staged.bytes > file.bytes:
        return None
    if staged.bytes == file.bytes:
        return file.bytes if staged.sha256 == file.sha256 else None
    # The beginning of this file, or of one that another model had under the same name?
    with path.open("rb") as source:
        digest, remaining = hashlib.sha256(), staged.bytes
        while remaining and (chunk := source.read(min(remaining, CHUNK_BYTES))):
            digest.update(chunk)
            remaining -= len(chunk)
    return staged.bytes if digest.hexdigest() == staged.sha256 else None


def destination_of(where: str) -> Destination:
    """Return the place that `user@board:folder`, a URL or a path names."""
    if not where.strip() or not where.isprintable():
        raise Mistake(f"--to {quoted(where)}: name a directory, user@board:directory or s3://bucket/prefix")
    scheme, separator, _ = where.partition("://")
    if separator and scheme != "file":
        return BucketDestination(open_store(where))
    if not separator and (named := _BOARD.fullmatch(where)):
        from packtrain.export.board import BoardDestination

        return BoardDestination(named[1], named[2])
    return FolderDestination(Path(unquote(urlsplit(where).path) if separator else where))


def staging_name(name: str) -> str:
    return f".{name}.delivery"


def full_disk(where: str, needed: int, free: int | None = None) -> PacktrainError:
    """Return the error for a disk on which the model does not fit."""
    room = "" if free is None else f": {show_bytes(needed)} are needed, and {show_bytes(max(free, 0))} are free"
    return PacktrainError(f"{where}: the disk is full{room}; free some space there, {AGAIN}")


def missing_bytes(files: Sequence[StoredFile], staged: Mapping[str, Staged]) -> int:
    return sum(max(0, file.bytes - (staged[file.name].bytes if file.name in staged else 0)) for file in files)


class FolderDestination(Destination):
    """A directory of this machine, or one that is mounted here."""

    def __init__(self, path: Path) -> None:
        path = expanded(path).absolute()
        if path.name in ("", ".."):
            raise Mistake(f"--to {quoted(str(path))}: name a directory for the model")
        self._target, self.where = path, str(path)
        self._stage = path.with_name(staging_name(path.name))

    def look(self, files: Sequence[StoredFile]) -> Mapping[str, Staged] | None:
        with self._explained():
            if self._target.is_symlink():
                raise Mistake(f"{self.where}: is a symbolic link; name the directory that it leads to")
            if self._target.exists() and not self._target.is_dir():
                raise Mistake(f"{self.where}: is a file; choose another name")
            if self._holds(files):
                return None
            self._stage.mkdir(parents=True, exist_ok=True)
            if self._stage.is_symlink() or self._stage.stat().st_uid != os.geteuid():
                raise Mistake(f"{self._stage}: belongs to somebody else; choose another directory")
            staged = {}
            for name in _files_below(self._stage):
                path = self._stage / name
                if name not in {file.name for file in files}:
                    path.unlink()
                    continue
                staged[name] = Staged(path.stat().st_size, sha256_of(path))
            needed, free = missing_bytes(files, staged), shutil.disk_usage(self._stage).free - SPARE_BYTES
            if needed > free:
                shutil.rmtree(self._stage, ignore_errors=True)
                raise full_disk(self.where, needed, free)
            return staged

    def _holds(self, files: Sequence[StoredFile]) -> bool:
        """True if the model is there; raise if something else is."""
        names = _files_below(self._target) if self._target.exists() else []
        if not names:
            return False
        manifest = self._target / MANIFEST
        is_small = manifest.is_file() and manifest.stat().st_size <= MAX_MANIFEST_BYTES
        self.check_replaced(manifest.read_bytes() if is_small else None, names)
        return all(_is_same(self._target / file.name, file) for file in reversed(files))

    def send(self, file: StoredFile, path: Path, start: int, moved: Callable[[int], None]) -> None:
        staged = self._stage / file.name
        with self._explained():
            staged.parent.mkdir(parents=True, exist_ok=True)
            with path.open("rb") as source, staged.open("ab" if start else "wb") as target:
                source.seek(start)
                while chunk := source.read(CHUNK_BYTES):
                    target.write(chunk)
                    moved(len(chunk))
                target.flush()
                os.fsync(target.fileno())

    def commit(self, files: Sequence[StoredFile]) -> list[str]:
        with self._explained():
            if altered := [file.name for file in files if not _is_same(self._stage / file.name, file)]:
                return altered
            replace_folder(self._stage, self._target)
        return []

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                shutil.rmtree(self._stage, ignore_errors=True)  # others need the space, too
                raise full_disk(self.where, 0) from None
            raise Mistake(f"{self.where}: {error.strerror}; choose another directory") from None


def _files_below(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]


def _is_same(path: Path, file: StoredFile) -> bool:
    return path.is_file() and path.stat().st_size == file.bytes and sha256_of(path) == file.sha256


def replace_folder(replacement: Path, target: Path) -> None:
    """Give `replacement` the name of `target`, which may be there; nobody finds half of either under that name."""
    if not target.exists():
        replacement.rename(target)
    elif _exchange(replacement, target):
        shutil.rmtree(replacement)
    else:  # a file system that cannot: for a moment there is none
        previous = target.with_name(f".{target.name}.old")
        shutil.rmtree(previous, ignore_errors=True)
        target.rename(previous)
        try:
            replacement.rename(target)
        except OSError:
            previous.rename(target)
            raise
        shutil.rmtree(previous)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step; False if the kernel or the file system cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    cwd, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return call is not None and call(cwd, os.fsencode(first), cwd, os.fsencode(second), exchange) == 0


class BucketDestination(Destination):
    """A prefix of a bucket. While files are put, a list of their names is there instead of model.json."""

    _NAMES = "delivery.json"
    _NAMES_BYTES = 4 << 20

    def __init__(self, store: Store) -> None:
        self._store, self.where = store, store.url

    def look(self, files: Sequence[StoredFile]) -> Mapping[str, Staged] | None:
        sizes = {entry.key: entry.size for entry in self._store.list()}
        delivered = self._delivered_names(sizes)
        staged = {
            file.name: Staged(file.bytes, file.sha256)
            for file in files
            if sizes.get(file.name) == file.bytes and self._arrived(file)
        }
        if self._NAMES not in sizes and len(staged) == len(files):
            return None
        names = sorted(delivered | {file.name for file in files})
        self._store.put(self._NAMES, json.dumps(names).encode())
        self._store.delete(MANIFEST)  # until the new files are there, it is no model
        staged.pop(MANIFEST, None)
        return staged

    def _delivered_names(self, sizes: Mapping[str, int]) -> set[str]:
        """Return the names of what an earlier delivery has put there; raise if there is anything else."""
        names = set(sizes) - {self._NAMES}
        if self._NAMES in sizes:
            with suppress(ValueError):
                listed = json.loads(self._store.get(self._NAMES, self._NAMES_BYTES))
                if isinstance(listed, list) and names <= {name for name in listed if isinstance(name, str)}:
                    return names
        if names:
            manifest = self._store.find(MANIFEST, MAX_MANIFEST_BYTES) if MANIFEST in sizes else None
            self.check_replaced(manifest, names)
        return names

    def send(self, file: StoredFile, path: Path, start: int, moved: Callable[[int], None]) -> None:  # noqa: ARG002
        if file.name != MANIFEST:  # which `commit` puts, when all others are right
            self._store.put_file(file.name, path)
        else:
            self._manifest = path.read_bytes()
        moved(file.bytes)

    def commit(self, files: Sequence[StoredFile]) -> list[str]:
        data_files = [file for file in files if file.name != MANIFEST]
        if altered := [file.name for file in data_files if not self._arrived(file)]:
            return altered
        names = {file.name for file in files}
        for entry in self._store.list():
            if entry.key not in {*names, self._NAMES}:
                self._store.delete(entry.key)  # of the model before; `look` has seen to it
        self._store.put(MANIFEST, self._manifest)
        self._store.delete(self._NAMES)
        return []

    def _arrived(self, file: StoredFile) -> bool:
        """Read an object back and compare it: a server may have its own idea of a digest."""
        with tempfile.TemporaryDirectory(prefix="deliver-", dir=cache_directory()) as scratch:
            path = Path(scratch) / "object"
            with suppress(ObjectNotFound, DamagedObject):
                self._store.get_file(file.name, path, max(file.bytes, 1))
            return _is_same(path, file)
