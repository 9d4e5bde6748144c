"""A store that records every operation and fails on demand."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from packtrain.store import RECORD_BYTES, Entry, Store, StoreError

Answer = TypeVar("Answer")
CHANGES = {"put", "put_if_absent", "put_file", "copy", "delete"}


class Killed(BaseException):
    """Stands for the death of the process: no code may catch it."""


class FaultyStore(Store):
    """`fault` is called with each operation and its key; if it returns an exception, that is raised.

    With `answers_get_lost` the operation is done first, and only its answer is lost.
    """

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.url, self.is_directory = inner.url, inner.is_directory
        self.operations: list[tuple[str, str]] = []
        self.fault: Callable[[str, str], BaseException | None] = lambda _operation, _key: None
        self.answers_get_lost = False

    def kill_at(self, number: int) -> None:
        """Die at the operation of that number, counting from 0 at the next one."""
        last = len(self.operations) + number
        self.fault = lambda _operation, _key: Killed() if len(self.operations) > last else None

    def refuse(self, *operations: str) -> None:
        """Make these operations fail as if the store were unreachable."""
        away = StoreError("the store is away", temporary=True)
        self.fault = lambda operation, _key: away if operation in operations else None

    def changes(self) -> list[tuple[str, str]]:
        return [(operation, key) for operation, key in self.operations if operation in CHANGES]

    def _do(self, operation: str, key: str, action: Callable[[], Answer]) -> Answer:
        self.operations.append((operation, key))
        error = self.fault(operation, key)
        if error is None:
            return action()
        if self.answers_get_lost:
            action()
        raise error

    def put(self, key: str, data: bytes) -> None:
        self._do("put", key, lambda: self._inner.put(key, data))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._do("put_if_absent", key, lambda: self._inner.put_if_absent(key, data))

    def put_file(self, key: str, path: Path) -> None:
        self._do("put_file", key, lambda: self._inner.put_file(key, path))

    def copy(self, key: str, target: str) -> None:
        self._do("copy", target, lambda: self._inner.copy(key, target))

    def find(self, key: str, limit: int = RECORD_BYTES) -> bytes | None:
        return self._do("find", key, lambda: self._inner.find(key, limit))

    def get_file(self, key: str, path: Path, limit: int | None = None) -> None:
        self._do("get_file", key, lambda: self._inner.get_file(key, path, limit))

    def list(self, prefix: str = "", after: str | None = None) -> builtins.list[Entry]:
        return self._do("list", prefix, lambda: self._inner.list(prefix, after))

    def folders(self, prefix: str) -> builtins.list[str]:
        return self._do("folders", prefix, lambda: self._inner.folders(prefix))

    def entry(self, key: str) -> Entry | None:
        return self._do("entry", key, lambda: self._inner.entry(key))

    def remove_unfinished(self, prefix: str, is_dead: Callable[[str], bool] = lambda _: True) -> None:
        self._do("remove_unfinished", prefix, lambda: self._inner.remove_unfinished(prefix, is_dead))

    def delete(self, key: str) -> None:
        self._do("delete", key, lambda: self._inner.delete(key))
