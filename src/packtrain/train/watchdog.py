"""Detects a worker that hangs: a phase of its work that takes far longer than earlier phases of the same kind.

Every rank watches itself. When one hangs the others wait for it, so all of them notice and write their stacks. A rank
that waits for data, compiles or writes a trace announces it, because the others then wait too: that is not a hang.
"""

from __future__ import annotations

import faulthandler
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from packtrain.process import end_process
from packtrain.train.world import World

TIMES_MEDIAN = 10.0
FIRST_SECONDS = 600.0  # for the first phases of a kind: kernels are compiled, files are fetched
_KNOWN = 3  # phases after which a kind's usual time is known
LOOK_SECONDS = 1.0
_ANNOUNCE_SECONDS = 3.0  # within which a rank that waits for data has announced it again
OTHERS_SECONDS = 3.0  # for the other ranks to notice too, before this one's exit ends them
STUCK_SECONDS = 30.0  # after which even a process that lets no Python run is ended
EXIT_HANG = 75

DATA = "data"  # the kind of phase that a slow store can hold up


def limit(earlier: list[float], patience: float) -> float:
    """Return how many seconds a phase may take, given what earlier phases of its kind took."""
    if len(earlier) < _KNOWN:
        return max(patience, FIRST_SECONDS)
    return max(patience, TIMES_MEDIAN * statistics.median(earlier))


@contextmanager
def must_end_within(seconds: float, phase: str, report: Callable[[str], None]) -> Iterator[None]:
    """End the process, with a report, if the block takes longer: it may be stuck in C, where no exception arrives."""

    def end() -> None:
        report(f"{phase} has taken {seconds:.0f} s; treating it as a hang")
        end_process(EXIT_HANG, flush=False)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Watchdog:
    """`stacks` is where stacks are written; `report` is called with one line just before the process ends."""

    def __init__(
        self, patience: float, stacks: Path, report: Callable[[str], None], world: World | None = None
    ) -> None:
        self._patience, self._path, self._report, self._world = patience, stacks, report, world or World()
        self._earlier: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=101))
        self._phase: tuple[str, str, float, float] | None = None  # kind, name, since, deadline
        self._excused_since: float | None = None
        self._forget_compiler: Callable[[], None] = lambda: None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def begin(self, kind: str, name: str = "", least_seconds: float = 0.0) -> None:
        """Begin a phase, which may take `least_seconds` in any case; the phase before it is over."""
        since = time.monotonic()
        self._finish(since)
        seconds = max(least_seconds, limit(list(self._earlier[kind]), self._patience))
        self._phase = (kind, name or kind, since, since + seconds)

    def pause(self) -> None:
        """Stop watching until the next phase: what comes now has its own limits, or nothing to compare with."""
        self._finish(time.monotonic())
        self._phase = None

    def watch_compiler(self) -> None:
        """Let steps that compile take longer: a new size of batch or image may come at any step."""
        from torch._dynamo.callback import callback_handler

        begin, end = self._begin_excuse, self._end_excuse

        def forget() -> None:
            callback_handler.remove_start_callback(begin)
            callback_handler.remove_end_callback(end)

        callback_handler.register_start_callback(begin)
        callback_handler.register_end_callback(end)
        self._forget_compiler = forget

    @contextmanager
    def excused(self) -> Iterator[None]:
        """Let what happens here take minutes; it is no part of the phase."""
        self._begin_excuse()
        try:
            yield
        finally:
            self._end_excuse()

    def _begin_excuse(self, _: object = None) -> None:
        self._excused_since = time.monotonic()

    def _end_excuse(self, _: object = None) -> None:
        since, phase, self._excused_since = self._excused_since, self._phase, None
        if since is not None and phase is not None:  # as if it had not been: the phase is compared with others
            kind, name, began, deadline = phase
            took = time.monotonic() - since
            self._phase = (kind, name, began + took, deadline + took)

    def usual_seconds(self) -> float:
        """Return what phases of the current kind usually take; 0 if nothing is known."""
        phase = self._phase
        earlier = [] if phase is None else list(self._earlier[phase[0]])
        return statistics.median(earlier) if earlier else 0.0

    def _finish(self, end: float) -> None:
        if self._phase is not None:
            kind, _, since, _ = self._phase
            self._earlier[kind].append(end - since)

    def close(self) -> None:
        self._forget_compiler()
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        with self._path.open("w", encoding="utf-8") as file:
            try:
                while True:
                    phase = self._phase
                    seconds_left = FIRST_SECONDS if phase is None else self._seconds_left(phase)
                    if phase is not None and seconds_left <= 0:
                        self._end(phase, file.fileno())
                    # C code that never releases the interpreter would also keep this thread from looking again:
                    # faulthandler's own thread needs no interpreter.
                    faulthandler.dump_traceback_later(seconds_left + STUCK_SECONDS, exit=True, file=file)
                    if self._closed.wait(LOOK_SECONDS):
                        break
            finally:
                faulthandler.cancel_dump_traceback_later()
        if not self._path.stat().st_size:
            self._path.unlink()

    def _seconds_left(self, phase: tuple[str, str, float, float]) -> float:
        """Return the seconds until this phase counts as a hang."""
        kind, _, since, deadline = phase
        clock, excused_since = time.monotonic(), self._excused_since
        if excused_since is not None:
            self._world.announce_waiting()
            return max(deadline, excused_since + FIRST_SECONDS) - clock
        # In time before the others, which wait for this rank, lose their patience.
        if kind == DATA and clock - since > self._patience / 2:
            self._world.announce_waiting()
        if clock > deadline and self._another_waits():
            return self._patience
        return deadline - clock

    def _another_waits(self) -> bool:
        # An announcement may be old: only a new one within a few seconds shows that a rank is waiting now.
        before = self._world.last_waiting()
        if before is None:
            return False
        self._closed.wait(_ANNOUNCE_SECONDS)
        return self._world.last_waiting() != before

    def _end(self, phase: tuple[str, str, float, float], file: int) -> None:
        kind, name, since, _ = phase
        earlier = list(self._earlier[kind])
        faulthandler.dump_traceback(file=file, all_threads=True)
        usual = f"usually {statistics.median(earlier):.1f} s" if earlier else "first of its kind"
        self._report(f"{name} has taken {time.monotonic() - since:.0f} s ({usual}); treating it as a hang")
        time.sleep(OTHERS_SECONDS)
        end_process(EXIT_HANG, flush=False)
