"""Finds a worker that hangs: a part of its work that takes far longer than its like.

Every rank watches itself. When one hangs the others wait for it, and so all of them find it and leave their stacks.
A rank that waits for its data says so to the others, which have to wait for it too: that is no hang.
"""

from __future__ import annotations

import faulthandler
import os
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path

from packtrain.train.world import World

TIMES_ITS_LIKE = 10.0
_FIRST_SECONDS = 600.0  # for the first of a kind: kernels are compiled, files are fetched
_LIKE = 3  # how many make a kind known
_LOOK_SECONDS = 1.0
_SAID_SECONDS = 3.0  # within which a rank that waits for its data has said so again
_OTHERS_SECONDS = 3.0  # for the other ranks to find it too, before this one's end takes them along
_STUCK_SECONDS = 30.0  # after which even a process that lets no Python run is ended
EXIT_HANG = 75

DATA = "data"  # the kind of work that the store can hold up


def limit(like: list[float], patience: float) -> float:
    """How long a part of the work may take, going by what others of its kind took."""
    if len(like) < _LIKE:
        return max(patience, _FIRST_SECONDS)
    return max(patience, TIMES_ITS_LIKE * statistics.median(like))


class Watch:
    """`stacks` is where they are written; `tell` is called with a line about it just before the process ends."""

    def __init__(self, patience: float, stacks: Path, tell: Callable[[str], None], world: World | None = None) -> None:
        self._patience, self._path, self._tell, self._world = patience, stacks, tell, world or World()
        self._like: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=101))
        self._now: tuple[str, str, float, float] | None = None  # kind, name, since, deadline
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="watch", daemon=True)
        self._thread.start()

    def begin(self, kind: str, name: str = "", least: float = 0.0) -> None:
        """A part of the work begins, which may take `least` seconds in any case; what was before it is over."""
        now = time.monotonic()
        self._finish(now)
        self._now = (kind, name or kind, now, now + max(least, limit(list(self._like[kind]), self._patience)))

    def rest(self) -> None:
        """What comes now has no like, or its own limits."""
        self._finish(time.monotonic())
        self._now = None

    def _finish(self, now: float) -> None:
        if self._now is not None:
            kind, _, since, _ = self._now
            self._like[kind].append(now - since)

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        with self._path.open("w") as file:
            try:
                while True:
                    current = self._now
                    left = _FIRST_SECONDS if current is None else self._seconds_left(current)
                    if current is not None and left <= 0:
                        self._end(current, file.fileno())
                    # Held by code that never lets go of the interpreter, this thread would not come to look again.
                    faulthandler.dump_traceback_later(left + _STUCK_SECONDS, exit=True, file=file)
                    if self._over.wait(_LOOK_SECONDS):
                        break
            finally:
                faulthandler.cancel_dump_traceback_later()
        if not self._path.stat().st_size:
            self._path.unlink()

    def _seconds_left(self, current: tuple[str, str, float, float]) -> float:
        """Until this part of the work is taken for a hang."""
        kind, _, since, deadline = current
        now = time.monotonic()
        if kind == DATA and now - since > self._patience / 2:
            self._world.say_waiting()
        if now > deadline and self._another_waits():
            return self._patience
        return deadline - now

    def _another_waits(self) -> bool:
        before = self._world.said_waiting()
        if before is None:
            return False
        self._over.wait(_SAID_SECONDS)
        return self._world.said_waiting() != before

    def _end(self, current: tuple[str, str, float, float], file: int) -> None:
        kind, name, since, _ = current
        like = list(self._like[kind])
        faulthandler.dump_traceback(file=file, all_threads=True)
        usual = f"where others take {statistics.median(like):.1f} s" if like else "and is the first of its kind"
        self._tell(f"{name} has taken {time.monotonic() - since:.0f} s {usual}: taken for a hang")
        time.sleep(_OTHERS_SECONDS)
        os._exit(EXIT_HANG)
