"""What a run amounts to so far: values out of its folder, for tables, reports and scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from packtrain.recipes import recipe_class
from packtrain.runs import Point, Result, Run, State

_RECENT_STEPS = 50
SPANS = ("data", "forward", "backward", "optimizer")


@dataclass(frozen=True)
class Machine:
    node: str
    workers: int
    working: bool
    cpu_fraction: float
    memory_fraction: float


@dataclass(frozen=True)
class Summary:
    """`goal` is the step at which the run ends, as far as that is known."""

    run: str
    state: State
    reason: str
    what: str
    step: int
    goal: int | None
    loss: float | None
    rate: float | None
    measure: str
    unit: str
    units_per_second: float | None
    seconds: float
    scores: dict[str, float]
    signatures: dict[str, str]
    generations: int
    machines: tuple[Machine, ...] = ()
    time_spent: dict[str, float] = field(default_factory=dict)

    @property
    def headline(self) -> str:
        """The score that says most, in a few words."""
        for name in (f"test.{self.measure}", f"valid.{self.measure}", "valid.loss"):
            if name in self.scores:
                return f"{name.replace('.', ' ')} {self.scores[name]:.2f}"
        return ""


def summarise(run: Run, state: State) -> Summary:
    return summary_of(run, state, run.metrics(), run.result())


def summary_of(run: Run, state: State, points: Sequence[Point], result: Result | None) -> Summary:
    job = run.job
    steps = [point for point in points if point.kind == "train"]
    recent = steps[-_RECENT_STEPS:]
    unit = job.train.batch.unit if job.recipe else ""
    goal = int(job.train.duration.value) if job.recipe and job.train.duration.unit == "steps" else None
    return Summary(
        run=run.name,
        state=state,
        reason=result.reason if result else "",
        what=_what(run),
        step=result.step if result and not steps else steps[-1].step if steps else 0,
        goal=goal,
        loss=_mean([point.values["loss"] for point in recent]),
        rate=recent[-1].values["rate"] if recent else None,
        measure=recipe_class(job.recipe).measure_of_best if job.recipe else "",
        unit=unit,
        units_per_second=units_per_second(recent, unit),
        seconds=result.seconds if result else steps[-1].values["elapsed_seconds"] if steps else 0.0,
        scores=_scores(points) | (result.scores if result else {}),
        signatures=result.signatures if result else {},
        generations=len(run.generations()),
        machines=tuple(
            Machine(
                node.node, node.workers, not node.left and state == "running",
                node.telemetry.cpu_fraction, node.telemetry.memory_fraction,
            )
            for node in run.nodes()
        ),
        time_spent=time_spent(points, result.seconds if result else None),
    )  # fmt: skip


def _what(run: Run) -> str:
    job = run.job
    if job.program is not None:
        return " ".join(job.program)
    return f"{job.recipe} {job.model.size}, {job.train.duration}, {job.train.batch} a batch"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _scores(points: Sequence[Point]) -> dict[str, float]:
    """The last value of every score."""
    return {
        f"{point.kind}.{name}": value
        for point in points
        if point.kind in ("valid", "test")
        for name, value in point.values.items()
        if not name.endswith("_seconds")
    }


def units_per_second(steps: Sequence[Point], unit: str) -> float | None:
    seconds = sum(point.values["step_seconds"] for point in steps)
    return sum(point.values[unit] for point in steps) / seconds if seconds else None


def time_spent(points: Sequence[Point], total: float | None) -> dict[str, float]:
    """Where the first rank's time went, in seconds. `other` is what no span claims: starts, saves, lost steps."""
    steps = [point.values for point in points if point.kind == "train"]
    if not steps:
        return {}
    spent = {name: sum(values[f"{name}_seconds"] for values in steps) for name in SPANS}
    spent["evaluation"] = sum(
        point.values["evaluation_seconds"] for point in points if "evaluation_seconds" in point.values
    )
    whole = total if total is not None else steps[-1]["elapsed_seconds"]
    spent["other"] = max(0.0, whole - sum(spent.values()))
    return spent
