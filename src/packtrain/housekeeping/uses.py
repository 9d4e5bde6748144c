"""The packs and files that runs use, and how their deletion and a run that starts now keep out of each other's way.

Whoever deletes puts a record under `discarding/` and then reads what runs use. Whoever creates, copies or renames a run
puts it, then reads those records, and then looks whether all that it uses is still there (`require_uses`). So they see
each other, whatever the order: the deletion spares what is used, or the run sees the record, or it sees what a deletion
that is over has deleted.

A record goes only when its deletion has ended. It names a lock on its machine, so that the next deletion there knows
which ones were killed.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from packtrain.errors import NotFound, PacktrainError
from packtrain.files import FileLock, is_free
from packtrain.job.part import is_name
from packtrain.pack.manifest import find_manifest, missing_files
from packtrain.run.inputs import given_keys
from packtrain.run.records import Discarding
from packtrain.run.run import Run
from packtrain.store import DamagedObject, Entry, ObjectNotFound, Store
from packtrain.store.records import MAX_RECORD_BYTES, DamagedRecord, decode, decode_name, encode
from packtrain.system import cache_directory, this_client
from packtrain.units import show_time

_FOLDER = "discarding/"
_FORGOTTEN_SECONDS = 24 * 3600.0  # after which a deletion of another machine counts as killed


@dataclass(frozen=True)
class Uses:
    """Names of packs, keys of files that jobs name, and names of runs: a run uses its own folder."""

    packs: frozenset[str] = frozenset()
    files: frozenset[str] = frozenset()
    runs: frozenset[str] = frozenset()

    def __or__(self, uses: Uses) -> Uses:
        return Uses(self.packs | uses.packs, self.files | uses.files, self.runs | uses.runs)

    def __and__(self, uses: Uses) -> Uses:
        return Uses(self.packs & uses.packs, self.files & uses.files, self.runs & uses.runs)

    def __sub__(self, uses: Uses) -> Uses:
        return Uses(self.packs - uses.packs, self.files - uses.files, self.runs - uses.runs)


def uses_of(run: Run) -> Uses:
    """Return what a run uses. A folder that is no run yet, such as a copy that is being made, may name its pack."""
    pack = run.store.find(run.key("pack.txt"))
    packs = frozenset() if pack is None else frozenset({decode_name(pack, f"{run.key('pack.txt')} in {run.store.url}")})
    try:
        job = run.job
    except NotFound:
        return Uses(packs)
    return Uses(packs, frozenset(given_keys(job, run.store)), frozenset({run.name}))


def all_uses(store: Store) -> Uses:
    """Return what all runs of a store use; one that cannot be read is an error, because it may use anything."""
    used = Uses()
    for name in store.folders("runs/"):
        try:
            used |= uses_of(Run(store, name)) if is_name(name) else Uses()
        except (DamagedRecord, DamagedObject, ObjectNotFound) as error:
            advice = f"repair it, or remove it with `packtrain rm {name}`"
            raise DamagedRecord(f"{error}; what it uses is not known: {advice}") from error
    return used


@contextmanager
def discarding(store: Store, unwanted: Uses) -> Iterator[Callable[[], Uses]]:
    """Announce a deletion, and give what may be deleted of it: no run uses that, and none that starts now will.

    It is asked before each object is deleted, and raises an error once somebody has removed the announcement.
    """
    name = uuid.uuid4().hex
    key, path = f"{_FOLDER}{name}.json", _lock_path(name)
    names = [tuple(sorted(names_of_kind)) for names_of_kind in (unwanted.packs, unwanted.files, unwanted.runs)]
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with FileLock(path):
        store.put(key, encode(Discarding(time.time(), this_client(), *names)))
        try:
            unused = unwanted - all_uses(store)

            def still_unused() -> Uses:
                if not store.exists(key):
                    raise PacktrainError(f"{key} is gone: this deletion was considered killed; run it again")
                return unused

            yield still_unused
        finally:
            store.delete(key)
            path.unlink(missing_ok=True)


def forget_killed(store: Store, store_now: float) -> None:
    """Remove the announcements of deletions that were killed; what they did not delete is found again.

    `store_now` is the time by the store's clock.
    """
    for entry, record in announced(store):
        # Another cache, or another machine with a user of the same name, does not have the lock.
        path = _lock_path(entry.key.removeprefix(_FOLDER).removesuffix(".json"))
        if record.client == this_client() and is_free(path):
            store.delete(entry.key)
            path.unlink(missing_ok=True)
        elif store_now - entry.modified.timestamp() > _FORGOTTEN_SECONDS:
            store.delete(entry.key)


def _lock_path(name: str) -> Path:
    return cache_directory() / "discarding" / f"{name}.lock"


def refuse_discarded(store: Store, used: Uses) -> None:
    """Refuse a new run, which is in the store already, if something that it uses is being deleted at this moment."""
    for entry, record in announced(store):
        gone = used & Uses(frozenset(record.packs), frozenset(record.files), frozenset(record.runs))
        if names := [*gone.packs, *gone.files, *gone.runs]:
            since = f"(by {record.client} since {show_time(record.time)}, {entry.key})"
            advice = "try again when it is done; if it was killed, run `packtrain gc` again"
            raise PacktrainError(f"`packtrain gc` is deleting {names[0]}, which the run needs {since}; {advice}")


def require_uses(store: Store, used: Uses) -> None:
    """Refuse a new run, which is in the store already, if a `packtrain gc` deletes what it uses, or has done so."""
    refuse_discarded(store, used)
    # After that: what was deleted since the run looked for it is missing, or its deletion is still announced.
    for pack in sorted(used.packs):
        manifest = find_manifest(store, pack)
        if manifest is None or missing_files(store, manifest):
            raise NotFound(f"pack {pack} was just deleted from {store.url}; run the same command again")
    for key in sorted(used.files):
        if not store.exists(key):
            raise NotFound(f"{key} was just deleted from {store.url}; run the same command again")


def announced(store: Store) -> list[tuple[Entry, Discarding]]:
    """Return the deletions that are under way, or were killed, with their objects."""
    records = [(entry, store.find(entry.key, MAX_RECORD_BYTES)) for entry in store.list(_FOLDER)]
    try:
        return [
            (entry, decode(Discarding, data, f"{entry.key} in {store.url}"))
            for entry, data in records
            if data is not None
        ]
    except DamagedRecord as error:
        raise DamagedRecord(f"{error}; delete it, unless a `packtrain gc` is under way") from error
