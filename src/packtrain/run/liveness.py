"""Whether machines work on runs, told at once: nobody has to wait for the next renewal of a lease.

An agent of this machine holds a lock that says so exactly. Of others the age of the lease tells, by the store's own
clock: a lease that holds is a machine at work for everybody, and one that ran out is a machine that is lost. Who works
on a run is watched for some seconds only where that leaves a doubt.
"""

from __future__ import annotations

import fcntl
import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime

from packtrain.errors import PacktrainError
from packtrain.run.records import Lease
from packtrain.run.run import LEASE_LOST_SECONDS, Run, State, states
from packtrain.store import Store
from packtrain.system import nodes_directory

# File systems that several machines share may have the times of whoever wrote: clocks that are less wrong than this
# make no machine look lost. (Doctor complains about 30 s.)
DOUBT_SECONDS = 120.0
_COARSE_SECONDS = 2.0  # servers know times to the second
_READERS = 16


@dataclass(frozen=True)
class Sign:
    """A lease of a machine that has not left: how old it is, whether one clock stamped it and was asked for the time,
    and whether its agent is known to live or to be dead."""

    age_seconds: float | None
    one_clock: bool
    lives: bool | None = None

    def says(self) -> bool | None:
        """Whether that machine is at work; None where nobody can tell yet."""
        if self.lives is not None:
            return self.lives
        if self.age_seconds is None:
            return None
        if self.age_seconds <= LEASE_LOST_SECONDS and (self.one_clock or self.age_seconds >= -_COARSE_SECONDS):
            return True
        lost_after = LEASE_LOST_SECONDS + _COARSE_SECONDS if self.one_clock else DOUBT_SECONDS
        return False if self.age_seconds > lost_after else None


def state_by(signs: Sequence[Sign] | None) -> State | None:
    """None for the leases: there never was a machine. No state: it has to be watched."""
    if signs is None:
        return "waiting"
    said = {sign.says() for sign in signs}
    return "running" if True in said else None if None in said else "interrupted"


def states_now(runs: Sequence[Run]) -> list[State]:
    """What each run is doing, without waiting wherever that can be told."""
    with ThreadPoolExecutor(_READERS) as readers:
        results = list(readers.map(Run.result, runs))
        known: list[State | None] = [None if result is None else result.status for result in results]
        going = [index for index, state in enumerate(known) if state is None]
        # Asked for before the leases are read: one that is renewed meanwhile looks younger, and none looks older.
        now = _store_time(runs[going[0]].store) if going else None
        found = readers.map(lambda index: state_by(_signs(runs[index], now)), going)
        for index, state in zip(going, found, strict=True):
            known[index] = state
    doubtful = [index for index in going if known[index] is None]
    watched = dict(zip(doubtful, states([runs[index] for index in doubtful]), strict=True))
    return [state or watched[index] for index, state in enumerate(known)]


def _signs(run: Run, now: datetime | None) -> list[Sign] | None:
    """What the leases of a run tell; those of machines that left say nothing."""
    modified = {entry.key: entry.modified for entry in run.store.list(run.key("nodes/"))}
    return [_sign(run, node, modified, now) for node in run.leases() if not node.left] if modified else None


def _sign(run: Run, node: Lease, modified: Mapping[str, datetime], now: datetime | None) -> Sign:
    own = node.hostname == socket.gethostname()
    renewed = modified.get(run.key(f"nodes/{node.node}.json"))
    age = None if now is None or renewed is None else (now - renewed).total_seconds()
    return Sign(age, own or not run.store.is_directory, is_held(run, node) if own else None)


def is_held(run: Run, node: Lease) -> bool | None:
    """Whether an agent of this machine holds its home; None where that home is not here."""
    home = nodes_directory() / f"{run.name}-{node.node}"
    if not (home / "owner.json").exists():  # before it is there, the agent has yet to take its lock
        return None
    try:
        descriptor = os.open(home / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False


def _store_time(store: Store) -> datetime | None:
    """The time by the store's clock: something is written and looked at. None where nobody may write."""
    key = f"scratch/time-{uuid.uuid4().hex}"
    try:
        store.put(key, b"")
        entry = store.entry(key)
        store.delete(key)
    except PacktrainError:
        return None
    return None if entry is None else entry.modified
