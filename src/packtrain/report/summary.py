"""The values that tables, reports and scripts show of a run, read from its folder in the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from packtrain.job import Job
from packtrain.recipes import RECIPES, recipe_class
from packtrain.report.cost import Cost, cost_of, goal_step
from packtrain.report.goodput import Goodput, goodput
from packtrain.run.checkpoint import last_step
from packtrain.run.liveness import State
from packtrain.run.records import Lease, Point, Result
from packtrain.run.run import Run, surviving
from packtrain.units import counted

_RECENT_STEPS = 50
_BETWEEN_STEPS = ("start", "evaluation", "save")  # spans that a point includes, but that are not part of its step


@dataclass(frozen=True)
class Overview:
    """A run in a list of many. `goal` is the step at which it ends, if that is known."""

    run: str
    state: State
    reason: str
    description: str
    step: int
    goal: int | None
    loss: float | None
    rate: float | None
    measure: str
    unit: str
    seconds: float
    scores: dict[str, float]
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
        """The score to show if there is room for one: `test bleu 20.12`."""
        for name in (f"test.{self.measure}", f"valid.{self.measure}", "valid.loss"):
            if name in self.scores:
                return f"{name.replace('.', ' ')} {self.scores[name]:.2f}"
        return ""


@dataclass(frozen=True)
class MachineSummary:
    node: str
    workers: int
    working: bool
    cpu_fraction: float
    memory_fraction: float


@dataclass(frozen=True)
class Summary(Overview):
    """A run in full. `units_per_second` covers the last steps while it runs, and all steps once it has ended."""

    generations: int
    units_per_second: float | None
    machines: tuple[MachineSummary, ...] = ()
    goodput: Goodput = field(default_factory=Goodput)


def overview(run: Run, state: State) -> Overview:
    """Read only the end of a run, back to its last evaluation."""
    result, job = run.result(), run.job
    # A result with scores replaces the search for the last evaluation, which may be thousands of steps back.
    points = run.recent_points(_RECENT_STEPS, is_evaluated(job) and not (result and result.scores))
    # The leases of a large run are many objects to read: they tell what it costs, and how long a program has run.
    is_needed = job.fleet.dollars_per_hour is not None or (job.program is not None and result is None)
    leases = run.leases() if is_needed else ()
    return overview_of(run, state, points, result, leases)


def is_evaluated(job: Job) -> bool:
    """True if the validation split is measured now and then."""
    return job.recipe is not None and job.evaluate.every is not None and bool(job.data and job.data.has_valid)


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
    steps = [point for point in points if point.kind == "train"]
    return Summary(
        **{**known, "seconds": max(known["seconds"], times.seconds)},
        generations=len(generations),
        # A running run shows its current speed, a finished one its average.
        units_per_second=units_per_second(steps if result else steps[-_RECENT_STEPS:], known["unit"]),
        machines=tuple(
            MachineSummary(
                node.node, node.workers, not node.left and state == "running",
                node.telemetry.cpu_fraction, node.telemetry.memory_fraction,
            )
            for node in leases
        ),
        goodput=times,
    )  # fmt: skip


def _overview_fields(
    run: Run, state: State, points: Sequence[Point], result: Result | None, leases: Sequence[Lease]
) -> dict[str, Any]:
    """Return the fields of an `Overview`; `points` are the surviving ones, or the last of them."""
    job, steps = run.job, [point for point in points if point.kind == "train"]
    recent = steps[-_RECENT_STEPS:]
    scores = {
        f"{point.kind}.{name}": value  # later points overwrite earlier ones
        for point in points
        if point.kind in ("valid", "test")
        for name, value in point.values.items()
        if not name.endswith("_seconds")
    }
    return {
        "run": run.name,
        "state": state,
        "reason": result.reason if result else "",
        "description": " ".join(job.program)
        if job.program is not None
        else f"{job.recipe} {job.model.size}, {job.train.duration}, {job.train.batch} per batch"
        + (f", {job.data.share} held out to validate" if job.data.held_out else ""),
        "step": _step(run, steps, result),
        "goal": goal_step(job, steps[-1] if steps else None),
        "loss": sum(point.values["loss"] for point in recent) / len(recent) if recent else None,
        "rate": recent[-1].values["rate"] if recent else None,
        # A job with the user's own recipe names its score: showing a run must not execute the user's code.
        "measure": recipe_class(job.recipe).best_metric
        if job.recipe is not None and job.recipe in RECIPES
        else job.checkpoint.best_by or "",
        "unit": job.train.batch.unit if job.recipe else "",
        "seconds": _seconds(job, steps, result, leases),
        "scores": scores | (result.scores if result else {}),
        "signatures": result.signatures if result else {},
        "cost": cost_of(job, leases, state == "running", recent),
    }


def _step(run: Run, steps: Sequence[Point], result: Result | None) -> int:
    """Return the last step; of a program, which does not report its steps, the number of its commits."""
    if run.job.program is not None and result is None:
        return last_step(run)
    return steps[-1].step if steps else result.step if result else 0


def _seconds(job: Job, steps: Sequence[Point], result: Result | None, leases: Sequence[Lease]) -> float:
    if result is not None:
        return result.seconds
    if job.program is not None:  # also of a run that was interrupted: what its machines said last
        return max((lease.used_seconds for lease in leases), default=0.0)
    return steps[-1].values["elapsed_seconds"] if steps else 0.0


def units_per_second(steps: Sequence[Point], unit: str) -> float | None:
    seconds = sum(step_seconds(point) for point in steps)
    return sum(point.values.get(unit, 0.0) for point in steps) / seconds if seconds else None


def step_seconds(point: Point) -> float:
    """Duration of a step, without the start, evaluation or save that came before it."""
    between = sum(point.values.get(f"{span}_seconds", 0.0) for span in _BETWEEN_STEPS)
    return point.values["step_seconds"] - between
