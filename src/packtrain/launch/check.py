"""Check a job before there is a run: what can be refused is refused first, then its data is packed.

The result is a `NewRun`, or for a run that will start elsewhere a `PortableJob`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from packtrain.data.order import NO_SAMPLES, draws
from packtrain.errors import Mistake
from packtrain.files import sha256_of
from packtrain.fleet import fleet_of
from packtrain.fleet.fleet import Say
from packtrain.identity import install_command
from packtrain.job.job import MIN_VOCABULARY, CodeOrigin, Job, Option
from packtrain.job.launchers import command_of, is_python
from packtrain.job.load import LoadedJob
from packtrain.job.part import FILES, IN_STORE, is_address
from packtrain.launch.create import NewRun
from packtrain.launch.parent import ParentName, choose, find_parent, read_name
from packtrain.pack.build import PackProgress, pack
from packtrain.pack.fetch import local_copy, local_source
from packtrain.pack.manifest import Manifest, find_manifest, missing_files, pack_key
from packtrain.pack.workers import Processes, Workers
from packtrain.recipes import recipe_class
from packtrain.run.code import CodeSnapshot, archive, git_commit, snapshot
from packtrain.run.inputs import is_remote, keys_of, put_input
from packtrain.run.records import JobSource
from packtrain.store import Store, open_store
from packtrain.store.records import MAX_RECORD_BYTES
from packtrain.system import cache_directory
from packtrain.train.control import PLACE_VARIABLES

# Without their common beginning, by which any of our variables would be close to them.
_PLACES = [name.removeprefix("PACKTRAIN_") for name in PLACE_VARIABLES]
_VARIABLE = re.compile(r"\$\{?PACKTRAIN_(\w+)")


def check(
    loaded: LoadedJob, progress: PackProgress, parent: ParentName | None = None, fleet_is_checked: bool = False
) -> NewRun:
    """Pack the data and do all checks, the cheap ones before packing; no run exists before they have passed."""
    job = loaded.job
    check_can_run(loaded)
    require_torch(job)
    # Before packing, which may take hours: a missing script is reported now, and nothing is created for it.
    code = take_code(loaded)
    store = open_store(job.store, create=True)
    if job.has_own_code:
        progress.say(f"took a snapshot of {code.summary}")
    if (fault := store_fault(job, store)) is not None:
        raise loaded.mistake("store", fault)
    parent = _named_parent(loaded, parent)
    parent_run = None if parent is None else find_parent(parent, store, job)
    if not fleet_is_checked:
        with loaded.placing_mistakes():
            fleet_of(job.fleet.kind).check(job, store, progress.say)
    # From here on, the job of the run differs from the file: it says what is in the store.
    packed, notes = None, [("note", line) for line in loaded.notes]
    if job.program is not None:
        job = _with_program_data(loaded, store, progress.say)
    else:
        job, packed, data_notes = _with_pack(loaded, store, progress, starts_from_parent=parent is not None)
        notes += data_notes
    source = JobSource(
        loaded.file, loaded.text, loaded.overrides, *git_commit(loaded.code), directory=str(loaded.directory)
    )
    recipe = None if job.recipe is None else recipe_class(job.recipe, loaded.code)
    new_run = NewRun(store, job, code.archive, packed, source, recipe, notes=notes)
    if parent is None or parent_run is None:
        return new_run
    record, lines = choose(parent_run, parent, new_run)
    job = job.model_copy(update={"parent": record})
    return replace(new_run, job=job, parent=parent_run, notes=[*notes, *(("from", line) for line in lines)])


def _named_parent(loaded: LoadedJob, parent: ParentName | None) -> ParentName | None:
    """Return where the run starts from: what the command says, or `weights` of the job."""
    weights = loaded.job.weights
    if weights is None:
        return parent
    if parent is not None:
        raise loaded.mistake("weights", "the command says --from; use one of them")
    try:
        return read_name(weights.removeprefix("run:"), fresh=True)
    except Mistake as mistake:
        raise loaded.mistake("weights", str(mistake)) from None


def _with_program_data(loaded: LoadedJob, store: Store, say: Say) -> Job:
    """Return the job of a program with its data as its machines find it: in the store, unless they are this one."""
    for name, path in loaded.job.inputs.items():
        if not is_remote(path) and not Path(path).exists():
            raise loaded.mistake(f"data.{name}", f"there is no file or folder {path}")
    inputs = dict(loaded.job.inputs)
    if not fleet_of(loaded.job.fleet.kind).trains_here:
        inputs = _put_inputs(loaded, store, say)
    directory = loaded.code.resolve()
    origin = CodeOrigin(directory=str(directory), inode=directory.stat().st_ino)
    return loaded.job.model_copy(update={"inputs": inputs, "origin": origin})


def _with_pack(
    loaded: LoadedJob, store: Store, progress: PackProgress, starts_from_parent: bool
) -> tuple[Job, Manifest, list[tuple[str, str]]]:
    """Put the data of a recipe, and the files that its model names, into the store; return job, pack and notes."""
    job = loaded.job
    assert job.recipe is not None
    files = _local_files(loaded, store, progress.say)
    model = job.model.model_copy(update={"options": _stored_options(loaded, store, files)})
    packed = pack_data(loaded, store, progress, Processes())
    assert packed is not None
    recipe = recipe_class(job.recipe, loaded.code)
    if packed.kind != recipe.kind:
        raise loaded.mistake("data.train", f"has {packed.kind}, but {job.recipe} learns from {recipe.kind}")
    weights = [source.weight for source in job.data.train]
    if not any(map(draws, packed.splits["train"].sources, weights)):
        raise loaded.mistake("data.train", NO_SAMPLES)
    checkpoint = job.checkpoint
    if job.has_own_code and checkpoint.best_by is None:
        # Written into the run, so that a client without the recipe's code can still show the score that counts.
        checkpoint = checkpoint.model_copy(update={"best_by": recipe.best_metric})
    notes = [("warning", line) for line in _too_large(job, packed, store)]
    if not starts_from_parent:  # whose weights would replace them
        notes += [("from", line) for line in _checked_files(loaded, files, packed.classes)]
    return job.model_copy(update={"model": model, "checkpoint": checkpoint}), packed, notes


def pack_data(loaded: LoadedJob, store: Store, progress: PackProgress, workers: Workers) -> Manifest | None:
    """Return the job's pack, packing it if needed; a program has none."""
    if loaded.job.program is not None:
        return None
    if loaded.job.data.pack is not None:
        existing = find_manifest(store, loaded.job.data.pack)
        if existing is None or (missing := missing_files(store, existing)):
            fault = "no such pack" if existing is None else f"the pack lacks {missing[0]}"
            raise loaded.mistake("data.pack", f"{fault} in {store.url}; copy it there, or remove this field to pack")
        return existing
    with loaded.placing_mistakes():
        directory = cache_directory() / "sources"  # remote files are downloaded once per machine
        data = loaded.job.data.map_sources(lambda source: local_source(source, store, directory, progress.say))
        return pack(loaded.job.name, data, store, workers, progress, loaded.allow_drops)


def _too_large(job: Job, packed: Manifest, store: Store) -> list[str]:
    """Return a line for each setting that is larger than the data supports, with what to set."""
    from packtrain.plan.workload import known_data

    lines = []
    size, batch = known_data(job, packed), job.train.batch
    units = round(size.steps_per_epoch * size.units_per_step)
    if batch.value > units:
        has = f"the data has about {units:,}" if batch.unit == "tokens" else f"the data has {units:,}"
        lines.append(f"train.batch: {batch}, but {has}; set about {max(1, units // 20):,}")
    if packed.vocabulary is not None and packed.vocabulary.bytes <= MAX_RECORD_BYTES:
        # Merges end where no pair of pieces occurs twice.
        document = json.loads(store.get(pack_key(packed.name, packed.vocabulary.name), MAX_RECORD_BYTES))
        pieces = len(document["model"]["vocab"])
        if pieces < job.data.vocabulary:
            has = f"the text has only {pieces:,} pieces"
            lines.append(f"data.vocabulary: {job.data.vocabulary}, but {has}; set {max(MIN_VOCABULARY, pieces // 2)}")
    return lines


@dataclass(frozen=True)
class PortableJob:
    """Everything that a run of a job needs, in a store: `document` is the job file for another place."""

    document: dict[str, Any]
    code: CodeSnapshot
    pack: Manifest | None
    files: Sequence[str]


def make_portable(loaded: LoadedJob, store: Store, progress: PackProgress) -> PortableJob:
    """Pack the job's data and store its files, as `check` does, for a run that will start elsewhere."""
    check_can_run(loaded)
    if loaded.job.weights is not None:
        raise loaded.mistake("weights", "names a run that may not be there; remove it, and copy the run there instead")
    code = take_code(loaded)
    document = {**loaded.document.data, "store": "./store"}
    if ".." in PurePosixPath(loaded.job.code).parts:  # there, nothing is above the job file
        document["code"] = "."
    named = _model_files(loaded)
    if named:
        options = _stored_options(loaded, store, _local_files(loaded, store, progress.say))
        document["model"] = {**document["model"], **{name: options[name] for name in named}}
    files = [str(document["model"][name]).removeprefix(IN_STORE) for name in named]
    if loaded.job.inputs:
        document["data"] = _put_inputs(loaded, store, progress.say)
        stored = [address for address in document["data"].values() if address.startswith(IN_STORE)]
        files += [key for address in stored for key in keys_of(store, address)]
    packed = pack_data(loaded, store, progress, Processes())
    if packed is not None:
        document["data"] = {**document["data"], "pack": packed.name}
    return PortableJob(document, code, packed, files)


# What both, dry runs and runs that are resumed check.


def store_fault(job: Job, store: Store) -> str | None:
    # Machines agree on a generation by put-if-absent; some S3 servers accept the condition and ignore it.
    machines = job.fleet.kind.machines
    if machines.most > 1 and not store.supports_put_if_absent():
        return f"{store.url} ignores put-if-absent, so {machines} machines could not agree; use another store"
    return None


def check_can_run(loaded: LoadedJob) -> None:
    """Refuse a job without a recipe or a program, or one whose model names a file that is not there."""
    if loaded.job.recipe is None and loaded.job.program is None:
        raise loaded.mistake("recipe", "is needed to run; without one the data can only be packed")
    for name, path in _model_files(loaded).items():
        if not is_address(path) and not Path(path).is_file():
            raise loaded.mistake(f"model.{name}", f"there is no file {path}")


def require_torch(job: Job) -> None:
    # `find_spec` does not import torch, which would take seconds. A program may have no use for it.
    if job.program is None and fleet_of(job.fleet.kind).trains_here and find_spec("torch") is None:
        raise Mistake(f"training on this machine needs torch; run `{install_command('train')}`")


def take_code(loaded: LoadedJob) -> CodeSnapshot:
    """Return a snapshot of the directory of a program or a user's recipe, or else of the job file alone."""
    program = loaded.job.program
    if not loaded.job.has_own_code:
        data = loaded.text.encode()
        return CodeSnapshot(archive({"job.yaml": data}), {"job.yaml": len(data)}, {})
    if loaded.code != loaded.directory and Path.home().is_relative_to(loaded.code):
        raise loaded.mistake("code", f"{loaded.code} contains your home directory; choose a smaller one")
    if not loaded.code.is_dir():
        raise loaded.mistake("code", f"there is no directory {loaded.code}")
    if program is not None:
        if not loaded.place.is_dir():
            raise loaded.mistake("directory", f"there is no directory {loaded.place}")
        words = program.command[command_of(program.command) :]
        if (fault := _program_fault(loaded, words) or _place_fault((*words, *program.resume))) is not None:
            raise loaded.mistake("program", fault)
    return snapshot(loaded.code, loaded.job.named_paths)


def _program_fault(loaded: LoadedJob, words: Sequence[str]) -> str | None:
    """Return why a program cannot start, as far as that can be seen here: it would cost every machine a start."""
    command, arguments = words[0], list(words[1:])
    is_here = fleet_of(loaded.job.fleet.kind).trains_here
    if is_python(command):
        while arguments and arguments[0].startswith("-") and arguments[0] not in ("-m", "-c"):
            del arguments[: 2 if arguments[0] in ("-W", "-X") else 1]
        if not arguments:
            return "Python has no script to run; write [train.py], or [python, -m, module]"
        if arguments[0] == "-m" and len(arguments) > 1:
            place = loaded.place.joinpath(*arguments[1].split("."))
            is_in_place = place.is_dir() or place.with_suffix(".py").is_file()
            if is_here and not is_in_place and find_spec(arguments[1].split(".")[0]) is None:
                return f"module {arguments[1]} is neither in {loaded.place} nor installed"
            return None
        command = arguments[0]
        if command in ("-c", "-m"):
            return None
    path = loaded.place / command
    if command.endswith(".py") or "/" in command:
        if not path.is_file():
            return f"there is no file {path}"
        if not command.endswith(".py") and not os.access(path, os.X_OK):
            return f"{path} is not executable; run `chmod +x {command}`"
        return None
    if is_here and shutil.which(command) is None:
        return f"there is no file {path}, and no command {command} on this machine"
    return None


def _place_fault(words: Sequence[str]) -> str | None:
    """Return which variable is a misspelled place: the program would get it as it is, and write to a file named so."""
    for name in _VARIABLE.findall(" ".join(words)):
        closest = get_close_matches(name, _PLACES, n=1)
        if closest and name not in _PLACES:
            return f"there is no variable $PACKTRAIN_{name}; did you mean $PACKTRAIN_{closest[0]}?"
    return None


def _model_files(loaded: LoadedJob) -> dict[str, str]:
    """Return the files that model options name, as addresses or absolute paths."""
    if loaded.job.recipe is None:
        return {}
    options = {name: loaded.job.model.options.get(name) for name in recipe_class(loaded.job.recipe, loaded.code).files}
    return {
        name: path if is_address(path) else str(loaded.directory / path)
        for name, path in options.items()
        if isinstance(path, str)
    }


def _put_inputs(loaded: LoadedJob, store: Store, say: Say) -> dict[str, str]:
    paths = loaded.job.inputs.items()
    return {name: path if is_remote(path) else put_input(store, Path(path), say) for name, path in paths}


def _local_files(loaded: LoadedJob, store: Store, say: Say) -> dict[str, Path]:
    """Return the files that model options name, on this machine; refuse those that the recipe cannot use."""
    files = {}
    for name, path in _model_files(loaded).items():
        try:
            files[name] = local_copy(path, store, cache_directory() / "sources", say)
        except Mistake as mistake:
            raise loaded.mistake(f"model.{name}", str(mistake)) from None
    _checked_files(loaded, files, ())  # before packing, which may take hours
    return files


def _checked_files(loaded: LoadedJob, files: Mapping[str, Path], classes: Sequence[str]) -> Sequence[str]:
    assert loaded.job.recipe is not None
    with loaded.placing_mistakes():
        return recipe_class(loaded.job.recipe, loaded.code).check_files(loaded.job, files, classes)


def _stored_options(loaded: LoadedJob, store: Store, files: Mapping[str, Path]) -> dict[str, Option]:
    """Put the files that model options name into the store, where workers find them; return the changed options."""
    options = dict(loaded.job.model.options)
    for name, file in files.items():
        key = f"{FILES}{sha256_of(file)}"  # by its digest: two runs share one copy
        if store.entry(key) is None:
            store.put_file(key, file)
        options[name] = f"{IN_STORE}{key}"
    return options
