"""Start a run from a checkpoint of another one: as a fork, which continues what that run did, or from its weights.

A fork has the same recipe, model, data, code and training settings; only then do optimizer, learning rate and the
place in the data still mean the same. Everything else starts from the weights alone. Either way the new run gets its
own copy, before it exists: nothing that happens to the other run later matters.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from packtrain.data.pack import Pack
from packtrain.errors import Mistake, printable, quoted
from packtrain.job.changes import other_training
from packtrain.job.job import Job, Parent
from packtrain.pack.manifest import Manifest, find_manifest, pack_key
from packtrain.recipes import Recipe
from packtrain.run.checkpoint import (
    FORMAT,
    Choice,
    CorruptCheckpoint,
    candidates,
    commit,
    fetch,
    manifest_key,
    part_name,
    parts_of,
    read_choice,
    read_manifest,
)
from packtrain.run.parent import VOCABULARY_FILE, WEIGHTS_FILE, put_weights, record_of
from packtrain.run.run import Run, open_run
from packtrain.store import Store, open_store
from packtrain.store.records import DamagedRecord, decode
from packtrain.system import cache_directory
from packtrain.train.progress import Progress, reached

if TYPE_CHECKING:
    from packtrain.launch.create import NewRun

STATE_FILE, MODEL_FILE, EMA_FILE = "state.json", "model.safetensors", "ema.safetensors"  # as train/state.py has them
_LISTED = 3  # differences that a line names


@dataclass(frozen=True)
class ParentName:
    """A checkpoint of a run as a person names it: `RUN`, `RUN:STEP`, `s3://bucket/prefix/RUN:best`.

    Without a choice, a fork takes the last one, and weights are those of the best. `fresh` asks for the weights,
    whatever the job.
    """

    store: str | None
    run: str
    choice: Choice | None = None
    fresh: bool = False


def read_name(text: str, option: str = "", fresh: bool = False) -> ParentName:
    """Read the name of a checkpoint; an error starts with the option that gave it."""
    place, colon, last = text.rpartition(":")
    choice: Choice | None = None
    if colon and not last.startswith("/"):
        choice = read_choice(last)
        if choice is None:
            raise Mistake(f"{option}{printable(text, 200)}: after the colon comes a step, best or last")
    store, slash, run = (place if choice is not None else text).rpartition("/")
    if not run or (slash and not store):
        raise Mistake(f"{option}{quoted(text)}: must be RUN, RUN:STEP or STORE/RUN")
    return ParentName(store or None, run, choice, fresh)


def find_parent(name: ParentName, store: Store, job: Job) -> Run:
    """Return the run, in its own store or in that of the new one, unless its checkpoints cannot fit the new job."""
    parent = open_run(store if name.store is None else open_store(name.store), name.run)
    if job.recipe != parent.job.recipe:
        theirs, ours = parent.job.recipe or "a program", job.recipe or "a program"
        raise Mistake(f"{parent.name} trains {theirs}, and this job {ours}; checkpoints fit the same recipe only")
    return parent


def choose(parent: Run, name: ParentName, new_run: NewRun) -> tuple[Parent, list[str]]:
    """Choose the checkpoint, and decide between a fork and the weights alone; return that, and lines that say it."""
    job = new_run.job
    differences = [] if job.recipe is None else _differences(parent, new_run)
    is_fork = job.recipe is None or not (name.fresh or differences)
    checkpoint = candidates(parent, name.choice or ("last" if is_fork else "best"))[0]
    if checkpoint.format != FORMAT:
        raise Mistake(f"checkpoint {checkpoint.name} has format {checkpoint.format}; this version reads {FORMAT}")
    takes: Literal["everything", "weights", "ema"] = "everything"
    if not is_fork:
        takes = "ema" if parts_of(EMA_FILE, (file.name for file in checkpoint.files)) else "weights"
    digest = hashlib.sha256(parent.store.get(manifest_key(parent, checkpoint.name))).hexdigest()
    record = Parent(
        run=parent.name,
        store=parent.store.url,
        step=checkpoint.step,
        checkpoint=checkpoint.name,
        sha256=digest,
        takes=takes,
    )
    return record, _in_words(parent, record, job, differences)


def _in_words(parent: Run, record: Parent, job: Job, differences: Sequence[str]) -> list[str]:
    if job.program is not None:
        return [f"{parent.name}, commit {record.step:,}: the program finds the files of that checkpoint"]
    if record.takes == "everything":
        first = f"{parent.name}, step {record.step:,}, as a fork: weights, optimizer, place in the data"
        before, after = parent.job.train.duration, job.train.duration
        if before == after:
            return [first, f"it continues exactly as {parent.name} would have"]
        follows = job.train.schedule.follows_duration
        rate = "the learning rate follows the new one" if follows else "the learning rate does not depend on it"
        return [first, f"train.duration: {before} -> {after}; {rate}"]
    weights = "the moving average of its weights" if record.takes == "ema" else "its weights"
    listed = ", ".join(differences[:_LISTED])
    if len(differences) > _LISTED:
        listed += f" and {len(differences) - _LISTED} more"
    why = f" ({listed} {'differs' if len(differences) == 1 else 'differ'})" if differences else ""
    first = f"{parent.name}, step {record.step:,}: {weights}"
    return [first, f"optimizer, schedule and data order start anew{why}"]


@contextmanager
def fetched(new_run: NewRun, parent: Run, say: Callable[[str], None]) -> Iterator[Callable[[Run], object]]:
    """Fetch and check all that a new run takes from its parent; what this yields gives it to the new run.

    `say` gets a line about what of the weights fits another model.
    """
    record = new_run.job.parent
    assert record is not None
    with tempfile.TemporaryDirectory(prefix="from-", dir=cache_directory()) as folder:
        directory = Path(folder)
        data = parent.store.find(manifest_key(parent, record.checkpoint))
        if data is None or hashlib.sha256(data).hexdigest() != record.sha256:
            fault = f"checkpoint {record.checkpoint} of {parent.name} is gone"
            raise CorruptCheckpoint(f"{fault}; run the same command again")
        checkpoint = read_manifest(record.checkpoint, data)
        fetch(parent, checkpoint, directory)
        if record.takes == "everything":
            if new_run.pack is not None:
                _check_goal(record, new_run.job, directory)
                # The same data, packed for a job of another name.
                state = {**json.loads((directory / STATE_FILE).read_bytes()), "pack": new_run.pack.name}
                (directory / STATE_FILE).write_text(json.dumps(state, indent=1), "utf-8")
            files = {file.name: directory / file.name for file in checkpoint.files}
            # In generation 0, before all that the run makes itself: its first workers resume from it.
            yield lambda run: commit(run, checkpoint.step, 0, checkpoint.score, files, checkpoint.reached)
            return
        assert new_run.pack is not None and new_run.recipe is not None
        manifest = find_manifest(parent.store, parent.pack_name())
        if manifest is None:
            raise Mistake(
                f"the pack of {parent.name} is gone from {parent.store.url}, and with it the names of its rows"
            )
        _check_rows(new_run.recipe, manifest, new_run.pack)
        name = EMA_FILE if record.takes == "ema" else MODEL_FILE
        file_names = parts_of(name, [path.name for path in directory.iterdir()])
        for number, file_name in enumerate(file_names):
            new_name = WEIGHTS_FILE if file_name == name else part_name(WEIGHTS_FILE, number, len(file_names))
            (directory / file_name).rename(directory / new_name)
        if manifest.vocabulary is not None:
            key, limit = pack_key(manifest.name, manifest.vocabulary.name), manifest.vocabulary.bytes
            parent.store.get_file(key, directory / VOCABULARY_FILE, limit=limit)
        weights = record_of(directory, manifest.classes)
        is_other_model = any(field.startswith(("model.", "code")) for field in _differences(parent, new_run))
        if is_other_model and find_spec("torch") is not None:
            from packtrain.train.weights import check_parent_fit

            # Where the model is the same, it fits; a client without torch leaves the question to the workers.
            pack = Pack(new_run.store, new_run.pack.name, cache_directory() / "packs", manifest=new_run.pack)
            say(check_parent_fit(new_run.recipe(new_run.job, pack), directory, weights).in_words)
        yield lambda run: put_weights(run, directory, weights)


def _differences(parent: Run, new_run: NewRun) -> list[str]:
    """Return what makes a new job train differently from a run, as fields of the job."""
    fields = other_training(parent.job, new_run.job)
    # The digest at the end of its name says what is in a pack; the rest is the name of its job.
    same = new_run.pack is not None and parent.pack_name().rpartition("-")[2] == new_run.pack.name.rpartition("-")[2]
    weights = [[source.weight for source in job.data.train] for job in (parent.job, new_run.job)]
    if not same or weights[0] != weights[1]:
        fields.append("data")
    if new_run.job.has_own_code and hashlib.sha256(parent.code).digest() != hashlib.sha256(new_run.code).digest():
        fields.append("code")
    return fields


@dataclass(frozen=True)
class ForkedState:
    """The part of a checkpoint's state.json that is needed without torch."""

    progress: Progress


def _check_goal(parent: Parent, job: Job, directory: Path) -> None:
    """Refuse a fork that would have nothing to do."""
    try:
        progress = decode(ForkedState, (directory / STATE_FILE).read_bytes(), STATE_FILE).progress
    except OSError as error:
        raise DamagedRecord(f"checkpoint {parent.checkpoint} has no {STATE_FILE}") from error
    if reached(job.train.duration, progress):
        raise Mistake(
            f"{parent.run} has trained for {job.train.duration} at step {parent.step}:"
            " nothing is left to do; name an earlier step, set a longer train.duration, or pass --fresh"
        )


def _check_rows(recipe: type[Recipe], theirs: Manifest, ours: Manifest) -> None:
    """Refuse other classes or another vocabulary where the recipe does not say which tensors depend on them."""
    digests = [manifest.vocabulary and manifest.vocabulary.sha256 for manifest in (theirs, ours)]
    for kind, subject, is_same in (
        ("classes", "classes differ", theirs.classes == ours.classes),
        ("pieces", "vocabularies differ", digests[0] == digests[1]),
    ):
        if not is_same and kind not in recipe.rows.values():
            raise Mistake(f"the {subject}, and {recipe.__name__}.rows does not say which tensors have a row for each")
