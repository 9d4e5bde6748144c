"""Pauses between tries of something that fails for now: they double, up to a limit, and vary at random."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable


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
        left = self._limit - (self._clock() - self._started)
        if left <= 0:
            return None
        self._pause = min(self._longest, longest_seconds, max(self._first, 2 * self._pause))
        return min(left, self._pause * (1 - self._jitter * self._random()))

    def wait(self) -> bool:
        """Sleep until the next try; False, without sleeping, if the limit has passed."""
        seconds = self.next_pause()
        if seconds is not None:
            self._sleep(seconds)
        return seconds is not None
