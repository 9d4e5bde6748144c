"""From a job file to a started run: check the job and its machines, pack, create the run's folder, start its nodes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from packtrain.data.order import NO_SAMPLES, draws
from packtrain.errors import FieldMistake, Mistake, PacktrainError
from packtrain.fleet import Fleet, LaunchPlan, StartedNode, fleet_of
from packtrain.fleet.fleet import HasManifests, Say, passed_keys
from packtrain.fleet.host import JOIN_SECONDS
from packtrain.fork import CheckpointName, Inheritance, check_parent, find_parent, inherit, read_name
from packtrain.housekeeping.removal import remove_run
from packtrain.housekeeping.uses import Uses, require_uses
from packtrain.identity import install_command
from packtrain.job.changes import FieldChange, changed_job
from packtrain.job.job import MIN_VOCABULARY, CodeOrigin, Job, Option
from packtrain.job.kinds import FLEETS, word_of
from packtrain.job.launchers import command_of, is_python, without_launcher
from packtrain.job.load import LoadedJob, load_job, text_of
from packtrain.job.part import FILES, IN_STORE, is_address
from packtrain.node.deadline import seconds_left, used_up
from packtrain.observe.history import read_points
from packtrain.observe.status import is_started_here
from packtrain.pack.build import PackProgress, pack
from packtrain.pack.fetch import local_copy, local_source
from packtrain.pack.manifest import Manifest, find_manifest, missing_files, pack_key
from packtrain.pack.workers import Processes, Workers
from packtrain.recipes import Recipe, check_recipe, recipe_class, recipe_defaults
from packtrain.run.checkpoint import committed, last_step
from packtrain.run.code import CodeSnapshot, archive, files_of, git_commit, snapshot
from packtrain.run.inputs import given_keys, is_remote, keys_of, put_input
from packtrain.run.liveness import fail_launch
from packtrain.run.records import Event, FleetLaunch, JobSource
from packtrain.run.run import Run, create_run, next_run, unnumbered_name
from packtrain.run.trust import Accept, is_remembered, remember, require_trust
from packtrain.store import NoKeys, Store, StoreError, open_store, unreachable_bucket
from packtrain.store.records import MAX_RECORD_BYTES
from packtrain.system import cache_directory, expanded, sha256_of, this_client
from packtrain.system import say as print_line
from packtrain.train.control import PLACE_VARIABLES
from packtrain.train.progress import Progress
from packtrain.train.schedule import rate_of
from packtrain.units import Duration, show_time

_NAMED = 3  # edited files that a line names

# Without their common beginning, by which any of our variables would be close to them.
_PLACES = [name.removeprefix("PACKTRAIN_") for name in PLACE_VARIABLES]
_VARIABLE = re.compile(r"\$\{?PACKTRAIN_(\w+)")

_LOOK_SECONDS = 5.0  # for a dry run to find the next number


def load(path: str | Path, overrides: Sequence[str] = (), allow_drops: bool = False) -> LoadedJob:
    """Load a job and check it against its recipe and this machine's environment."""
    loaded = replace(load_job(path, overrides, recipe_defaults), allow_drops=allow_drops)
    try:
        check_recipe(loaded.job, loaded.code)
    except FieldMistake as mistake:
        raise loaded.mistake(mistake.field, mistake.fault) from None
    if loaded.job.program is not None:
        loaded = _without_launcher(loaded)
    for number, variable in enumerate(loaded.job.environment):
        if (fault := loaded.job.fleet.kind.variable_fault(variable)) is not None:
            raise loaded.mistake(f"environment.{number}", fault)
    variables = loaded.job.fleet.kind.variables_here()
    if any(os.environ.get(name) != value for name, value in variables.items()):
        os.environ.update(variables)  # for the store and data in buckets, and for processes that open them
        words = shlex.join(f"{name}={value}" for name, value in variables.items())
        loaded = replace(loaded, notes=(*loaded.notes, f"commands that do not read the job also need: export {words}"))
    return loaded


def _without_launcher(loaded: LoadedJob) -> LoadedJob:
    """Return the job with its program as Packtrain starts it, and the workers that its launcher was told to start."""
    job = loaded.job
    assert job.program is not None
    try:
        found = without_launcher(job.program.command)
    except Mistake as mistake:
        raise loaded.mistake("program", str(mistake)) from None
    workers, machines = found.workers, job.fleet.kind.machines
    if found.total is not None:
        if found.total % machines.most or not machines.is_fixed:
            fault = f"{found.launcher} has {found.total} workers in all, for {machines} machines"
            raise loaded.mistake("program", f"{fault}; set fleet.workers, the number on each machine")
        workers = found.total // machines.most
    words, place = list(found.program), command_of(found.program)
    if "/" not in words[place] and not words[place].endswith(".py") and (loaded.place / words[place]).is_file():
        words[place] = f"./{words[place]}"  # otherwise it would be looked for on the path
    fleet = job.fleet.model_copy(update={"workers": job.fleet.workers or workers})
    program = job.program.model_copy(update={"command": tuple(words)})
    return replace(loaded, job=job.model_copy(update={"program": program, "fleet": fleet}))


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
    try:
        directory = cache_directory() / "sources"  # remote files are downloaded once per machine
        data = loaded.job.data.map_sources(lambda source: local_source(source, store, directory, progress.say))
        return pack(loaded.job.name, data, store, workers, progress, loaded.allow_drops)
    except FieldMistake as mistake:
        raise loaded.mistake(mistake.field, mistake.fault) from None


@dataclass(frozen=True)
class NewRun:
    """Everything that the folder of a run starts with, before there is one.

    `notes` are for the person who starts it: a word that says what it is about, and a line.
    """

    store: Store
    job: Job
    code: bytes
    pack: Manifest | None
    source: JobSource
    inheritance: Inheritance | None = None
    recipe: type[Recipe] | None = None
    notes: Sequence[tuple[str, str]] = ()

    @property
    def pack_name(self) -> str | None:
        return None if self.pack is None else self.pack.name

    @property
    def uses(self) -> Uses:
        packs = frozenset() if self.pack is None else frozenset({self.pack.name})
        return Uses(packs, frozenset(given_keys(self.job, self.store)))

    def create(self, say: Callable[[str], None] = lambda _: None) -> Run:
        """Create the run; `say` gets a line about the weights of another run if they do not fit as a whole."""
        run = self.create_with(lambda: create_run(self.store, self.job, self.code, self.pack_name), say)
        try:
            require_uses(self.store, self.uses)
        except PacktrainError:
            remove_run(run, lambda _: None)
            raise
        if self.pack is not None:
            _put_forecast(run, self.pack)
        return run

    def create_with(self, make: Callable[[], Run], say: Callable[[str], None] = lambda _: None) -> Run:
        """Make the run, and give it everything else that it starts with."""
        with ExitStack() as stack:
            give = None
            if self.inheritance is not None:  # fetched first: what cannot be read leaves no run behind
                fetched = self.inheritance.fetched(self.store, self.job, self.pack, self.recipe, say)
                give = stack.enter_context(fetched)
            run = make()
            try:
                if give is not None:
                    give(run)
            except BaseException:
                self.store.delete(run.key("job.json"))  # without its beginning it must not be resumed
                raise
        if run.source() is None:  # a run of a sweep may have been left half made
            run.put_source(self.source)
        # What was accepted of it before still counts: its driver may have given it another part of the fleet.
        remember(run, instead=False)
        return run


@dataclass(frozen=True)
class Beginning:
    """The checkpoint that `--from` names; `fresh` if only its weights are wanted, whatever the job."""

    name: CheckpointName
    fresh: bool = False


def create(loaded: LoadedJob, progress: PackProgress, beginning: Beginning | None = None) -> Run:
    """Create the run's folder with everything its nodes need."""
    made = prepare_run(loaded, progress, beginning=beginning)
    for label, line in made.notes:
        progress.say(f"{label}: {line}")
    return made.create(lambda line: progress.say(f"from: {line}"))


def prepare_run(
    loaded: LoadedJob,
    progress: PackProgress,
    fleet_is_checked: bool = False,
    beginning: Beginning | None = None,
) -> NewRun:
    """Pack the data and do all checks, the cheap ones before packing; no run exists before they have passed."""
    job = loaded.job
    _check_can_run(loaded)
    _require_torch(job)
    # Before packing, which may take hours: a missing script is reported now, and nothing is created for it.
    code = _code(loaded)
    store = open_store(job.store, create=True)
    if job.has_own_code:
        progress.say(f"took a snapshot of {code.summary}")
    if (fault := _store_fault(job, store)) is not None:
        raise loaded.mistake("store", fault)
    beginning = _beginning(loaded, beginning)
    parent = None if beginning is None else find_parent(beginning.name, store)
    if parent is not None:
        check_parent(parent, job)
    try:
        if not fleet_is_checked:
            fleet_of(job.fleet.kind).check(job, store, progress.say)
    except FieldMistake as mistake:
        raise loaded.mistake(mistake.field, mistake.fault) from None
    updates: dict[str, object] = {}  # of the job: what the run stores differs from the file only in these
    files: dict[str, Path] = {}
    if job.recipe is not None:
        files = _local_files(loaded, store, progress.say)
        updates["model"] = job.model.model_copy(update={"options": _stored_options(loaded, store, files)})
    if job.program is not None:
        directory = loaded.code.resolve()
        updates["inputs"] = _stored_inputs(loaded, store, progress.say)
        updates["origin"] = CodeOrigin(directory=str(directory), inode=directory.stat().st_ino)
    packed = pack_data(loaded, store, progress, Processes())
    if packed is not None and job.recipe is not None:
        recipe = recipe_class(job.recipe, loaded.code)
        if packed.kind != recipe.kind:
            raise loaded.mistake("data.train", f"has {packed.kind}, but {job.recipe} learns from {recipe.kind}")
        weights = [source.weight for source in job.data.train]
        if not any(map(draws, packed.splits["train"].sources, weights)):
            raise loaded.mistake("data.train", NO_SAMPLES)
        if job.has_own_code and job.checkpoint.best_by is None:
            # Written into the run, so that a client without the recipe's code can still show the score that counts.
            updates["checkpoint"] = job.checkpoint.model_copy(update={"best_by": recipe.best_metric})
    notes = [("note", line) for line in loaded.notes]
    if packed is not None and job.recipe is not None:
        notes += [("warning", line) for line in too_large(job, packed, store)]
        if parent is None:  # whose weights would replace them
            notes += [("from", line) for line in _checked_files(loaded, files, packed.classes)]
    source = JobSource(
        loaded.file, loaded.text, loaded.overrides, *git_commit(loaded.code), directory=str(loaded.directory)
    )
    made = NewRun(store, job.model_copy(update=updates), code.archive, packed, source, notes=notes)
    if parent is None or beginning is None:
        return made
    inheritance = inherit(parent, beginning.name.choice, made.job, made.code, packed, beginning.fresh)
    kind = None if job.recipe is None else recipe_class(job.recipe, loaded.code)
    begun = made.job.model_copy(update={"parent": inheritance.parent})
    notes = [*made.notes, *(("from", line) for line in inheritance.in_words(made.job))]
    return replace(made, job=begun, inheritance=inheritance, recipe=kind, notes=notes)


def too_large(job: Job, packed: Manifest, store: Store) -> list[str]:
    """Return a line for each setting that is larger than the data supports, with what to set."""
    from packtrain.plan.sizes import known_data

    found = []
    size, batch = known_data(job, packed), job.train.batch
    units = round(size.steps_per_epoch * size.units_per_step)
    if batch.value > units:
        has = f"the data has about {units:,}" if batch.unit == "tokens" else f"the data has {units:,}"
        found.append(f"train.batch: {batch}, but {has}; set about {max(1, units // 20):,}")
    if packed.vocabulary is not None and packed.vocabulary.bytes <= MAX_RECORD_BYTES:
        # Merges end where no pair of pieces occurs twice.
        document = json.loads(store.get(pack_key(packed.name, packed.vocabulary.name), MAX_RECORD_BYTES))
        pieces = len(document["model"]["vocab"])
        if pieces < job.data.vocabulary:
            has = f"the text has only {pieces:,} pieces"
            found.append(f"data.vocabulary: {job.data.vocabulary}, but {has}; set {max(MIN_VOCABULARY, pieces // 2)}")
    return found


def _beginning(loaded: LoadedJob, given: Beginning | None) -> Beginning | None:
    """Return where the run starts from: what the command says, or `weights` of the job."""
    named = loaded.job.weights
    if named is None:
        return given
    if given is not None:
        raise loaded.mistake("weights", "the command says --from; use one of them")
    try:
        return Beginning(read_name(named.removeprefix("run:")), fresh=True)
    except Mistake as mistake:
        raise loaded.mistake("weights", str(mistake)) from None


def _put_forecast(run: Run, packed: Manifest) -> None:
    """Remember in the run what is expected of it: the report says later how far that was off."""
    from packtrain.plan.known import expected

    with suppress(PacktrainError):  # a run does not need it: whatever is wrong shows when it starts
        if (found := expected(run, packed)) is not None:
            run.put_forecast(found)


@dataclass(frozen=True)
class PreparedJob:
    """Everything that a run of a job needs, in a store: `document` is the job file for another place."""

    document: dict[str, Any]
    code: CodeSnapshot
    pack: Manifest | None
    files: Sequence[str]


def prepare(loaded: LoadedJob, store: Store, progress: PackProgress) -> PreparedJob:
    """Pack the job's data and store its files, as `create` does, for a run that will start elsewhere."""
    _check_can_run(loaded)
    if loaded.job.weights is not None:
        raise loaded.mistake("weights", "names a run that may not be there; remove it, and copy the run there instead")
    code = _code(loaded)
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
        stored = [one for one in document["data"].values() if one.startswith(IN_STORE)]
        files += [key for address in stored for key in keys_of(store, address)]
    packed = pack_data(loaded, store, progress, Processes())
    if packed is not None:
        document["data"] = {**document["data"], "pack": packed.name}
    return PreparedJob(document, code, packed, files)


@dataclass(frozen=True)
class DryRun:
    """The code that `create` would put into the store, and the commands of `start`.

    `note` says why the run has no number, if the store cannot be asked for it.
    """

    code: CodeSnapshot
    plans: Sequence[LaunchPlan]
    note: str | None


def dry_run(loaded: LoadedJob) -> DryRun:
    """Return what a run would do; nothing is written, and no machine is asked."""
    code, run, note = _next_run(loaded)
    try:
        return DryRun(code, fleet_of(loaded.job.fleet.kind).plan(run), note)
    except FieldMistake as mistake:
        raise loaded.mistake(mistake.field, mistake.fault) from None


def manifests(loaded: LoadedJob, form: str, progress: PackProgress | None, beginning: Beginning | None = None) -> str:
    """Create a run for another program to start, and return what that program takes.

    Without `progress`, for a dry run, nothing is created: the manifests are those that the run would have.
    """
    fleet = fleet_of(loaded.job.fleet.kind)
    if not isinstance(fleet, HasManifests):
        raise Mistake(f"--format {form}: this fleet has no such manifests")
    if form not in fleet.formats:
        raise Mistake(f"--format {form}: this fleet has no such manifests; it has {', '.join(fleet.formats)}")
    if progress is None:
        _, run, note = _next_run(loaded)
        return ("" if note is None else f"# {note}\n") + fleet.manifests(run, form)
    run = create(loaded, progress, beginning)
    _record_launch(run)
    return fleet.manifests(run, form)


def _next_run(loaded: LoadedJob) -> tuple[CodeSnapshot, Run, str | None]:
    """Return the code and the next run, and why it has no number if its bucket does not answer at once."""
    _check_can_run(loaded)
    job, code = loaded.job, _code(loaded)
    try:
        store = open_store(job.store, outage_seconds=0.0, answer_seconds=_LOOK_SECONDS)
        return code, next_run(store, job, code.archive), None
    except (StoreError, NoKeys) as error:
        if "://" not in job.store or job.store.startswith("file:"):
            raise
        name = unnumbered_name(job)
        run = Run(unreachable_bucket(job.store), name, job.model_dump_json(indent=1).encode(), code.archive)
        return code, run, f"the run is called {name} here, since its number is not known: {error}"


def start(run: Run, tied: bool, say: Say = print_line, *, is_last_try: bool = True) -> list[StartedNode]:
    """Start the run's nodes; tied ones end with this process. `say` gets a line for each machine that is left out.

    If that fails, the run fails, unless the caller tries again.
    """
    fleet = fleet_of(run.job.fleet.kind)
    _record_launch(run)
    kind = run.job.fleet.kind
    run.record_event("machine", f"{this_client()} launches it on {word_of(FLEETS, kind)} (machines: {kind.machines})")
    try:
        # The run exists by now, so the advice is to resume it, not to create another one.
        plans = fleet.plan(run)
        for line in dict.fromkeys(passed_keys(plan.variables) for plan in plans):
            if line is not None:
                say(line)
        return fleet.start(run, plans, tied, say)
    except BaseException as error:
        with suppress(PacktrainError):
            is_last_try = is_last_try and not _has_earlier_machines(fleet, run)
            if isinstance(error, KeyboardInterrupt):
                fail_launch(run, "stopped", "stopped by user (Ctrl-C) before it started", is_last_try=is_last_try)
            else:
                why = str(error) if isinstance(error, PacktrainError) else f"{type(error).__name__}: {error}"
                fail_launch(run, "failed", f"could not start: {why}", is_last_try=is_last_try)
        if isinstance(error, Mistake):
            raise Mistake(f"{error}; then run `{run.command('resume')}`") from None
        raise


def _has_earlier_machines(fleet: Fleet, run: Run) -> bool:
    """True if machines of an earlier launch may come back by themselves, such as a job that was requeued."""
    if len(run.launches()) == 1:
        return False
    try:
        return any(not machine.is_over for machine in fleet.machines(run))
    except PacktrainError:
        return True


def _record_launch(run: Run) -> None:
    """Record what is about to be started: if this client dies meanwhile, `packtrain down` knows where to look."""
    run.record_launch(FleetLaunch(time.time(), this_client(), run.job.fleet.model_dump(mode="json")))


def wait_until_joined(run: Run, nodes: Sequence[StartedNode], seconds: float = JOIN_SECONDS) -> None:
    """Wait until the nodes have joined their run, so that it is running for whoever looks next; raise if one cannot."""
    deadline = time.monotonic() + seconds
    try:
        for node in nodes:
            while not node.has_joined() and time.monotonic() < deadline:
                time.sleep(0.05)
    except PacktrainError as error:
        if all(node.exit_code() is not None for node in nodes):
            with suppress(PacktrainError):
                fail_launch(run, "failed", str(error))
        raise


class AlreadyComplete(Mistake):
    """There is nothing to resume: the run has reached its end."""


def reopen(run: Run, accept: Accept, say: Say = print_line, overrides: Sequence[str] = ()) -> Run:
    """Prepare a run that has ended to be started again, after the checks that `create` does; return it with its job.

    `accept` decides about a run that was started elsewhere, or was changed (run/trust.py). `overrides` change the job,
    as far as that is possible (job/changes.py): where the run continues, what it may cost, how long it trains.
    """
    job, changes = changed_job(run.job_data, overrides) if overrides else (run.job, [])
    if overrides:
        _check_can_continue(run, job)
    require_trust(run, accept, job)
    is_own = is_remembered(run)
    _require_torch(job)
    if (fault := _store_fault(job, run.store)) is not None:
        raise Mistake(fault)
    fleet_of(job.fleet.kind).check(job, run.store, say)
    if not changes and run.is_complete():
        # On a busy machine it looked interrupted while it ended. Its result must not be lost.
        raise AlreadyComplete(f"{run.name} is already complete")
    if changes:
        # The job is the last of them: whatever ends this before or after, the same command does the rest.
        changed = run.changed(job)
        if is_own:
            remember(changed, instead=False)
        _record_changes(run, job, changes, say)
        source = run.source()
        if source is not None and source.overrides[-len(overrides) :] != tuple(overrides):
            run.put_source(replace(source, overrides=(*source.overrides, *overrides)))
        changed.put_job()
        if is_own:
            remember(changed)
        run = changed
    run.reopen()
    return run


def edited_since(run: Run, overrides: Sequence[str] = ()) -> str | None:
    """Return a line for a person who resumes a run if its job file or its code was edited since they started it.

    What resumes is what the run has stored, with these `overrides`. None if nothing differs, or if that cannot be seen
    from here.
    """
    source = run.source()
    if source is None or not source.directory or not is_started_here(run):
        return None
    directory = Path(source.directory)
    try:
        edited = set() if text_of(directory / source.file) == source.text else {source.file}
        if run.job.has_own_code:
            here = snapshot(directory / run.job.code, run.job.named_paths).archive
            stored, current = ({file.name: file for file in files_of(data)} for data in (run.code, here))
            edited |= {name for name in stored | current if stored.get(name) != current.get(name)}
    except (Mistake, OSError):  # moved, or too large by now
        return None
    if not edited:
        return None
    command = ["packtrain", "run", os.path.relpath(directory / source.file)]
    source = replace(source, overrides=(*source.overrides, *overrides))
    command += [word for override in source.last_overrides for word in ("--set", override)]
    if committed(run):
        is_its_store = run.store.url in (run.job.store, str(expanded(run.job.store).absolute()))
        command += ["--from", run.name if is_its_store else f"{run.store.url}/{run.name}"]
    names, code = sorted(edited), "code" if run.job.has_own_code else "job file"
    which = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    return (
        f"resumes the {code} of {show_time(run.launches()[0].time)}; {which} changed since. To use what is there now:"
        f" {shlex.join(command)}"
    )


def _check_can_continue(run: Run, job: Job) -> None:
    """Refuse what the run has already passed: its duration, its budget, or the end of its program."""
    result, step = run.result(), last_step(run)
    is_finished = result is not None and result.status == "finished"
    if job.recipe is None:
        if is_finished:
            raise Mistake(f"{run.name} is already complete: its program has ended; start a new run")
        return
    duration = job.train.duration
    at = _made(run, step).in_unit(duration.unit)
    if duration.value < at * (1 - 1e-9):
        raise Mistake(f"--set train.duration: the run has already trained for {Duration(at, duration.unit)}; set more")
    if is_finished and duration.value <= at * (1 + 1e-9):
        raise Mistake(f"{run.name} is already complete; it continues with a longer train.duration, not otherwise")
    leases = run.leases()
    used = max((lease.used_seconds for lease in leases), default=0.0)
    left = seconds_left(job.budget, job.fleet, leases, used, job.fleet.kind.machines.most)
    if left == 0:
        raise Mistake(f"{run.name}: {used_up(job.budget)}; set budget.hours or budget.dollars to more, in all")


def _made(run: Run, step: int) -> Progress:
    """Return the progress at a step. A checkpoint's manifest has only the step: the metrics say when that was."""
    points = [point for point in read_points(run) if point.kind == "train" and point.step <= step]
    last = points[-1].values if points else {}
    return Progress(step, last.get("epoch", 0.0), seconds=last.get("elapsed_seconds", 0.0))


def _rate_in_words(run: Run, job: Job) -> str:
    """Return what a new duration does to the learning rate, in a sentence."""
    if not job.train.schedule.follows_duration:
        return "the learning rate does not depend on train.duration: it continues as it was"
    now = _made(run, last_step(run))
    before, after = (rate_of(one.train, 1)(now) for one in (run.job, job))
    told = f"at step {now.step:,} it changes from {before:.3g} to {after:.3g}"
    return f"the learning rate follows train.duration: {told}"


def _record_changes(run: Run, job: Job, changes: Sequence[FieldChange], say: Say) -> None:
    """Say and record what a new job changes, and end what is left of the fleet that the run leaves."""
    lines = [str(change) for change in changes]
    if any(change.field == "train.duration" for change in changes):
        lines.append(_rate_in_words(run, job))
    if (result := run.result()) is not None and result.status == "finished":
        scores = ", ".join(f"{name} {value:.4g}" for name, value in result.scores.items())
        lines.append(f"it had {result.reason}" + (f" with {scores}" if scores else ""))
    if any(change.field == "fleet" for change in changes):
        # Nodes of the old job would refuse the new one; but a queue or an autoscaler would start them again and again.
        try:
            fleet_of(run.job.fleet.kind).down(run, say)
        except PacktrainError as error:
            say(f"could not end what is left of the former fleet: {error}")
    events = run.event_writer(f"client-{uuid.uuid4().hex[:12]}")
    for line in lines:
        say(line)
        events.append(Event(time.time(), "changed", f"{line} (by {this_client()})"))
    events.flush()


def _store_fault(job: Job, store: Store) -> str | None:
    # Machines agree on a generation by put-if-absent; some S3 servers accept the condition and ignore it.
    machines = job.fleet.kind.machines
    if machines.most > 1 and not store.supports_put_if_absent():
        return f"{store.url} ignores put-if-absent, so {machines} machines could not agree; use another store"
    return None


def _check_can_run(loaded: LoadedJob) -> None:
    if loaded.job.recipe is None and loaded.job.program is None:
        raise loaded.mistake("recipe", "is needed to run; without one the data can only be packed")
    for name, path in _model_files(loaded).items():
        if not is_address(path) and not Path(path).is_file():
            raise loaded.mistake(f"model.{name}", f"there is no file {path}")


def _require_torch(job: Job) -> None:
    # `find_spec` does not import torch, which would take seconds. A program may have no use for it.
    if job.program is None and fleet_of(job.fleet.kind).trains_here and find_spec("torch") is None:
        raise Mistake(f"training on this machine needs torch; run `{install_command('train')}`")


def _code(loaded: LoadedJob) -> CodeSnapshot:
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
            known = place.is_dir() or place.with_suffix(".py").is_file()
            if is_here and not known and find_spec(arguments[1].split(".")[0]) is None:
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
    named = {name: loaded.job.model.options.get(name) for name in recipe_class(loaded.job.recipe, loaded.code).files}
    return {
        name: path if is_address(path) else str(loaded.directory / path)
        for name, path in named.items()
        if isinstance(path, str)
    }


def _stored_inputs(loaded: LoadedJob, store: Store, say: Say) -> dict[str, str]:
    """Return the program's data as its machines find it: in the store, unless they are this one."""
    for name, path in loaded.job.inputs.items():
        if not is_remote(path) and not Path(path).exists():
            raise loaded.mistake(f"data.{name}", f"there is no file or folder {path}")
    if fleet_of(loaded.job.fleet.kind).trains_here:
        return dict(loaded.job.inputs)
    return _put_inputs(loaded, store, say)


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
    try:
        return recipe_class(loaded.job.recipe, loaded.code).check_files(loaded.job, files, classes)
    except FieldMistake as mistake:
        raise loaded.mistake(mistake.field, mistake.fault) from None


def _stored_options(loaded: LoadedJob, store: Store, files: Mapping[str, Path]) -> dict[str, Option]:
    """Put the files that model options name into the store, where workers find them; return the changed options."""
    options = dict(loaded.job.model.options)
    for name, file in files.items():
        key = f"{FILES}{sha256_of(file)}"  # by its digest: two runs share one copy
        if store.entry(key) is None:
            store.put_file(key, file)
        options[name] = f"{IN_STORE}{key}"
    return options
