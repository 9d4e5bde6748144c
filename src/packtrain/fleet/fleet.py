"""A fleet is a way to start `packtrain node RUN` on machines. Nothing more."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packtrain.runs import Run


@dataclass(frozen=True)
class Start:
    """What would be started on one machine: a value that can be printed and compared. Never holds a secret."""

    machine: str
    arguments: tuple[str, ...]


class Started(ABC):
    """A node that was started, as far as this client can see it."""

    log: Path | None

    @abstractmethod
    def exit_code(self) -> int | None:
        """None while it goes on, or when this client cannot know."""


class Fleet(ABC):
    @abstractmethod
    def plan(self, run: Run) -> list[Start]:
        """What `start` would do for this run."""

    @abstractmethod
    def start(self, starts: Sequence[Start], tied: bool) -> list[Started]:
        """Starts the nodes. Tied ones end with this process; others go on without it."""
