"""Checkpoints in the store: files under a new unique name, then the manifest with their digests, last of all.

A checkpoint without a manifest does not exist. The latest is found by listing manifests, never by a pointer. A
checkpoint that is deleted loses its manifest first. Of a sharded model every rank puts its parts of the files, and the
first rank the manifest with all of them.
"""

from __future__ import annotations

import math
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packtrain.errors import Mistake, NotFinished, NotFound, PacktrainError, quoted
from packtrain.files import sha256_of
from packtrain.run.records import Generation
from packtrain.run.run import Run
from packtrain.store import DamagedObject, ObjectNotFound, is_key
from packtrain.store.records import Count, DamagedRecord, Digest, FileName, Many, Measurement, decode, encode

FORMAT = 2

Choice = Literal["best", "last"] | int
"""A checkpoint of a run: by its score, the newest, or by its step."""

_PART = re.compile(r"(?P<stem>.+)-(?P<number>[1-9]\d{0,5})-of-(?P<count>[1-9]\d{0,5})(?P<suffix>\.\w+)")


class CorruptCheckpoint(PacktrainError):
    """A checkpoint does not match its manifest."""


class Superseded(PacktrainError):
    """A newer generation has started: this one must not commit anymore."""


@dataclass(frozen=True)
class StoredFile:
    name: str
    bytes: Count
    sha256: Digest


@dataclass(frozen=True)
class Checkpoint:
    """A manifest. `score` is what keep_best compares: higher is better.

    `step` of a program's checkpoint is its number; `reached` is the step that the program had logged by then.
    """

    format: Count
    name: FileName
    step: Count
    generation: Count
    score: Measurement | None
    files: Many[StoredFile]
    reached: Count | None = None


def checkpoint_name(step: int, generation: int) -> str:
    """Return a new unique name, which starts with step and generation."""
    return f"{step:09d}-{generation:06d}-{uuid.uuid4().hex[:12]}"


def generation_of(name: str) -> int | None:
    """Return the generation in a checkpoint's name; None if the name is of something else."""
    pieces = name.split("-")
    return int(pieces[1]) if len(pieces) == 3 and pieces[1].isdigit() else None


def commit(
    run: Run, step: int, generation: int, score: float | None, files: Mapping[str, Path], reached: int | None = None
) -> Checkpoint:
    """Put the files and then the manifest, unless a newer generation has started meanwhile."""
    name = checkpoint_name(step, generation)
    checkpoint = Checkpoint(FORMAT, name, step, generation, score, put_files(run, name, files), reached)
    put_manifest(run, checkpoint)
    return checkpoint


def put_files(run: Run, name: str, files: Mapping[str, Path]) -> tuple[StoredFile, ...]:
    stored = []
    for file_name, path in sorted(files.items()):
        run.store.put_file(file_key(run, name, file_name), path)
        stored.append(StoredFile(file_name, path.stat().st_size, sha256_of(path)))
    return tuple(stored)


def put_manifest(run: Run, checkpoint: Checkpoint) -> None:
    """Commit a checkpoint whose files are in the store, unless a newer generation has started meanwhile."""
    name, step, generation = checkpoint.name, checkpoint.step, checkpoint.generation
    latest = refuse_superseded(run, generation, f"committing step {step}")
    run.store.put(manifest_key(run, name), encode(checkpoint))
    # The put may have waited for an unreachable store. A generation that started without this checkpoint wins: the
    # commits of a run form one line.
    latest = run.latest_generation(latest)
    if latest is not None and latest.number > generation and latest.step < step:
        run.store.delete(manifest_key(run, name))
        raise Superseded(
            f"generation {latest.number} has started without step {step} of generation {generation}; withdrawn"
        )


def refuse_superseded(run: Run, generation: int, doing: str) -> Generation | None:
    """Return the latest generation, unless it is newer than that of the caller."""
    latest = run.latest_generation()
    if latest is not None and latest.number > generation:
        raise Superseded(f"generation {latest.number} has started; not {doing} of generation {generation}")
    return latest


def part_name(name: str, rank: int, num_ranks: int) -> str:
    """Return the name of a rank's part of a file: model-1-of-3.safetensors of model.safetensors."""
    stem, _, suffix = name.rpartition(".")
    return f"{stem}-{rank + 1}-of-{num_ranks}.{suffix}"


def whole_name(name: str) -> str:
    """Return the name of the file that a file is a part of; its own name if it is none."""
    match = _PART.fullmatch(name)
    return name if match is None else f"{match['stem']}{match['suffix']}"


def parts_of(name: str, present: Iterable[str]) -> list[str]:
    """Return the file of that name, or else its parts in their order; nothing if one of them is not there."""
    names = set(present)
    if name in names:
        return [name]
    matches = [match for match in map(_PART.fullmatch, names) if match is not None and whole_name(match.string) == name]
    counts = {int(match["count"]) for match in matches}
    complete = [part_name(name, rank, max(counts)) for rank in range(max(counts))] if counts else []
    return complete if len(counts) == 1 and names.issuperset(complete) else []


def committed(run: Run, complain: Callable[[str], None] = lambda _: None) -> list[Checkpoint]:
    """Return all checkpoints that have a readable manifest and are not late, oldest first.

    They are in the order of generation and step, not of time.
    """
    readable, _ = _manifests(run, complain)
    return _without_late(run, readable)


def last_step(run: Run) -> int:
    """Return the step that the run would resume from, if its newest checkpoint is valid; 0 without checkpoints.

    Not the highest: a commit that came late, from before the run resumed at an earlier step, may have that.
    """
    readable, unreadable = _manifests(run)
    if checkpoints := _without_late(run, readable):
        return checkpoints[-1].step
    # A run does not start over while someone may still fix a manifest (`fetch_newest`): no generation may say that it
    # did, or the checkpoint would count as late afterwards.
    names = [name for name in unreadable if generation_of(name) is not None]
    return int(max(names, key=lambda name: (generation_of(name), name)).split("-")[0]) if names else 0


def _manifests(run: Run, complain: Callable[[str], None] = lambda _: None) -> tuple[list[Checkpoint], list[str]]:
    """Return the checkpoints with a readable manifest, by generation and step, and the names of the others."""
    readable, unreadable = [], []
    for name in run.store.folders(run.key("checkpoints/")):
        try:
            data = run.store.find(manifest_key(run, name))
            if data is not None:
                readable.append(read_manifest(name, data))
        except (CorruptCheckpoint, DamagedObject) as error:
            unreadable.append(name)
            complain(str(error))
    return sorted(readable, key=lambda checkpoint: (checkpoint.generation, checkpoint.step)), unreadable


def _without_late(run: Run, checkpoints: list[Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoints without those that arrived after a newer generation had started at an earlier step.

    The commits of a run form one line: what a generation started without is not part of it, whether or not its files
    are still there. If nothing else is left, such a checkpoint counts after all, unless the newer generation started
    from scratch: what that one started from was deleted by the writer of this one, which had just been committed.
    """
    starts = run.starting_steps(checkpoints[0].generation) if checkpoints else {}
    earlier = [
        [step for number, step in starts.items() if number > checkpoint.generation and step < checkpoint.step]
        for checkpoint in checkpoints
    ]
    on_time = [checkpoint for checkpoint, steps in zip(checkpoints, earlier, strict=True) if not steps]
    return on_time or [checkpoint for checkpoint, steps in zip(checkpoints, earlier, strict=True) if 0 not in steps]


def read_manifest(name: str, data: bytes) -> Checkpoint:
    """Return the checkpoint of that name with this manifest; raise CorruptCheckpoint if it is none, or another's."""
    try:
        checkpoint = decode(Checkpoint, data, f"the manifest of checkpoint {name}")
    except DamagedRecord as error:
        raise CorruptCheckpoint(f"the manifest of checkpoint {name} cannot be read") from error
    if checkpoint.name != name or not name.startswith(f"{checkpoint.step:09d}-{checkpoint.generation:06d}-"):
        raise CorruptCheckpoint(f"the manifest of checkpoint {name} belongs to another checkpoint")
    for file in checkpoint.files:  # names become paths and keys, and others may write to the store
        if not is_key(file.name):
            raise CorruptCheckpoint(f"the manifest of checkpoint {name} names the invalid file {file.name!r}")
    return checkpoint


def fetch(run: Run, checkpoint: Checkpoint, directory: Path) -> None:
    """Fetch the files into an empty directory; raise CorruptCheckpoint unless every digest matches."""
    if checkpoint.format != FORMAT:
        raise Mistake(
            f"checkpoint {checkpoint.name} has format {checkpoint.format}, but this version reads {FORMAT}; "
            "use the version of Packtrain that wrote it"
        )
    for file in checkpoint.files:
        path = directory / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            run.store.get_file(file_key(run, checkpoint.name, file.name), path, limit=file.bytes)
        except ObjectNotFound as error:
            raise CorruptCheckpoint(f"checkpoint {checkpoint.name}: {file.name} is missing") from error
        except DamagedObject as error:
            raise CorruptCheckpoint(f"checkpoint {checkpoint.name}: {file.name} is larger than it was") from error
        if sha256_of(path) != file.sha256:
            raise CorruptCheckpoint(f"checkpoint {checkpoint.name}: {file.name} does not match its digest")


def fetch_named(run: Run, name: str, directory: Path) -> None:
    """Fetch the checkpoint that another machine has found, unless it was withdrawn or deleted since."""
    data = run.store.find(manifest_key(run, name))
    if data is None:
        raise CorruptCheckpoint(f"checkpoint {name} was deleted after the first machine found it")
    fetch(run, read_manifest(name, data), directory)


def fetch_newest(
    run: Run, directory: Path, complain: Callable[[str], None], check: Callable[[Path], None] = lambda _: None
) -> Checkpoint | None:
    """Fetch the newest valid checkpoint into an empty directory, and complain about those that are skipped.

    `check` may refuse a checkpoint: CorruptCheckpoint if it is damaged, Mistake if it belongs to something else. If all
    are refused, this raises instead of starting over: a person may still be able to fix one. Late ones do not count.
    """
    refused: list[str] = []

    def refuse(text: str) -> None:
        complain(f"{text}; skipped")
        refused.append(text)

    readable, _ = _manifests(run, refuse)
    checkpoints = _without_late(run, readable)
    for late in (checkpoint for checkpoint in readable if checkpoint not in checkpoints):
        complain(f"checkpoint {late.name}: it was committed after a newer generation had started without it; skipped")
    for checkpoint in reversed(checkpoints):
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
        shutil.rmtree(directory)  # the next one must not be mixed with files of this one
        directory.mkdir()
    if refused:
        raise Mistake(f"none of the {len(refused)} checkpoints of {run.name} can be used: {refused[0]}")
    if readable:
        complain(f"{run.name} has no other checkpoint; starting from scratch")
    return None


def best_first(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoints by falling score, the newest of equals first; those without a score come last."""
    return sorted(checkpoints, key=_merit, reverse=True)


def _merit(checkpoint: Checkpoint) -> tuple[bool, float, int, int]:
    scored = is_scored(checkpoint)
    return scored, (checkpoint.score or 0.0) if scored else 0.0, checkpoint.generation, checkpoint.step


def is_scored(checkpoint: Checkpoint) -> bool:
    return checkpoint.score is not None and math.isfinite(checkpoint.score)


def read_choice(text: str) -> Choice | None:
    """Return the choice that a person has written; None if it is neither best, last nor the number of a step."""
    if text == "best":
        return "best"
    if text == "last":
        return "last"
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None


def choice_of(text: str | None) -> Choice:
    """Return the choice that `--checkpoint` names."""
    if text is None:
        return "last"
    choice = read_choice(text)
    if choice is None:
        raise Mistake(f"--checkpoint: must be best, last or the number of a step, not {quoted(text)}")
    return choice


def candidates(run: Run, choice: Choice) -> list[Checkpoint]:
    """Return the checkpoints that the choice allows, the preferred one first: at least one."""
    checkpoints = committed(run)
    if not checkpoints:
        raise NotFinished(f"{run.name} has no checkpoint yet; see `{run.command('show')}`")
    if choice == "best":
        return best_first(checkpoints)
    if choice == "last":
        return checkpoints[::-1]
    steps = sorted({checkpoint.step for checkpoint in checkpoints})
    if choice not in steps:
        raise NotFound(f"{run.name} has no checkpoint of step {choice}; it has {', '.join(map(str, steps))}")
    return [checkpoint for checkpoint in reversed(checkpoints) if checkpoint.step == choice]


def superfluous(checkpoints: list[Checkpoint], keep_last: int, keep_best: int) -> list[Checkpoint]:
    """Return the checkpoints that no rule keeps, given those of `committed`. Those of another format stay."""
    newest = checkpoints[-max(1, keep_last) :]  # always one: a run must be able to resume
    scored = sorted(filter(is_scored, checkpoints), key=_merit, reverse=True)
    # Of a program that did not resume, but started again, the newest are not the farthest. Of those that are equally
    # far, as of a program that logs a step once an epoch, they are.
    stepped = [checkpoint for checkpoint in reversed(checkpoints) if checkpoint.reached is not None]
    farthest = sorted(stepped, key=lambda checkpoint: checkpoint.reached or 0, reverse=True)
    kept_names = {checkpoint.name for checkpoint in [*newest, *scored[:keep_best], *farthest[: max(1, keep_last)]]}
    surplus = (checkpoint for checkpoint in checkpoints if checkpoint.name not in kept_names)
    return [checkpoint for checkpoint in surplus if checkpoint.format == FORMAT]


def prune(run: Run, generation: int, keep_last: int, keep_best: int, spared: str | None = None) -> None:
    """Delete what no rule keeps, except the one of that name. Listing reads the newest manifest back first.

    Only the latest generation deletes: a newer one may have had to fall back to a checkpoint that is superfluous here.
    """
    for checkpoint in superfluous(committed(run), keep_last, keep_best):
        if checkpoint.name == spared:
            continue
        refuse_superseded(run, generation, "deleting checkpoints")  # before each: it takes long to delete many
        run.store.delete(manifest_key(run, checkpoint.name))  # first: without it the checkpoint does not exist
        for file in checkpoint.files:
            run.store.delete(file_key(run, checkpoint.name, file.name))


def remove_uncommitted(run: Run, before: int) -> None:
    """Delete what generations before that number uploaded and never committed, or too late; it no longer counts."""
    folder = run.key("checkpoints/")
    readable, _ = _manifests(run)
    on_time = _without_late(run, readable)
    late = {checkpoint.name for checkpoint in readable if checkpoint not in on_time}
    for name in run.store.folders(folder):
        generation, manifest = generation_of(name), manifest_key(run, name)
        if generation is not None and generation < before and (name in late or not run.store.exists(manifest)):
            run.store.delete(manifest)  # first: without it the checkpoint does not exist
            for entry in run.store.list(f"{folder}{name}"):
                run.store.delete(entry.key)

    def is_dead(key: str) -> bool:
        generation = generation_of(key.removeprefix(folder).split("/")[0])
        return generation is not None and generation < before

    run.store.remove_unfinished(folder, is_dead)


def manifest_key(run: Run, name: str) -> str:
    return run.key(f"checkpoints/{name}/manifest.json")


def file_key(run: Run, name: str, file_name: str) -> str:
    # In a folder of their own: a program may name one of its files manifest.json.
    return run.key(f"checkpoints/{name}/files/{file_name}")
