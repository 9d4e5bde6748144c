"""Prepare a run that has ended to be started again, with what a person changes of its job."""

from __future__ import annotations

import os
import shlex
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from packtrain.errors import Mistake, PacktrainError
from packtrain.fleet import fleet_of
from packtrain.fleet.fleet import Say
from packtrain.job.changes import FieldChange, changed_job
from packtrain.job.job import Job
from packtrain.job.load import text_of
from packtrain.launch.check import require_torch, store_fault
from packtrain.node.deadline import seconds_left, used_up
from packtrain.observe.history import read_points
from packtrain.observe.status import is_started_here
from packtrain.process import say as print_line
from packtrain.run.checkpoint import committed, last_step
from packtrain.run.code import files_of, snapshot
from packtrain.run.records import Event
from packtrain.run.run import Run
from packtrain.run.trust import Accept, is_remembered, remember, require_trust
from packtrain.system import expanded, this_client
from packtrain.train.progress import Progress
from packtrain.train.schedule import rate_of
from packtrain.units import Duration, show_time

_NAMED = 3  # edited files that a line names


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
    require_torch(job)
    if (fault := store_fault(job, run.store)) is not None:
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
    run.clear_end()
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
            code = snapshot(directory / run.job.code, run.job.named_paths).archive
            stored, current = ({file.name: file for file in files_of(data)} for data in (run.code, code))
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
    names, resumed = sorted(edited), "code" if run.job.has_own_code else "job file"
    listed = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    return (
        f"resumes the {resumed} of {show_time(run.launches()[0].time)}; {listed} changed since. To use what is there"
        f" now: {shlex.join(command)}"
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
    at = _progress_at(run, step).in_unit(duration.unit)
    if duration.value < at * (1 - 1e-9):
        raise Mistake(f"--set train.duration: the run has already trained for {Duration(at, duration.unit)}; set more")
    if is_finished and duration.value <= at * (1 + 1e-9):
        raise Mistake(f"{run.name} is already complete; it continues with a longer train.duration, not otherwise")
    leases = run.leases()
    used = max((lease.used_seconds for lease in leases), default=0.0)
    if seconds_left(job.budget, job.fleet, leases, used, job.fleet.kind.machines.most) == 0:
        raise Mistake(f"{run.name}: {used_up(job.budget)}; set budget.hours or budget.dollars to more, in all")


def _progress_at(run: Run, step: int) -> Progress:
    """Return the progress at a step. A checkpoint's manifest has only the step: the metrics say when that was."""
    points = [point for point in read_points(run) if point.kind == "train" and point.step <= step]
    last = points[-1].values if points else {}
    return Progress(step, last.get("epoch", 0.0), seconds=last.get("elapsed_seconds", 0.0))


def _rate_in_words(run: Run, job: Job) -> str:
    """Return what a new duration does to the learning rate, in a sentence."""
    if not job.train.schedule.follows_duration:
        return "the learning rate does not depend on train.duration: it continues as it was"
    progress = _progress_at(run, last_step(run))
    before, after = (rate_of(train, 1)(progress) for train in (run.job.train, job.train))
    change = f"at step {progress.step:,} it changes from {before:.3g} to {after:.3g}"
    return f"the learning rate follows train.duration: {change}"


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
