"""From a job file to a started run: check the job and its machines, pack, create the run's folder, start its nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from packtrain.data.order import NO_SAMPLES, draws
from packtrain.data.pack import GIVEN
from packtrain.errors import FieldMistake, Mistake
from packtrain.fleet import LaunchPlan, StartedNode, fleet_of
from packtrain.fleet.fleet import JOIN_SECONDS, Say
from packtrain.identity import install_command
from packtrain.job.job import Job, Option
from packtrain.job.load import LoadedJob, load_job
from packtrain.job.part import is_address
from packtrain.pack.build import PackProgress
from packtrain.pack.fetch import local_copy, local_source
from packtrain.pack.manifest import Manifest
from packtrain.pack.packing import pack
from packtrain.pack.workers import Processes, Workers
from packtrain.recipes import check_recipe, recipe_class, recipe_defaults
from packtrain.run.code import CodeSnapshot, archive, snapshot
from packtrain.run.run import Run, create_run, next_run
from packtrain.run.trust import Accept, remember, require_trust
from packtrain.store import Store, open_store
from packtrain.system import cache_directory, sha256_of


def load(path: str | Path, overrides: Sequence[str] = ()) -> LoadedJob:
    """Load a job and check it against its recipe and this machine's environment."""
    loaded = load_job(path, overrides, recipe_defaults)
    try:
        check_recipe(loaded.job, loaded.code)
    except FieldMistake as mistake:
        raise loaded.mistake(mistake.field, mistake.fault) from None
    for number, variable in enumerate(loaded.job.environment):
        if variable not in os.environ:
            raise loaded.mistake(f"environment.{number}", f"{variable} is not set here; export it before the run")
    return loaded


def pack_data(
    loaded: LoadedJob, store: Store, progress: PackProgress, workers: Workers, allow_drops: bool = False
) -> Manifest | None:
    """Return the job's pack, packing it if needed; a program has none."""
    if loaded.job.program is not None:
        return None
    try:
        directory = cache_directory() / "sources"  # remote files are downloaded once per machine
        data = loaded.job.data.map_sources(lambda source: local_source(source, store, directory, progress.say))
        return pack(loaded.job.name, data, store, workers, progress, allow_drops)
    except FieldMistake as mistake:
        raise loaded.mistake(mistake.field, mistake.fault) from None


def create(loaded: LoadedJob, progress: PackProgress) -> Run:
    """Create the run's folder with everything its nodes need. All checks come first, the cheap ones before packing."""
    job = loaded.job
    _check_can_run(loaded)
    _require_torch(job)
    # Before packing, which may take hours: a missing script is reported now, and nothing is created for it.
    code = _code(loaded)
    store = open_store(job.store, create=True)
    if job.has_own_code:
        progress.say(f"took a snapshot of {code.summary}")
    machines = job.fleet.kind.machines
    # Machines agree on a generation by put-if-absent; some S3 servers accept the condition and ignore it.
    if machines.most > 1 and not store.supports_put_if_absent():
        raise loaded.mistake(
            "store", f"{store.url} ignores put-if-absent, so {machines} machines could not agree; use another store"
        )
    fleet_of(job.fleet.kind).check(job, store, progress.say)
    updates: dict[str, object] = {}  # of the job: what the run stores differs from the file only in these
    if job.recipe is not None:
        updates["model"] = job.model.model_copy(update={"options": _stored_options(loaded, store, progress.say)})
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
    run = create_run(store, job.model_copy(update=updates), code.archive, packed.name if packed else None)
    remember(run)
    return run


@dataclass(frozen=True)
class DryRun:
    """The code that `create` would put into the store, and the commands of `start`."""

    code: CodeSnapshot
    plans: Sequence[LaunchPlan]


def dry_run(loaded: LoadedJob) -> DryRun:
    """Return what a run would do; nothing is written, and no machine is asked."""
    _check_can_run(loaded)
    store = open_store(loaded.job.store)
    code = _code(loaded)
    run = next_run(store, loaded.job, code.archive)
    return DryRun(code, fleet_of(loaded.job.fleet.kind).plan(run))


def start(run: Run, tied: bool, say: Say = print) -> list[StartedNode]:
    """Start the run's nodes; tied ones end with this process. `say` gets a line for each machine that is left out."""
    fleet = fleet_of(run.job.fleet.kind)
    try:
        # The run exists by now, so the advice is to resume it, not to create another one.
        return fleet.start(run, fleet.plan(run), tied, say)
    except Mistake as mistake:
        raise Mistake(f"{mistake}; then run `packtrain resume {run.name}`") from None


def wait_until_joined(nodes: Sequence[StartedNode], seconds: float = JOIN_SECONDS) -> None:
    """Wait until the nodes have joined their run, so that it is running for whoever looks next; raise if one cannot."""
    deadline = time.monotonic() + seconds
    for node in nodes:
        while not node.has_joined() and time.monotonic() < deadline:
            time.sleep(0.05)


def reopen(run: Run, accept: Accept, say: Say = print) -> None:
    """Prepare a run that has ended to be started again, after the checks that `create` does.

    `accept` decides about a run that was started elsewhere, or was changed (run/trust.py).
    """
    job = run.job
    # Not only code: the job says which machines get which of this person's secrets, and how they are reached.
    if job.has_own_code or job.environment or job.fleet.kind.power_off or not fleet_of(job.fleet.kind).trains_here:
        require_trust(run, accept)
    _require_torch(job)
    fleet_of(run.job.fleet.kind).check(run.job, run.store, say)
    run.reopen()


def _check_can_run(loaded: LoadedJob) -> None:
    if loaded.job.recipe is None and loaded.job.program is None:
        raise loaded.mistake("recipe", "is needed to run; without one the data can only be packed")
    for name, path in _model_files(loaded).items():
        if not is_address(path) and not Path(path).is_file():
            raise loaded.mistake(f"model.{name}", f"there is no file {path}")


def _require_torch(job: Job) -> None:
    # `find_spec` does not import torch, which would take seconds.
    if fleet_of(job.fleet.kind).trains_here and find_spec("torch") is None:
        raise Mistake(f"training on this machine needs torch; run `{install_command('train')}`")


def _code(loaded: LoadedJob) -> CodeSnapshot:
    """Return a snapshot of the directory of a program or a user's recipe, or else of the job file alone."""
    program = loaded.job.program
    if not loaded.job.has_own_code:
        data = loaded.text.encode()
        return CodeSnapshot(archive({"job.yaml": data}), {"job.yaml": len(data)}, {})
    if program is not None and program[0].endswith(".py") and not (loaded.code / program[0]).is_file():
        raise loaded.mistake("program.0", f"there is no file {loaded.code / program[0]}")
    return snapshot(loaded.code)


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


def _stored_options(loaded: LoadedJob, store: Store, say: Say) -> dict[str, Option]:
    """Put the files that model options name into the store, where workers find them; return the changed options."""
    options = dict(loaded.job.model.options)
    for name, path in _model_files(loaded).items():
        try:
            file = local_copy(path, store, cache_directory() / "sources", say)
        except Mistake as mistake:
            raise loaded.mistake(f"model.{name}", str(mistake)) from None
        key = f"{GIVEN}{sha256_of(file)}"  # by its digest: two runs share one copy
        if store.entry(key) is None:
            store.put_file(key, file)
        options[name] = f"store:{key}"
    return options
