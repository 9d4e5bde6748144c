"""The files that a run has for a person to take home: its outputs, and those of its newest checkpoint.

The outputs of a program are those of the newest list. As with checkpoints, files are put under new names, and then the
list with their digests, which counts only if no newer generation has started. Each generation begins with a list of its
own: what an older one puts from then on, however late it arrives, is never seen.
"""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from packtrain.errors import Mistake, NotFound, PacktrainError
from packtrain.files import sha256_of
from packtrain.run.checkpoint import Superseded, committed, file_key, refuse_superseded
from packtrain.run.run import Run
from packtrain.store import ObjectNotFound, is_key
from packtrain.store.base import TEMPORARY
from packtrain.store.records import Count, DamagedRecord, Digest, FileName, Many, decode, encode

CHECKPOINTS = "checkpoints"
MAX_OUTPUTS = 100_000
_LIST_BYTES = 128 << 20  # of that many files with the longest names
_LISTS, _FILES = "lists", "files"
_LIST = re.compile(r"[0-9]{6}-[0-9]{9}\.json")
_PUT_IN = re.compile(rf"(?:{_LISTS}|{_FILES})/([0-9]{{6}})-")


@dataclass(frozen=True)
class KeptFile:
    """An object of a run; `sha256` if a record has it."""

    key: str
    size: int
    sha256: str | None = None


@dataclass(frozen=True)
class Output:
    """A file that a program wrote. `upload` is the folder that it was put into, and starts with a generation."""

    name: str
    upload: FileName
    bytes: Count
    sha256: Digest


@dataclass(frozen=True)
class OutputList:
    """The outputs of a run. The newest is that of the last generation with the highest number."""

    generation: Count
    number: Count
    files: Many[Output]


def trace_key(run: Run, name: str) -> str:
    """Return the key of a file that a recipe's worker adds; its name has the generation."""
    return run.key(f"outputs/{name}")


def upload_name(generation: int) -> str:
    """Return a new unique name for files that are put together."""
    return f"{generation:06d}-{uuid.uuid4().hex[:12]}"


def output_key(run: Run, upload: str, name: str) -> str:
    return run.key(f"outputs/{_FILES}/{upload}/{name}")


def newest_list(run: Run) -> OutputList | None:
    """Return the outputs of a program; None if there is no list yet."""
    prefix = run.key(f"outputs/{_LISTS}/")
    while keys := [entry.key for entry in run.store.list(prefix) if _LIST.fullmatch(entry.key.removeprefix(prefix))]:
        key = max(keys)  # names have a fixed width
        data = run.store.find(key, _LIST_BYTES)
        if data is None:  # replaced meanwhile
            continue
        subject = f"{key.removeprefix(run.key(''))} of run {run.name} in {run.store.url}"
        outputs = decode(OutputList, data, subject)
        if _list_key(run, outputs) != key or not all(is_key(file.name) for file in outputs.files):
            raise DamagedRecord(f"{subject} is damaged")
        return outputs
    return None


def put_list(run: Run, outputs: OutputList) -> None:
    """Make these files the run's outputs and delete what they replace, unless a newer generation has started."""
    refuse_superseded(run, outputs.generation, "keeping outputs")
    key = _list_key(run, outputs)
    run.store.put(key, encode(outputs))
    try:
        # Every generation that starts from now on reads this list. One that has started meanwhile may have read an
        # older one: then no file may be deleted.
        refuse_superseded(run, outputs.generation, "keeping outputs")
    except Superseded:
        run.store.delete(key)
        raise
    remove_unlisted(run, outputs)


def remove_unlisted(run: Run, outputs: OutputList) -> None:
    """Delete what generations up to that of the list have put, unless it is in the list, which is the newest."""
    listed = {_list_key(run, outputs), *(output_key(run, file.upload, file.name) for file in outputs.files)}
    for entry in run.store.list(run.key("outputs")):
        put_in = _PUT_IN.match(entry.key.removeprefix(run.key("outputs/")))
        if put_in is not None and int(put_in[1]) <= outputs.generation and entry.key not in listed:
            run.store.delete(entry.key)


def _list_key(run: Run, outputs: OutputList) -> str:
    return run.key(f"outputs/{_LISTS}/{outputs.generation:06d}-{outputs.number:09d}.json")


def kept_files(run: Run) -> dict[str, KeptFile]:
    """Return the files by name; those of the newest checkpoint are below `checkpoints/`."""
    newest = committed(run)[-1:]
    checkpoint = {
        f"{CHECKPOINTS}/{file.name}": KeptFile(file_key(run, checkpoint.name, file.name), file.bytes, file.sha256)
        for checkpoint in newest
        for file in checkpoint.files
    }
    return checkpoint | _outputs(run)


def _outputs(run: Run) -> dict[str, KeptFile]:
    if run.job.program is None:
        prefix = trace_key(run, "")
        names = {entry.key.removeprefix(prefix): entry for entry in run.store.list(prefix)}
        return {name: KeptFile(entry.key, entry.size) for name, entry in sorted(names.items()) if is_key(name)}
    outputs = newest_list(run)
    files = sorted(outputs.files, key=lambda file: file.name) if outputs is not None else ()
    return {file.name: KeptFile(output_key(run, file.upload, file.name), file.bytes, file.sha256) for file in files}


def output_sizes(run: Run) -> dict[str, list[int]]:
    """Return the sizes of the files of each output: those that the job names, and other files or folders by name."""
    sizes: dict[str, list[int]] = {}
    named = [str(PurePosixPath(output)) for output in run.job.outputs]
    for name, file in _outputs(run).items():
        folder = next((place for place in named if name.startswith(f"{place}/")), None)
        output = f"{folder}/" if folder is not None else name if name in named else _top(name)
        sizes.setdefault(output, []).append(file.size)
    return sizes


def chosen(run: Run, files: Mapping[str, KeptFile], paths: Sequence[str]) -> dict[str, KeptFile]:
    """Return the files that have one of these names, or are in a folder of that name."""
    files_chosen: dict[str, KeptFile] = {}
    for path in paths:
        place = str(PurePosixPath(path))
        below = {name: file for name, file in files.items() if name == place or name.startswith(f"{place}/")}
        if not below and place != ".":
            has = ", ".join(sorted({_top(name) for name in files})) or "no files"
            raise NotFound(f"{run.name} has no {path!r}; it has {has}")
        files_chosen |= below if place != "." else files
    return files_chosen


def _top(name: str) -> str:
    first, slash, _ = name.partition("/")
    return first + slash


def fetch_file(run: Run, name: str, file: KeptFile, directory: Path) -> None:
    """Write a file below the directory. One that is there with other contents is not replaced."""
    target = directory / name
    # `-o .` may name a folder in which a link leads elsewhere.
    if not target.parent.resolve().is_relative_to(directory.resolve()):
        raise Mistake(f"{target} is outside {directory}, through a link; choose another directory with -o")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{TEMPORARY}{target.name}")
    try:
        while True:
            try:
                run.store.get_file(file.key, partial, limit=file.size)
                break
            except ObjectNotFound:
                newest = _outputs(run).get(name)  # files of two checkpoints would not fit together
                if newest in (None, file):
                    raise
                file = newest  # a running program has replaced it since it was listed
        digest = sha256_of(partial)
        if file.sha256 not in (None, digest):
            raise PacktrainError(f"{run.store.url}: {file.key} does not match its digest; it is damaged there")
        if target.exists() and (not target.is_file() or sha256_of(target) != digest):
            raise Mistake(f"{target} is there and differs; move it away, or choose another directory with -o")
        shutil.move(partial, target)
    finally:
        partial.unlink(missing_ok=True)
