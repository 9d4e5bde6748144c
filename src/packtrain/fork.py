"""Start a run from a checkpoint of another one: as a fork, which continues what that run did, or from its weights.

A fork has the same recipe, model, data, code and training settings; only then do optimizer, learning rate and the
place in the data still mean the same. Everything else starts from the weights alone. Either way the new run gets its
own copy, before it exists: nothing that happens to the other run later matters.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from packtrain.data.pack import Pack
from packtrain.errors import Mistake, printable, quoted
from packtrain.job.changes import other_training
from packtrain.job.job import Job, Parent
from packtrain.pack.manifest import Manifest, find_manifest, pack_key
from packtrain.recipes import Recipe
from packtrain.run.checkpoint import (
    FORMAT,
    Checkpoint,
    Choice,
    candidates,
    commit,
    fetch,
    manifest_key,
    part_name,
    parts_of,
    read_choice,
)
from packtrain.run.parent import VOCABULARY_FILE, WEIGHTS_FILE, put_weights, record_of
from packtrain.run.run import Run, open_run
from packtrain.store import Store, open_store
from packtrain.store.records import DamagedRecord, decode
from packtrain.system import cache_directory
from packtrain.train.progress import Progress, reached

STATE_FILE, MODEL_FILE, EMA_FILE = "state.json", "model.safetensors", "ema.safetensors"  # as train/state.py has them


@dataclass(frozen=True)
class CheckpointName:
    """A checkpoint of a run as a person names it: `RUN`, `RUN:STEP`, `s3://bucket/prefix/RUN:best`.

    Without a choice, a fork takes the last one, and weights are those of the best.
    """

    store: str | None
    run: str
    choice: Choice | None = None


def read_name(text: str, option: str = "") -> CheckpointName:
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
    return CheckpointName(store or None, run, choice)


@dataclass(frozen=True)
class ForkedState:
    """The part of a checkpoint's state.json that is needed without torch."""

    progress: Progress


@dataclass(frozen=True)
class Inheritance:
    """A checkpoint of another run, and how much of it a new run takes; `reasons` are why it is no fork."""

    run: Run
    checkpoint: Checkpoint
    takes: Literal["everything", "weights", "ema"]
    reasons: Sequence[str] = ()

    @property
    def parent(self) -> Parent:
        manifest = self.run.store.get(manifest_key(self.run, self.checkpoint.name))
        return Parent(
            run=self.run.name,
            store=self.run.store.url,
            step=self.checkpoint.step,
            checkpoint=self.checkpoint.name,
            sha256=hashlib.sha256(manifest).hexdigest(),
            takes=self.takes,
        )

    def in_words(self, job: Job) -> list[str]:
        at = f"step {self.checkpoint.step:,}" if job.recipe is not None else f"commit {self.checkpoint.step:,}"
        if job.program is not None:
            return [f"{self.run.name}, {at}: the program finds the files of that checkpoint"]
        if self.takes == "everything":
            lines = [f"{self.run.name}, {at}, as a fork: weights, optimizer, place in the data"]
            old = self.run.job.train.duration
            if old != job.train.duration:
                follows = job.train.schedule.follows_duration
                rate = "the learning rate follows the new one" if follows else "the learning rate does not depend on it"
                return [*lines, f"train.duration: {old} -> {job.train.duration}; {rate}"]
            return [*lines, f"it continues exactly as {self.run.name} would have"]
        which = "the moving average of its weights" if self.takes == "ema" else "its weights"
        why = f" ({_listed(self.reasons)})" if self.reasons else ""
        return [f"{self.run.name}, {at}: {which}", f"optimizer, schedule and data order start anew{why}"]

    @contextmanager
    def fetched(
        self,
        store: Store,
        job: Job,
        pack: Manifest | None,
        recipe: type[Recipe] | None,
        say: Callable[[str], None] = lambda _: None,
    ) -> Iterator[Callable[[Run], None]]:
        """Fetch and check everything for a run in that store; what it yields gives it to the new run.

        `say` gets a line about what of the weights fits another model.
        """
        with tempfile.TemporaryDirectory(prefix="from-", dir=cache_directory()) as folder:
            directory = Path(folder)
            fetch(self.run, self.checkpoint, directory)
            if self.takes == "everything":
                if job.recipe is not None and pack is not None:
                    _check_goal(self, job, directory)
                    _name_pack(directory, pack.name)
                files = {file.name: directory / file.name for file in self.checkpoint.files}
                # In generation 0, before all that the run makes itself: its first workers resume from it.
                yield partial(self._commit, files)
                return
            assert pack is not None and recipe is not None
            theirs = _manifest_of(self.run)
            _check_rows(recipe, theirs, pack)
            _rename_weights(directory, EMA_FILE if self.takes == "ema" else MODEL_FILE)
            if theirs.vocabulary is not None:
                key, limit = pack_key(theirs.name, theirs.vocabulary.name), theirs.vocabulary.bytes
                self.run.store.get_file(key, directory / VOCABULARY_FILE, limit=limit)
            record = record_of(directory, theirs.classes)
            if any(one.startswith(("model.", "code")) for one in self.reasons) and find_spec("torch") is not None:
                from packtrain.train.weights import check_parent_fit

                # Where the model is the same, it fits; a client without torch leaves the question to the workers.
                data = Pack(store, pack.name, cache_directory() / "packs", manifest=pack)
                say(check_parent_fit(recipe(job, data), directory, record).in_words)
            yield lambda run: put_weights(run, directory, record)

    def _commit(self, files: Mapping[str, Path], run: Run) -> None:
        commit(run, self.checkpoint.step, 0, self.checkpoint.score, files, self.checkpoint.reached)


def find_parent(name: CheckpointName, store: Store) -> Run:
    """Return the run, in its own store or in that of the new one."""
    return open_run(store if name.store is None else open_store(name.store), name.run)


def check_parent(run: Run, job: Job) -> None:
    """Refuse what can be refused before packing: a run whose checkpoints cannot fit."""
    if (job.recipe is None) != (run.job.recipe is None) or job.recipe != run.job.recipe:
        theirs, ours = (one.recipe or "a program" for one in (run.job, job))
        raise Mistake(f"{run.name} trains {theirs}, and this job {ours}; checkpoints fit the same recipe only")


def inherit(run: Run, choice: Choice | None, job: Job, code: bytes, pack: Manifest | None, fresh: bool) -> Inheritance:
    """Choose the checkpoint, and decide between a fork and the weights alone; `fresh` asks for the weights."""
    reasons = [] if job.recipe is None else _differences(run, job, code, pack)
    if job.recipe is None or not (fresh or reasons):
        return Inheritance(run, _usable(run, choice or "last"), "everything")
    checkpoint = _usable(run, choice or "best")
    takes: Literal["weights", "ema"] = (
        "ema" if parts_of(EMA_FILE, (file.name for file in checkpoint.files)) else "weights"
    )
    return Inheritance(run, checkpoint, takes, reasons)


def _usable(run: Run, choice: Choice) -> Checkpoint:
    chosen = candidates(run, choice)[0]
    if chosen.format != FORMAT:
        raise Mistake(f"checkpoint {chosen.name} has format {chosen.format}; this version reads {FORMAT}")
    return chosen


def _differences(run: Run, job: Job, code: bytes, pack: Manifest | None) -> list[str]:
    """Return what makes a new job train differently from a run, as fields of the job."""
    found = other_training(run.job, job)
    # The digest at the end of its name says what is in a pack; the rest is the name of its job.
    same = pack is not None and run.pack_name().rpartition("-")[2] == pack.name.rpartition("-")[2]
    weights = [[source.weight for source in one.data.train] for one in (run.job, job)]
    if not same or weights[0] != weights[1]:
        found.append("data")
    if job.has_own_code and hashlib.sha256(run.code).digest() != hashlib.sha256(code).digest():
        found.append("code")
    return found


def _listed(reasons: Sequence[str]) -> str:
    shown = ", ".join(reasons[:3]) + (f" and {len(reasons) - 3} more" if len(reasons) > 3 else "")
    return f"{shown} {'differs' if len(reasons) == 1 else 'differ'}"


def _rename_weights(directory: Path, name: str) -> None:
    parts = parts_of(name, [path.name for path in directory.iterdir()])
    for number, part in enumerate(parts):
        new = WEIGHTS_FILE if part == name else part_name(WEIGHTS_FILE, number, len(parts))
        (directory / part).rename(directory / new)


def _check_goal(inheritance: Inheritance, job: Job, directory: Path) -> None:
    """Refuse a fork that would have nothing to do."""
    try:
        progress = decode(ForkedState, (directory / STATE_FILE).read_bytes(), STATE_FILE).progress
    except OSError as error:
        raise DamagedRecord(f"checkpoint {inheritance.checkpoint.name} has no {STATE_FILE}") from error
    if reached(job.train.duration, progress):
        raise Mistake(
            f"{inheritance.run.name} has trained for {job.train.duration} at step {inheritance.checkpoint.step}:"
            " nothing is left to do; name an earlier step, set a longer train.duration, or pass --fresh"
        )


def _name_pack(directory: Path, pack: str) -> None:
    """Write the name of the new run's pack into a checkpoint: the same data, packed for a job of another name."""
    path = directory / STATE_FILE
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "pack": pack}, indent=1), "utf-8")


def _manifest_of(run: Run) -> Manifest:
    found = find_manifest(run.store, run.pack_name())
    if found is None:
        raise Mistake(f"the pack of {run.name} is gone from {run.store.url}, and with it the names of its rows")
    return found


def _check_rows(recipe: type[Recipe], theirs: Manifest, ours: Manifest) -> None:
    """Refuse other classes or another vocabulary where the recipe does not say which tensors depend on them."""
    digests = [None if one.vocabulary is None else one.vocabulary.sha256 for one in (theirs, ours)]
    for kind, what, same in (
        ("classes", "classes differ", theirs.classes == ours.classes),
        ("pieces", "vocabularies differ", digests[0] == digests[1]),
    ):
        if not same and kind not in recipe.rows.values():
            raise Mistake(f"the {what}, and {recipe.__name__}.rows does not say which tensors have a row for each")
