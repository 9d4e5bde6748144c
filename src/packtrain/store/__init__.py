"""Stores keep everything about packs and runs: a directory (local, NFS), or a bucket of S3, Google or Azure.

`open_store("./store")` and `open_store("s3://bucket/prefix")` behave the same. Keys are names separated by `/`. An
object appears whole or not at all, and `put_if_absent` has exactly one winner.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packtrain.errors import Mistake, quoted
from packtrain.store.base import IDENTITY, RECORD_BYTES, Entry, Store, is_key
from packtrain.store.directory import DirectoryStore
from packtrain.store.errors import DamagedObject, NoKeys, ObjectNotFound, StoreAway, StoreError
from packtrain.system import expanded

__all__ = [
    "RECORD_BYTES", "DamagedObject", "Entry", "NoKeys", "ObjectNotFound", "Store", "StoreAway", "StoreError",
    "default_store", "is_key", "open_store", "store_option", "stores_nearby", "unreachable_bucket",
]  # fmt: skip

_KEYS = {  # of buckets, by the scheme of their URLs: where the keys belong
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
}


def default_store() -> str:
    """Return the store of a command that names none: PACKTRAIN_STORE, or ./store, or the next `store` above that.

    Above the current directory only this user's own stores count: in a shared one, such as /tmp, anybody can make one.
    """
    if location := os.environ.get("PACKTRAIN_STORE"):
        return location
    with suppress(OSError):  # the current directory was removed, or one above it cannot be read
        if not Path("store").exists():
            for directory in Path.cwd().parents:
                if _is_own(mark := directory / "store" / IDENTITY):
                    return str(mark.parent)
    return "./store"


def store_option(store: Store) -> list[str]:
    """Return --store for a command in a hint, only if the command would otherwise look elsewhere."""
    location = default_store()
    locations = (location.rstrip("/"), str(expanded(location).absolute()))
    return [] if store.url in locations else ["--store", store.url]


def stores_nearby() -> list[Store]:
    """Return stores in directories above the current one and directly below it, the nearest first."""
    with suppress(OSError):
        current = Path.cwd()
        marks = [directory / "store" / IDENTITY for directory in (current, *current.parents)]
        marks += sorted(current.glob(f"*/store/{IDENTITY}"))
        return [DirectoryStore(mark.parent) for mark in marks if _is_own(mark)]
    return []


def _is_own(mark: Path) -> bool:
    """True if this user has made the store with this file; a link may be anybody's."""
    return os.access(mark, os.R_OK) and {mark.lstat().st_uid, mark.parent.lstat().st_uid} == {os.getuid()}


def open_store(
    location: str,
    *,
    create: bool = False,
    identity: str | None = None,
    outage_seconds: float = 60.0,
    answer_seconds: float = 15.0,
) -> Store:
    """Return the store at `location` without asking anything of it.

    Only with `create` does a directory become a store, at once: whoever expects a store must not make one where a mount
    is missing. With an `identity`, no directory but the store of that id is used. A bucket whose server fails, or is
    silent for `answer_seconds`, is tried again for `outage_seconds`.
    """
    scheme, separator, address = location.partition("://")
    if not separator:
        return _open_directory(location, create, identity)
    # Refused without repeating it: it may contain a secret.
    if "@" in address.split("/")[0] or "?" in address:
        raise Mistake(f"a store URL must not contain keys; set {_KEYS.get(scheme, _KEYS['s3'])} instead")
    _check_printable(location)
    if scheme == "file":
        url = urlsplit(location)
        if url.netloc not in ("", "localhost"):
            raise Mistake(f"{location!r}: names a host; write file:///path with three slashes, or just the path")
        return _open_directory(unquote(url.path), create, identity)
    if scheme in _KEYS:
        # Imported late: the client starts without obstore.
        from packtrain.store.bucket import open_bucket

        return open_bucket(scheme, address, os.environ, outage_seconds, answer_seconds)
    raise Mistake(
        f"{location!r}: {scheme}:// is not supported; use a directory, or s3://, gs:// or az://bucket/prefix "
        "(for any server that speaks S3, set AWS_ENDPOINT_URL)"
    )


def unreachable_bucket(location: str) -> Store:
    """Return a store at this address that every look finds away: for what is only to be named."""
    store = DirectoryStore(Path(location))
    store.url, store.is_directory = location.rstrip("/"), False  # no path of a directory
    return store


def _open_directory(path: str, create: bool, identity: str | None) -> Store:
    if not path.strip() or "\0" in path:
        raise Mistake("the store's location is empty; use a directory or s3://bucket/prefix")
    root = expanded(path).absolute()
    _check_printable(str(root))
    if root.exists() and not root.is_dir():
        raise Mistake(f"{root}: is a file, and a store is a directory; choose another name")
    store = DirectoryStore(root, identity)
    if create:
        store.create()
    return store


def _check_printable(location: str) -> None:
    """Refuse control characters: locations become parts of scripts, command lines and messages."""
    if not location.isprintable():
        raise Mistake(f"the store's location {quoted(location)} contains a control character; use another one")
