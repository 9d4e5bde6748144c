"""Judges whether the machines of a run are alive, by their leases. No other module does.

A node renews its lease every `LEASE_SECONDS`. There are two ways to judge it:

- Watching (`LeaseWatch`): a lease is alive if this reader saw it change not long ago, by the reader's own monotonic
  clock; clocks of two machines are never compared. Nodes, the follower and the mpirun supervisor do this.
- At one look (`states_now`, for `packtrain ls`): a node on this machine holds a lock; of others, the store's own clock
  says how old the lease is. Where that leaves a doubt, the run is watched for a few seconds.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from packtrain.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_UNFINISHED, PacktrainError
from packtrain.files import FileLock
from packtrain.run.checkpoint import last_step, remove_uncommitted
from packtrain.run.records import Lease, Result
from packtrain.run.run import Run
from packtrain.store import Store, StoreError
from packtrain.store.records import encode
from packtrain.system import nodes_directory, this_client

LEASE_SECONDS = 2.0  # between two renewals of a lease
LEASE_LOST_SECONDS = 12.0  # without a renewal, until a node counts as lost
WATCH_SECONDS = 3 * LEASE_SECONDS  # how long a command watches a run for a renewal
# A shared file system may stamp files with the clock of the machine that wrote them. Clocks that are off by less than
# this make no machine look lost. (Doctor complains about 30 s.)
DOUBT_SECONDS = 120.0
_BLIND_SECONDS = 4.0  # a longer pause between two looks means that the reader could not look
_COARSE_SECONDS = 2.0  # object stores keep times to the second
_READERS = 16
_MAX_LEASES = 64  # that one look reads: of a thousand machines, those that were not read wait for the next look

Answer = TypeVar("Answer")
State = Literal["finished", "failed", "stopped", "running", "waiting", "interrupted"]
EXIT_CODES: dict[State, int] = {
    "finished": EXIT_DONE,
    "failed": EXIT_FAILED,
    "stopped": EXIT_STOPPED,
    "running": EXIT_UNFINISHED,
    "waiting": EXIT_UNFINISHED,
    "interrupted": EXIT_UNFINISHED,
}


def attempt(read: Callable[[], Answer]) -> Answer | PacktrainError:
    """Return the answer, or the error that keeps this run from being read; one bad run must not hide the others."""
    try:
        return read()
    except PacktrainError as error:
        if isinstance(error, StoreError) and error.temporary:  # the store is away, which concerns all runs
            raise
        return error


# Watching.


@dataclass
class LeaseWatch:
    """Judges leases by when this reader saw them renewed. Pure: the caller reads the leases and the clock.

    Time in which the reader could not look, because the store was unreachable, does not count: no node could renew.
    """

    lost_after_seconds: float = LEASE_LOST_SECONDS
    leases: dict[str, Lease] = field(default_factory=dict)
    """The leases as last seen, including those of nodes that have left."""
    _renewals: dict[str, tuple[int, float]] = field(
        default_factory=dict
    )  # the latest renewal, and when it was first seen
    _renewed: set[str] = field(default_factory=set)
    _looked: dict[str, float] = field(default_factory=dict)

    def observe(self, leases: Iterable[Lease], moment: float) -> None:
        for lease in leases:
            name = lease.node
            self.leases[name] = lease
            # Time that the reader was blind is added to the moment of the last renewal, as if it had not passed.
            blind = moment - self._looked.get(name, moment) - _BLIND_SECONDS
            self._looked[name] = moment
            if lease.left:
                self._renewals.pop(name, None)
                self._renewed.discard(name)
                continue
            before = self._renewals.get(name)
            if before is not None and before[0] != lease.renewal:
                self._renewed.add(name)
            if before is None or before[0] != lease.renewal:
                self._renewals[name] = (lease.renewal, moment)
            elif blind > 0:
                self._renewals[name] = (before[0], before[1] + blind)
                self._renewed.discard(name)  # it may have died while this reader could not look

    def alive(self, node: str, moment: float) -> bool:
        """True if the node was seen to renew its lease not long ago."""
        return node in self._renewed and moment - self._renewals[node][1] < self.lost_after_seconds

    def lost(self, node: str, moment: float) -> bool:
        """True if the node has left or not renewed for too long. A node seen only once is neither alive nor lost."""
        return node not in self._renewals or moment - self._renewals[node][1] >= self.lost_after_seconds

    def renewed_since(self, node: str, moment: float) -> bool:
        return node in self._renewed and self._renewals[node][1] > moment

    def count_alive(self, moment: float) -> int:
        return sum(self.alive(node, moment) for node in self.leases)

    def count_remaining(self, moment: float) -> int:
        """Return the number of nodes that are alive or may be."""
        return sum(not self.lost(node, moment) for node in self.leases)


def watch_states(
    runs: Sequence[Run],
    seconds: float = WATCH_SECONDS,
    poll_seconds: float = LEASE_SECONDS / 4,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[State | PacktrainError]:
    """Return the state of each run; one without a result is watched until a node renews its lease or joins.

    All are watched together: many take no longer than one. A run that no machine has ever joined is waiting. For a run
    that cannot be read, its error is in the list.
    """
    results = [attempt(run.result) for run in runs]
    states: list[State | PacktrainError] = [
        "waiting" if result is None else result.status if isinstance(result, Result) else result for result in results
    ]
    watches = {index: LeaseWatch() for index, result in enumerate(results) if result is None}
    before: dict[int, set[str]] = {}
    deadline = clock() + seconds
    while watches:
        for index, watch in list(watches.items()):
            leases = attempt(runs[index].leases)
            if isinstance(leases, PacktrainError):
                states[index] = leases
                del watches[index]
                continue
            watch.observe(leases, clock())
            first = before.setdefault(index, set(watch.leases))
            joined = [name for name in watch.leases if name not in first and not watch.lost(name, clock())]
            if joined or watch.count_alive(clock()):
                states[index] = "running"
            elif watch.leases:
                states[index] = "interrupted"
            # Runs whose node renews leave the set, so this usually ends after one renewal.
            if states[index] != "interrupted":
                del watches[index]
        if not watches or clock() >= deadline:
            break
        sleep(poll_seconds)
    for index in watches:
        states[index] = attempt(partial(without_nodes, runs[index]))
    return states


def without_nodes(run: Run) -> State:
    """Return the state of a run that nodes have left: waiting if it was launched since, and none has joined yet.

    Both times are the store's, or those of machines that share its directory: never that of this reader.
    """
    renewed, launched = _times_of(run, "nodes/"), _times_of(run, "launches/")
    return "waiting" if not renewed or (launched and launched[-1] > renewed[-1]) else "interrupted"


def was_left_before_launch(run: Run) -> bool:
    """True if the nodes of earlier launches have left, and none has yet to join. The latest launch is the caller's."""
    if state_of(run) not in ("interrupted", "waiting"):
        return False
    renewed, launched = _times_of(run, "nodes/"), _times_of(run, "launches/")[:-1]
    return bool(renewed) and not (launched and launched[-1] > renewed[-1])


def _times_of(run: Run, folder: str) -> list[datetime]:
    return sorted(entry.modified for entry in run.store.list(run.key(folder)))


def state_of(run: Run) -> State:
    return _readable(watch_states([run])[0])


def state_now(run: Run) -> State:
    return _readable(states_now([run])[0])


def _readable(state: State | PacktrainError) -> State:
    if isinstance(state, PacktrainError):
        raise state
    return state


class StateWatch:
    """The state of a run without a result, look by look: for a reader that stays, and that writes nothing.

    The first looks judge by the age of the leases, later ones by what was seen of them.
    """

    def __init__(self, run: Run, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = run, clock
        self._watch, self._since = LeaseWatch(), clock()
        self._modified: dict[str, datetime] = {}
        self._alive: set[str] = set()

    @property
    def leases(self) -> list[Lease]:
        return list(self._watch.leases.values())

    def is_alive(self, node: str) -> bool:
        """True if the node worked on the run at the last look, as far as this reader can know."""
        return node in self._alive

    def look(self) -> State:
        """Read the leases that were renewed since the last look, and judge."""
        folder = self._run.key("nodes/")
        modified = {entry.key: entry.modified for entry in self._run.store.list(folder)}
        names = [
            key.removeprefix(folder).removesuffix(".json")
            for key, renewed in modified.items()
            if key.endswith(".json") and "/" not in key.removeprefix(folder) and self._modified.get(key) != renewed
        ][:_MAX_LEASES]
        read = {lease.node: lease for lease in map(self._run.lease, names) if lease is not None}
        self._modified |= {self._run.lease_key(name): modified[self._run.lease_key(name)] for name in read}
        moment = self._clock()
        self._watch.observe((self._watch.leases | read).values(), moment)
        present = [lease for lease in self._watch.leases.values() if not lease.left]
        self._alive = {lease.node for lease in present if self._may_live(lease, modified, moment)}
        return "running" if self._alive else without_nodes(self._run)

    def _may_live(self, lease: Lease, modified: Mapping[str, datetime], moment: float) -> bool:
        age = _age(self._run, lease, modified, datetime.now(UTC))
        if age.holds_lock is not None:
            return age.holds_lock
        if moment - self._since > LEASE_LOST_SECONDS:
            return not self._watch.lost(lease.node, moment)
        # The time is that of this machine, not of the store.
        return replace(age, one_clock=lease.hostname == socket.gethostname()).is_alive() is not False


# At one look.


@dataclass(frozen=True)
class LeaseAge:
    """The lease of a node that has not left, at one look.

    `one_clock`: the clock that stamped the lease is the one that was asked for the time. `holds_lock`: the node is on
    this machine, and is known to be running or dead.
    """

    seconds: float | None
    one_clock: bool
    holds_lock: bool | None = None

    def is_alive(self) -> bool | None:
        """True if the node is alive, False if it is lost; None if one look is not enough to know."""
        if self.holds_lock is not None:
            return self.holds_lock
        if self.seconds is None:
            return None
        if self.seconds <= LEASE_LOST_SECONDS and (self.one_clock or self.seconds >= -_COARSE_SECONDS):
            return True
        lost_after = LEASE_LOST_SECONDS + _COARSE_SECONDS if self.one_clock else DOUBT_SECONDS
        return False if self.seconds > lost_after else None


def state_by(ages: Sequence[LeaseAge] | None) -> State | None:
    """Return the state of a run without a result, or None if it has to be watched. No leases at all is None."""
    if ages is None:
        return "waiting"
    alive = {age.is_alive() for age in ages}
    return "running" if True in alive else None if None in alive else "interrupted"


def store_time(store: Store) -> datetime | None:
    """Return the time by the store's clock, by writing an object; None if the store cannot be written."""
    key = f"scratch/time-{uuid.uuid4().hex}"
    try:
        store.put(key, b"")
        entry = store.entry(key)
        store.delete(key)
    except PacktrainError:
        return None
    return None if entry is None else entry.modified


def states_now(
    runs: Sequence[Run],
    watch: Callable[[Sequence[Run]], list[State | PacktrainError]] = watch_states,
    clock_of: Callable[[Store], datetime | None] = store_time,
) -> list[State | PacktrainError]:
    """Return the state of each run, or its error; only those that one look leaves in doubt are watched."""
    with ThreadPoolExecutor(_READERS) as readers:
        results = list(readers.map(lambda run: attempt(run.result), runs))
        states: list[State | PacktrainError | None] = [
            result.status if isinstance(result, Result) else result for result in results
        ]
        unfinished = [index for index, state in enumerate(states) if state is None]
        # Before the leases are read: a lease that is renewed meanwhile then looks younger than it is, never older.
        store_now = clock_of(runs[unfinished[0]].store) if unfinished else None
        glances = readers.map(lambda index: attempt(lambda: _at_one_look(runs[index], store_now)), unfinished)
        for index, state in zip(unfinished, glances, strict=True):
            states[index] = state
    doubtful = [index for index in unfinished if states[index] is None]
    watched = dict(zip(doubtful, watch([runs[index] for index in doubtful]), strict=True))
    return [state or watched[index] for index, state in enumerate(states)]


def _at_one_look(run: Run, store_now: datetime | None) -> State | None:
    modified = {entry.key: entry.modified for entry in run.store.list(run.key("nodes/"))}
    present = [lease for lease in run.leases() if not lease.left] if modified else []
    state = state_by([_age(run, lease, modified, store_now) for lease in present] if modified else None)
    return without_nodes(run) if state == "interrupted" else state


def _age(run: Run, lease: Lease, modified: Mapping[str, datetime], store_now: datetime | None) -> LeaseAge:
    is_here = lease.hostname == socket.gethostname()
    renewed = modified.get(run.lease_key(lease.node))
    seconds = None if store_now is None or renewed is None else (store_now - renewed).total_seconds()
    return LeaseAge(seconds, is_here or not run.store.is_directory, holds_lock(run, lease.node) if is_here else None)


def node_directory(run: Run, node: str) -> Path:
    """Return the directory that a node on this machine keeps locked while it runs."""
    return nodes_directory() / f"{run.name}-{node}"


def holds_lock(run: Run, node: str) -> bool | None:
    """True if the node runs on this machine, False if it died here; None if it never had a directory here."""
    directory = node_directory(run, node)
    if not (directory / "owner.json").exists():  # the node has yet to take its lock
        return None
    try:
        FileLock(directory / "lock", shared=True, wait=False).close()
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def fail_launch(run: Run, status: Literal["failed", "stopped"], reason: str, *, is_last_try: bool = True) -> None:
    """Record that the latest launch, which is the caller's, has started nothing; the run would wait forever.

    It ends the run, unless another try follows, or machines of an earlier launch may still join.
    """
    if state_now(run) != "waiting":
        return
    *earlier, (key, launch) = run.launches_by_key().items()
    if launch.client != this_client():  # another client launched it at the same moment
        return
    run.store.put(key, encode(replace(launch, failed=True)))
    modified = {entry.key: entry.modified for entry in run.store.list(run.key("launches/"))}
    renewed = _times_of(run, "nodes/")
    awaited = [key for key, before in earlier if not (before.failed or (renewed and renewed[-1] >= modified[key]))]
    if is_last_try and not awaited:
        run.finish(_result(run, status, reason))


def _result(run: Run, status: Literal["failed", "stopped"], reason: str) -> Result:
    """Return the result of a run that no machine works on."""
    seconds = max((lease.used_seconds for lease in run.leases()), default=0.0)
    return Result(status, reason, last_step(run), seconds)


def finish_unattended(run: Run) -> bool:
    """True if no machine works on a run that was asked to stop: then its result is written here.

    Nobody else would do it, and the run would stay interrupted.
    """
    if state_now(run) not in ("interrupted", "waiting"):
        return False
    run.finish(_result(run, "stopped", "stopped by user while no machine was working on it"))
    latest = run.latest_generation()
    with suppress(PacktrainError):  # the run has its result; the next generation would remove the rest, too
        # The last generation's files stay: a machine that was only cut off may still commit them.
        remove_uncommitted(run, 0 if latest is None else latest.number)
        run.store.remove_unfinished(run.folder)
    return True
