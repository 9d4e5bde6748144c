"""The scores of a run: which of them counts, at which step it was measured, and on how many samples.

Every view takes them from here, so that a name stands for the same number in all of them. The score of a run is its
last one on the validation split, by the measure that chooses the best checkpoint: every run has it, also one that still
trains, and choosing among runs leaves the test split untouched.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from packtrain.job import Job
from packtrain.recipes import Recipe, built_in
from packtrain.run.records import Point, Result, evaluates
from packtrain.units import counted, show_score


@dataclass(frozen=True)
class BestBy:
    """The score by which checkpoints and runs are judged; `lower`: it should be low. Without a name there is none."""

    name: str = ""
    lower: bool = False

    def best(self, scores: Iterable[float]) -> float | None:
        """Return the best of some scores, without those that are not finite."""
        return (min if self.lower else max)(filter(math.isfinite, scores), default=None)


def measure_of(job: Job, recipe: type[Recipe] | None = None, points: Iterable[Point] = ()) -> BestBy:
    """Return the score that decides for a job: the one that it names, or else its recipe's.

    A run of a user's recipe names it, so `recipe` is only needed before there is a run. A program has the first number
    among its `points` by which it evaluates its model, to judge by what it is called.
    """
    if job.recipe is None:
        names = (name for point in points if point.kind == "log" for name in point.values)
        return BestBy(next(filter(evaluates, names), ""))
    recipe_class = recipe or built_in(job.recipe)
    name = job.checkpoint.best_by or (recipe_class.best_metric if recipe_class else "")
    return BestBy(name, name in (recipe_class or Recipe).lower_is_better)


def is_lower_better(job: Job, name: str) -> bool:
    """True if a score of the job should be low, also one that does not decide."""
    return name in (built_in(job.recipe) or Recipe).lower_is_better


@dataclass(frozen=True)
class Score:
    """A score, named as in `valid.bleu`. `samples` is None if it is not known of how many it is."""

    name: str
    value: float
    step: int
    samples: int | None = None

    @property
    def title(self) -> str:
        """The name as people read it: `valid bleu`."""
        return score_title(self.name)

    @property
    def text(self) -> str:
        """The score and of how many samples it is: `20.30 (100 samples)`."""
        return of_samples(show_score(self.value), self.samples)


def score_title(name: str) -> str:
    """Return the name of a score for people: `test bleu`; a program's own names stay as they are."""
    split, dot, measure = name.partition(".")
    return f"{split} {measure}" if dot and split in ("valid", "test") else name


def of_samples(text: str, samples: int | None) -> str:
    """Add of how many samples something is, if that is known."""
    return text if samples is None else f"{text} ({counted(samples, 'sample')})"


def scores_of(points: Iterable[Point], result: Result | None) -> dict[str, Score]:
    """Return the last score of each name; the result has those of a full split, which replace an evaluation's."""
    measured = {
        name: Score(name, value, point.step, point.counts.get(measure))
        for point in points
        if point.kind in ("valid", "test", "log")
        for measure, value in point.values.items()
        if not measure.endswith("_seconds")
        for name in [point.column(measure)]
    }
    final = result.scores if result else {}
    return measured | {
        name: Score(name, value, result.step, result.counts.get(name)) for name, value in final.items() if result
    }


def score_of(scores: Mapping[str, Score], measure: BestBy) -> Score | None:
    """Return the score of a run: the one that counts, or else the loss; of the test split only without any other."""
    names = [f"{split}.{name}" for name in (measure.name, "loss") for split in ("valid", "test")]
    names.insert(1, measure.name)  # of a program
    return next((scores[name] for name in names if name in scores), None)


def best_score(measure: BestBy, points: Iterable[Point], best: Score | None = None) -> Score | None:
    """Return the best score of the evaluations among some points, given the `best` before them."""
    for point in points:
        value = point.values.get(measure.name, math.nan)
        if point.kind != "valid" or not math.isfinite(value):
            continue
        if best is None or measure.best((best.value, value)) != best.value:  # of equal ones the first, as is kept
            best = Score(f"valid.{measure.name}", value, point.step, point.counts.get(measure.name))
    return best
