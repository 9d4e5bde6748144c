"""Knowledge without a measurement: speeds that this machine remembers of a plan, earlier runs, and arithmetic.

`packtrain run` says in three lines what it expects, and must not take time for it: nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
import socket
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from packtrain.errors import Mistake, PacktrainError
from packtrain.fleet import fleet_of
from packtrain.job.job import Job
from packtrain.job.kinds import FLEETS, word_of
from packtrain.observe.history import read_recent, step_seconds, steps_in, throughput
from packtrain.pack.manifest import Manifest
from packtrain.plan.devices import Link, rented_hardware, this_machine
from packtrain.plan.estimate import Layout, Speed, Workload, estimate, forecast_of, goal_of, speed_from_table
from packtrain.plan.workload import known_data, known_model, workload_of
from packtrain.run.records import Forecast
from packtrain.run.run import Run
from packtrain.store.records import MAX_RECORD_BYTES, Many, decode, encode
from packtrain.system import cache_directory

_FORMAT = 2
# Fields of `train` that change neither the work of a step nor its data.
_NO_WORK = {"duration", "schedule", "scale_rate", "clip", "label_smoothing", "patience", "seed"}
_ENOUGH_STEPS = 20  # of an earlier run
_RECENT_STEPS = 100
_LOOKED_AT = 5  # earlier runs of the job


@dataclass(frozen=True)
class KnownSpeeds:
    """The outcome of a plan: the job's sizes, and the speed in each layout that it looked at."""

    workload: Workload
    link: Link
    speeds: Many[tuple[Layout, Speed]]


def remember_speeds(job: Job, pack: str, speeds: KnownSpeeds) -> None:
    """Keep the outcome of a plan on this machine, for runs of the same job. A cache that is full forgets it."""
    with suppress(OSError, Mistake):
        path = _path(job, pack)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(encode(speeds))


def remembered_speeds(job: Job, pack: str) -> KnownSpeeds | None:
    with suppress(OSError, PacktrainError):  # of another version, or damaged: it is only a cache
        data = _path(job, pack).read_bytes()
        if len(data) <= MAX_RECORD_BYTES:
            return decode(KnownSpeeds, data, "a remembered plan")
    return None


def _path(job: Job, pack: str) -> Path:
    """Return where a plan is kept: by a digest of all that the time of a step depends on but the number of machines."""
    document = [_FORMAT, socket.gethostname(), pack, *_work_of(job)]
    digest = hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()[:24]
    return cache_directory() / "plans" / f"{digest}.json"


def _work_of(job: Job) -> list[object]:
    fleet = job.fleet.kind.model_dump(mode="json", exclude={"machines", "power_off"})
    return [
        job.recipe,
        job.model.model_dump(mode="json"),
        job.train.model_dump(mode="json", exclude=_NO_WORK),
        job.evaluate.beam,
        word_of(FLEETS, job.fleet.kind),
        fleet,
        job.fleet.workers,
    ]


# What a run expects.


def expected(run: Run, manifest: Manifest, earlier: bool = True) -> Forecast | None:
    """Return what to expect of a run before it starts; None for a recipe that nothing is known of."""
    job = run.job
    if job.recipe is None:
        return None
    speeds = remembered_speeds(job, manifest.name) or _by_arithmetic(job, manifest)
    if speeds is None:
        return None
    machines, goal = job.fleet.kind.machines.most, goal_of(job, speeds.workload)
    layout, speed = min(speeds.speeds, key=lambda measured: abs(measured[0].machines - machines))
    if layout.machines != machines:
        layout, speed = replace(layout, machines=machines), replace(speed, exchange_seconds=None, memory_bytes=None)
    estimated = estimate(speeds.workload, goal, speed, layout, speeds.link)
    forecast = forecast_of(speeds.workload, estimated, job.train.duration)
    return _as_earlier(run, forecast) if earlier else forecast


def _by_arithmetic(job: Job, manifest: Manifest) -> KnownSpeeds | None:
    model = known_model(job, manifest)
    if model is None:
        return None
    hardware = this_machine()
    assumed = f"peak of {hardware.device.name}"
    if not fleet_of(job.fleet.kind).trains_here:
        rented = rented_hardware(job.fleet.kind)
        assumed = "as if its machines were like this one"
        if rented is not None:
            hardware, assumed = rented, f"table of devices: {rented.device.name}"
    work = workload_of(job.train, job.train.batch.unit, model, known_data(job, manifest), hardware.gpus > 0)
    workers = job.fleet.workers or hardware.workers
    shared = job.fleet.kind.machines.most if fleet_of(job.fleet.kind).trains_here else 1
    speed = speed_from_table(work, hardware, workers * shared, job.evaluate.beam)
    speed = replace(speed, source=f"rough: {assumed}; packtrain plan measures")
    layout = Layout(job.fleet.kind.machines.most, workers, hardware.worker_memory_bytes(workers * shared), shared > 1)
    return KnownSpeeds(work, hardware.link, ((layout, speed),))


def _as_earlier(run: Run, forecast: Forecast) -> Forecast:
    """Return the forecast with the pace of the newest run of the same job that did the same work on the same number of
    machines, if there is one; evaluations take as long as they were expected to."""
    stem, _, number = run.name.rpartition("-")
    for before in range(int(number) - 1, max(0, int(number) - 1 - _LOOKED_AT), -1):
        with suppress(PacktrainError, ValueError):
            candidate = Run(run.store, f"{stem}-{before}")
            if _work_of(candidate.job) != _work_of(run.job) or candidate.pack_name() != run.pack_name():
                continue
            if candidate.job.fleet.kind.machines != run.job.fleet.kind.machines:
                continue
            steps = steps_in(read_recent(candidate, _RECENT_STEPS, False), "train")
            speed = throughput(steps, run.job.train.batch.unit)
            if len(steps) >= _ENOUGH_STEPS and speed is not None:
                pace = fmean(map(step_seconds, steps))
                between = forecast.seconds - forecast.steps * forecast.step_seconds
                seconds = max(0.0, between) + forecast.steps * pace
                return replace(
                    forecast,
                    source=f"as in {candidate.name}",
                    step_seconds=pace,
                    units_per_second=speed,
                    seconds=seconds,
                    dollars=None if forecast.dollars is None else forecast.dollars * seconds / forecast.seconds,
                )
    return forecast
