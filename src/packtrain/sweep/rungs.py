"""Successive halving: after each rung the better half trains on. Pure functions of scores.

A round ends when all of its runs have reached its rung, so the same scores always keep the same runs, whatever was
killed meanwhile. A run keeps its whole duration: its learning rate is the same with and without halving.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from packtrain.errors import Mistake
from packtrain.run.sweeps import Rung, RungResult, SweepPlan, survivors
from packtrain.units import Duration

TrialState = Literal["new", "running", "idle", "ended"]
"""Never started; has machines or waits for them; has none and could train on; finished, failed or given up."""


def rungs_for(trials: int, duration: Duration, every: Duration | None) -> tuple[Rung, ...]:
    """Return the rungs at which half of the runs are stopped, the last at half of the duration."""
    if every is None:
        raise Mistake("--halving: judges runs by their evaluations; set evaluate.every")
    rounds = math.ceil(math.log2(trials)) if trials > 1 else 0
    if not rounds:
        raise Mistake("--halving: needs at least two runs")
    rungs: list[Rung] = []
    for number in range(rounds):
        at, keep = duration.value / 2 ** (rounds - number), math.ceil(trials / 2 ** (number + 1))
        if every.unit == duration.unit:
            at = math.ceil(at / every.value - 1e-9) * every.value  # where there is an evaluation to judge by
        if at < duration.value and (not rungs or at > rungs[-1].at):
            rungs.append(Rung(at, keep))
        elif rungs:
            rungs[-1] = Rung(rungs[-1].at, keep)
    if not rungs:
        raise Mistake(
            f"--halving: the first evaluation (evaluate.every: {every}) has to come before the end ({duration});"
            " evaluate more often, or train longer"
        )
    return tuple(rungs)


@dataclass(frozen=True)
class RungScore:
    """A score at a rung, and the validation loss, which decides between equal scores: early ones are often all 0."""

    score: float
    loss: float = math.nan


def ranked(scores: Mapping[int, RungScore | None], lower: bool) -> list[int]:
    """Return trials from best to worst; those without a score last, equal ones by their loss, then their number."""

    def order(trial: int) -> tuple[bool, float, float, int]:
        score = scores[trial]
        if score is None or not math.isfinite(score.score):
            return True, 0.0, 0.0, trial
        loss = score.loss if math.isfinite(score.loss) else math.inf
        return False, score.score if lower else -score.score, loss, trial

    return sorted(scores, key=order)


@dataclass(frozen=True)
class TrialView:
    """A trial as its driver sees it: `scores` at each rung that it has passed."""

    number: int
    state: TrialState
    scores: tuple[RungScore, ...] = ()


@dataclass(frozen=True)
class Actions:
    """The next steps of a driver. `settled` ends the round; `over`: there is nothing left to do, now or later."""

    start: tuple[int, ...] = ()
    stop: tuple[int, ...] = ()
    settled: RungResult | None = None
    over: bool = False


def next_actions(plan: SweepPlan, views: Sequence[TrialView], settled: Sequence[RungResult], free: int) -> Actions:
    """Decide what happens next. `free` is how many more runs may train now."""
    round_, racing = len(settled), survivors(plan, settled)
    rung = plan.rungs[round_] if round_ < len(plan.rungs) else None
    # A run that did not survive may still be on its way to a stop, and keeps its machines until then.
    late = tuple(view.number for view in views if view.state == "running" and view.number not in racing)
    views = [view for view in views if view.number in racing]
    passed = {view.number for view in views if rung is not None and len(view.scores) > round_}
    running = {view.number for view in views if view.state == "running"}
    finished = (passed - running) | {view.number for view in views if view.state == "ended"}
    if len(finished) == len(views):
        if rung is None:
            return Actions(stop=late, over=not late)
        # The round is over; those of its runs that have the best scores train on.
        scores = {view.number: view.scores[round_] if len(view.scores) > round_ else None for view in views}
        best = [number for number in ranked(scores, plan.lower)[: rung.keep] if scores[number] is not None]
        values = {str(number): None if score is None else score.score for number, score in scores.items()}
        return Actions(stop=late, settled=RungResult(values, tuple(sorted(best))))
    startable = [view for view in views if view.state in ("new", "idle") and view.number not in finished]
    # Those that have trained before come first: their checkpoints are closer to the rung.
    startable.sort(key=lambda view: (view.state == "new", view.number))
    start = tuple(view.number for view in startable[: max(0, free)])
    return Actions(start, (*late, *(view.number for view in views if view.number in passed & running)))
