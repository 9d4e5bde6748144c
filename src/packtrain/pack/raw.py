"""What raw formats have in common: samples as they come, before anything is decoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

Drop = Callable[[str, str], None]
"""Tells of a sample that is left out: the reason, which is counted, and the sample's own name."""

_FIRST_NAMES = 10


@dataclass(frozen=True, slots=True)
class Locator:
    """Where the bytes of a sample are: a file, or a part of one (a member of a tar, found without unpacking it)."""

    path: str
    offset: int = 0
    length: int | None = None

    def read(self) -> bytes:
        with Path(self.path).open("rb") as file:
            file.seek(self.offset)
            return file.read() if self.length is None else file.read(self.length)


@dataclass(frozen=True, slots=True)
class RawImage:
    """An image with its class or its captions. `name` is what people know it by, and unique in its source."""

    name: str
    where: Locator
    label: int | None = None
    captions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TextPair:
    source: str
    target: str


@dataclass
class Dropped:
    """What was left out and why: counts, and the first names of each reason for a person to look at."""

    counts: Counter[str] = field(default_factory=Counter)
    names: dict[str, list[str]] = field(default_factory=dict)

    def __call__(self, reason: str, name: str) -> None:
        self.counts[reason] += 1
        first = self.names.setdefault(reason, [])
        if len(first) < _FIRST_NAMES:
            first.append(name)
