"""The weights of another run that a run starts from: its own copy, so that the other one may go away.

parent/weights.safetensors  parent/vocabulary.json    weights-1-of-2.safetensors of a sharded model
parent.json                                  last: digests of the files, and the classes
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from packtrain.errors import Mistake
from packtrain.files import sha256_of
from packtrain.run.checkpoint import CorruptCheckpoint, StoredFile, parts_of
from packtrain.run.run import Run
from packtrain.store import DamagedObject, ObjectNotFound
from packtrain.store.records import MAX_RECORD_BYTES, FileName, Many, decode, encode

WEIGHTS_FILE, VOCABULARY_FILE = "weights.safetensors", "vocabulary.json"
_RECORD = "parent.json"


@dataclass(frozen=True)
class ParentFile(StoredFile):
    name: FileName


@dataclass(frozen=True)
class ParentRecord:
    """`classes` are those of the other run's data, in their order."""

    files: Many[ParentFile]
    classes: Many[str] = ()


def record_of(directory: Path, classes: tuple[str, ...]) -> ParentRecord:
    present = [path.name for path in directory.iterdir()]
    paths = [directory / file for name in (WEIGHTS_FILE, VOCABULARY_FILE) for file in parts_of(name, present)]
    files = [ParentFile(path.name, path.stat().st_size, sha256_of(path)) for path in paths]
    return ParentRecord(tuple(files), classes)


def put_weights(run: Run, directory: Path, record: ParentRecord) -> None:
    for file in record.files:
        run.store.put_file(run.key(f"parent/{file.name}"), directory / file.name)
    run.store.put(run.key(_RECORD), encode(record))


def fetch_weights(run: Run, directory: Path) -> None:
    """Fetch the files and the record into an empty directory; raise CorruptCheckpoint unless every digest matches."""
    data = run.store.find(run.key(_RECORD), MAX_RECORD_BYTES)
    if data is None:
        raise Mistake(f"{run.name} has no copy of the weights that it starts from; create it again")
    for file in decode(ParentRecord, data, f"{_RECORD} of run {run.name}").files:
        try:
            run.store.get_file(run.key(f"parent/{file.name}"), directory / file.name, limit=file.bytes)
        except (ObjectNotFound, DamagedObject) as error:
            raise CorruptCheckpoint(f"{run.name}: parent/{file.name} is missing or damaged") from error
        if sha256_of(directory / file.name) != file.sha256:
            raise CorruptCheckpoint(f"{run.name}: parent/{file.name} does not match its digest")
    (directory / _RECORD).write_bytes(data)


def read_record(directory: Path) -> ParentRecord:
    return decode(ParentRecord, (directory / _RECORD).read_bytes(), _RECORD)
