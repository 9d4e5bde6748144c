"""A node's directory on its machine, and the cleanup of directories that dead nodes left there.

A node holds a lock on its directory as long as it lives. The kernel releases the lock however the node ends, so a
directory whose lock can be taken belongs to a dead node: its logs are uploaded to the store, and it is removed.

Several machines may share one cache on a network file system, where each may see only its own locks: directories of
another machine are left alone.

A second lock limits how many nodes of a run a machine has: clients that resume the run at the same moment each start
one, and only the first gets the slot.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from packtrain.errors import AlreadyJoined, Mistake, PacktrainError
from packtrain.files import FileLock
from packtrain.node.launcher import kill_marked
from packtrain.node.output import LogShipper, source_of
from packtrain.process import say
from packtrain.run.liveness import node_directory
from packtrain.run.records import LogLine, TellEvent
from packtrain.run.run import Run
from packtrain.store import StoreError
from packtrain.system import machine_id, nodes_directory

_RECOVERED = "-recovered-"  # in the names of writers that upload the logs of a dead node
_PART = ".part"  # the suffix of a directory that is being made
_SLOT = ".slot"
_SLOT_SECONDS = 3.0  # for a node that has just seen the end of the run to leave, if it is resumed at that moment
_SLOT_POLL_SECONDS = 0.1
_FOREIGN_SECONDS = 7 * 24 * 3600.0


@dataclass(frozen=True)
class Owner:
    """The node that a directory belongs to."""

    store: str
    run: str
    node: str
    hostname: str


class NodeSlot:
    """One of the places that a machine has for the nodes of a run, held as long as the node takes part."""

    def __init__(self, run: Run, patience: float = _SLOT_SECONDS) -> None:
        """Raise AlreadyJoined if all are taken: one, or as many as the run has machines where nodes share them."""
        kind = run.job.fleet.kind
        store = run.store.identity or run.store.url  # known by now: the job has been read
        stem = f"{run.name}-{_short_digest(store)}-{_short_digest(machine_id())}"
        paths = [
            nodes_directory() / f"{stem}-{number}{_SLOT}"
            for number in range(kind.machines.most if kind.shares_machines else 1)
        ]
        deadline = time.monotonic() + patience
        try:
            nodes_directory().mkdir(parents=True, exist_ok=True)
            while True:
                for path in paths:
                    with suppress(BlockingIOError):
                        self._path, self._lock = path, FileLock(path, wait=False)
                        return
                if time.monotonic() >= deadline:
                    raise AlreadyJoined(f"{run.name} already has its node on this machine; nothing was started")
                time.sleep(_SLOT_POLL_SECONDS)
        except OSError as error:
            raise _no_locks(error) from None

    def close(self) -> None:
        if self._lock.fileno() >= 0:
            self._path.unlink(missing_ok=True)  # before the lock is released: afterwards it may be another node's
            self._lock.close()


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _no_locks(error: OSError) -> Mistake:
    return Mistake(
        f"{nodes_directory()}: cannot create a locked directory ({error.strerror or error}); "
        "set PACKTRAIN_CACHE to a directory on a local disk"
    )


class NodeDirectory:
    def __init__(self, path: Path, lock: FileLock) -> None:
        self.path, self.lock = path, lock

    @classmethod
    def create(cls, run: Run, node: str) -> NodeDirectory:
        path = node_directory(run, node)
        unfinished = path.with_name(f"{path.name}{_PART}")
        owner = Owner(run.store.url, run.name, node, socket.gethostname())
        try:
            unfinished.mkdir(mode=0o700, parents=True)  # workers meet in a file in it, and programs write checkpoints
            lock = _lock(unfinished)
            (unfinished / "owner.json").write_text(json.dumps(asdict(owner)), "utf-8")
            unfinished.rename(
                path
            )  # only when it is complete and locked: a node that takes over leftovers skips it until then
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise _no_locks(error) from None
        return cls(path, lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.lock.close()


def _lock(path: Path) -> FileLock:
    return FileLock(path / "lock", wait=False)


def owner_of(path: Path) -> Owner | None:
    try:
        return Owner(**json.loads((path / "owner.json").read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def take_over_leftovers(run: Run, tell: TellEvent) -> None:
    """Take over what dead nodes left on this machine: their processes, logs, leases and files.

    Directories of other stores are removed only once they are old: their logs may still be wanted.
    """
    directory = nodes_directory()
    for path in sorted(directory.iterdir()) if directory.exists() else ():
        try:
            if path.suffix == _SLOT:
                # Of a node that was killed. Those of other machines, and from before a reboot, have to be old.
                is_here = f"-{_short_digest(machine_id())}-" in path.name
                if is_here or time.time() - path.stat().st_mtime >= _FOREIGN_SECONDS:
                    with FileLock(path, wait=False):
                        path.unlink(missing_ok=True)
            owner = owner_of(path)
            if not path.is_dir() or not _is_ours(run, path, owner):
                continue
            lock = _lock(path)
        except (OSError, StoreError):
            continue
        kill_marked(path)  # before its logs are read: a worker may have survived its node
        if owner is not None and owner.store == run.store.url:
            try:
                _take_over(Run(run.store, owner.run), owner.node, path, tell if owner.run == run.name else None)
            except PacktrainError as error:
                say(f"warning: keeping {path} for now: {error}")
                lock.close()
                continue
        NodeDirectory(path, lock).remove()  # last: while it exists and is locked, no other node takes it over


def _is_ours(run: Run, path: Path, owner: Owner | None) -> bool:
    """True if this machine may take the directory over, should its lock be free.

    A directory of another machine is taken over only if its lease says that it died long ago: a rented machine or a
    container does not come back for it.
    """
    is_old = time.time() - path.stat().st_mtime >= _FOREIGN_SECONDS
    if owner is None or path.name.endswith(_PART):
        return is_old
    is_here, is_this_store = owner.hostname == socket.gethostname(), owner.store == run.store.url
    if is_here:
        return is_this_store or is_old
    if not is_this_store or not is_old:
        return False
    lease = run.store.entry(Run(run.store, owner.run).lease_key(owner.node))
    return lease is None or time.time() - lease.modified.timestamp() >= _FOREIGN_SECONDS


def _take_over(run: Run, node: str, path: Path, tell: TellEvent | None) -> None:
    lines = _ship_rest(run, node, path)
    lease = run.lease(node)
    if lease is not None and not lease.left:
        run.renew(replace(lease, left=True))
    if tell is not None:
        tell("machine", f"{node} died on this machine; recovered {lines} more lines of its logs")


def _ship_rest(run: Run, node: str, path: Path) -> int:
    """Ship the lines that the store lacks. They arrive in order, so a second try knows which are missing."""
    generations = {generation.number: generation for generation in run.generations()}
    writer = run.log_writer(f"{node}{_RECOVERED}{uuid.uuid4().hex[:8]}")
    # Files are shipped from their start, so the number of lines in the store says where to continue.
    shipped = Counter(source_of(line) for line in _lines_of(run, node))
    count = 0
    for folder in sorted(path.iterdir()):
        if folder.name.isdigit() and int(folder.name) in generations and (folder / "logs").is_dir():
            generation = generations[int(folder.name)]
            rank = generation.rank_of(node) or 0
            first_rank = sum(member.workers for member in generation.members[:rank])
            shipper = LogShipper(folder / "logs", writer, node, generation.number, first_rank, shipped)
            count += shipper.ship(is_complete=True)
    writer.flush()
    return count


def _lines_of(run: Run, node: str) -> Iterator[LogLine]:
    reader = run.log_lines()
    for writer in run.store.folders(run.key("logs/")):
        if writer == node or writer.startswith(f"{node}{_RECOVERED}"):
            for chunk in reader.of(writer):
                yield from chunk
