"""A run leaves its name: it is removed, or gets another name. Both may end at any object, and are continued later.

    removed/NAME.json     who did it; put first, and it stays: only a sweep that is made again reuses the name
    runs/NAME/job.json    deleted next: without it, the folder is no run
    runs/NAME/...         the rest

Before that, the caller has seen that no machine works on the run. Whoever starts machines records a launch before, and
a machine reads the job before anything else. So a launch that came in between is seen here, and the job is put back;
the machines of a later one find no run. Whoever changes the job looks for the record afterwards, and withdraws it.

A run gets its new name as a copy, which is no run before its own job.json, the last object, is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from packtrain.errors import Mistake, NotFound, PacktrainError, quoted
from packtrain.housekeeping.uses import refuse_discarded, uses_of
from packtrain.job.part import is_name
from packtrain.run.records import Lease, RemovedRun, RenamedRun
from packtrain.run.run import Run, removed_key, removed_run, renamed_key, renamed_run, run_names, split_name
from packtrain.run.sweeps import Sweep, sweep_of
from packtrain.run.trust import forget, is_remembered, remember
from packtrain.store import Store
from packtrain.store.records import MAX_RECORD_BYTES, decode, encode
from packtrain.system import this_client

_THREADS = 16

Check = Callable[[Run], None]
"""Raises Mistake while machines work on the run, or may come to."""


def is_half_removed(store: Store, name: str) -> bool:
    """True if the removal of a run has begun and not ended: it is no run, but has objects."""
    run = Run(store, name)
    return removed_run(store, name) is not None and not store.exists(run.key("job.json")) and bool(_keys(run))


def remove_run(run: Run, check: Check) -> None:
    """Remove a run with everything in its folder, or the rest of one that was removed half-way."""
    if not is_half_removed(run.store, run.name):
        launches = _launches(run)
        check(run)
        _check_is_single(run)
        _leave_name(run, RemovedRun(time.time(), this_client()), launches)
    _delete(run.store, _keys(run))
    forget(run)


def remove_sweep(sweep: Sweep, check: Check) -> list[str]:
    """Remove a sweep with all its runs; return their names. The caller drives it, so that nobody else does."""
    runs = [run for run in map(sweep.run, sweep.plan.trials) if run.store.exists(run.key("job.json"))]
    for run in runs:
        check(run)
    # Without a plan there is no sweep: whatever ends this, the runs that are left are runs like any others.
    sweep.store.delete(sweep.key("plan.json"))
    for run in runs:
        remove_run(run, check)
    return [run.name for run in runs]


def clear_sweep(sweep: Sweep) -> None:
    """Delete what a removed sweep has left."""
    sweep.store.remove_unfinished(sweep.key(""))
    _delete(sweep.store, [entry.key for entry in sweep.store.list(sweep.key(""))])


def rename_run(store: Store, name: str, new_name: str, check: Check) -> Run:
    """Give a run another name, or continue to do so. It has the old name until the new one is complete."""
    run, target = Run(store, name), Run(store, new_name)
    was = removed_run(store, name)
    if was is not None and was.renamed_to == new_name and not store.exists(run.key("job.json")):
        _delete(store, _keys(run))
        return target
    created = store.entry(run.key("job.json"))
    if created is None:
        raise NotFound(f"no run {quoted(name)} in {store.url}; `packtrain ls` lists the runs")
    _check_name(store, name, new_name)
    launches = _launches(run)  # before the copy, which may take long
    check(run)
    _check_is_single(run)
    is_own, former_claim = is_remembered(run), renamed_run(store, name)
    created_at = former_claim.created if former_claim else created.modified.timestamp()
    claim = RenamedRun(time.time(), this_client(), name, created_at)
    if not store.put_if_absent(renamed_key(new_name), encode(claim)):
        claimed = renamed_run(store, new_name)
        if claimed is None or claimed.former != name:
            raise Mistake(f"{new_name} is the name of another run; choose another name")
    if store.exists(target.key("job.json")) and _launches(target) != launches:
        raise Mistake(f"{name} and {new_name} are copies of one run that both exist; remove one with `packtrain rm`")
    copied = _copy(run, target)
    try:
        # A deletion that has listed the runs before there was a new name must find the old one.
        refuse_discarded(store, uses_of(target))
        if gone := copied - set(_keys(target)):
            raise NotFound(f"{min(gone)} was just deleted from {store.url}; run the same command again")
        _leave_name(run, RemovedRun(time.time(), this_client(), renamed_to=new_name), launches)
    except PacktrainError:
        _delete(store, [target.key("job.json"), *_keys(target), renamed_key(new_name)])
        raise
    if is_own and target.code_digest == run.code_digest:  # others may have written to the store meanwhile
        remember(target)
    _delete(store, _keys(run))
    forget(run)
    return Run(store, new_name)


def _check_name(store: Store, name: str, new_name: str) -> None:
    """Refuse a name that belongs to something, or that would make the newest run of a job another one."""
    if not is_name(new_name):
        fault = "names consist of a-z, 0-9 and -, at most 63 of them"
        raise Mistake(f"{quoted(new_name)} is not a valid run name; {fault}")
    stem, number = split_name(new_name)
    if number:
        advice = "choose a name that does not end in a hyphen and a number"
        raise Mistake(f"{new_name} would be taken for run {number} of the job {stem}; {advice}")
    if removed_run(store, new_name) is not None:
        raise Mistake(f"{new_name} was the name of a run that was removed or renamed; choose another name")
    claim = renamed_run(store, new_name)
    if claim is not None and claim.former == name:
        return
    if claim is not None or store.list(Run(store, new_name).folder):
        raise Mistake(f"{new_name} is the name of another run; choose another name")
    if new_name in {Run(store, name).job.name, *(split_name(run_name)[0] for run_name in run_names(store))}:
        raise Mistake(f"{new_name} is the name of a job, and stands for its newest run; choose another name")


def _check_is_single(run: Run) -> None:
    """Refuse a run of a sweep: the plan of the sweep names it, and its driver would start it again."""
    name = sweep_of(run)
    plan = None if name is None else Sweep(run.store, name).find_plan()
    if plan is not None and any(trial.run == run.name for trial in plan.trials):
        raise Mistake(f"{run.name} belongs to the sweep {name}; `packtrain rm {name}` removes the sweep with its runs")


def _leave_name(run: Run, record: RemovedRun, launches: set[str]) -> None:
    """Make the folder no run, unless somebody has started machines for it since it had those launches."""
    store, job = run.store, run.job_data
    if not store.put_if_absent(removed_key(run.name), encode(record)):
        earlier = removed_run(store, run.name)
        if earlier is not None and earlier.renamed_to != record.renamed_to:
            fate = f"renamed to {earlier.renamed_to}" if earlier.renamed_to else "removed"
            raise Mistake(
                f"{run.name} is being {fate} by {earlier.client}; let that finish, or repeat it if it was killed"
            )
    # It may have been changed since it was checked; from now on, a change is withdrawn.
    job = store.find(run.key("job.json"), MAX_RECORD_BYTES) or job
    store.delete(run.key("job.json"))
    if _launches(run) - launches:
        store.put(run.key("job.json"), job)
        store.delete(removed_key(run.name))
        raise Mistake(f"{run.name} was resumed at this moment, and stays; stop it first: `packtrain stop {run.name}`")


def _copy(run: Run, target: Run) -> set[str]:
    """Copy everything, the job last; return the keys of the copies."""
    store, job_key = run.store, run.key("job.json")
    sizes_there = {entry.key: entry.size for entry in store.list(target.folder)}
    sizes = {entry.key: entry.size for entry in store.list(run.folder)}
    targets = {key: target.key(key.removeprefix(run.key(""))) for key in sizes if key != job_key}
    _delete(store, [key for key in sizes_there if key not in targets.values()])

    def copy(key: str) -> None:
        # The names of checkpoints are unique, so a file of one is not copied twice.
        if key.startswith(run.key("checkpoints/")) and sizes_there.get(targets[key]) == sizes[key]:
            return
        if not key.startswith(run.key("nodes/")):
            store.copy(key, targets[key])
            return
        store.put(targets[key], lease_as_left(store, key))

    _in_parallel(copy, targets)
    store.copy(job_key, target.key("job.json"))
    return {*targets.values(), target.key("job.json")}


def lease_as_left(store: Store, key: str) -> bytes:
    """Return a lease with its machine gone: a fresh copy of it would look like a machine that is alive."""
    lease = decode(Lease, store.get(key, MAX_RECORD_BYTES), f"{key} in {store.url}")
    return encode(replace(lease, left=True))


def _delete(store: Store, keys: Iterable[str]) -> None:
    _in_parallel(store.delete, keys)


def _in_parallel(work: Callable[[str], None], keys: Iterable[str]) -> None:
    pool = ThreadPoolExecutor(_THREADS)
    try:
        list(pool.map(work, keys))
    finally:
        pool.shutdown(cancel_futures=True)  # after an error or Ctrl-C the rest is not started


def _keys(run: Run) -> list[str]:
    return [entry.key for entry in run.store.list(run.folder)]


def _launches(run: Run) -> set[str]:
    return {entry.key.removeprefix(run.key("")) for entry in run.store.list(run.key("launches/"))}
