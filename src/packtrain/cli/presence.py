"""Who is there for a run that somebody follows: the leases say it, and where there are too few, the fleet does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from packtrain.errors import PacktrainError
from packtrain.fleet import Machine, fleet_of
from packtrain.fleet.slurm import summed_up
from packtrain.node.assembly import LeaseWatch
from packtrain.node.attempt import Task
from packtrain.run.run import LEASE_SECONDS, Run
from packtrain.units import Machines

ASK_SECONDS = 30.0
_SURE = 2  # so often in a row nobody is there: a job that is queued again may be in no list for a moment
_ENDED = ("ended", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


@dataclass(frozen=True)
class Word:
    """What is to be said about the machines; `none_left`: nothing will happen unless somebody acts."""

    text: str
    none_left: bool = False


def in_words(alive: int, wanted: Machines, machines: Sequence[Machine] | None, run: str) -> Word | None:
    """What keeps a run from going on; nothing, if enough machines are there. `machines` is None: nobody could tell."""
    if alive >= wanted.least:
        return None
    if machines is None:
        return Word(f"waits for {wanted.least - alive} of {wanted.least} machines")
    going = [machine for machine in machines if not is_over(machine.state)]
    if alive or going:
        states = summed_up(machines)
        return Word(f"waits for {wanted.least - alive} of {wanted.least} machines" + (f": {states}" if states else ""))
    return Word(f"no machine is left: `packtrain resume {run}` goes on", none_left=True)


def is_over(state: str) -> bool:
    """Of a machine's state, as its fleet names it. Slurm has several words for a job that is queued again."""
    words = state.split()
    return "PENDING" not in words and any(word in _ENDED for word in words)


@dataclass
class Presence:
    """Looks at the leases every few seconds, and asks the fleet in a thread of its own: hosts may take their time."""

    run: Run
    clock: Callable[[], float] = time.monotonic
    watch: LeaseWatch = field(default_factory=LeaseWatch)
    _looked: float = float("-inf")
    _asked: float = field(default=0.0, init=False)
    _asking: Task | None = None
    _machines: list[Machine] | None = None
    _word: Word | None = None
    _times: int = 0

    @property
    def in_vain(self) -> bool:
        """Whether nothing will come any more, for whoever waits."""
        return self._times >= _SURE

    def __post_init__(self) -> None:
        self._asked = self.clock()  # time to start, before anybody wonders

    def look(self) -> Word | None:
        """What there is to say now."""
        now = self.clock()
        if now - self._looked >= LEASE_SECONDS:
            self._looked = now
            self.watch.observe(self.run.leases(), now)
        alive = sum(self.watch.alive(name, now) for name in self.watch.leases)
        wanted = self.run.job.fleet.kind.machines
        if alive >= wanted.least:
            self._asked, self._word, self._times = now, None, 0
        elif self._asking is not None and self._asking.is_done:
            self._asking, self._asked = None, now
            self._word = in_words(alive, wanted, self._machines, self.run.name)
            self._times = self._times + 1 if self._word is not None and self._word.none_left else 0
        elif self._asking is None and now - self._asked >= ASK_SECONDS:
            self._asking = Task(self._ask, "machines")
        return self._word

    def _ask(self) -> None:
        try:
            self._machines = fleet_of(self.run.job.fleet.kind).list(self.run)
        except PacktrainError:
            self._machines = None
