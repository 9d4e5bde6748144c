"""From a job file to a run that goes: check, pack, take the code along, make the folder, start the fleet."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from packtrain.code import archive, snapshot
from packtrain.errors import FieldMistake, Mistake
from packtrain.fleet import Started, fleet_of
from packtrain.jobfile import LoadedJob, load_job
from packtrain.pack.packing import pack
from packtrain.recipes import check_recipe, recipe_defaults
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


def pack_data(loaded: LoadedJob, store: Store, tell: Tell) -> str | None:
    """The name of the job's pack, made if it is not there; a program has none."""
    if loaded.job.recipe is None:
        return None
    try:
        return pack(loaded.job, store, tell).name
    except FieldMistake as mistake:
        raise loaded.mistake(mistake.field, mistake.fault) from None


def create(loaded: LoadedJob, tell: Tell) -> Run:
    """The run's folder with everything that nodes need. Whatever can be refused is refused before."""
    require_torch()
    store = open_store(loaded.job.store)
    code = _code(loaded, store)
    machines: int = getattr(loaded.job.fleet.kind, "machines", 1)
    if machines > 1 and not store.holds_put_if_absent():
        raise loaded.mistake(
            "store", f"{store.url} ignores put-if-absent, so {machines} machines could not agree; use another store"
        )
    return create_run(store, loaded.job, code, pack_data(loaded, store, tell))


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
