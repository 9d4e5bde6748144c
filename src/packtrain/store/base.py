"""What every store can do, whatever it is made of."""

from __future__ import annotations

import builtins
import re
import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from packtrain.store.errors import ObjectNotFound

TEMPORARY = ".tmp-"
"""How the names of files begin that are not objects (yet)."""

KEY_BYTES = 1024
_IMPOSSIBLE = re.compile(
    rf"(?:^|/)(?:\.{{0,2}}|{re.escape(TEMPORARY)}[^/]*)(?:/|\Z)"  # empty, `.`, `..` or temporary parts
    r"|[\x00-\x1f\x7f-\x9f\ud800-\udfff]"  # control characters and halves of characters
)


@dataclass(frozen=True)
class Entry:
    key: str
    size: int
    modified: datetime


class Store(ABC):
    """Every method raises `StoreError` for what a person can act on and `ValueError` for an impossible key.

    A `prefix` is the name of a folder, with or without the last slash: `a` covers `a/b` but not `ab`.
    """

    url: str
    is_directory: bool

    @abstractmethod
    def put(self, key: str, data: bytes) -> None: ...

    @abstractmethod
    def put_if_absent(self, key: str, data: bytes) -> bool:
        """False: somebody else was first, and nothing was changed."""

    @abstractmethod
    def put_file(self, key: str, path: Path) -> None: ...

    @abstractmethod
    def find(self, key: str) -> bytes | None: ...

    @abstractmethod
    def get_range(self, key: str, start: int, length: int) -> bytes:
        """As a slice of bytes would be: shorter, or empty, where the object ends before the range."""

    @abstractmethod
    def get_file(self, key: str, path: Path) -> None:
        """`path` appears, or changes, only when the whole object has arrived."""

    @abstractmethod
    def list(self, prefix: str = "", after: str | None = None) -> builtins.list[Entry]:
        """All objects below `prefix`, at any depth, sorted by key; only keys greater than `after`."""

    @abstractmethod
    def folders(self, prefix: str) -> builtins.list[str]:
        """The names one level below `prefix` that have objects below them, sorted."""

    @abstractmethod
    def entry(self, key: str) -> Entry | None:
        """The object as a listing shows it; None where there is none."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Nothing happens if the object is gone already."""

    def exists(self, key: str) -> bool:
        return self.entry(key) is not None

    def get(self, key: str) -> bytes:
        data = self.find(key)
        if data is None:
            raise absent(self, key)
        return data

    def holds_put_if_absent(self) -> bool:
        """Whether put-if-absent means what it says here: some S3 servers ignore the condition."""
        key = f"scratch/put-if-absent-{uuid.uuid4().hex}"
        try:
            return self.put_if_absent(key, b"first") and not self.put_if_absent(key, b"second")
        finally:
            self.delete(key)


def absent(store: Store, key: str) -> ObjectNotFound:
    return ObjectNotFound(f"{store.url}: there is no object {key!r}")


def is_key(text: str) -> bool:
    """Whether `text` can name an object in every kind of store."""
    return _IMPOSSIBLE.search(text) is None and len(text.encode()) <= KEY_BYTES


def checked_key(key: str) -> str:
    if not is_key(key):
        raise ValueError(
            f"{key[:80]!r} is not a key: names separated by '/', none empty, '.', '..' or beginning with "
            f"{TEMPORARY!r}, no control characters, at most {KEY_BYTES} bytes"
        )
    return key


def checked_prefix(prefix: str) -> str:
    """The prefix without its last slash; the empty one covers the whole store."""
    return checked_key(prefix.removesuffix("/")) if prefix else ""


def checked_range(start: int, length: int) -> None:
    if start < 0 or length < 0:
        raise ValueError(f"no range begins at {start} and is {length} bytes long")
