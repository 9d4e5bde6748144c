"""Preemption notices (a machine is about to be taken away), and how a node and its machine end early.

Notices come as signals and from sources of the fleet, such as a cloud's metadata service. A signal handler only sets a
flag; everything else happens at the node's next look.
"""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Literal

from packtrain.errors import EXIT_UNFINISHED
from packtrain.process import end_process, say
from packtrain.store import StoreError

POLL_SECONDS = 3.0
STOP_GRACE_SECONDS = 600.0  # for workers to commit: a large checkpoint over a slow network takes minutes
_END_SECONDS = 20.0  # after that, for the last records
SECONDS_VARIABLE = "PACKTRAIN_NOTICE_SECONDS"  # how long the sender of a signal waits before it kills
POWER_OFF = ("systemctl", "poweroff")
OFF_VARIABLE = "PACKTRAIN_POWER_OFF"  # a Python module with its arguments that ends this machine in place of that
_POWER_OFF_SECONDS = 60.0
_SIGNALS = {
    signal.SIGTERM: "SIGTERM",
    signal.SIGINT: "SIGINT",
    signal.SIGUSR1: "SIGUSR1, as Slurm sends before the time limit",
}
_SIGNAL_FRACTION = 0.9  # of the time after a signal, until the process ends itself


@dataclass(frozen=True)
class PreemptionNotice:
    """Why this machine will be taken away, and in how many seconds, if known.

    If it is not `certain`, the machine only may be taken away soon: it commits a checkpoint and continues.
    """

    reason: str
    seconds: float | None = None
    certain: bool = True


NoticeSource = Callable[[], PreemptionNotice | None]
"""Returns a notice if this machine will be taken away; called every few seconds. An exception counts as no notice."""


@dataclass(frozen=True)
class Leaving:
    """Why workers end early: a stop request and the budget end the run, a preemption only this node's part."""

    kind: Literal["stop", "budget", "preemption"]
    reason: str


def seconds_from(environment: Mapping[str, str]) -> float | None:
    """Return how many seconds after a signal this machine is gone, if the environment says so."""
    try:
        seconds = float(environment.get(SECONDS_VARIABLE, ""))
    except ValueError:
        return None
    return seconds if 0 < seconds < float("inf") else None


class PreemptionWatch:
    """Waits for a preemption notice from any source, and keeps the first that is certain, and the first that is not.

    If this process is still there when the time after a signal is nearly used up, `end` is called with the reason, in a
    thread: the process may be stuck in a request to the store.
    """

    def __init__(
        self,
        sources: Sequence[NoticeSource] = (),
        clock: Callable[[], float] = time.monotonic,
        poll_seconds: float = POLL_SECONDS,
        end: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._sources, self._clock, self._poll_seconds, self._end = sources, clock, poll_seconds, end
        self.notice: PreemptionNotice | None = None  # the first that is certain ...
        self.risk: PreemptionNotice | None = None  # ... and the first that is not
        self._at = 0.0
        self._signal_seconds: float | None = None
        self._over = threading.Event()

    def listen(self) -> None:
        """Start to treat signals as notices and to poll the sources."""
        self._signal_seconds = seconds_from(os.environ)
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        threading.Thread(target=self._heed_signal, args=(reading,), name="signals", daemon=True).start()
        # SIGINT, too: a person may have started the node in a terminal.
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)
        if self._sources:
            threading.Thread(target=self._poll, name="preemption", daemon=True).start()

    def close(self) -> None:
        self._over.set()

    def seconds_left(self) -> float | None:
        """Return the seconds until this machine is gone, if the notice said so."""
        if self.notice is None or self.notice.seconds is None:
            return None
        return max(0.0, self._at + self.notice.seconds - self._clock())

    def post(self, notice: PreemptionNotice) -> None:
        if not notice.certain:
            self.risk = self.risk or notice
        elif self.notice is None:  # the first one set the clock: a later notice must not extend the time
            self._at, self.notice = self._clock(), notice

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.post(PreemptionNotice(f"preemption notice: {_SIGNALS[signal.Signals(number)]}", self._signal_seconds))

    def _heed_signal(self, reading: int) -> None:
        """Post the notice even if the main thread, which alone runs Python's handlers, is stuck; then watch the end."""
        # One that is stuck in the kernel, as on a dead mount, does not even take the signal. This thread then can,
        # but only if it blocks the signal.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        number = 0
        while not number:
            if select.select([reading], [], [], self._poll_seconds)[0]:
                number = next((byte for byte in os.read(reading, 100) if byte in _SIGNALS), 0)
            elif (information := signal.sigtimedwait(_SIGNALS, 0)) is not None:
                number = information.si_signo
        self._on_signal(number, None)
        seconds = self._signal_seconds
        time.sleep(STOP_GRACE_SECONDS + _END_SECONDS if seconds is None else _SIGNAL_FRACTION * seconds)
        assert self.notice is not None
        self._end(self.notice.reason)

    def _poll(self) -> None:
        last_error = ""
        while not self._over.wait(self._poll_seconds):
            for source in self._sources:
                try:
                    notice = source()
                except Exception as error:
                    if str(error) != last_error:  # every few seconds, for as long as it lasts
                        last_error = str(error)
                        say(f"warning: cannot check for preemption notices: {error}")
                    continue
                if notice is not None:
                    self.post(notice)
                if self.notice is not None:
                    return  # only the first notice counts


# Ending.


def complain(error: StoreError) -> None:
    say(f"warning: {error}")


def run_all(*steps: Callable[[], object]) -> None:
    """Run every step in order, whatever one of them raises."""
    for step in steps:
        try:
            step()
        except Exception as error:
            say(f"warning: {type(error).__name__}: {error}")


def exit_immediately(reason: str, power_off: bool) -> None:
    """End this process, and the machine if the fleet says so, without the store."""
    try:
        say(f"failed: {reason}, and the store does not answer")
        switch_off(power_off)
    finally:
        end_process(EXIT_UNFINISHED, flush=False)


def switch_off(is_wanted: bool, command: Sequence[str] = ()) -> bool:
    """Shut this machine down if the fleet says so: by the command, or by sudo if that needs no password.

    Raises nothing; returns True if a command succeeded.
    """
    if not is_wanted:
        return False
    module = shlex.split(os.environ.get(OFF_VARIABLE, ""))
    command = command or ((sys.executable, "-P", "-m", *module) if module else POWER_OFF)
    say("machine: shutting down")
    for tried in (command, ("sudo", "-n", *command)):
        words = " ".join(tried)
        try:
            code = subprocess.run(tried, check=False, timeout=_POWER_OFF_SECONDS).returncode
        except (OSError, subprocess.SubprocessError) as error:
            say(f"warning: `{words}`: {error}")
            continue
        if code == 0:
            return True
        say(f"warning: `{words}` exited with code {code}")
    say("failed: cannot shut down this machine; it is still running and billing; shut it down manually")
    return False
