"""The process that starts the runs of a sweep, stops the worse ones, and can be killed at any time.

One process at a time drives a sweep. It claims a number under `drivers/` and shows that it lives; another one that
looks at the same sweep only watches, and takes over when the first is gone. Everything that it decides is in the store
before it acts on it, so the next driver continues where this one was killed. Runs do not depend on their driver.
"""

from __future__ import annotations

import json
import math
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from packtrain.errors import Mistake, PacktrainError
from packtrain.files import FileLock
from packtrain.fleet import fleet_of, release
from packtrain.fleet.fleet import Say
from packtrain.job.job import FleetSettings
from packtrain.job.kinds import FleetKind
from packtrain.launch.resume import AlreadyComplete, reopen
from packtrain.launch.start import start
from packtrain.observe.history import surviving
from packtrain.run.liveness import LEASE_LOST_SECONDS, LEASE_SECONDS, states_now
from packtrain.run.records import Point, Result
from packtrain.run.run import Run
from packtrain.run.sweeps import (
    PAUSED,
    DriverBeat,
    RungResult,
    Sweep,
    SweepDriver,
    SweepPlan,
    Trial,
    TrialStart,
    is_paused,
    survivors,
)
from packtrain.run.trust import Accept, require_trust
from packtrain.store import StoreError
from packtrain.sweep.rungs import RungScore, TrialView, next_actions
from packtrain.system import cache_directory, machine_id, this_client
from packtrain.units import Duration

_MAX_STARTS = 3  # of a trial in one round: a run whose machines always vanish is given up
_ASK_SECONDS = 10.0  # between two questions to a fleet about the machines of a run
_GRACE_SECONDS = 60.0  # in which a fleet may not know machines yet


class DriverSeat:
    """The right to start runs of a sweep, which one process has at a time."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._seen: dict[int, tuple[int, float]] = {}  # the beat of a driver, and when it was first seen
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock: FileLock | None = None
        self._path: Path | None = None
        self.number: int | None = None
        self.other: SweepDriver | None = None

    def take(self) -> bool:
        """True if this process drives the sweep from now on, or does so already."""
        drivers = self._sweep.drivers()
        last = drivers[-1] if drivers else None
        if self.number is not None:
            if last is None or last.number == self.number:
                return True
            self.close()  # somebody took this process for dead, for instance while the machine was asleep
        if last is not None and not self._is_gone(last):
            self.other = last
            return False
        driver = SweepDriver(1 if last is None else last.number + 1, this_client(), machine_id(), uuid.uuid4().hex)
        self._path = _lock_path(driver)
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        self._lock = FileLock(self._path, wait=False)
        if not self._sweep.become_driver(driver):
            self._let_go()
            return False
        if last is not None:
            # Remove what the driver before this one could not, because it was killed.
            with suppress(OSError):
                _lock_path(last).unlink(missing_ok=True)
            with suppress(StoreError):
                self._sweep.store.remove_unfinished(self._sweep.key(""))
        self.number, self.other, self._over = driver.number, None, threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(driver.number, self._over), name="beat", daemon=True)
        self._thread.start()
        return True

    def close(self) -> None:
        """Leave the seat, so that the next process need not wait."""
        self._over.set()
        if self.number is not None and self._thread is not None:
            self._thread.join(LEASE_LOST_SECONDS)  # its last beat must not replace the one that says goodbye
            with suppress(StoreError):
                self._sweep.put_beat(self.number, DriverBeat(0, left=True))
        self.number = None
        self._let_go()

    def _let_go(self) -> None:
        if self._path is not None and self._lock is not None:
            self._path.unlink(missing_ok=True)
            self._lock.close()
        self._lock = self._path = None

    def _beat(self, number: int, over: threading.Event) -> None:
        count = 0
        while not over.is_set():
            count += 1
            with suppress(StoreError):  # a store that is away is away for the others, too
                self._sweep.put_beat(number, DriverBeat(count))
            over.wait(LEASE_SECONDS)

    def _is_gone(self, driver: SweepDriver) -> bool:
        beat = self._sweep.beat(driver.number) or DriverBeat(0)
        if beat.left:
            return True
        if driver.machine == machine_id():  # its lock tells at once; other machines have to be watched
            try:
                FileLock(_lock_path(driver), shared=True, wait=False).close()
                return True
            except BlockingIOError:
                return False
            except OSError:  # another user, or another cache directory
                pass
        count, since = self._seen.get(driver.number, (-1, 0.0))
        if count != beat.count:
            since = time.monotonic()
            self._seen[driver.number] = (beat.count, since)
        return time.monotonic() - since > LEASE_LOST_SECONDS


def _lock_path(driver: SweepDriver) -> Path:
    return cache_directory() / "sweeps" / f"{driver.lock}.lock"


@dataclass
class WatchedTrial:
    """A trial whose run has been started. Reads only what is new of its metrics."""

    trial: Trial
    run: Run
    starts: list[TrialStart]
    since: float
    """When this process first looked at it, by its own clock."""
    result: Result | None = None
    has_machines: bool = True
    asked_at: float = -math.inf
    looks: int = 0

    def __post_init__(self) -> None:
        self._reader = self.run.points()
        self._evaluations: list[Point] = []  # that count, and the starts, which decide that
        self._last: Point | None = None  # step before the next evaluation: it knows epoch and seconds
        self._reached: dict[tuple[int, int], float] = {}  # how far that was, by generation and step

    def read(self, plan: SweepPlan) -> None:
        for point in sorted(self._reader.read(), key=lambda point: (point.generation, point.step)):
            if point.kind == "train":
                self._last = point
            elif point.kind in ("start", "valid"):
                self._evaluations.append(replace(point, samples=()))
                if point.kind == "valid":
                    progress = float(point.step)
                    if plan.unit != "steps" and self._last is not None:
                        progress = self._last.values["epoch" if plan.unit == "epochs" else "elapsed_seconds"]
                    self._reached[point.generation, point.step] = progress
        self._evaluations = surviving(self._evaluations)

    def scores(self, plan: SweepPlan) -> tuple[RungScore, ...]:
        """Return the score at each rung that the run has passed: of the first evaluation there or later."""
        passed: list[RungScore] = []
        for point in (point for point in self._evaluations if point.kind == "valid"):
            reached = self._reached[point.generation, point.step]
            while len(passed) < len(plan.rungs) and reached >= plan.rungs[len(passed)].at * (1 - 1e-9):
                passed.append(RungScore(point.values.get(plan.measure, math.nan), point.values.get("loss", math.nan)))
        return tuple(passed)


class SweepDrive:
    """Looks at a sweep and, while it has the seat, does what is to do next."""

    def __init__(
        self,
        sweep: Sweep,
        accept: Accept,
        say: Say,
        parallel: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sweep, self._plan, self._accept, self._say, self._clock = sweep, sweep.plan, accept, say, clock
        self.seat = DriverSeat(sweep)
        self._watched: dict[int, WatchedTrial] = {}
        self._stopping: set[int] = set()
        self._settled: list[RungResult] = []
        self._views: list[TrialView] = []
        self._was_driving = True
        self._has_started = False
        # The part of the fleet of each run that trains at the same time; None is that of its job.
        self._fleets: list[FleetKind | None] = [None] * (parallel or self._plan.parallel)
        if self._plan.fleet:
            kind = FleetSettings.model_validate(self._plan.fleet).kind
            self._fleets = list(kind.divided(parallel or self._plan.parallel))

    def look(self) -> bool:
        """Read what is new and act on it; True if the sweep is over."""
        drives = self.seat.take()
        if self._was_driving and not drives and self.seat.other is not None:
            self._say(f"{self.seat.other.client} already drives this sweep; watching")
        self._was_driving = drives
        self._read_starts()
        self._settled = self._sweep.rung_results()
        self._look_at_runs()
        self._views = [self._view(trial) for trial in self._plan.trials]
        free = len(self._fleets) - len(self.running)
        actions = next_actions(self._plan, self._views, self._settled, free)
        if drives:
            for number in actions.stop:
                if number not in self._stopping:
                    self._stopping.add(number)
                    reason = f"{PAUSED} {self._sweep.name} at rung {len(self._settled) + 1}"
                    self._watched[number].run.request_stop(reason)
            if actions.settled is not None:
                self._settle(actions.settled)
            for number in actions.start:
                self._start(number)
        return actions.over

    @property
    def running(self) -> list[str]:
        """The runs that have machines, or wait for them, as of the last look."""
        return [self._plan.trial(view.number).run for view in self._views if view.state == "running"]

    def close(self) -> None:
        self.seat.close()

    # Looking.

    def _read_starts(self) -> None:
        starts: defaultdict[int, list[TrialStart]] = defaultdict(list)
        for trial_start in self._sweep.starts():
            starts[trial_start.trial].append(trial_start)
        for number, trial_starts in starts.items():
            watched = self._watched.get(number)
            if watched is None or len(watched.starts) != len(trial_starts):
                self._watch(number, trial_starts, self._sweep.run(self._plan.trial(number)))
            else:
                watched.starts = trial_starts

    def _watch(self, number: int, starts: list[TrialStart], run: Run) -> None:
        self._watched[number] = WatchedTrial(self._plan.trial(number), run, starts, self._clock())

    def _look_at_runs(self) -> None:
        unfinished = []
        for watched in self._watched.values():
            if watched.result is not None:
                continue
            watched.result = watched.run.result()  # before the metrics, so that everything up to it is read
            watched.read(self._plan)
            if watched.result is None:
                unfinished.append(watched)
            elif watched.looks and self._was_driving:  # at the first look it is history
                result = watched.result
                at_rung = f"reached its rung at step {result.step:,}"
                self._say(f"{watched.run.name} {at_rung if is_paused(result) else f'{result.status}: {result.reason}'}")
                release(watched.run, self._say)
            watched.looks += 1
        states = states_now([watched.run for watched in unfinished]) if unfinished else []
        for watched, state in zip(unfinished, states, strict=True):
            # Without a node that lives it may be starting, or wait in a queue: its fleet knows.
            watched.has_machines = state == "running" or self._has_machines(watched)

    def _has_machines(self, watched: WatchedTrial) -> bool:
        """True unless the fleet of a run says that it has no machine, and none in a queue."""
        fleet, moment = fleet_of(watched.run.job.fleet.kind), self._clock()
        if not fleet.trains_here:
            # Clouds list machines a while after they were ordered, and asking takes connections.
            self._require_trust(watched.run)
            if watched.result is None and moment - watched.since < _GRACE_SECONDS:
                return True
            if moment - watched.asked_at < _ASK_SECONDS:
                return watched.has_machines
        watched.asked_at = moment
        try:
            return any(not machine.is_over for machine in fleet.machines(watched.run))
        except PacktrainError:
            return True  # not known: a second set of machines would be worse than a wait

    def _require_trust(self, run: Run) -> None:
        """Ask the person about a run, and about a fleet that somebody else may have written into the plan."""
        if not self._plan.fleet:
            require_trust(run, self._accept)
            return
        fleet = FleetSettings.model_validate(self._plan.fleet)
        require_trust(run, self._accept, run.job.model_copy(update={"fleet": fleet}), fleet=fleet.kind)

    def _view(self, trial: Trial) -> TrialView:
        watched = self._watched.get(trial.number)
        if watched is None:
            return TrialView(trial.number, "new")
        scores, result = watched.scores(self._plan), watched.result
        if result is not None:
            # A run that a person has stopped is out: starting it again would be against their will.
            return TrialView(trial.number, "idle" if is_paused(result) else "ended", scores)
        if watched.has_machines:
            return TrialView(trial.number, "running", scores)
        return TrialView(trial.number, "ended" if self._tries(watched.starts) >= _MAX_STARTS else "idle", scores)

    def _tries(self, starts: Sequence[TrialStart]) -> int:
        """Return how often a trial was started in this round; a driver that was killed meanwhile has not tried."""
        return sum(start.tried and start.round == len(self._settled) for start in starts)

    # Acting.

    def _settle(self, result: RungResult) -> None:
        number = len(self._settled) + 1
        at = Duration(self._plan.rungs[number - 1].at, self._plan.unit)
        dropped = sorted(survivors(self._plan, self._settled) - set(result.survivors))
        self._sweep.settle(number, result)
        names = ", ".join(self._plan.trial(trial_number).run for trial_number in dropped)
        early = f"; stopped early: {names}" if names else ""
        self._say(f"rung {number} of {len(self._plan.rungs)} ({at}): kept {len(result.survivors)}{early}")

    def _start(self, number: int) -> None:
        watched, trial = self._watched.get(number), self._plan.trial(number)
        if watched is not None and self._has_machines(watched):
            return  # its last node is on its way out; the next look tries again
        if watched is not None and watched.result is None and watched.run.result() is not None:
            return  # it has ended since this look began
        busy = {self._watched[view.number].starts[-1].slot for view in self._views if view.state == "running"}
        just_started = (started for started in self._watched.values() if not started.looks)
        busy |= {started.starts[-1].slot for started in just_started}
        slot = next((slot for slot in range(len(self._fleets)) if slot not in busy), None)
        if slot is None:  # another driver of this sweep had more of them
            return
        starts = [] if watched is None else watched.starts
        claim = TrialStart(number, len(starts) + 1, len(self._settled), slot, time.time(), self.seat.number or 0)
        if not self._sweep.claim(claim):
            return  # another driver was first
        self._stopping.discard(number)
        run = self._sweep.run(trial)
        try:
            self._require_trust(run)
            run = reopen(run, self._accept, self._say, moved(run, self._fleets[slot]))
            start(run, tied=False, say=self._say, is_last_try=self._tries(starts) + 1 >= _MAX_STARTS)
        except AlreadyComplete:
            pass  # the next look sees it
        except PacktrainError as error:
            # A host that does not answer later should not end a sweep of days; a mistake shows at the first start.
            if isinstance(error, Mistake) and not self._has_started:
                raise
            self._say(f"could not start {run.name}: {error}")
        else:
            self._has_started = True
            self._say(f"{'resumed' if starts else 'started'} {run.name} ({in_words(trial)})")
        tried = replace(claim, tried=True)
        self._sweep.put_outcome(tried)
        self._watch(number, [*starts, tried], run)


def in_words(trial: Trial) -> str:
    return ", ".join(f"{name}={value}" for name, value in trial.values.items())


def moved(run: Run, kind: FleetKind | None) -> list[str]:
    """Return the change that gives a run its part of the fleet, if it has another one."""
    if kind is None or run.job.fleet.kind == kind:
        return []
    fleet = run.job.fleet.model_copy(update={"kind": kind}).model_dump(mode="json", exclude_defaults=True)
    return [f"fleet={json.dumps(fleet)}"]
