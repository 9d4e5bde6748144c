"""Load a job and check it against its recipe and this machine's environment."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from packtrain.errors import Mistake
from packtrain.job.launchers import command_of, without_launcher
from packtrain.job.load import LoadedJob, load_job
from packtrain.recipes import check_recipe, recipe_defaults


def load(path: str | Path, overrides: Sequence[str] = (), allow_drops: bool = False) -> LoadedJob:
    """Return the job of a file, with the variables of its fleet set in this process."""
    loaded = replace(load_job(path, overrides, recipe_defaults), allow_drops=allow_drops)
    with loaded.placing_mistakes():
        check_recipe(loaded.job, loaded.code)
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
        launched = without_launcher(job.program.command)
    except Mistake as mistake:
        raise loaded.mistake("program", str(mistake)) from None
    workers, machines = launched.workers, job.fleet.kind.machines
    if launched.total is not None:
        if launched.total % machines.most or not machines.is_fixed:
            fault = f"{launched.launcher} has {launched.total} workers in all, for {machines} machines"
            raise loaded.mistake("program", f"{fault}; set fleet.workers, the number on each machine")
        workers = launched.total // machines.most
    words, place = list(launched.program), command_of(launched.program)
    if "/" not in words[place] and not words[place].endswith(".py") and (loaded.place / words[place]).is_file():
        words[place] = f"./{words[place]}"  # otherwise it would be looked for on the path
    fleet = job.fleet.model_copy(update={"workers": job.fleet.workers or workers})
    program = job.program.model_copy(update={"command": tuple(words)})
    return replace(loaded, job=job.model_copy(update={"program": program, "fleet": fleet}))
