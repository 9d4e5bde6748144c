"""Checkpoints in the store: files under a new unique name, then the manifest with their hashes, last of all.

A checkpoint without a manifest does not exist. The latest is found by listing manifests, never by a
pointer. What is deleted loses its manifest first.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from packtrain.errors import Mistake, PacktrainError
from packtrain.run.run import Run
from packtrain.store import ObjectNotFound, is_key

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
    """Puts the files and then the manifest, unless a newer generation has begun meanwhile.

    The manifest itself may have waited for a store that was away. If a generation has begun without it by then, it is
    taken back: one line of commits survives.
    """
    name = f"{step:09d}-{generation:06d}-{uuid.uuid4().hex[:12]}"
    stored = []
    for file_name, path in sorted(files.items()):
        run.store.put_file(_file_key(run, name, file_name), path)
        stored.append(StoredFile(file_name, path.stat().st_size, sha256_of(path)))
    checkpoint = Checkpoint(FORMAT, name, step, generation, score, tuple(stored))
    latest = run.latest_generation()
    if latest is not None and latest.number > generation:
        raise Superseded(f"generation {latest.number} has begun; step {step} of {generation} is not committed")
    run.store.put(_manifest_key(run, name), json.dumps(asdict(checkpoint), indent=1).encode())
    latest = run.latest_generation(latest)
    if latest is not None and latest.number > generation and latest.step < step:
        run.store.delete(_manifest_key(run, name))
        raise Superseded(f"generation {latest.number} has begun without step {step} of {generation}: it is taken back")
    return checkpoint


def committed(run: Run, complain: Callable[[str], None] = lambda _: None) -> list[Checkpoint]:
    """All checkpoints with a readable manifest, the oldest first; order is by generation and step, not by time."""
    found = []
    for name in run.store.folders(run.key("checkpoints/")):
        data = run.store.find(_manifest_key(run, name))
        if data is not None:
            try:
                found.append(_read_manifest(name, data))
            except CorruptCheckpoint as error:
                complain(str(error))
    return sorted(found, key=lambda checkpoint: (checkpoint.generation, checkpoint.step))


def _read_manifest(name: str, data: bytes) -> Checkpoint:
    try:
        checkpoint = TypeAdapter(Checkpoint).validate_json(data)
    except ValidationError as error:
        raise CorruptCheckpoint(f"the manifest of checkpoint {name} cannot be read") from error
    if checkpoint.name != name:
        raise CorruptCheckpoint(f"the manifest of checkpoint {name} is that of another one")
    return checkpoint


def fetch(run: Run, checkpoint: Checkpoint, directory: Path) -> None:
    """Brings the files into the empty directory; raises CorruptCheckpoint unless every hash holds."""
    if checkpoint.format != FORMAT:
        raise Mistake(
            f"checkpoint {checkpoint.name} has format {checkpoint.format}, and this version reads {FORMAT}: "
            "upgrade Packtrain"
        )
    for file in checkpoint.files:
        path = directory / _safe(file.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            run.store.get_file(_file_key(run, checkpoint.name, file.name), path)
        except ObjectNotFound as error:
            raise CorruptCheckpoint(f"checkpoint {checkpoint.name} lacks its file {file.name}") from error
        if sha256_of(path) != file.sha256:
            raise CorruptCheckpoint(f"checkpoint {checkpoint.name}: {file.name} does not have the hash it should")


def fetch_newest(
    run: Run, directory: Path, complain: Callable[[str], None], check: Callable[[Path], None] = lambda _: None
) -> Checkpoint | None:
    """Brings the newest checkpoint that holds into the empty directory; those passed over are complained of.

    `check` may refuse what was brought: CorruptCheckpoint if it cannot be used, Mistake if it is of something else.
    Where there is nothing but what is refused, nothing is begun anew: that would lose what a person may still mend.
    """
    refused: list[str] = []

    def refuse(text: str) -> None:
        complain(f"{text}; passed over")
        refused.append(text)

    for checkpoint in reversed(committed(run, refuse)):
        try:
            fetch(run, checkpoint, directory)
        except (CorruptCheckpoint, Mistake) as error:
            refuse(str(error))
        else:
            try:
                check(directory)
                return checkpoint
            except (CorruptCheckpoint, Mistake) as error:
                refuse(f"checkpoint {checkpoint.name}: {error}")
        _empty(directory)
    if refused:
        raise Mistake(f"none of the {len(refused)} checkpoints of {run.name} can be used: {refused[0]}")
    return None


def best(checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
    """The checkpoint with the best score, of equals the newest; where none has one, the newest."""
    return max(checkpoints, key=_merit, default=None)


def _merit(checkpoint: Checkpoint) -> tuple[bool, float, int, int]:
    scored = is_scored(checkpoint)
    return scored, (checkpoint.score or 0.0) if scored else 0.0, checkpoint.generation, checkpoint.step


def is_scored(checkpoint: Checkpoint) -> bool:
    return checkpoint.score is not None and math.isfinite(checkpoint.score)


def superfluous(checkpoints: list[Checkpoint], keep_last: int, keep_best: int) -> list[Checkpoint]:
    """Those that neither rule keeps. `checkpoints` are in the order of `committed`; those of another version stay."""
    newest = checkpoints[-max(1, keep_last) :]
    scored = sorted(filter(is_scored, checkpoints), key=_merit, reverse=True)
    kept = {one.name for one in [*newest, *scored[:keep_best]]}
    return [one for one in checkpoints if one.name not in kept and one.format == FORMAT]


def prune(run: Run, keep_last: int, keep_best: int) -> None:
    """Deletes what the rules do not keep, once the newest manifest has been read back."""
    for checkpoint in superfluous(committed(run), keep_last, keep_best):
        run.store.delete(_manifest_key(run, checkpoint.name))
        for file in checkpoint.files:
            run.store.delete(_file_key(run, checkpoint.name, file.name))


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest_key(run: Run, name: str) -> str:
    return run.key(f"checkpoints/{name}/manifest.json")


def _file_key(run: Run, name: str, file_name: str) -> str:
    """Files have a folder of their own: a person's program may call one of them manifest.json."""
    return run.key(f"checkpoints/{name}/files/{file_name}")


def _safe(name: str) -> Path:
    """A file's name out of a manifest as a path that cannot leave the directory it is put into."""
    if not is_key(name):
        raise CorruptCheckpoint(f"a manifest names the file {name!r}, which no checkpoint can have")
    return Path(name)


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
