"""The packs and files that runs use, and how their deletion and a run that starts now keep out of each other's way.

Whoever deletes puts a record under `discarding/` and then reads what runs use; whoever creates a run puts it and then
reads those records. One of them sees the other, whatever the order: the first spares what is used, or the second starts
no run.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from packtrain.errors import PacktrainError
from packtrain.job.part import is_name
from packtrain.run.inputs import given_keys
from packtrain.run.records import MAX_RECORD_BYTES, DamagedRecord, Discarding, decode, decode_name, encode
from packtrain.run.run import Run
from packtrain.store import Store
from packtrain.system import this_client
from packtrain.units import show_time

_FOLDER = "discarding/"


@dataclass(frozen=True)
class Uses:
    """Names of packs, and keys of files that jobs name."""

    packs: frozenset[str] = frozenset()
    files: frozenset[str] = frozenset()

    def __or__(self, other: Uses) -> Uses:
        return Uses(self.packs | other.packs, self.files | other.files)

    def __and__(self, other: Uses) -> Uses:
        return Uses(self.packs & other.packs, self.files & other.files)

    def __bool__(self) -> bool:
        return bool(self.packs or self.files)


def uses_of(run: Run) -> Uses:
    """Return what a run uses. A folder that is no run yet, such as a copy that is being made, may name its pack."""
    pack = run.store.find(run.key("pack.txt"))
    packs = frozenset() if pack is None else frozenset({decode_name(pack, f"{run.key('pack.txt')} in {run.store.url}")})
    has_job = run.store.exists(run.key("job.json"))
    return Uses(packs, frozenset(given_keys(run.job, run.store)) if has_job else frozenset())


def all_uses(store: Store) -> Uses:
    """Return what all runs of a store use; one that cannot be read is an error, because it may use anything."""
    used = Uses()
    for name in store.folders("runs/"):
        try:
            used |= uses_of(Run(store, name)) if is_name(name) else Uses()
        except DamagedRecord as error:
            advice = f"repair it, or remove it with `packtrain rm {name}`"
            raise DamagedRecord(f"{error}; what it uses is not known: {advice}") from error
    return used


@contextmanager
def discarding(store: Store, wanted: Uses) -> Iterator[Uses]:
    """Announce a deletion, and give what may be deleted of it: no run uses that, and none that starts now will."""
    key = f"{_FOLDER}{uuid.uuid4().hex}.json"
    record = Discarding(time.time(), this_client(), tuple(sorted(wanted.packs)), tuple(sorted(wanted.files)))
    store.put(key, encode(record))
    try:
        used = all_uses(store)
        yield Uses(wanted.packs - used.packs, wanted.files - used.files)
    finally:
        store.delete(key)


def refuse_discarded(store: Store, used: Uses) -> None:
    """Refuse a new run, which is in the store already, if something that it uses is being deleted at this moment."""
    for key, record in announced(store):
        gone = used & Uses(frozenset(record.packs), frozenset(record.files))
        if gone:
            what = next(iter([*gone.packs, *gone.files]))
            since = f"(by {record.client} since {show_time(record.time)}, {key})"
            advice = "try again when it has ended; if it was killed, run it again"
            raise PacktrainError(f"`packtrain gc` is deleting {what}, which the run needs {since}; {advice}")


def announced(store: Store) -> list[tuple[str, Discarding]]:
    """Return the deletions that are under way, or were killed, by their keys."""
    keys = [entry.key for entry in store.list(_FOLDER)]
    found = [(key, store.find(key, MAX_RECORD_BYTES)) for key in keys]
    try:
        return [(key, decode(Discarding, data, f"{key} in {store.url}")) for key, data in found if data is not None]
    except DamagedRecord as error:
        raise DamagedRecord(f"{error}; delete it, unless a `packtrain gc` is under way") from error
