"""The directory that a program runs in: the run's code, what the snapshot left out, and what the program writes.

Where a machine sees the directory that the run was started from, files that the snapshot does not have are linked, so
that `data/train.bin` is found although git ignores it. What the job names under `outputs` is kept in the run's folder,
and restored on another machine; the rest of what a program wrote is named at the end.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath

from packtrain.job.job import CodeOrigin
from packtrain.run.code import unpack
from packtrain.run.inputs import is_remote, staged
from packtrain.run.outputs import output_key
from packtrain.run.records import TellEvent
from packtrain.run.run import Run
from packtrain.store import is_key
from packtrain.system import cache_directory
from packtrain.units import counted, show_bytes, show_seconds

Fingerprint = dict[str, tuple[int, int]]
"""Size and time of files by their names."""
INPUTS = "data"  # the folder beside that of the code
_NAMED = 5  # folders and files that the warning names
_CACHES = "__pycache__"


class Workspace:
    """`keep_outputs` and `warn_of_the_rest` are called on the first machine only, which has rank 0."""

    def __init__(self, run: Run, directory: Path, tell: TellEvent) -> None:
        self._run, self._directory, self._tell = run, directory, tell
        self._outputs = tuple(str(PurePosixPath(path)) for path in run.job.outputs)
        self._kept: Fingerprint = {}
        self._before: Fingerprint = {}
        self._is_restored = False
        self._named: set[str] = set()

    def prepare(self) -> None:
        """Write the code, and link what is beside it in the directory that it came from, if this machine sees that."""
        unpack(self._run.code, self._directory)
        for output in self._outputs:  # its folder must not be a link: what the program writes is the run's own
            (self._directory / output).parent.mkdir(parents=True, exist_ok=True)
        source = visible(self._run.job.origin)
        if source is not None:
            link_missing(source, self._directory, self._outputs)
        self._before = fingerprint(self._directory)

    def restore_outputs(self) -> None:
        """Fetch what the run has kept so far, once: afterwards the program decides what is there."""
        if self._is_restored:
            return
        folder = output_key(self._run, "")
        for entry in self._run.store.list(folder) if self._outputs else ():
            name = entry.key.removeprefix(folder)
            # The job is what was trusted: the store may have other names.
            if is_key(name) and self._is_output(name):
                (self._directory / name).parent.mkdir(parents=True, exist_ok=True)
                self._run.store.get_file(entry.key, self._directory / name, limit=entry.size)
        self._kept = self._outputs_now()
        self._is_restored = True

    def stage_inputs(self) -> None:
        """Have the job's data on this machine, each under its name in one folder."""
        folder = self._directory.with_name(INPUTS)
        for name, address in self._run.job.inputs.items():
            folder.mkdir(exist_ok=True)
            if not (folder / name).is_symlink():
                began = time.monotonic()
                path = staged(address, self._run.store, cache_directory() / "inputs")
                (folder / name).symlink_to(path)
                if is_remote(address):
                    self._tell("data", f"staged {name} in {show_seconds(time.monotonic() - began)}")

    def keep_outputs(self) -> None:
        """Put the files that changed since the last call, and remove those that the program has removed."""
        now = self._outputs_now()
        for name, state in now.items():
            if self._kept.get(name) != state:
                try:
                    self._run.store.put_file(output_key(self._run, name), self._directory / name)
                except FileNotFoundError:  # renamed meanwhile; the next call sees its new name
                    continue
                self._kept[name] = state
        for name in self._kept.keys() - now.keys():
            self._run.store.delete(output_key(self._run, name))
            del self._kept[name]

    def warn_of_the_rest(self) -> None:
        """Say which files the program wrote that nothing keeps; each is named once."""
        sizes: defaultdict[str, list[int]] = defaultdict(list)
        for name, state in fingerprint(self._directory).items():
            if self._before.get(name) != state and not self._is_output(name) and _CACHES not in name.split("/"):
                top, slash, _ = name.partition("/")
                sizes[top + slash].append(state[0])
        new = sorted(sizes.keys() - self._named)
        if not new:
            return
        self._named.update(new)
        shown = [f"{name} ({counted(len(sizes[name]), 'file')}, {show_bytes(sum(sizes[name]))})" for name in new]
        more = [f"{len(new) - _NAMED} more"] if len(new) > _NAMED else []
        advice = f"add `outputs: [{', '.join(new[:_NAMED])}]` to the job to keep it"
        self._tell("warning", f"not kept: {', '.join([*shown[:_NAMED], *more])}; {advice}")

    def _outputs_now(self) -> Fingerprint:
        return {name: state for name, state in fingerprint(self._directory).items() if self._is_output(name)}

    def _is_output(self, name: str) -> bool:
        return any(name == output or name.startswith(f"{output}/") for output in self._outputs)


def visible(origin: CodeOrigin | None) -> Path | None:
    """Return the directory that a run was started from, if this machine sees that one and not another of its name."""
    if origin is None:
        return None
    path = Path(origin.directory)
    try:
        return path if path.stat().st_ino == origin.inode and os.access(path, os.R_OK | os.X_OK) else None
    except OSError:
        return None


def link_missing(source: Path, copy: Path, own: Collection[str], place: PurePosixPath = PurePosixPath()) -> None:
    """Link every entry of `source` that `copy` does not have, except paths that are the run's `own`."""
    for entry in _entries(source):
        path, target = place / entry.name, copy / entry.name
        if str(path) in own or entry.name == _CACHES:
            continue
        if entry.is_dir(follow_symlinks=False) and target.is_dir():
            link_missing(source / entry.name, target, own, path)
        elif not target.exists():
            target.symlink_to(source / entry.name)


def _entries(directory: Path) -> Iterable[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as found:
            return list(found)
    except PermissionError:  # what this person may not read, the program could not read there either
        return []


def fingerprint(directory: Path) -> Fingerprint:
    """Return size and time of every regular file whose name a store can hold."""
    found: Fingerprint = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        try:
            if path.is_file() and not path.is_symlink() and is_key(name):
                status = path.stat()
                found[name] = (status.st_size, status.st_mtime_ns)
        except FileNotFoundError:
            continue
    return found
