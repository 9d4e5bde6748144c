"""The interface of a store, and the names that objects can have in every kind of store."""

from __future__ import annotations

import builtins
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from packtrain.store.errors import DamagedObject, ObjectNotFound
from packtrain.units import show_bytes

RECORD_BYTES = 16 << 20
"""The most that one object may have to be read into memory, unless a caller expects more."""

TEMPORARY = ".tmp-"
"""Prefix of the names of files that are not objects (yet)."""

IDENTITY = ".packtrain-store"
"""Name of the file with the id of a store in a directory."""

GITIGNORE = ".gitignore"
"""Name of the file, in a store in a directory, that keeps it out of a repository."""

_KEY_BYTES = 1024  # S3's limit
_IMPOSSIBLE = re.compile(
    rf"(?:^|/)(?:\.{{0,2}}|{re.escape(TEMPORARY)}[^/]*|{re.escape(IDENTITY)})(?:/|\Z)"  # parts that are no names
    rf"|\A{re.escape(GITIGNORE)}\Z"
    r"|[\x00-\x1f\x7f-\x9f\ud800-\udfff\\]"  # control characters, lone surrogates, and what Azure takes for a slash
)


@dataclass(frozen=True)
class Entry:
    """An object as a listing shows it."""

    key: str
    size: int
    modified: datetime


class Store(ABC):
    """Objects under keys. Methods raise `StoreError` for what a person can act on and `ValueError` for an invalid key.

    A `prefix` is the name of a folder, with or without the last slash: `a` covers `a/b` but not `ab`.
    """

    url: str
    is_directory: bool
    endpoint: str | None = None
    """URL of the server, unless it is the default one."""
    key_source: str | None = None
    """What opens it here and not on other machines, such as `the AWS profile diux`."""
    identity: str | None = None
    """Id of a store in a directory, once it is known: another directory at that place is not this store."""

    @abstractmethod
    def put(self, key: str, data: bytes) -> None: ...

    @abstractmethod
    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create the object; False, without changing anything, if it already exists."""

    @abstractmethod
    def put_file(self, key: str, path: Path) -> None: ...

    @abstractmethod
    def copy(self, key: str, target: str) -> None:
        """Put the object under another key as well, without a detour over this machine if that is possible."""

    @abstractmethod
    def find(self, key: str, limit: int = RECORD_BYTES) -> bytes | None:
        """Return the object's data; None if there is no object.

        Others may write to the store: the size is checked before anything is read, and `DamagedObject` raised if the
        object has more than `limit` bytes.
        """

    @abstractmethod
    def get_file(self, key: str, path: Path, limit: int | None = None) -> None:
        """Download the object; `path` is created or replaced only when the whole object has arrived.

        With a `limit`, nothing of an object with more bytes is downloaded.
        """

    @abstractmethod
    def list(self, prefix: str = "", after: str | None = None) -> builtins.list[Entry]:
        """List all objects below `prefix`, at any depth, sorted by key; only keys greater than `after`."""

    @abstractmethod
    def folders(self, prefix: str) -> builtins.list[str]:
        """List the names one level below `prefix` that have objects below them, sorted."""

    @abstractmethod
    def entry(self, key: str) -> Entry | None:
        """Return the object's entry; None if there is no object."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete the object if it exists."""

    @abstractmethod
    def remove_unfinished(self, prefix: str, is_dead: Callable[[str], bool] = lambda _: True) -> None:
        """Remove what killed writers left below `prefix`: temporary files, empty folders, multipart uploads.

        `is_dead` is asked with the name of each. A writer that turns out to be alive loses nothing: it starts over.
        """

    def stamps(self, prefix: str, below: Sequence[str] = ()) -> dict[str, tuple[int, ...]] | None:  # noqa: ARG002
        """Return a stamp for each folder one level below `prefix`; None if the store can tell no cheaper than by lists.

        It is another one after an object directly in that folder, or in one of the folders `below` it, was made,
        replaced or deleted. So a reader who looks every second lists only what has changed.
        """
        return None

    def exists(self, key: str) -> bool:
        return self.entry(key) is not None

    def get(self, key: str, limit: int = RECORD_BYTES) -> bytes:
        data = self.find(key, limit)
        if data is None:
            raise self.not_found(key)
        return data

    def not_found(self, key: str) -> ObjectNotFound:
        """Return the error for an object that does not exist."""
        return ObjectNotFound(f"{self.url}: object {key!r} not found")

    def check_size(self, key: str, size: int, limit: int | None) -> None:
        if limit is not None and size > limit:
            raise DamagedObject(
                f"{self.url}: object {key!r} is damaged: it has {show_bytes(size)}, and at most {show_bytes(limit)} are"
                " expected; delete it"
            )

    def supports_put_if_absent(self) -> bool:
        """Try `put_if_absent` on a scratch key: some S3 servers ignore its condition."""
        key = f"scratch/put-if-absent-{uuid.uuid4().hex}"
        try:
            # A server that ignores the condition accepts the second one, too.
            return self.put_if_absent(key, b"first") and not self.put_if_absent(key, b"second")
        finally:
            self.delete(key)


def is_key(text: str) -> bool:
    """True if `text` can name an object in every kind of store."""
    return _IMPOSSIBLE.search(text) is None and len(text.encode()) <= _KEY_BYTES


def checked_key(key: str) -> str:
    if not is_key(key):
        raise ValueError(
            f"{key[:80]!r}: invalid key; use names separated by '/', none empty, '.', '..' or starting with "
            f"{TEMPORARY!r}, no control characters or backslashes, at most {_KEY_BYTES} bytes"
        )
    return key


def checked_prefix(prefix: str) -> str:
    """Return the prefix without its last slash; the empty one covers the whole store."""
    return checked_key(prefix.removesuffix("/")) if prefix else ""
