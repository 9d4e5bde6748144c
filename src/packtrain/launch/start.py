"""Start the nodes of a run, have another program start them, or say only what would be started."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from packtrain.errors import Mistake, PacktrainError
from packtrain.fleet import Fleet, LaunchPlan, StartedNode, fleet_of
from packtrain.fleet.fleet import HasManifests, Say, passed_keys
from packtrain.fleet.host import JOIN_SECONDS
from packtrain.job.kinds import FLEETS, word_of
from packtrain.job.load import LoadedJob
from packtrain.launch.check import check, check_can_run, take_code
from packtrain.launch.create import create
from packtrain.launch.parent import ParentName
from packtrain.pack.build import PackProgress
from packtrain.process import say as print_line
from packtrain.run.code import CodeSnapshot
from packtrain.run.liveness import fail_launch
from packtrain.run.records import FleetLaunch
from packtrain.run.run import Run, next_run, unnumbered_name
from packtrain.store import NoKeys, StoreError, open_store, unreachable_bucket
from packtrain.system import this_client

_LOOK_SECONDS = 5.0  # for a dry run to find the next number


def start(run: Run, tied: bool, say: Say = print_line, *, is_last_try: bool = True) -> list[StartedNode]:
    """Start the run's nodes; tied ones end with this process. `say` gets a line for each machine that is left out.

    If that fails, the run fails, unless the caller tries again.
    """
    kind = run.job.fleet.kind
    fleet = fleet_of(kind)
    _record_launch(run)
    run.record_event("machine", f"{this_client()} launches it on {word_of(FLEETS, kind)} (machines: {kind.machines})")
    try:
        # The run exists by now, so the advice is to resume it, not to create another one.
        plans = fleet.plan(run)
        for line in dict.fromkeys(passed_keys(plan.variables) for plan in plans):
            if line is not None:
                say(line)
        return fleet.start(run, plans, tied, say)
    except BaseException as error:
        with suppress(PacktrainError):
            is_last_try = is_last_try and not _has_earlier_machines(fleet, run)
            if isinstance(error, KeyboardInterrupt):
                fail_launch(run, "stopped", "stopped by user (Ctrl-C) before it started", is_last_try=is_last_try)
            else:
                why = str(error) if isinstance(error, PacktrainError) else f"{type(error).__name__}: {error}"
                fail_launch(run, "failed", f"could not start: {why}", is_last_try=is_last_try)
        if isinstance(error, Mistake):
            raise Mistake(f"{error}; then run `{run.command('resume')}`") from None
        raise


def _has_earlier_machines(fleet: Fleet, run: Run) -> bool:
    """True if machines of an earlier launch may come back by themselves, such as a job that was requeued."""
    if len(run.launches()) == 1:
        return False
    try:
        return any(not machine.is_over for machine in fleet.machines(run))
    except PacktrainError:
        return True


def _record_launch(run: Run) -> None:
    """Record what is about to be started: if this client dies meanwhile, `packtrain down` knows where to look."""
    run.record_launch(FleetLaunch(time.time(), this_client(), run.job.fleet.model_dump(mode="json")))


def wait_until_joined(run: Run, nodes: Sequence[StartedNode], seconds: float = JOIN_SECONDS) -> None:
    """Wait until the nodes have joined their run, so that it is running for whoever looks next; raise if one cannot."""
    deadline = time.monotonic() + seconds
    try:
        for node in nodes:
            while not node.has_joined() and time.monotonic() < deadline:
                time.sleep(0.05)
    except PacktrainError as error:
        if all(node.exit_code() is not None for node in nodes):
            with suppress(PacktrainError):
                fail_launch(run, "failed", str(error))
        raise


@dataclass(frozen=True)
class DryRun:
    """The code that `create` would put into the store, and the commands of `start`.

    `note` says why the run has no number, if the store cannot be asked for it.
    """

    code: CodeSnapshot
    plans: Sequence[LaunchPlan]
    note: str | None


def dry_run(loaded: LoadedJob) -> DryRun:
    """Return what a run would do; nothing is written, and no machine is asked."""
    code, run, note = _look_ahead(loaded)
    with loaded.placing_mistakes():
        return DryRun(code, fleet_of(loaded.job.fleet.kind).plan(run), note)


def manifests(loaded: LoadedJob, form: str, progress: PackProgress | None, parent: ParentName | None = None) -> str:
    """Create a run for another program to start, and return what that program takes.

    Without `progress`, for a dry run, nothing is created: the manifests are those that the run would have.
    """
    fleet = fleet_of(loaded.job.fleet.kind)
    if not isinstance(fleet, HasManifests):
        raise Mistake(f"--format {form}: this fleet has no such manifests")
    if form not in fleet.formats:
        raise Mistake(f"--format {form}: this fleet has no such manifests; it has {', '.join(fleet.formats)}")
    if progress is None:
        _, run, note = _look_ahead(loaded)
        return ("" if note is None else f"# {note}\n") + fleet.manifests(run, form)
    run = create(check(loaded, progress, parent), lambda label, line: progress.say(f"{label}: {line}"))
    _record_launch(run)
    return fleet.manifests(run, form)


def _look_ahead(loaded: LoadedJob) -> tuple[CodeSnapshot, Run, str | None]:
    """Return the code and the next run, and why it has no number if its bucket does not answer at once."""
    check_can_run(loaded)
    job, code = loaded.job, take_code(loaded)
    try:
        store = open_store(job.store, outage_seconds=0.0, answer_seconds=_LOOK_SECONDS)
        return code, next_run(store, job, code.archive), None
    except (StoreError, NoKeys) as error:
        if "://" not in job.store or job.store.startswith("file:"):
            raise
        name = unnumbered_name(job)
        run = Run(unreachable_bucket(job.store), name, job.model_dump_json(indent=1).encode(), code.archive)
        return code, run, f"the run is called {name} here, since its number is not known: {error}"
