"""How an agent and its workers on one machine talk: a directory with a few files, and variables that name it.

A file needs no handler and no moment of its own: a worker looks at it once a step.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

RUN_VARIABLE = "PACKTRAIN_RUN"
STORE_VARIABLE = "PACKTRAIN_STORE"
GENERATION_VARIABLE = "PACKTRAIN_GENERATION"
CONTROL_VARIABLE = "PACKTRAIN_CONTROL"
CHECKPOINTS_VARIABLE = "PACKTRAIN_CHECKPOINTS"

WorkerCause = Literal["program", "memory", "disk", "store", "hang", "number", "mistake"]


@dataclass(frozen=True)
class WorkerError:
    """Why a worker gave up, and at which step. `hopeless`: starting again would end the same way."""

    rank: int
    text: str
    hopeless: bool
    time: float
    cause: WorkerCause = "program"
    step: int | None = None


class Control:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._stop, self._under_way = directory / "stop", directory / "under-way"
        self._has_told = False

    def ask_to_stop(self) -> None:
        self._stop.touch()

    def asked_to_stop(self) -> bool:
        return self._stop.exists()

    def tell_under_way(self) -> None:
        """That a step was made; may be told again and again."""
        if not self._has_told:
            self._has_told = True
            with suppress(OSError):  # a full disk: then nobody knows
                self._under_way.touch()

    def is_under_way(self) -> bool:
        return self._under_way.exists()

    def tell_error(self, error: WorkerError) -> None:
        path = self.directory / f"error-{error.rank}.json"
        path.with_suffix(".part").write_text(json.dumps(asdict(error)))
        path.with_suffix(".part").rename(path)

    def errors(self) -> list[WorkerError]:
        """What workers told, the most telling first: one that gives up takes the others with it."""
        errors = [WorkerError(**json.loads(path.read_text())) for path in self.directory.glob("error-*.json")]
        return sorted(errors, key=lambda error: (not error.hopeless, error.time))


# Signals that ask a worker to commit and leave. The handler sets a flag; the loop looks at it once a step.


NOTICES = (signal.SIGTERM, signal.SIGUSR1)


class Notice:
    def __init__(self) -> None:
        self.given = False

    def listen(self) -> Notice:
        for number in NOTICES:
            signal.signal(number, self._hear)
        return self

    def _hear(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.given = True

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within it a signal ends the process, and so does one that was given before: there is nothing to commit.

        Who waits in torch for a worker that has died hears no handler of Python's.
        """
        for number in NOTICES:
            signal.signal(number, signal.SIG_DFL)
        if self.given:
            os.kill(os.getpid(), NOTICES[0])
        yield
        self.listen()
