"""Copies of runs and packs in other stores: everything they need, checked by digest, so that half a copy is none.

    the pack's files, then its manifest          unless the pack is there
    files that model options name
    the run's records, streams and checkpoints; the manifest of each checkpoint after its files
    job.json                                     last: without it, the folder is not a run

Manifests are put after their files have been read back, so where an equal manifest is, only sizes are compared. What
an interrupted copy left is kept if its digest is right.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, Semaphore
from typing import Protocol

from packtrain.errors import Mistake, NotFound, PacktrainError
from packtrain.files import sha256_of
from packtrain.housekeeping.removal import lease_as_left
from packtrain.housekeeping.uses import require_uses, uses_of
from packtrain.job.part import FILES
from packtrain.pack.manifest import find_manifest, pack_key
from packtrain.run.checkpoint import committed, file_key, manifest_key
from packtrain.run.inputs import given_keys
from packtrain.run.liveness import state_of
from packtrain.run.run import Run
from packtrain.run.trust import is_remembered, remember
from packtrain.store import Store
from packtrain.system import cache_directory

_SMALL_BYTES = 4 << 20  # an object without a known digest is compared in memory up to this size
_THREADS = 8
_LARGE_BYTES, _LARGE_FILES = 64 << 20, 2  # so many files of at least this size are on this disk at the same time
_MANIFEST_BYTES = 128 << 20
_FIRST_RECORDS = ("launches/000001.json", "generations/000001.json", "code.tar.zst")  # no two runs share all of them


class CopyProgress(Protocol):
    def say(self, text: str) -> None: ...

    def track(self, label: str, total_bytes: int, /) -> AbstractContextManager[Callable[[int], None]]:
        """Show a bar; the block calls what it gets with the bytes of each object that is done."""


@dataclass(frozen=True)
class _Item:
    """An object to copy; `sha256` if a manifest has it, `data` if the copy differs from the original."""

    key: str
    size: int
    sha256: str | None = None
    data: bytes | None = None


@dataclass
class CopySummary:
    """Numbers of what was copied, and of what was there before."""

    objects: int = 0
    bytes: int = 0
    present: int = 0
    lock: Lock = field(default_factory=Lock, repr=False)

    def add(self, item: _Item, copied: bool) -> None:
        with self.lock:
            self.objects += copied
            self.bytes += item.size * copied
            self.present += not copied


def copy_pack(source: Store, name: str, destination: Store, progress: CopyProgress) -> CopySummary:
    summary = CopySummary()
    with tempfile.TemporaryDirectory(prefix="copy-", dir=cache_directory()) as scratch:
        _Copier(source, destination, Path(scratch), progress, summary).pack(name)
    return summary


def copy_run(run: Run, destination: Store, progress: CopyProgress) -> CopySummary:
    """Copy a run that is not running, with its pack and the files of its model, or bring an older copy up to date."""
    is_own = is_remembered(run)
    target = Run(destination, run.name)
    _check_is_free(run, target)
    if state_of(run) == "running":
        raise Mistake(f"{run.name} is running; stop it first (`{run.command('stop')}`), then copy it")
    summary = CopySummary()
    with tempfile.TemporaryDirectory(prefix="copy-", dir=cache_directory()) as scratch:
        copier = _Copier(run.store, destination, Path(scratch), progress, summary)
        if run.job.recipe is not None:
            copier.pack(run.pack_name())
        copier.named_files(run)
        copied = copier.run(run, target)
    # This person's own run stays theirs; nobody else's becomes it by a copy. Others may write to the destination, too:
    # what they have put there meanwhile is not what was copied.
    copy = Run(destination, run.name)
    try:
        # What was there before had nothing that used it, and may be gone by now.
        require_uses(destination, uses_of(copy))
        if gone := copied - {entry.key for entry in destination.list(target.folder)}:
            raise NotFound(f"{min(gone)} was just deleted from {destination.url}; run the same command again")
    except PacktrainError:
        destination.delete(target.key("job.json"))
        raise
    if is_own and copy.code_digest == run.code_digest:
        remember(copy)
    return summary


def _check_is_free(run: Run, target: Run) -> None:
    """Refuse if the name belongs to another run at the destination, or if the run has continued there."""
    present = {entry.key.removeprefix(target.key("")) for entry in target.store.list(target.folder)}
    ids = (target.store.identity, run.store.identity)  # of directories, each of which may have several paths
    if target.store.url == run.store.url or (ids[0] == ids[1] is not None):
        raise Mistake(f"{run.name} is already in {run.store.url}; name another store")
    if not present:
        return
    # A run that has never been started has nothing of its own but its job.
    first = [name for name in _FIRST_RECORDS if name in present] or ["job.json"]
    if any(_data(target, name) is not None and _data(run, name) != _data(target, name) for name in first):
        raise Mistake(f"{target.store.url} has another run {run.name}; copy to another prefix or directory")
    # Compared, not only looked for: both may have continued, and then records of the same name differ.
    for folder in ("launches/", "generations/"):
        newest = max((name for name in present if name.startswith(folder)), default=None)
        if newest is not None and _data(run, newest) != _data(target, newest):
            fault = f"{run.name} has continued in {target.store.url} since it was copied"
            raise Mistake(f"{fault}; copy it from there, or to another prefix or directory")


def _data(run: Run, name: str) -> bytes | None:
    return run.store.find(run.key(name), _MANIFEST_BYTES)


class _Copier:
    def __init__(
        self, source: Store, destination: Store, scratch: Path, progress: CopyProgress, summary: CopySummary
    ) -> None:
        self._source, self._destination, self._scratch = source, destination, scratch
        self._progress, self._summary = progress, summary
        self._large = Semaphore(_LARGE_FILES)
        self._sizes: dict[str, int] = {}  # of the objects that the destination has

    # What belongs together.

    def pack(self, name: str) -> None:
        manifest = find_manifest(self._source, name)
        if manifest is None:
            raise NotFound(f"no pack {name} in {self._source.url}")
        files = [_Item(pack_key(name, file.name), file.bytes, file.sha256) for file in manifest.files()]
        page = self._source.entry(pack_key(name, "samples.html"))
        self._look(pack_key(name, ""))
        if not self._is_whole(pack_key(name, "manifest.json"), files):
            self._copy(f"pack {name}", [*files, *([_Item(page.key, page.size)] if page else [])])
            self._put_manifest(pack_key(name, "manifest.json"))

    def named_files(self, run: Run) -> None:
        """Copy the files that model options name, and the data of a program; their keys are their digests."""
        entries = [(key, self._source.entry(key)) for key in given_keys(run.job, self._source)]
        files = [_Item(key, entry.size, key.removeprefix(FILES)) for key, entry in entries if entry is not None]
        self._look(FILES)
        self._copy("files that the job names", [item for item in files if self._sizes.get(item.key) != item.size])

    def run(self, run: Run, target: Run) -> set[str]:
        """Copy what is in the run's folder; return the keys of all that is there now."""
        checkpoints = {
            manifest_key(run, checkpoint.name): [
                _Item(file_key(run, checkpoint.name, file.name), file.bytes, file.sha256) for file in checkpoint.files
            ]
            for checkpoint in committed(run, self._progress.say)
        }
        entries = self._source.list(run.folder)
        folder = run.key("checkpoints/")  # without a manifest, what is there was never committed
        records = [_Item(entry.key, entry.size) for entry in entries if not entry.key.startswith(folder)]
        records = [item for item in records if item.key != run.key("job.json")]
        self._look(run.folder)
        missing = {key: files for key, files in checkpoints.items() if not self._is_whole(key, files)}
        contents = {run.key("job.json"), *checkpoints, *(item.key for item in records)}
        contents |= {item.key for files in checkpoints.values() for item in files}
        if run.key("job.json") in self._sizes and contents != self._sizes.keys():
            self._destination.delete(run.key("job.json"))  # until it is up to date, it is no run
        files = [item for files in missing.values() for item in files]
        leases = [item for item in records if item.key.startswith(run.key("nodes/"))]
        other_records = [item for item in records if not item.key.startswith(run.key("nodes/"))]
        self._copy(run.name, [*other_records, *files])
        # Last: a launch that is newer than every lease means that machines are still to come.
        copies = [(item.key, lease_as_left(run.store, item.key)) for item in leases]
        self._copy("leases of its machines", [_Item(key, len(data), data=data) for key, data in copies])
        for key in missing:
            self._put_manifest(key)
        # A manifest first: without its files a checkpoint must not seem to exist.
        surplus = sorted(self._sizes.keys() - contents, key=lambda key: not key.endswith("/manifest.json"))
        for key in surplus:
            self._destination.delete(key)
        self._destination.put(target.key("job.json"), run.job_data)
        return contents

    def _look(self, prefix: str) -> None:
        self._sizes = {entry.key: entry.size for entry in self._destination.list(prefix)}

    def _is_whole(self, manifest: str, files: Iterable[_Item]) -> bool:
        """True if the destination has the same manifest, and files of the sizes that it names."""
        if manifest not in self._sizes or any(self._sizes.get(item.key) != item.size for item in files):
            return False
        return self._destination.find(manifest, _MANIFEST_BYTES) == self._source.get(manifest, _MANIFEST_BYTES)

    def _put_manifest(self, key: str) -> None:
        self._destination.put(key, self._source.get(key, _MANIFEST_BYTES))

    # One object after the other.

    def _copy(self, label: str, items: Sequence[_Item]) -> None:
        if not items:
            return
        pool = ThreadPoolExecutor(_THREADS)
        try:
            with self._progress.track(label, sum(item.size for item in items)) as advance:
                for item, copied in zip(items, pool.map(self._copy_one, items), strict=True):
                    self._summary.add(item, copied)
                    advance(item.size)
        finally:
            pool.shutdown(cancel_futures=True)  # after an error or Ctrl-C the rest is not started

    def _copy_one(self, item: _Item) -> bool:
        """Copy an object unless it is there; True if it was copied."""
        data = item.data
        if data is None and item.sha256 is None and item.size <= _SMALL_BYTES:
            data = self._source.get(item.key, _SMALL_BYTES)
        if data is None:
            with self._large if item.size >= _LARGE_BYTES else Semaphore():
                return self._copy_file(item)
        if self._sizes.get(item.key) == len(data) and self._destination.find(item.key, len(data)) == data:
            return False
        self._destination.put(item.key, data)
        return True

    def _copy_file(self, item: _Item) -> bool:
        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            path, expected = Path(folder) / "object", item.sha256
            if expected is not None and self._sizes.get(item.key) == item.size and self._arrived(item, expected, path):
                return False
            self._source.get_file(item.key, path, item.size)
            digest = sha256_of(path)
            if expected not in (None, digest):
                raise PacktrainError(f"{self._source.url}: {item.key} does not match its digest; it is damaged there")
            self._destination.put_file(item.key, path)
            if not self._arrived(item, digest, path):
                fault = f"{item.key} is not in {self._destination.url} as it was sent"
                raise PacktrainError(f"{fault}; run the same command again")
        return True

    def _arrived(self, item: _Item, digest: str, path: Path) -> bool:
        self._destination.get_file(item.key, path, item.size)
        return sha256_of(path) == digest
