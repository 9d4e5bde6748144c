"""What a run amounts to so far: values out of its folder, for tables, reports and scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from packtrain.recipes import RECIPES, recipe_class
from packtrain.report.goodput import Goodput, goodput
from packtrain.run.liveness import State
from packtrain.run.records import Point, Result
from packtrain.run.run import Run, surviving

_RECENT_STEPS = 50
_BETWEEN = ("start", "evaluation", "save")


@dataclass(frozen=True)
class Machine:
    node: str
    workers: int
    working: bool
    cpu_fraction: float
    memory_fraction: float


@dataclass(frozen=True)
class Standing:
    """How far a run has come. `goal` is the step at which it ends, as far as that is known."""

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
    seconds: float
    scores: dict[str, float]
    signatures: dict[str, str]

    @property
    def headline(self) -> str:
        """The score that says most, in a few words."""
        for name in (f"test.{self.measure}", f"valid.{self.measure}", "valid.loss"):
            if name in self.scores:
                return f"{name.replace('.', ' ')} {self.scores[name]:.2f}"
        return ""


@dataclass(frozen=True)
class Summary(Standing):
    """All that there is to say about a run. Its speed is that of its last steps, and of all once it has ended."""

    generations: int
    units_per_second: float | None
    machines: tuple[Machine, ...] = ()
    goodput: Goodput = field(default_factory=Goodput)


def standing(run: Run, state: State) -> Standing:
    """Reads the end of a run alone, as far back as its last evaluation."""
    result = run.result()
    job = run.job
    evaluated = job.recipe is not None and job.evaluate.every is not None and bool(job.data and job.data.valid)
    points = run.recent_points(_RECENT_STEPS, evaluated and not (result and result.scores))
    return Standing(**_fields(run, state, points, result))


def summarise(run: Run, state: State) -> Summary:
    return summary_of(run, state, run.points().read(), run.result())


def summary_of(run: Run, state: State, raw: Sequence[Point], result: Result | None) -> Summary:
    """`raw` are the points of all generations, also of those whose steps were lost."""
    generations, points = run.generations(), surviving(raw)
    known = _fields(run, state, points, result)
    steps = [point for point in points if point.kind == "train"]
    return Summary(
        **known,
        generations=len(generations),
        units_per_second=units_per_second(steps if result else steps[-_RECENT_STEPS:], known["unit"]),
        machines=tuple(
            Machine(
                node.node, node.workers, not node.left and state == "running",
                node.telemetry.cpu_fraction, node.telemetry.memory_fraction,
            )
            for node in run.leases()
        ),
        goodput=goodput(generations, raw, run.time_spent().read()),
    )  # fmt: skip


def _fields(run: Run, state: State, points: Sequence[Point], result: Result | None) -> dict[str, Any]:
    """What a standing and a summary have in common; `points` are those that survived, or the last of them."""
    job, steps = run.job, [point for point in points if point.kind == "train"]
    recent = steps[-_RECENT_STEPS:]
    unit = job.train.batch.unit if job.recipe else ""
    return {
        "run": run.name,
        "state": state,
        "reason": result.reason if result else "",
        "what": _what(run),
        "step": result.step if result and not steps else steps[-1].step if steps else 0,
        "goal": int(job.train.duration.value) if job.recipe and job.train.duration.unit == "steps" else None,
        "loss": _mean([point.values["loss"] for point in recent]),
        "rate": recent[-1].values["rate"] if recent else None,
        "measure": _measure(run),
        "unit": unit,
        "seconds": result.seconds if result else steps[-1].values["elapsed_seconds"] if steps else 0.0,
        "scores": _scores(points) | (result.scores if result else {}),
        "signatures": result.signatures if result else {},
    }


def _measure(run: Run) -> str:
    """The score that says most. A job with an own recipe names it: nobody's code is run to look at a run."""
    recipe = run.job.recipe
    if recipe is not None and recipe in RECIPES:
        return recipe_class(recipe).measure_of_best
    return run.job.checkpoint.best_by or ""


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
    seconds = sum(step_seconds(point) for point in steps)
    return sum(point.values[unit] for point in steps) / seconds if seconds else None


def step_seconds(point: Point) -> float:
    """What a step took, without what happened between it and the one before."""
    between = sum(point.values.get(f"{span}_seconds", 0.0) for span in _BETWEEN)
    return point.values["step_seconds"] - between
