"""A sweep's folder in the store: many runs of one job that differ in a few fields, and who starts them.

    sweeps/NAME/
      plan.json               parameters, trials and rungs; put-if-absent, never changed
      starts/000003-001.json  trial 3 is about to be started for the first time; put-if-absent
      rungs/001.json          who trains on after the first rung; put-if-absent
      drivers/000001.json     the first process that started runs; put-if-absent
      beats/000001.json       shows that it is alive
      report.html

The runs themselves are like any others, named `NAME-3`, and say in `sweep.txt` which sweep they belong to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import model_validator

from packtrain.errors import Mistake, NotFound, nearest, quoted
from packtrain.job.part import is_name
from packtrain.run.code import MAX_SNAPSHOT_BYTES
from packtrain.run.records import Result
from packtrain.run.run import Run, removed_key, removed_run
from packtrain.store import Store
from packtrain.store.records import (
    MAX_RECORD_BYTES,
    Count,
    DamagedRecord,
    FileName,
    Label,
    Many,
    Number,
    Time,
    decode,
    decode_name,
    encode,
)

MAX_TRIALS = 1000
PAUSED = "paused by sweep"
"""How the reason of a stop begins that a driver asked for: the run may train on."""
_START = re.compile(r"([0-9]{6})-([0-9]{3})\.json")
_NUMBERED = re.compile(r"([0-9]{3,6})\.json")

Stored = TypeVar("Stored")


@dataclass(frozen=True)
class Trial:
    """A run of a sweep: `values` are those of the swept fields, as a person writes them."""

    number: Count
    run: FileName
    values: dict[str, str]


@dataclass(frozen=True)
class Rung:
    """A point of training at which runs are judged: all of a round train until `at`, the `keep` best train on."""

    at: Number
    keep: Count


@dataclass(frozen=True)
class SweepPlan:
    """Everything that a sweep does, decided before it starts. `digest` is that of the jobs of all trials.

    `measure` is the score that decides, and `lower` that it should be low; empty for programs. `unit` is that of rungs:
    steps, epochs or seconds. At most `parallel` runs train at the same time, each on a part of `fleet`, which is the
    job's section; empty if the fleet itself is swept.
    """

    name: FileName
    job: Label
    digest: Label
    parameters: Many[str]
    trials: Many[Trial]
    parallel: Count
    fleet: dict[str, Any]
    measure: Label = ""
    lower: bool = False
    rungs: Many[Rung] = ()
    unit: Label = "steps"

    @model_validator(mode="after")
    def _is_numbered(self) -> SweepPlan:
        if not self.trials or [trial.number for trial in self.trials] != list(range(1, len(self.trials) + 1)):
            raise ValueError("trials are numbered from 1")
        return self

    def trial(self, number: int) -> Trial:
        return self.trials[number - 1]


@dataclass(frozen=True)
class TrialStart:
    """A driver is about to start a trial, in a round and on a part of the fleet.

    `tried`: it lived to see what came of it, and the start counts.
    """

    trial: Count
    attempt: Count
    round: Count
    slot: Count
    time: Time
    driver: Count
    tried: bool = False


@dataclass(frozen=True)
class RungResult:
    """The scores of a round, by trial, and the trials that train on; None is a run that failed."""

    scores: dict[str, float | None]
    survivors: Many[Count]


@dataclass(frozen=True)
class SweepDriver:
    """A process that starts the runs of a sweep; `lock` names a file on its machine that it keeps locked."""

    number: Count
    client: Label
    machine: Label
    lock: FileName


@dataclass(frozen=True)
class DriverBeat:
    """A counter that a driver increments; `left`: it has ended in order."""

    count: Count
    left: bool = False


class Sweep:
    """A sweep by its name; nothing is read until it is asked for."""

    def __init__(self, store: Store, name: str) -> None:
        if not is_name(name):
            raise NotFound(f"{quoted(name)} is not a valid name of a sweep")
        self.store, self.name = store, name
        self._plan: SweepPlan | None = None

    def key(self, name: str) -> str:
        return f"sweeps/{self.name}/{name}"

    def find_plan(self) -> SweepPlan | None:
        if self._plan is None:
            self._plan = self._find("plan.json", SweepPlan)
        return self._plan

    @property
    def plan(self) -> SweepPlan:
        plan = self.find_plan()
        if plan is None:
            names = sweep_names(self.store)
            hint = nearest(self.name, names) if names else "there is none yet"
            raise NotFound(f"no sweep {self.name!r} in {self.store.url}; {hint}")
        return plan

    def put_plan(self, plan: SweepPlan) -> SweepPlan:
        """Put the plan, unless there is one; return the one that counts."""
        self.store.put_if_absent(self.key("plan.json"), encode(plan))
        return self.plan

    def run(self, trial: Trial) -> Run:
        return Run(self.store, trial.run)

    def starts(self) -> list[TrialStart]:
        starts = self._all("starts/", _START, TrialStart)
        if any(not 1 <= start.trial <= len(self.plan.trials) for start in starts):
            raise DamagedRecord(f"{self.key('starts')} in {self.store.url} is damaged: it has a trial of another sweep")
        return starts

    def claim(self, start: TrialStart) -> bool:
        """True if this start is the first of its trial and attempt, and so may happen."""
        return self.store.put_if_absent(self._start_key(start), encode(start))

    def put_outcome(self, start: TrialStart) -> None:
        """Replace a claim by what became of it."""
        self.store.put(self._start_key(start), encode(start))

    def _start_key(self, start: TrialStart) -> str:
        return self.key(f"starts/{start.trial:06d}-{start.attempt:03d}.json")

    def rung_results(self) -> list[RungResult]:
        return self._all("rungs/", _NUMBERED, RungResult)

    def settle(self, number: int, result: RungResult) -> None:
        """Put who survives a rung; the first to say it decides."""
        self.store.put_if_absent(self.key(f"rungs/{number:03d}.json"), encode(result))

    def drivers(self) -> list[SweepDriver]:
        return self._all("drivers/", _NUMBERED, SweepDriver)

    def become_driver(self, driver: SweepDriver) -> bool:
        return self.store.put_if_absent(self.key(f"drivers/{driver.number:06d}.json"), encode(driver))

    def beat(self, number: int) -> DriverBeat | None:
        return self._find(f"beats/{number:06d}.json", DriverBeat)

    def put_beat(self, number: int, beat: DriverBeat) -> None:
        self.store.put(self.key(f"beats/{number:06d}.json"), encode(beat))

    def _find(self, name: str, kind: type[Stored]) -> Stored | None:
        data = self.store.find(self.key(name), MAX_RECORD_BYTES)
        return None if data is None else decode(kind, data, f"{name} of sweep {self.name} in {self.store.url}")

    def _all(self, folder: str, names: re.Pattern[str], kind: type[Stored]) -> list[Stored]:
        start = self.key(folder)
        keys = [entry.key for entry in self.store.list(start) if names.fullmatch(entry.key.removeprefix(start))]
        return [
            decode(kind, self.store.get(key, MAX_RECORD_BYTES), f"{key} in {self.store.url}") for key in sorted(keys)
        ]


def sweep_names(store: Store) -> list[str]:
    names = [name for name in store.folders("sweeps/") if is_name(name)]
    return [name for name in names if store.exists(f"sweeps/{name}/plan.json")]  # or it is half removed


def sweep_of(run: Run) -> str | None:
    """Return the name of the sweep that a run belongs to; None for a run of its own."""
    key = run.key("sweep.txt")
    data = run.store.find(key)
    return None if data is None else decode_name(data, f"{key} in {run.store.url}")


def add_trial_run(sweep: Sweep, trial: Trial, job_data: bytes, code: bytes, pack: str | None) -> Run:
    """Create the run of a trial, or complete one that a killed client has left half made."""
    run, store = Run(sweep.store, trial.run, job_data, code), sweep.store
    if not store.exists(run.key("job.json")) and removed_run(store, run.name) is not None:
        # A sweep of this name was removed, perhaps not completely: the new run gets nothing of the old one.
        for entry in store.list(run.folder):
            store.delete(entry.key)
        store.delete(removed_key(run.name))
    # Before job.json, which makes it a run: so a run never looks as if it were one of its own.
    store.put(run.key("sweep.txt"), sweep.name.encode())
    store.put_if_absent(run.key("job.json"), job_data)
    if pack is not None:
        store.put_if_absent(run.key("pack.txt"), pack.encode())
    key = run.key("code.tar.zst")
    if not store.put_if_absent(key, code) and store.get(key, MAX_SNAPSHOT_BYTES) != code:
        raise Mistake(f"the code has changed since {trial.run} was created; choose another --name for a new sweep")
    return run


def is_paused(result: Result) -> bool:
    """True if a driver has stopped the run, which may train on."""
    return result.status == "stopped" and result.reason.startswith(PAUSED)


def survivors(plan: SweepPlan, settled: Sequence[RungResult]) -> set[int]:
    """Return the trials that are still in the race."""
    return set(settled[-1].survivors) if settled else {trial.number for trial in plan.trials}
