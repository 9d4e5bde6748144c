"""The space that runs, packs and sweeps take in a store, by what it is for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from packtrain.job.part import FILES, is_name
from packtrain.store import Entry, Store

PARTS: Mapping[str, tuple[str, ...]] = {
    "checkpoints": ("checkpoints",),
    "logs": ("logs", "stacks"),
    "metrics": ("metrics", "time", "telemetry", "events", "tensorboard"),
    "outputs": ("outputs", "pictures"),
    "code": ("code.tar.zst", "environment.tar"),
}
"""Folders and objects of a run by what they are for; the rest is `other`."""
OTHER = "other"
_READERS = 16
_PURPOSE_OF = {name: purpose for purpose, names in PARTS.items() for name in names}


@dataclass(frozen=True)
class RunUsage:
    """The bytes of a run, by what they are for."""

    run: str
    parts: Mapping[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class StoreUsage:
    """The bytes of everything in a store. `files` are those that jobs name; `other` is what is left."""

    runs: tuple[RunUsage, ...]
    packs: Mapping[str, int] = field(default_factory=dict)
    files: int = 0
    other: int = 0

    @property
    def bytes(self) -> int:
        return sum(run.bytes for run in self.runs) + sum(self.packs.values()) + self.files + self.other


def usage_of(name: str, entries: Iterable[Entry]) -> RunUsage:
    """Return what the objects of a run take; keys are those of the store."""
    sizes: Counter[str] = Counter()
    for entry in entries:
        top = entry.key.split("/")[2] if entry.key.count("/") >= 2 else ""
        sizes[_PURPOSE_OF.get(top, OTHER)] += entry.size
    return RunUsage(name, {purpose: sizes[purpose] for purpose in (*PARTS, OTHER)})


def store_usage(store: Store) -> StoreUsage:
    """List everything in a store, run by run: a list of all at once could be too large for memory."""
    runs = [name for name in store.folders("runs/") if is_name(name)]
    packs = store.folders("packs/")
    other_folders = [name for name in store.folders("") if f"{name}/" not in ("runs/", "packs/", FILES)]
    with ThreadPoolExecutor(_READERS) as readers:
        return StoreUsage(
            tuple(readers.map(lambda name: usage_of(name, store.list(f"runs/{name}")), runs)),
            dict(zip(packs, readers.map(lambda name: _bytes(store, f"packs/{name}"), packs), strict=True)),
            _bytes(store, FILES),
            sum(_bytes(store, name) for name in other_folders),
        )


def _bytes(store: Store, prefix: str) -> int:
    return sum(entry.size for entry in store.list(prefix))
