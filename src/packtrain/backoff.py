"""Pauses between tries of something that fails for now: they double, up to a limit, and vary at random.

A person who waits for it is told: see `SlowAnswers`.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, Timer

_SLOW_SECONDS = 4.0  # without an answer, until a person is told


class Backoff:
    """The pauses of one series of tries.

    `jitter` is the share of each pause that is random: 0 for none, 1 for anything from zero to the full pause.
    After `limit_seconds` there are no more pauses; the last one is cut so that one more try fits at the limit.
    """

    def __init__(
        self,
        first_seconds: float,
        longest_seconds: float,
        *,
        jitter: float = 0.5,
        limit_seconds: float = math.inf,
        # Not random.random: a model seeds that, and then all machines would come back at the same moment.
        random: Callable[[], float] = random.SystemRandom().random,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._first, self._longest, self._jitter, self._limit = first_seconds, longest_seconds, jitter, limit_seconds
        self._random, self._clock, self._sleep = random, clock, sleep
        self.reset()

    def reset(self) -> None:
        """Start over, as after a success: the next pause is the first one, and the limit counts from now."""
        self._pause, self._started = 0.0, self._clock()

    def next_pause(self, longest_seconds: float = math.inf) -> float | None:
        """Return the seconds to wait before the next try; None if the limit has passed.

        `longest_seconds` bounds this pause further, for a failure that may be over at any moment.
        """
        remaining = self._limit - (self._clock() - self._started)
        if remaining <= 0:
            return None
        self._pause = min(self._longest, longest_seconds, max(self._first, 2 * self._pause))
        return min(remaining, self._pause * (1 - self._jitter * self._random()))

    def wait(self) -> bool:
        """Sleep until the next try; False, without sleeping, if the limit has passed."""
        seconds = self.next_pause()
        if seconds is not None:
            self._sleep(seconds)
        return seconds is not None


class SlowAnswers:
    """Tells a person that a server does not answer, once until it does. Without `tell`, as on machines, nobody is."""

    def __init__(self) -> None:
        self.tell: Callable[[str], None] | None = None
        self._told: set[str] = set()
        self._lock = Lock()

    @contextmanager
    def watched(self, place: str, limit_seconds: float) -> Iterator[None]:
        """Watch a request to a place. It may hang inside of a library, so that only another thread can tell."""
        if self.tell is None:
            yield
            return
        timer = Timer(_SLOW_SECONDS, self.late, (place, limit_seconds))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()  # it may be telling right now, and what it says must come first
        self.answered(place)

    def late(self, place: str, limit_seconds: float) -> None:
        with self._lock:
            is_new = place not in self._told
            self._told.add(place)
        if is_new and self.tell is not None:
            self.tell(f"{place} does not answer; trying again for up to {limit_seconds:.0f} s")

    def answered(self, place: str) -> None:
        with self._lock:
            was_told = place in self._told
            self._told.discard(place)
        if was_told and self.tell is not None:
            self.tell(f"{place} answers again")


SLOW_ANSWERS = SlowAnswers()
"""Those of this process: a client has one terminal, whatever number of stores it opens."""
