"""Checkpoints in the store: files under a new unique name, then the manifest with their hashes, last of all.

A checkpoint without a manifest does not exist. The latest is found by listing manifests, never by a
pointer. What is deleted loses its manifest first.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from packtrain.errors import PacktrainError
from packtrain.run import Run

FORMAT = 1


class CorruptCheckpoint(PacktrainError):
    """A checkpoint that is not what its manifest says."""


class Superseded(PacktrainError):
    """A newer generation has begun: this one commits nothing any more."""


@dataclass(frozen=True)
class StoredFile:
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Checkpoint:
    """A manifest. `score` is the measure that keep_best goes by: more is better."""

    format: int
    name: str
    step: int
    generation: int
    score: float | None
    files: tuple[StoredFile, ...]


def commit(run: Run, step: int, generation: int, score: float | None, files: Mapping[str, Path]) -> Checkpoint:
    """Puts the files and then the manifest, unless a newer generation has begun meanwhile."""
    name = f"{step:09d}-{generation:06d}-{uuid.uuid4().hex[:12]}"
    stored = []
    for file_name, path in sorted(files.items()):
        run.store.put_file(run.key(f"checkpoints/{name}/{file_name}"), path)
        stored.append(StoredFile(file_name, path.stat().st_size, sha256_of(path)))
    checkpoint = Checkpoint(FORMAT, name, step, generation, score, tuple(stored))
    latest = run.latest_generation()
    if latest is not None and latest.number > generation:
        raise Superseded(f"generation {latest.number} has begun; step {step} of {generation} is not committed")
    run.store.put(_manifest_key(run, name), json.dumps(asdict(checkpoint), indent=1).encode())
    return checkpoint


def committed(run: Run) -> list[Checkpoint]:
    """All checkpoints with a readable manifest, the oldest first; order is by generation and step, not by time."""
    found = []
    for entry in run.store.list(run.key("checkpoints/")):
        if entry.key.endswith("/manifest.json"):
            data = run.store.find(entry.key)
            try:
                found.append(TypeAdapter(Checkpoint).validate_json(data or b""))
            except ValidationError:
                continue  # damaged or deleted meanwhile: as good as not there
    return sorted(found, key=lambda checkpoint: (checkpoint.generation, checkpoint.step))


def fetch(run: Run, checkpoint: Checkpoint, directory: Path) -> None:
    """Brings the files into the directory; raises CorruptCheckpoint unless every hash holds."""
    if checkpoint.format != FORMAT:
        raise CorruptCheckpoint(
            f"checkpoint {checkpoint.name} has format {checkpoint.format}, this version reads {FORMAT}"
        )
    for file in checkpoint.files:
        path = directory / _safe(file.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        key = run.key(f"checkpoints/{checkpoint.name}/{file.name}")
        if not run.store.exists(key):
            raise CorruptCheckpoint(f"checkpoint {checkpoint.name} lacks its file {file.name}")
        run.store.get_file(key, path)
        if sha256_of(path) != file.sha256:
            raise CorruptCheckpoint(f"checkpoint {checkpoint.name}: {file.name} does not have the hash it should")


def fetch_newest(run: Run, directory: Path, complain: Callable[[str], None]) -> Checkpoint | None:
    """Brings the newest checkpoint that holds; those passed over are complained of."""
    for checkpoint in reversed(committed(run)):
        try:
            fetch(run, checkpoint, directory)
            return checkpoint
        except CorruptCheckpoint as error:
            complain(f"{error}; passed over")
    return None


def best(checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
    """The checkpoint with the best score; where none has one, the newest."""
    scored = list(checkpoints)
    return max(
        scored,
        key=lambda one: (one.score is not None, one.score or 0.0, one.generation, one.step),
        default=None,
    )


def superfluous(checkpoints: list[Checkpoint], keep_last: int, keep_best: int) -> list[Checkpoint]:
    """Those that neither rule keeps. `checkpoints` are in the order of `committed`."""
    newest = checkpoints[-max(1, keep_last) :]
    scored = sorted(
        (one for one in checkpoints if one.score is not None), key=lambda one: one.score or 0.0, reverse=True
    )
    kept = {one.name for one in [*newest, *scored[:keep_best]]}
    return [one for one in checkpoints if one.name not in kept]


def prune(run: Run, keep_last: int, keep_best: int) -> None:
    """Deletes what the rules do not keep, once the newest manifest has been read back."""
    for checkpoint in superfluous(committed(run), keep_last, keep_best):
        run.store.delete(_manifest_key(run, checkpoint.name))
        for file in checkpoint.files:
            run.store.delete(run.key(f"checkpoints/{checkpoint.name}/{file.name}"))


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest_key(run: Run, name: str) -> str:
    return run.key(f"checkpoints/{name}/manifest.json")


def _safe(name: str) -> Path:
    """A file's name out of a manifest as a path that cannot leave the directory it is put into."""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise CorruptCheckpoint(f"a manifest names the file {name!r}, which leaves its directory")
    return path
