"""The status of a run at a moment: the one value that tables, reports, notebooks, the dashboard and scripts show."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from packtrain.job import Job
from packtrain.observe.goodput import Goodput, goodput
from packtrain.observe.history import (
    RECENT_STEPS,
    goal_step,
    progress,
    read_recent,
    recent_losses,
    seconds_to_goal,
    steps_in,
    surviving,
    throughput,
)
from packtrain.observe.measure import BestBy, Score, best_score, measure_of, score_of, scores_of
from packtrain.run.checkpoint import last_step
from packtrain.run.liveness import State
from packtrain.run.records import Generation, Lease, Notes, Point, Result
from packtrain.run.run import Run
from packtrain.store.records import DamagedRecord
from packtrain.system import this_client
from packtrain.units import counted, show_dollars

_RATES = ("rate", "lr", "learning_rate", "train/learning_rate", "train/lr")
_MAX_TEXT = 2000  # characters of a reason or a command: whoever writes the store may write millions
_IN_FULL = ("best", "generations", "units_per_second", "machines", "goodput")  # what is read of one run, not of many
_FOR_VIEWS = ("progress", "seconds_left")  # what scripts do not get


@dataclass(frozen=True)
class Cost:
    """Dollars of all machines of a run, also of those that are gone.

    `per_hour` is for the machines that work on it now. `expected` is the total at the end of the duration at the
    present pace, or the budget if that is less; None if the run has ended, or its pace is not known.
    """

    so_far: float
    per_hour: float
    expected: float | None
    budget: float | None

    @property
    def line(self) -> str:
        """As people read it: `$3.42 so far, $1.05 per hour, $12.40 expected, 6% of the budget of $60.00`."""
        texts = [f"{show_dollars(self.so_far)} so far" if self.per_hour else show_dollars(self.so_far)]
        if self.per_hour:
            texts.append(f"{show_dollars(self.per_hour)} per hour")
        if self.expected is not None:
            texts.append(f"{show_dollars(self.expected)} expected")
        if self.budget is not None:
            texts.append(f"{self.so_far / self.budget:.0%} of the budget of {show_dollars(self.budget)}")
        return ", ".join(texts)


def cost_of(job: Job, leases: Sequence[Lease], running: bool, steps: Sequence[Point]) -> Cost | None:
    """Return the cost of a run; None if no price is known. `steps` are recent ones, of one generation if possible."""
    price = job.fleet.dollars_per_hour
    paid = sum(lease.dollars for lease in leases)
    if price is None and not paid:
        return None
    # A machine that died has not left, and another took its place.
    working = min(sum(not lease.left for lease in leases), job.fleet.kind.machines.most) if running else 0
    per_hour = working * (price or 0.0)
    seconds = seconds_to_goal(job, steps)
    expected = paid + per_hour * seconds / 3600 if per_hour and seconds is not None else None
    if expected is not None and job.budget.dollars is not None:
        expected = min(expected, job.budget.dollars)
    return Cost(paid, per_hour, expected, job.budget.dollars)


@dataclass(frozen=True)
class MachineStatus:
    node: str
    workers: int
    working: bool
    cpu_fraction: float
    memory_fraction: float


@dataclass(frozen=True)
class Status:
    """A run as every view shows it. `goal` is the step at which it ends, if that is known.

    `loss` is the mean of the last `loss_steps` steps that have one. `score` is the one that counts, by its `measure`,
    which should be low if `lower`, and `test` the same on the test split; `counts` says of how many samples each of the
    `scores` is. `best` is the best score of the evaluations during training, which all measure the same samples.

    `units_per_second` covers the last steps while the run makes them, and all steps of a run that was read in full and
    has ended. Only if it was read in full are `best`, `generations`, `machines` and `goodput` known.
    """

    run: str
    state: State
    reason: str
    description: str
    step: int
    goal: int | None
    loss: float | None
    loss_steps: int
    rate: float | None
    measure: str
    lower: bool
    unit: str
    seconds: float
    score: Score | None
    test: Score | None
    scores: dict[str, float]
    counts: dict[str, int]
    signatures: dict[str, str]
    cost: Cost | None
    best: Score | None = None
    generations: int = 0
    units_per_second: float | None = None
    machines: tuple[MachineStatus, ...] = ()
    goodput: Goodput = field(default_factory=Goodput)
    progress: float | None = None
    seconds_left: float | None = None

    @property
    def outcome(self) -> str:
        """State and reason, as in `finished: reached 500 steps` and `stopped by user`."""
        if not self.reason or self.reason.startswith(self.state):
            return self.reason or self.state
        return f"{self.state}: {self.reason}"

    @property
    def step_text(self) -> str:
        """How far it is: the step, or `9 commits` of a program."""
        return f"{self.step:,}" if self.unit else counted(self.step, "commit")

    @property
    def headline(self) -> str:
        """The score that counts: `valid bleu 20.12 (100 samples)`."""
        return "" if self.score is None else f"{self.score.title} {self.score.text}"


def status_json(status: Status, in_full: bool = True) -> dict[str, Any]:
    """Return a status for scripts; `in_full` if all of the run was read."""
    omitted = _FOR_VIEWS if in_full else (*_FOR_VIEWS, *_IN_FULL)
    return {name: value for name, value in asdict(status).items() if name not in omitted}


@dataclass(frozen=True)
class About:
    """Who started a run from which job and when, what `--set` changed, and the words of people about it."""

    job: str
    created: float
    started_by: str
    tags: tuple[str, ...] = ()
    note: str = ""
    overrides: tuple[str, ...] = ()


def about(run: Run) -> About:
    """Read who started a run; the time of one that nobody has started yet is that of its job."""
    launches, notes, overrides = run.launches(), Notes(), tuple[str, ...]()
    with suppress(DamagedRecord):  # anybody may write notes: a run is shown without them
        notes = run.notes()
    with suppress(DamagedRecord):
        overrides = source.last_overrides if (source := run.source()) is not None else ()
    if launches:
        return About(run.job.name, launches[0].time, launches[0].client, notes.tags, notes.text, overrides)
    entry = run.store.entry(run.key("job.json"))
    created = 0.0 if entry is None else entry.modified.timestamp()
    return About(run.job.name, created, "", notes.tags, notes.text, overrides)


def is_started_here(run: Run) -> bool:
    """True if this user has started or resumed the run on this machine."""
    return any(launch.client == this_client() for launch in run.launches())


def read_end(run: Run, state: State) -> Status:
    """Read only the end of a run, back to its last evaluation, for a list of many."""
    result, job = run.result(), run.job
    points = read_recent(run, RECENT_STEPS, is_evaluated(job, result))
    # The leases of a large run are many objects to read: they tell what it costs, and how long a program has run.
    is_needed = job.fleet.dollars_per_hour is not None or (job.program is not None and result is None)
    return status_of(run, state, points, result, run.leases() if is_needed else ())


def is_evaluated(job: Job, result: Result | None) -> bool:
    """True if the validation split was measured: now and then, and at the end."""
    if job.recipe is None or not job.data.has_valid:
        return False
    return job.evaluate.every is not None or (result is not None and result.status == "finished")


def read_status(run: Run, state: State) -> Status:
    return status_in_full(run, state, run.points().read(), run.result())


def status_in_full(run: Run, state: State, raw: Sequence[Point], result: Result | None) -> Status:
    """Return the status of a run whose points and result were read; `raw` includes the steps that were lost."""
    generations, points, leases = run.generations(), surviving(raw), run.leases()
    status = status_of(run, state, points, result, leases)
    times = goodput(generations, raw, run.time_spent().read()).within(result.seconds if result else 0.0)
    speed = status.units_per_second  # None: printed steps that were read at one time
    if result or speed is None:
        speed = throughput(steps_in(points, run.job.step_kind), status.unit)
    return replace(
        status,
        seconds=max(status.seconds, times.seconds),
        best=best_score(BestBy(status.measure, status.lower), points),
        generations=len(generations),
        units_per_second=speed,
        machines=tuple(
            MachineStatus(
                lease.node, lease.workers, state == "running" and _is_there(lease, generations[-1:]),
                lease.telemetry.cpu_fraction, lease.telemetry.memory_fraction,
            )
            for lease in leases
        ),
        goodput=times,
    )  # fmt: skip


def _is_there(lease: Lease, latest: Sequence[Generation]) -> bool:
    """True for a member of the latest generation, or a node that may be of the next; others were lost before it."""
    is_out = any(generation.rank_of(lease.node) is None and lease.joined <= generation.number for generation in latest)
    return not lease.left and not is_out


def status_of(
    run: Run, state: State, points: Sequence[Point], result: Result | None, leases: Sequence[Lease]
) -> Status:
    """Return the status of a run whose records were read; `points` are those that count, or the last of them."""
    job = run.job
    steps = steps_in(points, job.step_kind)
    recent = steps[-RECENT_STEPS:]
    losses = recent_losses(steps)
    scores = scores_of(points, result)
    measure = measure_of(job, points=points)
    unit = job.train.batch.unit if job.recipe else "steps" if steps else ""
    step = steps[-1].step if steps else result.step if result else 0
    if job.program is not None and result is None and not steps:  # it does not log its steps: count its commits
        step = last_step(run)
    if result is not None:
        seconds = result.seconds
    elif job.program is not None:  # also of a run that was interrupted: what its machines said last
        seconds = max((lease.used_seconds for lease in leases), default=0.0)
    else:
        seconds = steps[-1].values["elapsed_seconds"] if steps else 0.0
    if job.program is not None:
        description = job.program.in_words[:_MAX_TEXT]
    else:
        held_out = f", {job.data.share} held out to validate" if job.data.held_out else ""
        description = f"{job.recipe} {job.model.size}, {job.train.duration}, {job.train.batch} per batch{held_out}"
    return Status(
        run=run.name,
        state=state,
        reason=result.reason[:_MAX_TEXT] if result else "",
        description=description,
        step=step,
        goal=goal_step(job, steps[-1] if steps else None),
        loss=sum(losses) / len(losses) if losses else None,  # one of them may be infinite
        loss_steps=len(losses),
        rate=next((point.values[name] for point in reversed(recent) for name in _RATES if name in point.values), None),
        measure=measure.name,
        lower=measure.lower,
        unit=unit,
        seconds=seconds,
        score=score_of(scores, measure),
        test=scores.get(f"test.{measure.name}"),
        scores={name: score.value for name, score in scores.items()},
        counts={name: score.samples for name, score in scores.items() if score.samples is not None},
        signatures=result.signatures if result else {},
        cost=cost_of(job, leases, state == "running", recent),
        units_per_second=throughput(recent, unit),
        progress=1.0 if state == "finished" else progress(job, recent),
        seconds_left=seconds_to_goal(job, recent) if state == "running" else None,
    )
