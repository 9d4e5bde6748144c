"""The files that a run has for a person to take home: its outputs, and those of its newest checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from packtrain.errors import Mistake, NotFound, PacktrainError
from packtrain.run.checkpoint import committed, file_key
from packtrain.run.run import Run
from packtrain.store import is_key
from packtrain.store.base import TEMPORARY
from packtrain.system import sha256_of

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class KeptFile:
    """An object of a run; `sha256` if a manifest has it."""

    key: str
    size: int
    sha256: str | None = None


def output_key(run: Run, name: str) -> str:
    return run.key(f"outputs/{name}")


def kept_files(run: Run) -> dict[str, KeptFile]:
    """Return the files by name; those of the newest checkpoint are below `checkpoints/`."""
    newest = committed(run)[-1:]
    found = {
        f"{CHECKPOINTS}/{file.name}": KeptFile(file_key(run, one.name, file.name), file.bytes, file.sha256)
        for one in newest
        for file in one.files
    }
    prefix = output_key(run, "")
    names = {entry.key.removeprefix(prefix): entry for entry in run.store.list(prefix)}
    return found | {name: KeptFile(entry.key, entry.size) for name, entry in sorted(names.items()) if is_key(name)}


def chosen(run: Run, files: Mapping[str, KeptFile], paths: Sequence[str]) -> dict[str, KeptFile]:
    """Return the files that have one of these names, or are in a folder of that name."""
    found: dict[str, KeptFile] = {}
    for path in paths:
        wanted = str(PurePosixPath(path))
        below = {name: file for name, file in files.items() if name == wanted or name.startswith(f"{wanted}/")}
        if not below and wanted != ".":
            has = ", ".join(sorted({_top(name) for name in files})) or "no files"
            raise NotFound(f"{run.name} has no {path!r}; it has {has}")
        found |= below if wanted != "." else files
    return found


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
    part = target.with_name(f"{TEMPORARY}{target.name}")
    try:
        run.store.get_file(file.key, part, limit=file.size)
        digest = sha256_of(part)
        if file.sha256 not in (None, digest):
            raise PacktrainError(f"{run.store.url}: {file.key} does not match its digest; it is damaged there")
        if target.exists() and (not target.is_file() or sha256_of(target) != digest):
            raise Mistake(f"{target} is there and differs; move it away, or choose another directory with -o")
        shutil.move(part, target)
    finally:
        part.unlink(missing_ok=True)
