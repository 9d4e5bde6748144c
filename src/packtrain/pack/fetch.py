"""Download sources that are not local files into a directory of this machine.

    https://host/path/train.de.gz     also http
    s3://bucket/path/train.tar        also gs and az, with the store's own environment
    store:raw/train.tar               an object of the job's store

A copy is in a folder named after the URL, under a name with the version that the server reports (ETag or date, size).
If that version is already here, nothing is downloaded; a file that changed is downloaded again. The name ends like the
original, because readers of raw formats look at the ending.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import FileIO
from itertools import islice
from pathlib import Path
from urllib.parse import quote, unquote, urljoin, urlsplit

from packtrain.errors import Mistake, printable
from packtrain.files import FileLock
from packtrain.job.kinds import Source
from packtrain.pack.archive import split_member
from packtrain.pack.picture import MAX_BYTES as MAX_IMAGE_BYTES
from packtrain.pack.web import (
    PROGRESS_SECONDS,
    Client,
    Download,
    FetchPolicy,
    MissingFile,
    Say,
    check_size,
    checked_url,
    shown,
    version_of,
)
from packtrain.store import Store, StoreError, is_key, open_store
from packtrain.store.base import TEMPORARY
from packtrain.store.directory import make_folder, opened_folder, replace
from packtrain.store.errors import explained
from packtrain.units import show_bytes

MAX_BYTES = 10**12

_MAX_CHANGES = 10  # mirrors behind one name may report different versions; one of them will answer twice
_ABANDONED_SECONDS = 24 * 3600.0
_NAME_LENGTH = 120
_WEB = ("http://", "https://")
_BUCKETS = ("s3", "gs", "az")
_HEADERS_ONLY = FetchPolicy(answer_seconds=10.0, tries=3)
_PARALLEL = 16  # downloads of small files, whose time is mostly spent waiting
_BLOCK_FILES = 1000  # handed to them at a time: all names of a source would take memory


def local_copy(
    path: str,
    store: Store,
    directory: Path,
    say: Say,
    *,
    max_bytes: int = MAX_BYTES,
    policy: FetchPolicy | None = None,
) -> Path:
    """Return the local file for a source: the path itself, or a copy below `directory`.

    Raises `Mistake` if a person must fix something, and a temporary `StoreError` if trying later may help.
    """
    fetch = _fetch_from(path, store, directory, policy or FetchPolicy())
    return Path(path) if fetch is None else fetch(path, say, max_bytes)


def local_source(
    source: Source, store: Store, directory: Path, say: Say, *, policy: FetchPolicy | None = None
) -> Source:
    """Return the source with local paths, and with local copies of the files that it names beside its own."""
    paths, fetches = [], []
    for path in source.paths:
        archive, member = split_member(path)
        fetch = _fetch_from(archive, store, directory, policy or FetchPolicy())
        copy = archive if fetch is None else str(fetch(archive, say, MAX_BYTES))
        paths.append(f"{copy}#{member}" if member else copy)
        fetches.append(fetch)
    copied = source.model_copy(update={"paths": tuple(paths)})
    listing, fetch = Path(paths[0]), fetches[0]
    # In place, in a store that is a directory, its neighbors are there too.
    if fetch is None or not listing.is_relative_to(directory) or next(copied.named_files(), None) is None:
        return copied
    folder = listing.with_name(f"{listing.name}.files")
    with explained(folder):
        folder.mkdir(exist_ok=True)
        _link(listing, folder / listing.name)
    beside = copied.model_copy(update={"paths": (str(folder / listing.name), *paths[1:])})
    address = source.paths[0]

    def fetch_beside(name: str) -> Path:
        """Fetch a file that is named by the file at `address`; never from outside of its folder."""
        name = posixpath.normpath(name)
        if address.startswith("store:") or address.lower().startswith(tuple(f"{bucket}:" for bucket in _BUCKETS)):
            neighbor = address[: max(address.rfind("/"), len("store:") - 1) + 1] + name
        else:
            # Quoted: a name such as https://elsewhere/x stays below the folder
            neighbor = urljoin(address, quote(name))
        return fetch(neighbor, lambda _text: None, MAX_IMAGE_BYTES)

    _fetch_named(beside, folder, fetch_beside, lambda count: say(f"fetching the images of {shown(address)}{count}"))
    return beside


Fetch = Callable[[str, Say, int], Path]
"""Downloads an address of one server or bucket, of at most so many bytes, and returns the copy."""


def _fetch_from(path: str, store: Store, directory: Path, policy: FetchPolicy) -> Fetch | None:
    """Return how to download a path and what is beside it; None if it is local."""
    if path.lower().startswith(_WEB):
        client = Client(policy)
        return lambda path, say, limit: _from_web(checked_url(path), client, directory, say, limit)
    if not path.startswith("store:") and "://" not in path:
        return None
    origin, start = _store_of(path, store)
    return lambda path, say, limit: _from_store(origin, path[start:], path, directory, say, limit)


def _store_of(path: str, store: Store) -> tuple[Store, int]:
    """Return the store or the bucket of an address, and where the key begins in the address."""
    if path.startswith("store:"):
        return store, len("store:")
    scheme, _, place = path.partition("://")
    if scheme.lower() not in _BUCKETS:
        hint = "use the plain path" if scheme.lower() == "file" else "use a path, http://, https://, a bucket or store:"
        raise Mistake(f"{printable(scheme[:20])}:// is not supported for data; {hint}")
    bucket, _, key = place.partition("/")
    if "?" in key:  # not shown: it may hold a signature
        raise Mistake(f"{scheme.lower()}:// URLs have no '?'; name only the object")
    with _lasting_errors_as_mistakes():
        return open_store(f"{scheme.lower()}://{bucket}"), len(f"{scheme}://{bucket}/")


def remote_size(path: str, store: Store) -> int | None:
    """Return the size of a remote file by its headers, without a download; None if its server does not say it."""
    if path.lower().startswith(_WEB):
        client = Client(_HEADERS_ONLY)
        url = checked_url(path)
        return client.retry(url, lambda: version_of(client, url)).size
    origin, start = _store_of(path, store)
    with _lasting_errors_as_mistakes():
        entry = origin.entry(path[start:]) if is_key(path[start:]) else None
    if entry is None:
        raise MissingFile(f"{printable(path[:200])}: not found in {origin.url}")
    return entry.size


def _fetch_named(source: Source, folder: Path, fetch: Callable[[str], Path], tell: Say) -> None:
    """Download all files that a source names to their places below `folder`, several at once; tell their number."""

    def fetch_and_link(name: str) -> None:
        try:
            copy: Path | None = fetch(name)
        except MissingFile:  # packing drops the sample, and counts it
            copy = None
        with explained(folder):
            _link(copy, folder / name)

    names, count, told_at = (name for name, _ in source.named_files()), 0, time.monotonic()
    tell("")
    with ThreadPoolExecutor(_PARALLEL) as pool:
        while block := list(islice(names, _BLOCK_FILES)):
            for _ in pool.map(fetch_and_link, block):
                count += 1
                if time.monotonic() - told_at > PROGRESS_SECONDS:
                    told_at = time.monotonic()
                    tell(f": {count:,} so far")


def _link(copy: Path | None, place: Path) -> None:
    """Let `place` be the same file as the copy, or nothing; atomically, because another process may be reading."""
    if copy is None:
        if os.path.lexists(place):  # false, and no error, for a name that is too long to be here
            place.unlink()
        return
    with suppress(FileNotFoundError):
        if place.samefile(copy):
            return
    place.parent.mkdir(parents=True, exist_ok=True)
    staged = place.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
    os.link(copy, staged)
    staged.replace(place)


def _from_store(store: Store, key: str, address: str, directory: Path, say: Say, max_bytes: int) -> Path:
    if not is_key(key):
        raise Mistake(f"{printable(address[:200])}: must name one object, not a folder; make a tar of the folder")
    with _lasting_errors_as_mistakes():
        entry = store.entry(key)
        if entry is None:
            raise MissingFile(f"{printable(address)}: not found in {store.url}")
        if store.is_directory:
            return Path(store.url, key)
        check_size(address, entry.size, max_bytes)
        target = _target(directory, f"{store.url}/{key}", f"{entry.size} {entry.modified.isoformat()}", key)
        if target.exists():
            _touch(target)
        else:
            say(f"downloading {address} ({show_bytes(entry.size)})")
            _prepare(target, entry.size)
            store.get_file(key, target)
            if target.stat().st_size != entry.size:
                target.unlink()
                raise StoreError(f"{address}: changed during the download; try again", temporary=True)
            # The same on every machine: packs of large files and images depend on it.
            modified = round(entry.modified.timestamp() * 1e9)
            with explained(target):
                os.utime(target, ns=(modified, modified))
    return target


@contextmanager
def _lasting_errors_as_mistakes() -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        if error.temporary:
            raise
        raise Mistake(str(error)) from error


def _from_web(url: str, client: Client, directory: Path, say: Say, max_bytes: int) -> Path:
    version = client.retry(url, lambda: version_of(client, url))
    for _ in range(_MAX_CHANGES):
        check_size(shown(url), version.size, max_bytes)
        target = _target(directory, url, str(version), unquote(urlsplit(url).path))
        if target.exists() and version.is_known:
            _touch(target)
            return target
        _prepare(target, version.size)
        with _partial_file(target, say) as file:
            if target.exists() and version.is_known:  # another process has just downloaded it
                return target
            changed = Download(client, url, version, file, target, max_bytes, say).run()
            if changed is None:
                with explained(target):
                    if version.is_known:
                        os.utime(file.fileno(), ns=(version.time_ns, version.time_ns))
                    os.fsync(file.fileno())
                    with opened_folder(target.parent) as folder:
                        replace(folder, _partial_path(target).name, target.name)
                return target
        version = changed
    raise StoreError(f"{shown(url)}: keeps changing; try again later", temporary=True)


def _touch(target: Path) -> None:
    """Note that the copy is used now, for `packtrain gc`. The time of its contents stays: packs may depend on it."""
    with suppress(OSError):
        os.utime(target, ns=(time.time_ns(), target.stat().st_mtime_ns))


def _target(directory: Path, address: str, version: str, name: str) -> Path:
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", name.rstrip("/").rpartition("/")[2])[-_NAME_LENGTH:]
    digests = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest() for text in (address, version)]
    return directory / digests[0][:32] / f"{digests[1][:16]}-{plain or 'data'}"


def _partial_path(target: Path) -> Path:
    """Return the path of an unfinished download, named after the boot of this machine.

    After a power cut it is unknown which bytes reached the disk, so an earlier boot's file is not resumed.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
    except OSError:
        boot = str(os.getpid())
    return target.with_name(f"{TEMPORARY}{boot}-{target.name}")


def _prepare(target: Path, size: int | None) -> None:
    """Make the folder of a download, remove abandoned files in it, and check that the download fits on the disk."""
    partial = _partial_path(target)
    with explained(target.parent):
        make_folder(target.parent.absolute())
        for leftover in target.parent.glob(f"{TEMPORARY}*"):
            with suppress(FileNotFoundError):
                if leftover != partial and time.time() - leftover.stat().st_mtime > _ABANDONED_SECONDS:
                    leftover.unlink()
        fetched = partial.stat().st_size if partial.exists() else 0
        free = shutil.disk_usage(target.parent).free
    if size is not None and size - fetched > free:
        raise Mistake(
            f"{target.parent}: not enough space: {show_bytes(size - fetched)} needed, {show_bytes(free)} free;"
            " free some, or set PACKTRAIN_CACHE to a directory on another disk"
        )


@contextmanager
def _partial_file(target: Path, say: Say) -> Iterator[FileIO]:
    """Open the file that will be renamed to `target`, locked; if the download fails, it stays for the next try."""
    path = _partial_path(target)
    with explained(path):
        try:
            lock = FileLock(path, wait=False)
        except BlockingIOError:
            say(f"waiting for another process that is downloading {target.name}")
            lock = FileLock(path)
    with lock:
        try:
            yield FileIO(lock.fileno(), "r+", closefd=False)
        except Mistake:  # a retry would not help, so there is nothing to keep
            path.unlink(missing_ok=True)
            raise
        finally:
            if target.exists():
                path.unlink(missing_ok=True)
