"""Things that nothing uses anymore, in a store and in the cache of this machine, and their deletion.

Everything has to be old as well: a pack may be made hours before its run, a copy of a run has its job last, and what a
process fetches it has not begun to use. What is found is looked at again when it is deleted.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packtrain.data.cache import FileCache
from packtrain.errors import Mistake
from packtrain.files import FileLock, is_free
from packtrain.housekeeping.uses import Uses, all_uses, discarding, forget_killed
from packtrain.job.part import FILES, is_name
from packtrain.run.code import remove_unpacked
from packtrain.run.liveness import store_time
from packtrain.run.run import removed_run
from packtrain.store import Entry, Store
from packtrain.system import COMPILED, cache_directory, nodes_directory
from packtrain.units import show_seconds

LEAST_SECONDS = 3600.0  # a pack that is being made gets a new object far more often
REMOVED, FILE = "removed run", "file"
PACKS, RUNS = "packs/", "runs/"
_LOCKS = ("sweeps/*.lock", "discarding/*.lock")  # of processes that were killed; of others they are held
_SCRATCH = ("copy-*", "deliver-*", "tmp*", "images/tmp*", "code/unpacking-*")  # of processes that were killed


@dataclass(frozen=True)
class Unused:
    """Something that nothing uses, in the store or in the cache: `entries` are its objects there, `path` is here."""

    where: Literal["store", "cache"]
    kind: str
    name: str
    bytes: int
    age_seconds: float
    entries: tuple[Entry, ...] = ()
    path: Path | None = None


def check_age(seconds: float) -> None:
    if seconds < LEAST_SECONDS:
        raise Mistake(f"--older: at least {show_seconds(LEAST_SECONDS)}, so that nothing is deleted that is being made")


# In a store.


def unused_in_store(store: Store, older_seconds: float) -> list[Unused]:
    """Return packs and files that no run uses, and what killed commands left, each older than that."""
    store_now = _store_now(store)
    unused = []
    for kind, name, entries in _candidates(store, all_uses(store)):
        age = store_now - max((entry.modified.timestamp() for entry in entries), default=store_now)
        # The rest of a run that was removed has nobody who could still want it.
        if entries and (age >= older_seconds or kind == REMOVED):
            size = sum(entry.size for entry in entries)
            unused.append(Unused("store", kind, name, size, age, entries=tuple(entries)))
    return unused


def _store_now(store: Store) -> float:
    clock = store_time(store)
    return time.time() if clock is None else clock.timestamp()


def _candidates(store: Store, used: Uses) -> Iterator[tuple[str, str, list[Entry]]]:
    """Yield everything that nothing uses, of any age: its kind, its name and its objects."""
    for name in store.folders(PACKS):
        if name not in used.packs:
            is_whole = store.exists(f"{PACKS}{name}/manifest.json")
            yield "pack" if is_whole else "unfinished pack", f"{PACKS}{name}", store.list(f"{PACKS}{name}")
    yield from ((FILE, entry.key, [entry]) for entry in store.list(FILES) if entry.key not in used.files)
    for name in store.folders(RUNS):
        if is_name(name) and not store.exists(f"runs/{name}/job.json"):
            kind = "unfinished copy" if removed_run(store, name) is None else REMOVED
            yield kind, f"runs/{name}", store.list(f"runs/{name}")
    for name in store.folders("sweeps/"):
        if not store.exists(f"sweeps/{name}/plan.json"):
            yield "removed sweep", f"sweeps/{name}", store.list(f"sweeps/{name}")
    yield from (("scratch", entry.key, [entry]) for entry in store.list("scratch/"))


def delete_from_store(store: Store, candidates: Sequence[Unused], say: Callable[[str], None]) -> list[Unused]:
    """Delete what was found, unless something uses it by now; return what was deleted."""
    forget_killed(store, _store_now(store))
    packs, runs = (
        frozenset(candidate.name.removeprefix(folder) for candidate in candidates if candidate.name.startswith(folder))
        for folder in (PACKS, RUNS)
    )
    files = frozenset(candidate.name for candidate in candidates if candidate.kind == FILE)
    deleted = []
    with discarding(store, Uses(packs, files, runs)) as free:
        for candidate in candidates:
            deletable = free()
            in_use = (
                (candidate.name.startswith(PACKS) and candidate.name.removeprefix(PACKS) not in deletable.packs)
                or (candidate.name.startswith(RUNS) and candidate.name.removeprefix(RUNS) not in deletable.runs)
                or (candidate.kind == FILE and candidate.name not in deletable.files)
            )
            if in_use:
                say(f"kept {candidate.name}: a run now uses it")
            # Somebody may be making the same pack, or copying the same run, again.
            elif candidate.kind != FILE and _listed(store, candidate) != sorted(candidate.entries, key=_key):
                say(f"kept {candidate.name}: it is being written")
            else:
                # The manifest first: without it, there is no pack.
                for key in sorted(map(_key, candidate.entries), key=lambda key: not key.endswith("/manifest.json")):
                    free()  # of many objects, this may take hours, and the machine may be suspended meanwhile
                    store.delete(key)
                deleted.append(candidate)
    return deleted


def _listed(store: Store, candidate: Unused) -> list[Entry]:
    entry = store.entry(candidate.name) if candidate.kind == "scratch" else None
    return store.list(candidate.name) if entry is None else [entry]


def _key(entry: Entry) -> str:
    return entry.key


# On this machine.


def unused_here(older_seconds: float) -> list[Unused]:
    """Return what this machine can fetch again and no process uses, each unused for longer than that."""
    cache, moment = cache_directory(), time.time()
    unused = [
        Unused("cache", "file of a pack", sha256, size, age)
        for sha256, size, age in FileCache(cache / "packs").unused(older_seconds)
    ]
    places = [("download", path) for path in _below(cache / "sources")]
    places += [("code", path) for path in _below(cache / "code") if len(path.name) == 64]
    # A program reads its data as long as it runs, and holds no lock on it.
    places += [("data of a program", path) for path in ([] if _has_live_nodes() else _below(cache / "inputs"))]
    places += [("compiled code", path) for path in ([] if _has_live_nodes() else _below(cache / COMPILED))]
    places += [("lock", path) for pattern in _LOCKS for path in cache.glob(pattern) if is_free(path)]
    places += [("scratch", path) for pattern in _SCRATCH for path in cache.glob(pattern)]
    for kind, path in places:
        size, used = _measure(path)
        if moment - used >= older_seconds:
            name = str(path.relative_to(cache))
            unused.append(Unused("cache", kind, name, size, moment - used, path=path))
    return unused


def delete_here(candidates: Sequence[Unused], older_seconds: float) -> list[Unused]:
    """Delete what was found, unless a process uses it by now; return what was deleted."""
    files, deleted = FileCache(cache_directory() / "packs"), []
    for candidate in candidates:
        if candidate.path is None:
            is_gone = files.remove_unused(candidate.name, older_seconds)
        elif time.time() - _measure(candidate.path)[1] < older_seconds:
            is_gone = False
        elif candidate.kind == "code":
            is_gone = remove_unpacked(candidate.path)
        elif candidate.kind == "lock":
            is_gone = is_free(candidate.path) and _remove(candidate.path)
        elif candidate.kind == "compiled code":
            is_gone = not _has_live_nodes() and _remove(candidate.path)
        elif candidate.kind == "data of a program":
            is_gone = not _has_live_nodes() and _remove_locked(candidate.path)
        else:
            is_gone = _remove(candidate.path)
        if is_gone:
            deleted.append(candidate)
    return deleted


def _below(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []


def _measure(path: Path) -> tuple[int, float]:
    """Return the bytes of a file or folder, and when any of it was last read or put here, as far as is known."""
    size, used = 0, 0.0
    for file in (path, *path.rglob("*")) if path.is_dir() else (path,):
        with suppress(FileNotFoundError):
            status = file.lstat()
            # Not the time of its contents, which is that of the original.
            used = max(used, status.st_ctime, 0.0 if file.is_dir() else status.st_atime)
            size += 0 if file.is_dir() else status.st_size
    return size, used


def _remove_locked(path: Path) -> bool:
    """Remove a folder unless a node is about to use it."""
    try:
        with FileLock(path / ".lock", wait=False):
            return _remove(path)
    except OSError:
        return False


def _remove(path: Path) -> bool:
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink(missing_ok=True)
    return not path.exists()


def _has_live_nodes() -> bool:
    """True if a node holds its lock here. One of another machine, whose cache this is, too, may hold it unseen."""
    for path in _below(nodes_directory()):
        if path.is_dir():
            try:
                FileLock(path / "lock", shared=True, wait=False).close()
            except BlockingIOError:
                return True
            except OSError:
                continue
    return False
