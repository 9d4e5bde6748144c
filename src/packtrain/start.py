"""From a job file to a run that goes: check, also the machines, pack, take the code along, make the folder, start."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from packtrain.data.order import NO_SAMPLES, draws
from packtrain.data.pack import GIVEN
from packtrain.errors import FieldMistake, Mistake
from packtrain.fleet import Started, fleet_of
from packtrain.job.job import Data, Job
from packtrain.job.kinds import Source
from packtrain.job.load import LoadedJob, load_job
from packtrain.job.part import is_address
from packtrain.pack.build import PackProgress
from packtrain.pack.fetch import local_copy
from packtrain.pack.manifest import Manifest
from packtrain.pack.packing import pack
from packtrain.pack.workers import Processes, Workers
from packtrain.recipes import check_recipe, recipe_class, recipe_defaults
from packtrain.run.code import archive, snapshot
from packtrain.run.run import Run, create_run
from packtrain.store import Store, open_store
from packtrain.system import cache_directory, sha256_of

Tell = Callable[[str], None]


def load(path: str | Path, overrides: Sequence[str] = ()) -> LoadedJob:
    """A job that its recipe and this machine's environment agree with."""
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
    """The job's pack, made if it is not there; a program has none."""
    if loaded.job.program is not None:
        return None
    fetched = cache_directory() / "sources"
    try:
        data = with_local_copies(loaded.job.data, store, fetched, progress.say)
        return pack(loaded.job.name, data, store, workers, progress, allow_drops)
    except FieldMistake as mistake:
        raise loaded.mistake(mistake.field, mistake.fault) from None


def with_local_copies(data: Data, store: Store, directory: Path, tell: Tell) -> Data:
    """The data with every path on this machine; what is elsewhere is fetched once."""

    def local(sources: tuple[Source, ...]) -> tuple[Source, ...]:
        return tuple(
            source.model_copy(
                update={"paths": tuple(str(local_copy(path, store, directory, tell)) for path in source.paths)}
            )
            for source in sources
        )

    splits = {"train": local(data.train), "valid": local(data.valid), "test": local(data.test)}
    return data.model_copy(update=splits)


def create(loaded: LoadedJob, progress: PackProgress) -> Run:
    """The run's folder with everything that nodes need. Whatever can be refused is refused before."""
    if loaded.job.recipe is None and loaded.job.program is None:
        raise loaded.mistake("recipe", "is needed to run; without one the data can only be packed")
    _check_files(loaded)
    _require_torch(loaded.job)
    store = open_store(loaded.job.store)
    code = _code(loaded, store)
    machines = loaded.job.fleet.kind.machines
    if machines.most > 1 and not store.supports_put_if_absent():
        raise loaded.mistake(
            "store", f"{store.url} ignores put-if-absent, so {machines} machines could not agree; use another store"
        )
    fleet_of(loaded.job.fleet.kind).check(loaded.job, store, progress.say)
    loaded = _with_given_files(loaded, store, progress.say)
    packed = pack_data(loaded, store, progress, Processes())
    if packed is not None and loaded.job.recipe is not None:
        wanted = recipe_class(loaded.job.recipe, loaded.code).kind
        if packed.kind != wanted:
            raise loaded.mistake("data.train", f"has {packed.kind}, where {loaded.job.recipe} learns from {wanted}")
        weights = [source.weight for source in loaded.job.data.train]
        if not any(map(draws, packed.splits["train"].sources, weights)):
            raise loaded.mistake("data.train", NO_SAMPLES)
    return create_run(store, _with_score_of_best(loaded), code, packed.name if packed else None)


def _with_score_of_best(loaded: LoadedJob) -> Job:
    """A job with an own recipe says which score counts, so that the run can be shown where that recipe is not."""
    job = loaded.job
    if job.recipe is None or ":" not in job.recipe or job.checkpoint.best_by is not None:
        return job
    best_by = recipe_class(job.recipe, loaded.code).measure_of_best
    return job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"best_by": best_by})})


def _files(loaded: LoadedJob) -> dict[str, str]:
    """The files that options of the model name, as addresses or absolute paths."""
    if loaded.job.recipe is None:
        return {}
    named = {name: loaded.job.model.options.get(name) for name in recipe_class(loaded.job.recipe, loaded.code).files}
    return {
        name: path if is_address(path) else str(loaded.directory / path)
        for name, path in named.items()
        if isinstance(path, str)
    }


def _check_files(loaded: LoadedJob) -> None:
    for name, path in _files(loaded).items():
        if not is_address(path) and not Path(path).is_file():
            raise loaded.mistake(f"model.{name}", f"there is no file {path}")


def _with_given_files(loaded: LoadedJob, store: Store, tell: Tell) -> LoadedJob:
    """The job with the files that it names put into the store, under their hashes: workers run elsewhere."""
    options = dict(loaded.job.model.options) if loaded.job.recipe is not None else {}
    for name, path in _files(loaded).items():
        try:
            file = local_copy(path, store, cache_directory() / "sources", tell)
        except Mistake as mistake:
            raise loaded.mistake(f"model.{name}", str(mistake)) from None
        key = f"{GIVEN}{sha256_of(file)}"
        if store.entry(key) is None:
            store.put_file(key, file)
        options[name] = f"store:{key}"
    if not options:
        return loaded
    model = loaded.job.model.model_copy(update={"options": options})
    return replace(loaded, job=loaded.job.model_copy(update={"model": model}))


def start(run: Run, tied: bool, tell: Tell = print) -> list[Started]:
    """Starts the run's nodes; tied ones end with this process. `tell` hears of machines that are done without."""
    fleet = fleet_of(run.job.fleet.kind)
    try:
        return fleet.start(fleet.plan(run), tied, tell)
    except Mistake as mistake:
        raise Mistake(f"{mistake} (then `packtrain resume {run.name}`)") from None


def reopen(run: Run, tell: Tell = print) -> None:
    """Makes a run that has ended ready to be started again. Whatever can be refused is refused before."""
    _require_torch(run.job)
    fleet_of(run.job.fleet.kind).check(run.job, run.store, tell)
    run.reopen()


def _require_torch(job: Job) -> None:
    """Nodes on this machine train here; the base install has nothing to do it with."""
    if fleet_of(job.fleet.kind).trains_here and find_spec("torch") is None:
        raise Mistake("training on this machine needs torch: pip install 'packtrain[train]'")


def _code(loaded: LoadedJob, store: Store) -> bytes:
    """What the run takes along: the directory of a program or an own recipe, or just the job file."""
    leave_out = Path(store.url) if store.is_directory else None
    if loaded.job.program is None:
        if loaded.job.recipe is not None and ":" in loaded.job.recipe:
            return snapshot(loaded.code, leave_out)
        return archive({"job.yaml": loaded.text.encode()})
    script = loaded.code / loaded.job.program[0]
    if script.suffix == ".py" and not script.is_file():
        raise loaded.mistake("program.0", f"there is no file {script}")
    return snapshot(loaded.code, leave_out)
