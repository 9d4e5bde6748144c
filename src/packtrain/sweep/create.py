"""From a job and the fields to sweep to a plan, and from the plan to runs in the store. Nothing is started here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial, reduce
from operator import or_
from pathlib import Path

from packtrain.errors import Mistake
from packtrain.housekeeping.uses import require_uses
from packtrain.job.load import LoadedJob
from packtrain.launch.check import check
from packtrain.launch.create import NewRun, create_with
from packtrain.launch.load import load
from packtrain.observe.measure import BestBy, measure_of
from packtrain.pack.build import PackProgress, PlainProgress
from packtrain.recipes import recipe_class
from packtrain.run.sweeps import Rung, Sweep, SweepPlan, Trial, add_trial_run
from packtrain.store import open_store
from packtrain.sweep.rungs import rungs_for
from packtrain.sweep.space import Combination, combinations_of, read_axes

_MAX_STEM = 48  # characters of a job's name in that of its sweep: runs add a number


@dataclass(frozen=True)
class SweepRequest:
    """A sweep as a person asks for it. `draws` is the number of random combinations; None trains all of them."""

    job: Path
    grid: Sequence[str]
    overrides: Sequence[str] = ()
    draws: int | None = None
    seed: int = 1
    halving: bool = False
    parallel: int | None = None
    name: str | None = None
    allow_drops: bool = False


@dataclass(frozen=True)
class PreparedSweep:
    """A plan with the job of each trial."""

    plan: SweepPlan
    jobs: Sequence[LoadedJob]


def prepare_sweep(request: SweepRequest) -> PreparedSweep:
    """Check every combination and return the plan; nothing is written, and no machine is asked."""
    axes = read_axes(request.grid, request.draws is not None)
    combinations = combinations_of(axes, request.draws, request.seed)
    jobs = [_load(request, combination) for combination in combinations]
    first_with: dict[str, Combination] = {}
    for loaded, combination in zip(jobs, combinations, strict=True):
        # Refuse values that mean the same, such as 0.001 and 1e-3: the runs would be the same.
        earlier = first_with.setdefault(loaded.job.model_dump_json(), combination)
        if earlier is not combination:
            pair = [", ".join(map("=".join, values.items())) for values in (earlier, combination)]
            raise Mistake(f"--grid: {' and '.join(pair)} are the same job")
    measure = _measure(jobs)
    rungs = _rungs(jobs) if request.halving else ()
    fleets = {loaded.job.fleet.model_dump_json() for loaded in jobs}
    # Where the fleet itself is swept, every run has its own; how many fit beside each other is not known.
    is_one = len(fleets) == 1
    parallel = len(jobs[0].job.fleet.kind.divided(request.parallel)) if is_one else request.parallel or 1
    fleet = jobs[0].job.fleet.model_dump(mode="json") if is_one else {}
    # Of all that the sweep will do: the same command always finds the same sweep.
    contents = [loaded.job.model_dump_json() for loaded in jobs], [asdict(rung) for rung in rungs]
    digest = hashlib.sha256(json.dumps(contents).encode()).hexdigest()[:16]
    name = request.name or f"{jobs[0].job.name[:_MAX_STEM]}-{digest[:6]}"
    trials = tuple(
        Trial(number, f"{name}-{number}", dict(combination)) for number, combination in enumerate(combinations, 1)
    )
    fields = tuple(axis.field for axis in axes)
    unit = jobs[0].job.train.duration.unit if jobs[0].job.recipe is not None else "seconds"
    first = jobs[0].job.name
    plan = SweepPlan(name, first, digest, fields, trials, parallel, fleet, measure.name, measure.lower, rungs, unit)
    return PreparedSweep(plan, jobs)


def _load(request: SweepRequest, combination: Combination) -> LoadedJob:
    """Load the job of a combination; an error of a swept field names `--grid` and the combination."""
    changes = [f"{field}={value}" for field, value in combination.items()]
    try:
        return load(request.job, [*request.overrides, *changes], request.allow_drops)
    except Mistake as mistake:
        text = str(mistake)
        if text.startswith("--set ") and any(text.startswith(f"--set {field}") for field in combination):
            text = f"--grid {text.removeprefix('--set ')}"
        where = f" (in the combination {', '.join(changes)})" if len(combination) > 1 else f" (in {changes[0]})"
        raise Mistake(text + where) from None


def _measure(jobs: Sequence[LoadedJob]) -> BestBy:
    measures = set()
    for loaded in jobs:
        recipe = None if loaded.job.recipe is None else recipe_class(loaded.job.recipe, loaded.code)
        measures.add(measure_of(loaded.job, recipe))
    if len(measures) > 1:
        names = ", ".join(sorted(measure.name or "none" for measure in measures))
        raise Mistake(f"--grid: the runs have different scores ({names}), which do not compare; sweep one recipe")
    return measures.pop()


def _rungs(jobs: Sequence[LoadedJob]) -> tuple[Rung, ...]:
    if jobs[0].job.recipe is None:
        raise Mistake("--halving: applies to recipes only: the scores of a program are not known")
    settings = {(loaded.job.train.duration, loaded.job.evaluate.every) for loaded in jobs}
    if len(settings) > 1:
        raise Mistake("--halving: compares runs at the same points; do not sweep train.duration or evaluate.every")
    if any(not loaded.job.data.has_valid for loaded in jobs):
        raise Mistake("--halving: judges runs by their validation scores; the job needs data.valid")
    [(duration, every)] = settings
    return rungs_for(len(jobs), duration, every)


def create_sweep(prepared: PreparedSweep, progress: PackProgress) -> Sweep:
    """Pack the data, check the machines, and create the plan and all runs; what exists already is kept."""
    plan = prepared.plan
    store = open_store(prepared.jobs[0].job.store, create=True)
    sweep = Sweep(store, plan.name)
    existing = sweep.find_plan()
    if existing is not None and existing.digest != plan.digest:
        raise Mistake(f"sweep {plan.name} exists and trains other runs; choose another --name")
    if not store.supports_put_if_absent():
        raise Mistake(f"{store.url} ignores put-if-absent, so a sweep could start runs twice; use another store")
    # All of them first: a sweep whose last run could not be created should not start its first one.
    checked: set[str] = set()
    quiet = PlainProgress(lambda _: None)
    packed: set[str] = set()
    codes: dict[bytes, bytes] = {}
    new_runs: list[NewRun] = []
    for loaded in prepared.jobs:
        fleet = loaded.job.fleet.model_dump_json()
        data = loaded.job.data.model_dump_json() if loaded.job.recipe is not None else ""
        # What was said about a pack is not said again for each of its runs.
        run = check(loaded, quiet if data in packed else progress, fleet_is_checked=fleet in checked)
        checked.add(fleet)
        packed.add(data)
        # One copy in memory: runs of one sweep mostly share their code.
        code = codes.setdefault(hashlib.sha256(run.code).digest(), run.code)
        new_runs.append(replace(run, code=code))
    sweep.put_plan(plan)
    for trial, run in zip(plan.trials, new_runs, strict=True):
        job = run.job.model_dump_json(indent=1).encode()
        create_with(run, partial(add_trial_run, sweep, trial, job, run.code, run.pack_name))
    require_uses(store, reduce(or_, (run.uses for run in new_runs)))
    return sweep
