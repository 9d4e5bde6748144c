"""The values that tables, reports and scripts show of a run, read from its folder in the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, MutableSequence, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

from packtrain.job import Job
from packtrain.recipes import BestBy, measure_of
from packtrain.report.cost import Cost, cost_of, goal_step
from packtrain.report.goodput import Goodput, goodput
from packtrain.report.score import Score, better_score, score_of, scores_of
from packtrain.run.checkpoint import last_step
from packtrain.run.liveness import State
from packtrain.run.records import Generation, Lease, Notes, Point, Result, evaluates, loss_name
from packtrain.run.run import Run, surviving
from packtrain.store.records import DamagedRecord
from packtrain.system import this_client
from packtrain.units import counted

RECENT_STEPS = 50
"""Of these last steps are the loss and the speed of a run: those of a single step are mostly noise."""
_RATES = ("rate", "lr", "learning_rate", "train/learning_rate", "train/lr")
_MAX_TEXT = 2000  # characters of a reason or a command: whoever writes the store may write millions
_BETWEEN_STEPS = ("start", "evaluation", "save")  # spans that a point includes, but that are not part of its step


@dataclass(frozen=True)
class Overview:
    """A run in a list of many. `goal` is the step at which it ends, if that is known.

    `loss` is the mean of the last `loss_steps` steps that have one. `score` is the one that counts, by its `measure`,
    which should be low if `lower`, and `test` the same on the test split; `counts` says of how many samples each of the
    `scores` is.
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

    @property
    def outcome(self) -> str:
        """State and reason, as in `finished: reached 500 steps` and `stopped by user`."""
        if not self.reason or self.reason.startswith(self.state):
            return self.reason or self.state
        return f"{self.state}: {self.reason}"

    @property
    def progress(self) -> str:
        """How far it is: the step, or `9 commits` of a program."""
        return f"{self.step:,}" if self.unit else counted(self.step, "commit")

    @property
    def headline(self) -> str:
        """The score that counts: `valid bleu 20.12 (100 samples)`."""
        return "" if self.score is None else f"{self.score.title} {self.score.text}"


@dataclass(frozen=True)
class About:
    """Who started a run from which job and when, what `--set` changed, and the words of people about it."""

    job: str
    created: float
    started_by: str
    tags: tuple[str, ...] = ()
    note: str = ""
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class MachineSummary:
    node: str
    workers: int
    working: bool
    cpu_fraction: float
    memory_fraction: float


@dataclass(frozen=True)
class Summary(Overview):
    """A run in full. `units_per_second` covers the last steps while it runs, and all steps once it has ended.

    `best` is the best score of the evaluations during training, which all measure the same samples.
    """

    best: Score | None
    generations: int
    units_per_second: float | None
    machines: tuple[MachineSummary, ...] = ()
    goodput: Goodput = field(default_factory=Goodput)


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


def overview(run: Run, state: State) -> Overview:
    """Read only the end of a run, back to its last evaluation."""
    result, job = run.result(), run.job
    points = run.recent_points(RECENT_STEPS, is_evaluated(job, result))
    # The leases of a large run are many objects to read: they tell what it costs, and how long a program has run.
    is_needed = job.fleet.dollars_per_hour is not None or (job.program is not None and result is None)
    leases = run.leases() if is_needed else ()
    return overview_of(run, state, points, result, leases)


def is_evaluated(job: Job, result: Result | None) -> bool:
    """True if the validation split was measured: now and then, and at the end."""
    if job.recipe is None or not job.data.has_valid:
        return False
    return job.evaluate.every is not None or (result is not None and result.status == "finished")


def overview_of(
    run: Run, state: State, points: Sequence[Point], result: Result | None, leases: Sequence[Lease]
) -> Overview:
    """Return the overview of a run whose last points, result and leases were read already."""
    return Overview(**_overview_fields(run, state, points, result, leases))


def summarize(run: Run, state: State) -> Summary:
    return summary_of(run, state, run.points().read(), run.result())


def summary_of(run: Run, state: State, raw: Sequence[Point], result: Result | None) -> Summary:
    """Summarize a run whose points and result were read already; `raw` includes the steps that were lost."""
    generations, points, leases = run.generations(), surviving(raw), run.leases()
    known = _overview_fields(run, state, points, result, leases)
    times = goodput(generations, raw, run.time_spent().read()).within(result.seconds if result else 0.0)
    steps = steps_in(points, run.job)
    speed = units_per_second(steps[-RECENT_STEPS:], known["unit"])  # None: printed steps that were read at one time
    return Summary(
        **{**known, "seconds": max(known["seconds"], times.seconds)},
        best=reduce(partial(better_score, BestBy(known["measure"], known["lower"])), points, None),
        generations=len(generations),
        # A running run shows its current speed, a finished one its average.
        units_per_second=units_per_second(steps, known["unit"]) if result or speed is None else speed,
        machines=tuple(
            MachineSummary(
                node.node, node.workers, state == "running" and _is_there(node, generations[-1:]),
                node.telemetry.cpu_fraction, node.telemetry.memory_fraction,
            )
            for node in leases
        ),
        goodput=times,
    )  # fmt: skip


def _is_there(lease: Lease, latest: Sequence[Generation]) -> bool:
    """True for a member of the latest generation, or a node that may be of the next; others were lost before it."""
    is_out = any(one.rank_of(lease.node) is None and lease.joined <= one.number for one in latest)
    return not lease.left and not is_out


def _overview_fields(
    run: Run, state: State, points: Sequence[Point], result: Result | None, leases: Sequence[Lease]
) -> dict[str, Any]:
    """Return the fields of an `Overview`; `points` are the surviving ones, or the last of them."""
    job = run.job
    steps = steps_in(points, job)
    recent = steps[-RECENT_STEPS:]
    losses = recent_losses(steps)
    scores = scores_of(points, result)
    measure = measure_of(job) if job.recipe is not None else BestBy(_measure_of(points))
    return {
        "run": run.name,
        "state": state,
        "reason": result.reason[:_MAX_TEXT] if result else "",
        "description": job.program.in_words[:_MAX_TEXT]
        if job.program is not None
        else f"{job.recipe} {job.model.size}, {job.train.duration}, {job.train.batch} per batch"
        + (f", {job.data.share} held out to validate" if job.data.held_out else ""),
        "step": _step(run, steps, result),
        "goal": goal_step(job, steps[-1] if steps else None),
        "loss": sum(losses) / len(losses) if losses else None,  # one of them may be infinite
        "loss_steps": len(losses),
        "rate": next((rate for point in reversed(recent) if (rate := _first_of(point, _RATES)) is not None), None),
        "measure": measure.name,
        "lower": measure.lower,
        "unit": job.train.batch.unit if job.recipe else "steps" if steps else "",
        "seconds": _seconds(job, steps, result, leases),
        "score": score_of(scores, measure),
        "test": scores.get(f"test.{measure.name}"),
        "scores": {name: score.value for name, score in scores.items()},
        "counts": {name: score.samples for name, score in scores.items() if score.samples is not None},
        "signatures": result.signatures if result else {},
        "cost": cost_of(job, leases, state == "running", recent),
    }


def _step(run: Run, steps: Sequence[Point], result: Result | None) -> int:
    """Return the last step; of a program that does not log its steps, the number of its commits."""
    if run.job.program is not None and result is None and not steps:
        return last_step(run)
    return steps[-1].step if steps else result.step if result else 0


def _seconds(job: Job, steps: Sequence[Point], result: Result | None, leases: Sequence[Lease]) -> float:
    if result is not None:
        return result.seconds
    if job.program is not None:  # also of a run that was interrupted: what its machines said last
        return max((lease.used_seconds for lease in leases), default=0.0)
    return steps[-1].values["elapsed_seconds"] if steps else 0.0


def _measure_of(points: Sequence[Point]) -> str:
    """Return the name of the first number by which a program evaluates its model, to judge by what it is called."""
    names = (name for point in points if point.kind == "log" for name in point.values)
    return next(filter(evaluates, names), "")


def steps_in(points: Iterable[Point], job: Job) -> list[Point]:
    """Return the steps of training among some points."""
    steps = list[Point]()
    for point in points:
        if point.kind == job.step_kind:
            add_step(steps, point)
    return steps


def add_step(steps: MutableSequence[Point], point: Point) -> None:
    """Append a step. Rows in which a program only evaluates its model count if there are no others."""
    if steps and steps[-1].is_evaluation != point.is_evaluation:
        if point.is_evaluation:
            return
        steps.clear()
    steps.append(point)


def recent_losses(steps: Sequence[Point]) -> list[float]:
    """Return the training losses of the last steps; their mean is what every view shows as the loss of a run."""
    return [loss for point in steps[-RECENT_STEPS:] if (loss := loss_of(point)) is not None]


def loss_of(point: Point) -> float | None:
    """Return the training loss at a step; None if a program has not logged it there."""
    name = loss_name(point.values)
    return None if name is None else point.values[name]


def _first_of(point: Point, names: Sequence[str]) -> float | None:
    return next((point.values[name] for name in names if name in point.values), None)


def units_per_second(steps: Sequence[Point], unit: str) -> float | None:
    if steps and steps[-1].kind == "log":  # a program says when it made a step, and not how long it took
        # What comes before training, such as the size of the model, is often logged at step 0.
        own = [point for point in steps if point.generation == steps[-1].generation and point.step > 0]
        # By one number that comes again: others may be logged at steps of another kind, such as epochs.
        counts = Counter(name for point in own for name in point.values)
        again = {name: count for name, count in counts.items() if count > 1}
        name = loss_name(again) or max(again, key=again.__getitem__, default=None)
        # Of steps that were read from the output at one time, only the last was just made.
        counted = list({point.time: point for point in own if name is None or name in point.values}.values())
        if not counted:
            return None
        seconds = counted[-1].time - counted[0].time
        return max(0.0, (counted[-1].step - counted[0].step) / seconds) if seconds > 0 else None
    seconds = sum(step_seconds(point) for point in steps)
    return sum(point.values.get(unit, 0.0) for point in steps) / seconds if seconds else None


def step_seconds(point: Point) -> float:
    """Duration of a step, without the start, evaluation or save that came before it."""
    between = sum(point.values.get(f"{span}_seconds", 0.0) for span in _BETWEEN_STEPS)
    return point.values["step_seconds"] - between
