"""The data of a program: folders of the person's machine, and buckets, on every machine of a run.

A folder goes into the store once, each file under its digest, with a listing that is named by its own digest. Machines
keep what they have fetched in their cache. A bucket is read by the machines themselves, with their own keys.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packtrain.errors import Mistake
from packtrain.files import FileLock, sha256_of
from packtrain.job import Job
from packtrain.job.part import FILES, IN_STORE, STORED_FILE
from packtrain.run.checkpoint import StoredFile
from packtrain.store import DamagedObject, Entry, Store, is_key, open_store
from packtrain.store.records import MAX_RECORD_BYTES, Many, decode, encode
from packtrain.units import counted, show_bytes

_LISTING_BYTES = 16 * MAX_RECORD_BYTES
_BUCKETS = ("s3://", "gs://", "az://")


@dataclass(frozen=True)
class InputListing:
    """The files of a folder, or one file. Names start with the name of the folder or the file itself."""

    name: str
    files: Many[StoredFile]


def is_remote(address: str) -> bool:
    """True if machines can fetch it, and False for a path of one machine."""
    return address.startswith((*_BUCKETS, STORED_FILE))


def put_input(store: Store, path: Path, say: Callable[[str], None]) -> str:
    """Put a folder or a file into the store, unless it is there, and return the address for a job."""
    files = dict(_files_of(path))
    if odd := next((name for name in files if not is_key(name)), None):
        raise Mistake(f"{path.parent / odd}: a store cannot have an object of this name; rename the file")
    size = sum(file.stat().st_size for file in files.values())
    say(f"reading {path} ({counted(len(files), 'file')}, {show_bytes(size)})")
    present = {entry.key for entry in store.list(FILES)}
    stored = []
    for name, file in sorted(files.items()):
        digest = sha256_of(file)
        if f"{FILES}{digest}" not in present:  # another run, or another file of this one, has the same contents
            store.put_file(f"{FILES}{digest}", file)
            present.add(f"{FILES}{digest}")
        stored.append(StoredFile(name, file.stat().st_size, digest))
    listing = encode(InputListing(path.name, tuple(stored)))
    key = f"{FILES}{hashlib.sha256(listing).hexdigest()}"
    if key not in present:
        store.put(key, listing)
    return f"{IN_STORE}{key}"


def _files_of(path: Path) -> Iterator[tuple[str, Path]]:
    if path.is_file():
        yield path.name, path
    visited = set()
    for folder, folders, names in os.walk(path, followlinks=True):
        real = Path(folder).resolve()
        if real in visited:  # a link that leads back
            folders.clear()
            continue
        visited.add(real)
        for name in names:
            file = Path(folder) / name
            if file.is_file():
                yield str(file.relative_to(path.parent)), file


def listing_of(store: Store, address: str) -> InputListing:
    key = address.removeprefix(IN_STORE)
    data = store.get(key, _LISTING_BYTES)
    if hashlib.sha256(data).hexdigest() != key.removeprefix(FILES):
        raise DamagedObject(f"{store.url}: object {key!r} does not match its digest; it is damaged there")
    listing = decode(InputListing, data, f"{key} in {store.url}")
    # Whoever can write the store can write a listing: its names become paths.
    if "/" in listing.name or not all(map(is_key, (listing.name, *(file.name for file in listing.files)))):
        raise DamagedObject(f"{store.url}: the listing {key!r} has names that no writer of Packtrain would write")
    return listing


def keys_of(store: Store, address: str) -> list[str]:
    """Return the keys of everything that an address in the store needs."""
    files = [f"{FILES}{file.sha256}" for file in listing_of(store, address).files]
    return [address.removeprefix(IN_STORE), *dict.fromkeys(files)]


def given_keys(job: Job, store: Store) -> list[str]:
    """Return the keys of the files that a job names: those of model options, and the data of a program."""
    options = job.model.options.values() if job.recipe is not None else ()
    addresses = [option for option in options if isinstance(option, str) and option.startswith(STORED_FILE)]
    keys = {address.removeprefix(IN_STORE) for address in addresses}
    for address in job.inputs.values():
        if address.startswith(STORED_FILE):
            keys.update(keys_of(store, address))
    # The job is in the store, where others may write: it may name anything.
    return sorted(key for key in keys if is_key(key))


def staged(address: str, store: Store, cache: Path) -> Path:
    """Return the path of a job's data on this machine; what is elsewhere is fetched into the cache first."""
    if not is_remote(address):
        if not Path(address).exists():
            raise Mistake(f"{address} is not on this machine; start a new run, which copies the job's data to machines")
        return Path(address)
    directory = cache / hashlib.sha256(address.encode()).hexdigest()[:32]
    directory.mkdir(parents=True, exist_ok=True)
    with FileLock(directory / ".lock", wait=True):  # nodes of other runs may fetch the same
        os.utime(directory / ".lock")  # the time of its last use, for `packtrain gc`
        if address.startswith(STORED_FILE):
            return _fetch_listing(address, store, directory)
        return _fetch(address, directory)


def _fetch_listing(address: str, store: Store, directory: Path) -> Path:
    listing = listing_of(store, address)
    for file in listing.files:
        path = directory / "files" / file.name
        if path.is_file() and path.stat().st_size == file.bytes:
            continue  # it was checked when it was fetched
        path.parent.mkdir(parents=True, exist_ok=True)
        store.get_file(f"{FILES}{file.sha256}", path, limit=file.bytes)
        if sha256_of(path) != file.sha256:
            path.unlink()
            raise DamagedObject(f"{store.url}: {FILES}{file.sha256} does not match its digest; it is damaged there")
    return directory / "files" / listing.name


def _fetch(address: str, directory: Path) -> Path:
    bucket = open_store(address)
    entries = bucket.list("")
    if not entries:
        raise Mistake(f"{address}: no objects there; check the name")
    for entry in entries:
        if is_key(entry.key):
            path = directory / "files" / entry.key
            if not _is_current(path, entry):
                path.parent.mkdir(parents=True, exist_ok=True)
                bucket.get_file(entry.key, path, limit=entry.size)
                os.utime(path, (entry.modified.timestamp(), entry.modified.timestamp()))
    return directory / "files"


def _is_current(path: Path, entry: Entry) -> bool:
    """True if this version of the object is here: buckets tell sizes and times, not digests."""
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_size == entry.size and abs(status.st_mtime - entry.modified.timestamp()) < 1
