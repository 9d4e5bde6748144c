"""What packing tells while it goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Advance = Callable[[int], None]


class Progress(Protocol):
    def say(self, text: str) -> None:
        """A line that stays."""

    def track(self, what: str, total: int | None) -> AbstractContextManager[Advance]:
        """A bar of that many samples; None where nobody knows."""


class Plain:
    """Lines alone, for scripts."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def say(self, text: str) -> None:
        self._tell(text)

    @contextmanager
    def track(self, what: str, total: int | None) -> Iterator[Advance]:  # noqa: ARG002
        yield lambda _: None
