"""From a job file to a run that goes: check, pack, take the code along, make the folder, start the fleet."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from packtrain.code import archive, snapshot
from packtrain.control import cache_directory
from packtrain.errors import FieldMistake, Mistake
from packtrain.fleet import Started, fleet_of
from packtrain.job import Data, Source
from packtrain.jobfile import LoadedJob, load_job
from packtrain.pack.fetch import local_copy
from packtrain.pack.manifest import Manifest
from packtrain.pack.packing import pack
from packtrain.pack.progress import Progress
from packtrain.pack.workers import Processes, Workers
from packtrain.recipes import check_recipe, recipe_class, recipe_defaults
from packtrain.runs import Run, create_run
from packtrain.store import Store, open_store

Tell = Callable[[str], None]


def load(path: str | Path, overrides: Sequence[str] = ()) -> LoadedJob:
    """A job that its recipe and this machine's environment agree with."""
    loaded = load_job(path, overrides, recipe_defaults)
    try:
        check_recipe(loaded.job)
    except FieldMistake as mistake:
        raise loaded.mistake(mistake.field, mistake.fault) from None
    for number, variable in enumerate(loaded.job.environment):
        if variable not in os.environ:
            raise loaded.mistake(f"environment.{number}", f"{variable} is not set here; export it before the run")
    return loaded


def pack_data(
    loaded: LoadedJob, store: Store, progress: Progress, workers: Workers, allow_drops: bool = False
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


def create(loaded: LoadedJob, progress: Progress) -> Run:
    """The run's folder with everything that nodes need. Whatever can be refused is refused before."""
    if loaded.job.recipe is None and loaded.job.program is None:
        raise loaded.mistake("recipe", "is needed to run; without one the data can only be packed")
    require_torch()
    store = open_store(loaded.job.store)
    code = _code(loaded, store)
    machines = loaded.job.fleet.kind.machines
    if machines > 1 and not store.holds_put_if_absent():
        raise loaded.mistake(
            "store", f"{store.url} ignores put-if-absent, so {machines} machines could not agree; use another store"
        )
    packed = pack_data(loaded, store, progress, Processes())
    if packed is not None and loaded.job.recipe is not None:
        wanted = recipe_class(loaded.job.recipe).kind
        if packed.kind != wanted:
            raise loaded.mistake("data.train", f"has {packed.kind}, where {loaded.job.recipe} learns from {wanted}")
    return create_run(store, loaded.job, code, packed.name if packed else None)


def start(run: Run, tied: bool) -> list[Started]:
    """Starts the run's nodes; tied ones end with this process."""
    fleet = fleet_of(run.job.fleet.kind)
    return fleet.start(fleet.plan(run), tied)


def require_torch() -> None:
    """Nodes on this machine train here; the base install has nothing to do it with."""
    if find_spec("torch") is None:
        raise Mistake("training on this machine needs torch: pip install 'packtrain[train]'")


def _code(loaded: LoadedJob, store: Store) -> bytes:
    """What the run takes along: a program's directory, or just the job file."""
    if loaded.job.program is None:
        return archive({"job.yaml": loaded.text.encode()})
    script = loaded.code / loaded.job.program[0]
    if script.suffix == ".py" and not script.is_file():
        raise loaded.mistake("program.0", f"there is no file {script}")
    return snapshot(loaded.code, Path(store.url) if store.is_directory else None)
