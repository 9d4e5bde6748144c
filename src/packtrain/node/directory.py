"""A node's directory on its machine, and what to do about those that dead nodes left there.

An agent holds a lock on its home as long as it lives. The kernel takes the lock back whatever ends the agent, so a
home whose lock can be taken belongs to nobody: its logs are brought into the store, and it is removed.

Several machines may have one cache, on a network's file system, and each may know of its own locks alone: what is of
another machine is left to that one.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from packtrain.errors import Mistake
from packtrain.node.launch import kill_marked
from packtrain.node.logs import LogShipper, source_of
from packtrain.run.records import Generation, LogLine, TellEvent
from packtrain.run.run import Run
from packtrain.store import StoreError
from packtrain.system import nodes_directory, say

_REST = "-rest-"
_PART = ".part"  # how the names of homes end that are being made
_FOREIGN_SECONDS = 7 * 24 * 3600.0


@dataclass(frozen=True)
class Owner:
    """Whose home it is."""

    store: str
    run: str
    node: str
    hostname: str


class Home:
    def __init__(self, path: Path, lock: int) -> None:
        self.path, self._lock = path, lock

    @classmethod
    def make(cls, run: Run, node: str) -> Home:
        """Under its own name once it is whole, and locked: until then whoever sweeps passes it over."""
        path = nodes_directory() / f"{run.name}-{node}"
        part = path.with_name(f"{path.name}{_PART}")
        owner = Owner(run.store.url, run.name, node, socket.gethostname())
        try:
            part.mkdir(parents=True)
            lock = _lock(part)
            (part / "owner.json").write_text(json.dumps(asdict(owner)))
            part.rename(path)
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            raise Mistake(
                f"{nodes_directory()}: an agent cannot have a locked directory there ({error.strerror or error}): "
                "set PACKTRAIN_CACHE to a directory on a disk of this machine"
            ) from None
        return cls(path, lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def owner(self) -> Owner | None:
        return _owner_of(self.path)


def _owner_of(path: Path) -> Owner | None:
    try:
        return Owner(**json.loads((path / "owner.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _lock(path: Path) -> int:
    """The home's lock, until it is closed or this process ends; OSError while another has it, or it cannot be had."""
    descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def sweep(run: Run, tell: TellEvent) -> None:
    """Takes over what dead nodes of this machine left: their processes, their logs, their leases, their files.

    Homes of other stores are only removed once they are old: their logs may still be wanted.
    """
    directory = nodes_directory()
    for path in sorted(directory.iterdir()) if directory.exists() else ():
        try:
            owner = _owner_of(path)
            if not path.is_dir() or not _is_for_us(run, path, owner):
                continue
            lock = _lock(path)
        except (OSError, StoreError):
            continue
        kill_marked(path)
        if owner is not None and owner.store == run.store.url:
            try:
                _bury(Run(run.store, owner.run), owner.node, path, tell if owner.run == run.name else None)
            except StoreError as error:
                say(f"warning: {path} is kept for now: {error}")
                os.close(lock)
                continue
        Home(path, lock).remove()


def _is_for_us(run: Run, path: Path, owner: Owner | None) -> bool:
    """Whether the home is this machine's to take over, should its lock be free.

    One of another machine is, in the end, if its lease in this store tells that it is long dead: a machine that was
    rented, or a container, does not come back for it.
    """
    is_old = time.time() - path.stat().st_mtime >= _FOREIGN_SECONDS
    if owner is None or path.name.endswith(_PART):
        return is_old
    is_here, is_ours = owner.hostname == socket.gethostname(), owner.store == run.store.url
    if is_here:
        return is_ours or is_old
    if not is_ours or not is_old:
        return False
    lease = run.store.entry(Run(run.store, owner.run).key(f"nodes/{owner.node}.json"))
    return lease is None or time.time() - lease.modified.timestamp() >= _FOREIGN_SECONDS


def _bury(run: Run, node: str, path: Path, tell: TellEvent | None) -> None:
    """Ships what the store does not have of a dead node's logs, and says in its lease that it has left."""
    lines = _ship_rest(run, node, path)
    lease = run.lease(node)
    if lease is not None and not lease.left:
        run.renew(replace(lease, left=True))
    if tell is not None:
        tell("machine", f"{node} was found dead on this machine; {lines} more lines of its logs are kept")


def _ship_rest(run: Run, node: str, path: Path) -> int:
    """Whatever is shipped arrives whole, as one object, so whoever has to do it again knows what is there."""
    generations = {one.number: one for one in run.generations()}
    writer = run.log_writer(f"{node}{_REST}{uuid.uuid4().hex[:8]}")
    shipped = Counter(source_of(line) for line in _lines_of(run, node))
    count = 0
    for folder in sorted(path.iterdir()):
        if folder.name.isdigit() and int(folder.name) in generations and (folder / "logs").is_dir():
            number = int(folder.name)
            first_rank = _first_rank(generations[number], node)
            count += LogShipper(folder / "logs", writer, node, number, first_rank, shipped).ship(all_of_it=True)
    writer.flush()
    return count


def _lines_of(run: Run, node: str) -> Iterator[LogLine]:
    """What the store has of one node's logs."""
    for writer in run.store.folders(run.key("logs/")):
        if writer == node or writer.startswith(f"{node}{_REST}"):
            for entry in run.store.list(run.key(f"logs/{writer}")):
                for line in run.store.get(entry.key).splitlines():
                    yield LogLine(**json.loads(line))


def _first_rank(generation: Generation, node: str) -> int:
    rank = generation.rank_of(node) or 0
    return sum(member.workers for member in generation.members[:rank])


def remove_orphans(run: Run, current: int, complain: Callable[[StoreError], None]) -> None:
    """Deletes files of checkpoints that older generations began and never committed.

    Only a generation older than the current one is touched: it commits nothing any more.
    """
    try:
        _remove_orphans(run, current)
    except StoreError as error:
        complain(error)


def _remove_orphans(run: Run, current: int) -> None:
    for name in run.store.folders(run.key("checkpoints/")):
        _, _, rest = name.partition("-")
        generation = rest.partition("-")[0]
        if not generation.isdigit() or int(generation) >= current:
            continue
        folder = run.key(f"checkpoints/{name}")
        if run.store.exists(f"{folder}/manifest.json"):
            continue
        for entry in run.store.list(folder):
            run.store.delete(entry.key)
