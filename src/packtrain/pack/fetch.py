"""Sources that are not local files, fetched into a directory of this machine.

    https://host/path/train.de.gz     also http
    s3://bucket/path/train.tar        with the store's own environment
    store:raw/train.tar               an object of the job's store

A copy lies in a folder named after the address and what the server says of the version (ETag or date, size), so what
changed there is fetched again, and what did not is only asked about. It keeps its name, whose ending readers go by.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packtrain.errors import Mistake
from packtrain.pack.raw import printable
from packtrain.pack.web import Client, Download, Patience, Tell, check_size, checked_address, describe, shown
from packtrain.store import Entry, Store, StoreError, is_key, open_store
from packtrain.store.base import TEMPORARY
from packtrain.store.staging import explained, make_folder, replace
from packtrain.units import show_bytes

MOST_BYTES = 10**12

_MOST_CHANGES = 10  # mirrors behind one name may give the same file different tags: one of them will answer twice
_ABANDONED_SECONDS = 24 * 3600.0
_NAME_LENGTH = 120


def local_copy(
    path: str,
    store: Store,
    directory: Path,
    tell: Tell,
    *,
    most_bytes: int = MOST_BYTES,
    patience: Patience | None = None,
) -> Path:
    """The file that a source's path stands for: itself where it is local, else its copy below `directory`.

    Raises `Mistake` for what the person must mend, and a temporary `StoreError` for what may pass.
    """
    if path.startswith("store:"):
        return _from_store(store, path.removeprefix("store:"), path, directory, tell, most_bytes)
    scheme, separator, rest = path.partition("://")
    if not separator:
        return Path(path)
    if scheme.lower() in ("http", "https"):
        client = Client(patience or Patience())
        return _from_web(checked_address(path), client, directory, tell, most_bytes)
    if scheme.lower() == "s3":
        bucket, _, key = rest.partition("/")
        if "?" in key:  # not repeated: it may hold a signature
            raise Mistake("an s3:// address has no '?': name the object alone, or use a signed https:// address")
        with _as_mistakes():
            return _from_store(open_store(f"s3://{bucket}"), key, path, directory, tell, most_bytes)
    hint = "write its path alone" if scheme.lower() == "file" else "use a path, http://, https://, s3:// or store:"
    raise Mistake(f"data cannot be read from {printable(scheme[:20])}://; {hint}")


# From stores.


def _from_store(store: Store, key: str, address: str, directory: Path, tell: Tell, most_bytes: int) -> Path:
    if not is_key(key):
        raise Mistake(f"{printable(address[:200])}: must name one object, not a folder; pack folders as a tar")
    with _as_mistakes():
        entry = store.entry(key)
        if entry is None:
            raise Mistake(f"{address}: there is no such object in {store.url}")
        if store.is_directory:
            return Path(store.url, key)  # a file already
        check_size(address, entry.size, most_bytes)
        target = _place(directory, f"{store.url}/{key}", f"{entry.size} {entry.modified.isoformat()}", key)
        if not target.exists():
            tell(f"fetching {address} ({show_bytes(entry.size)})")
            _prepare(target, entry.size)
            store.get_file(key, target)
            _check_whole(target, entry, address)
    return target


def _check_whole(target: Path, entry: Entry, address: str) -> None:
    if target.stat().st_size != entry.size:
        target.unlink()
        raise StoreError(f"{address}: was changed while it was fetched; try again", temporary=True)


@contextmanager
def _as_mistakes() -> Iterator[None]:
    """What will not pass by itself is the person's to mend."""
    try:
        yield
    except StoreError as error:
        if error.temporary:
            raise
        raise Mistake(str(error)) from error


# From the web.


def _from_web(address: str, client: Client, directory: Path, tell: Tell, most_bytes: int) -> Path:
    version = client.patiently(address, lambda: describe(client, address))
    for _ in range(_MOST_CHANGES):
        check_size(shown(address), version.size, most_bytes)
        target = _place(directory, address, str(version), unquote(urlsplit(address).path))
        if target.exists() and version.is_known:
            return target
        _prepare(target, version.size)
        with _partial(target, tell) as file:
            if target.exists() and version.is_known:  # another process has just fetched it
                return target
            changed = Download(client, address, version, file, most_bytes, tell).run()
            if changed is None:
                with explained(target):
                    os.fsync(file.fileno())
                    replace(_partial_path(target), target)
                return target
        version = changed
    raise StoreError(f"{shown(address)}: changes all the time; try again later", temporary=True)


# Files.


def _place(directory: Path, address: str, version: str, name: str) -> Path:
    """Where the copy of a version belongs. Its name ends as the original's does."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", name.rstrip("/").rpartition("/")[2])[-_NAME_LENGTH:]
    return directory / _digest(address)[:32] / f"{_digest(version)[:16]}-{plain or 'data'}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _partial_path(target: Path) -> Path:
    """Named after the machine's boot: after a power cut nobody knows which of the bytes reached the disk."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = str(os.getpid())
    return target.with_name(f"{TEMPORARY}{boot}-{target.name}")


def _prepare(target: Path, size: int | None) -> None:
    """The folder of a file to come, without what was abandoned in it, and with room for the file."""
    partial = _partial_path(target)
    with explained(target.parent):
        make_folder(target.parent.absolute())
        for old in target.parent.glob(f"{TEMPORARY}*"):
            with suppress(FileNotFoundError):
                if old != partial and time.time() - old.stat().st_mtime > _ABANDONED_SECONDS:
                    old.unlink()
        here = partial.stat().st_size if partial.exists() else 0
        free = shutil.disk_usage(target.parent).free
    if size is not None and size - here > free:
        raise Mistake(f"{target.parent}: {show_bytes(size - here)} are needed and {show_bytes(free)} are free")


@contextmanager
def _partial(target: Path, tell: Tell) -> Iterator[FileIO]:
    """The file that will be renamed to `target`, for this process alone; kept for the next try if this one fails."""
    path = _partial_path(target)
    with explained(path):
        file = _locked(path, tell)
    try:
        yield file
    except Mistake:
        path.unlink(missing_ok=True)
        raise
    finally:
        if target.exists():
            path.unlink(missing_ok=True)
        file.close()


def _locked(path: Path, tell: Tell) -> FileIO:
    while True:
        file = FileIO(path, "a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"waiting for another process that fetches {path.parent.name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()  # whoever had it has renamed or removed it
