"""The directory that a program runs in: the run's code, what the snapshot left out, and what the program writes.

Where a machine sees the directory that the run was started from, files that the snapshot does not have are linked, so
that `data/train.bin` is found although git ignores it. What the job names under `outputs` is kept in the run's folder,
and there again on a machine that takes over; the rest of what a program wrote is named at the end.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath

from packtrain.files import sha256_of
from packtrain.job.job import CodeOrigin
from packtrain.run.checkpoint import Superseded, refuse_superseded
from packtrain.run.code import files_of, unpack
from packtrain.run.inputs import is_remote, staged
from packtrain.run.outputs import MAX_OUTPUTS, Output, OutputList, newest_list, output_key, put_list, upload_name
from packtrain.run.records import TellEvent
from packtrain.run.run import Run
from packtrain.store import DamagedObject, ObjectNotFound, is_key
from packtrain.system import cache_directory
from packtrain.units import counted, show_bytes, show_seconds

FileState = tuple[int, int]
"""Size and time."""
Fingerprint = dict[str, FileState]
"""States of files by their names."""
INPUTS = "data"  # the folder beside that of the code
_NAMED = 5  # folders and files that the warning names
_CACHES = "__pycache__"
_FOLDER = "x" * 120  # as long as the longest folder of a run that files are put into


class Workspace:
    """`keep_outputs` and `warn_of_the_rest` are called on the first machine only, which has rank 0."""

    def __init__(self, run: Run, directory: Path, tell: TellEvent) -> None:
        self._run, self._directory, self._tell = run, directory, tell
        self._outputs = tuple(str(PurePosixPath(path)) for path in run.job.outputs)
        self._before: Fingerprint = {}
        self._named: set[str] = set()
        self._using = threading.Lock()  # of what follows, by a commit of the generation before
        self._generation = 0
        self._own_generations: set[int] = set()  # that this machine has led since it last took over
        self._number = 0  # of the last list that this machine has put
        self._listed: set[Output] | None = None  # files in the newest list; None if a put failed and may still arrive
        self._kept: dict[str, tuple[FileState, Output]] = {}  # files that the store has as they are here
        self._only_stored: dict[str, Output] = {}  # that the store has, and this machine does not

    def prepare(self) -> None:
        """Write the code, and link what is beside it in the directory that it came from, if this machine sees that."""
        unpack(self._run.code, self._directory)
        (self._directory / self._run.job.directory).mkdir(parents=True, exist_ok=True)
        for output in self._outputs:  # its folder must not be a link: what the program writes is the run's own
            (self._directory / output).parent.mkdir(parents=True, exist_ok=True)
        source = visible(self._run.job.origin)
        if source is not None:
            link_missing(source, self._directory, self._outputs)
        self._before = fingerprint(self._directory)

    def restore_outputs(self, generation: int, is_first: bool) -> None:
        """Begin a generation: from here on, outputs of older ones do not count, and those in the store are here."""
        self._generation = generation
        if not self._outputs:
            return
        with self._using:
            newest = newest_list(self._run)
            listed = newest.files if newest is not None else ()
            # This machine put that list: what its program has written since is here and nowhere else.
            continues = is_first and newest is not None and newest.generation in self._own_generations
            self._own_generations = {*self._own_generations, generation} if continues else set()
            if is_first:
                self._put_list(generation, listed)
            if continues:
                stored = set(listed)
                self._kept = {name: state for name, state in self._kept.items() if state[1] in stored}
                self._only_stored = {name: file for name, file in self._only_stored.items() if file in stored}
            else:
                self._restore(listed, is_first)
            if is_first:  # and has everything
                self._own_generations.add(generation)

    def _restore(self, listed: Iterable[Output], is_first: bool) -> None:
        """Fetch the outputs of the list; the first machine, whose outputs the run keeps, has no others."""
        # The job is what was trusted: the store may have other names.
        listed_files = {file.name: file for file in listed if self._is_output(file.name)}
        present = self._outputs_now()
        self._kept = {
            name: (state, file)
            for name, (state, file) in self._kept.items()
            if present.get(name) == state and listed_files.get(name) == file
        }
        if is_first:
            for name in present.keys() - listed_files.keys():
                (self._directory / name).unlink(missing_ok=True)
            self._restore_code(listed_files)
        for name, file in listed_files.items():
            if name not in self._kept:
                self._fetch(file)
        self._only_stored = {file.name: file for file in listed if file.name not in self._kept}

    def _fetch(self, file: Output) -> None:
        path = _make_room(self._directory, file.name)
        try:
            self._run.store.get_file(output_key(self._run, file.upload, file.name), path, limit=file.bytes)
            if sha256_of(path) != file.sha256:
                raise DamagedObject(f"{file.name} does not match its digest")
        except (ObjectNotFound, DamagedObject) as error:
            path.unlink(missing_ok=True)
            self._tell("warning", f"output {file.name} not restored: {error}")
        else:
            self._kept[file.name] = (_state(path.stat()), file)

    def _restore_code(self, restored: Collection[str]) -> None:
        """Write the files of the code among the outputs again that this machine's program has changed or deleted."""
        code = {name: state for name, state in self._before.items() if self._is_output(name) and name not in restored}
        present = fingerprint(self._directory) if code else {}
        changed = {name for name, state in code.items() if present.get(name) != state}
        for file in files_of(self._run.code) if changed else ():
            if file.name in changed:
                path = _make_room(self._directory, file.name)
                path.unlink(missing_ok=True)  # the program may have made it a link, even to a file of this person
                file.write(path)
                self._before[file.name] = _state(path.stat())

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

    def keep_outputs(self, generation: int) -> None:
        """Put the files that changed since the last call; Superseded if a newer generation has started."""
        if not self._outputs:
            return
        with self._using:
            self._check_is_current(generation)
            present = self._outputs_now()
            if len(present) > MAX_OUTPUTS:
                self._tell("warning", f"outputs: kept none of {len(present):,} files; the limit is {MAX_OUTPUTS:,}")
                return
            changed = [name for name in present if name not in self._kept or self._kept[name][0] != present[name]]
            upload = upload_name(generation)
            if changed:
                refuse_superseded(self._run, generation, "keeping outputs")
            for name in changed:
                self._upload(generation, upload, name, present[name])
            for name in self._kept.keys() - present.keys():
                del self._kept[name]
            files = (*self._only_stored.values(), *(file for _, file in self._kept.values()))
            if set(files) != self._listed:
                self._put_list(generation, files)

    def _put_list(self, generation: int, files: tuple[Output, ...]) -> None:
        self._number += 1  # a new one for each try: one that failed may still arrive
        self._listed = None
        put_list(self._run, OutputList(generation, self._number, files))
        self._listed = set(files)

    def _upload(self, generation: int, upload: str, name: str, state: FileState) -> None:
        with tempfile.TemporaryDirectory(prefix="copy-", dir=self._directory.parent) as folder:
            copy = Path(folder, "copy")
            try:
                shutil.copyfile(self._directory / name, copy)  # the program may write on while this is sent
            except FileNotFoundError:  # renamed meanwhile; the next call sees its new name
                return
            self._check_is_current(generation)
            self._run.store.put_file(output_key(self._run, upload, name), copy)
            self._kept[name] = (state, Output(name, upload, copy.stat().st_size, sha256_of(copy)))
            self._only_stored.pop(name, None)

    def _check_is_current(self, generation: int) -> None:
        if generation != self._generation:
            raise Superseded(f"generation {self._generation} has started here; not keeping outputs of {generation}")

    def warn_of_the_rest(self) -> None:
        """Say which files the program wrote that nothing keeps; each is named once."""
        sizes: defaultdict[str, list[int]] = defaultdict(list)
        for name, state in fingerprint(self._directory).items():
            if self._before.get(name) != state and not self._is_output(name) and _CACHES not in name.split("/"):
                sizes[_top_in(self._run.job.directory, name)].append(state[0])
        unnamed = sorted(sizes.keys() - self._named)
        if not unnamed:
            return
        self._named.update(unnamed)
        shown = [f"{name} ({counted(len(sizes[name]), 'file')}, {show_bytes(sum(sizes[name]))})" for name in unnamed]
        ending = [f"{len(unnamed) - _NAMED} more"] if len(unnamed) > _NAMED else []
        possible = [name for name in unnamed if not name.startswith("..")]
        advice = f"; add `outputs: [{', '.join(possible[:_NAMED])}]` to the job to keep it" if possible else ""
        self._tell("warning", f"not kept: {', '.join([*shown[:_NAMED], *ending])}{advice}")

    def _outputs_now(self) -> Fingerprint:
        return {
            name: state
            for name, state in fingerprint(self._directory).items()
            if self._is_output(name) and self._before.get(name) != state  # every machine has the code
        }

    def _is_output(self, name: str) -> bool:
        return any(name == output or name.startswith(f"{output}/") for output in self._outputs)


def _top_in(directory: str, name: str) -> str:
    """Return a file's folder or its own name as a program sees it that runs in this directory: `out/`, `../data/`."""
    is_inside = PurePosixPath(name).is_relative_to(directory)
    path = str(PurePosixPath(name).relative_to(directory)) if is_inside else name
    top, slash, _ = path.partition("/")
    return (top if is_inside else os.path.relpath(top, directory)) + slash


def _make_room(directory: Path, name: str) -> Path:
    """Return the path of a file to write, after removing what is in its way."""
    *folders, last = PurePosixPath(name).parts
    for folder in folders:
        directory /= folder
        if directory.is_symlink() or directory.is_file():
            directory.unlink()
        directory.mkdir(exist_ok=True)
    if (directory / last).is_dir() and not (directory / last).is_symlink():
        shutil.rmtree(directory / last)
    return directory / last


def visible(origin: CodeOrigin | None) -> Path | None:
    """Return the directory that a run was started from, if this machine sees that one and not another of its name."""
    if origin is None:
        return None
    path = Path(origin.directory)
    try:
        return path if path.stat().st_ino == origin.inode and os.access(path, os.R_OK | os.X_OK) else None
    except OSError:
        return None


def link_missing(source: Path, copy: Path, excluded: Collection[str], place: PurePosixPath = PurePosixPath()) -> None:
    """Link every entry of `source` that `copy` does not have, except the `excluded` paths, which are the run's own."""
    try:
        with os.scandir(source) as entries:
            readable = list(entries)
    except PermissionError:  # what this person may not read, the program could not read there either
        return
    for entry in readable:
        path, target = place / entry.name, copy / entry.name
        if str(path) in excluded or entry.name == _CACHES:
            continue
        if entry.is_dir(follow_symlinks=False) and target.is_dir():
            link_missing(source / entry.name, target, excluded, path)
        elif not target.exists():
            target.symlink_to(source / entry.name)


def _state(status: os.stat_result) -> FileState:
    return status.st_size, status.st_mtime_ns


def fingerprint(directory: Path) -> Fingerprint:
    """Return size and time of every regular file whose name a store can hold."""
    states: Fingerprint = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        try:
            if path.is_file() and not path.is_symlink() and is_key(f"{_FOLDER}/{name}"):
                states[name] = _state(path.stat())
        except FileNotFoundError:
            continue
    return states
