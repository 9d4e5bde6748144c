"""Where a worker's time goes: every moment belongs to the span that is named when it ends."""

from __future__ import annotations

import time
from collections import defaultdict, deque

import torch

SPANS = (
    "start", "data", "forward", "backward", "exchange", "wait", "optimizer", "save", "evaluation", "other",
)  # fmt: skip


class Clock:
    """A chain of marks: nothing between two of them is left out, so the spans add up to the time that passed.

    `exchange` is what of the exchange of gradients computing did not hide; `wait` the part of it in which others were
    still computing, and what others waited for their data.
    """

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._spans: defaultdict[str, float] = defaultdict(float)

    def mark(self, span: str) -> None:
        """The time since the last mark was spent on `span`."""
        now = time.perf_counter()
        self._spans[span] += now - self._last
        self._last = now

    def add(self, span: str, seconds: float) -> None:
        """Time from before this clock was made."""
        self._spans[span] += seconds

    def spent(self, span: str) -> float:
        """The seconds of a span since they were last taken, as far as they are known."""
        return self._spans[span]

    def take(self) -> dict[str, float]:
        """The seconds of every span since the last call."""
        taken, self._spans = dict(self._spans), defaultdict(float)
        return taken


class DeviceClock(Clock):
    """The same on a GPU, which works behind the program's back: marks are set in its own queue of work.

    A mark is read when the device has passed it; until then its span counts for a later step.
    """

    def __init__(self) -> None:
        super().__init__()
        self._passed = self._event()
        self._marks: deque[tuple[str, torch.cuda.Event]] = deque()

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def mark(self, span: str) -> None:
        self._marks.append((span, self._event()))

    def spent(self, span: str) -> float:
        self._read()
        return super().spent(span)

    def take(self) -> dict[str, float]:
        self._read()
        return super().take()

    def _read(self) -> None:
        while self._marks and self._marks[0][1].query():  # type: ignore[no-untyped-call]
            span, event = self._marks.popleft()
            self._spans[span] += self._passed.elapsed_time(event) / 1000
            self._passed = event


def clock_of(device: torch.device) -> Clock:
    return DeviceClock() if device.type == "cuda" else Clock()
