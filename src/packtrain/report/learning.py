"""Questions about the model: is it trained, does it overfit, was training stable, what does the learning rate do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Literal

from packtrain.observe.evidence import Evidence, values_of
from packtrain.observe.measure import is_lower_better
from packtrain.report.finding import Chart, Finding, Rows, Verdict, unknown
from packtrain.report.page import Series
from packtrain.report.trend import Trend, bucketed, noise_of, trend
from packtrain.run.records import Point
from packtrain.units import counted, show_seconds

MIN_EVALUATIONS = 4
"""Below, a line through evaluations has no uncertainty worth stating."""
_NO_CHANGE = 0.005  # of the value, per doubling of the steps: less is not worth a doubled bill
_MAYBE_CHANGE = 0.02  # as long as more than this is possible, a curve is not called flat
_MIN_STEPS = 20
_BUCKETS = 40
_LONG_WARMUP = 0.5  # of a run

Course = Literal["improving", "flat", "worse", "unclear"]


@dataclass(frozen=True)
class Progression:
    """The movement of a validation score in the last third of its evaluations, per doubling of the steps."""

    name: str
    course: Course
    last: float
    line: Trend
    window: Sequence[tuple[float, float]]

    @property
    def text(self) -> str:
        line = self.line
        if not line.slope and not line.error:
            return f"validation {self.name} did not change at all"
        moved = f"{'rises' if line.slope > 0 else 'falls'} by {abs(line.slope):.3g} ± {line.error:.2g}"
        return f"validation {self.name} {moved} per doubling of the steps"


def progression(name: str, points: Sequence[tuple[float, float]], lower_is_better: bool) -> Progression | None:
    """Judge a score by a line over the logarithm of the step; None with too few evaluations."""
    window = [point for point in points if point[0] > 0][-max(MIN_EVALUATIONS, math.ceil(len(points) / 3)) :]
    line = trend([(math.log2(step), value) for step, value in window])
    if line is None or len(window) < MIN_EVALUATIONS:
        return None
    sign = -1.0 if lower_is_better else 1.0
    gain, last = sign * line.slope, window[-1][1]
    scale = max(abs(last), 1e-12)
    if gain - line.error > 0 and gain > _NO_CHANGE * scale:
        course: Course = "improving"
    elif gain + line.error < 0 and -gain > _NO_CHANGE * scale:
        course = "worse"
    else:
        course = "flat" if gain + line.error < _MAYBE_CHANGE * scale else "unclear"
    return Progression(name, course, last, line, window)


def trained(evidence: Evidence) -> Finding | None:
    """Fully trained, or still improving; what more steps would bring."""
    key, question = "trained", "Is it fully trained?"
    if evidence.job.recipe is None:
        return None
    measure = evidence.status.measure
    names = [name for name in dict.fromkeys((measure, "loss")) if name]
    progressions = [progression(name, evidence.scores(name), is_lower_better(evidence.job, name)) for name in names]
    judged = [course for course in progressions if course is not None]
    if not judged:
        count = len(evidence.evaluations)
        why = f"{counted(count, 'evaluation')}, and a trend needs {MIN_EVALUATIONS}; see evaluate.every"
        losses = values_of(evidence.steps, "loss")
        half = bucketed(losses[len(losses) // 2 :], 20) if len(losses) >= _MIN_STEPS else []
        line = trend([(math.log2(step), value) for step, value in half if step > 0])
        if line is None:
            return unknown(key, "model", question, why)
        fact = (
            f"Training loss changed by {line.slope:+.3g} ± {line.error:.2g} per doubling in the second half; only"
            " validation can tell learning from memorizing."
        )
        return unknown(key, "model", question, why, (fact,))
    answer, verdict = _how_trained(evidence, judged)
    counts = [point.counts[judged[0].name] for point in evidence.evaluations if judged[0].name in point.counts]
    evidence_texts: tuple[str, ...] = (
        *(f"{course.text[0].upper()}{course.text[1:]}." for course in judged),
        f"Decided by a straight line over the logarithm of the step through the last {judged[0].line.count}"
        " evaluations, with its 95 % interval. What twice the steps bring is at best what the last doubling brought,"
        " and less if gains shrink as they did.",
        *(f"Each evaluation of {judged[0].name} is of the same {counted(count, 'sample')}." for count in counts[:1]),
    )
    rates = [value for _, value in values_of(evidence.steps, "rate")]
    if rates and max(rates) > 0 and evidence.job.train.schedule.ends_with_run:
        evidence_texts += (
            f"The schedule ends with the run: the rate was at {rates[-1] / max(rates):.2%} of its peak, which flattens"
            " every curve. More steps need a longer train.duration from the start.",
        )
    numbers = {f"{course.name}_per_doubling": course.line.slope for course in judged}
    numbers |= {f"{course.name}_per_doubling_error": course.line.error for course in judged}
    charts = tuple(_score_charts(evidence, judged))
    return Finding(key, "model", question, answer, verdict, evidence_texts, charts, numbers)


def _how_trained(evidence: Evidence, judged: Sequence[Progression]) -> tuple[str, Verdict]:
    improving = next((score for score in judged if score.course == "improving"), None)
    flat = next((score for score in judged if score.course == "flat"), None)
    first = judged[0]  # the score that counts, or else the loss
    if improving is not None:
        return f"No, it is still improving: {improving.text}. {_twice(evidence, improving)}", "note"
    if first.course == "worse":
        return f"It got worse: {first.text}. Use the best checkpoint, not the last.", "bad"
    if flat is not None:
        largest = flat.line.error + abs(flat.line.slope)
        change = f": twice the steps would change it by at most {largest:.2g}" if largest else ""
        return f"Yes, validation {flat.name} is flat at {flat.last:.4g}{change}.", "good"
    return f"Not enough data: the evaluations scatter too much; {first.text}, so it may be flat or not.", "unknown"


@dataclass(frozen=True)
class Gains:
    """The gain of the last doubling of the steps, and of the next: gains shrink from doubling to doubling.

    `expected` continues the shrinking of the last two; None if the evaluations do not reach back that far.
    """

    start: float
    end: float
    expected: float | None

    @property
    def at_best(self) -> float:
        """The value after another doubling that brings as much as the last one."""
        return 2 * self.end - self.start


def gains(points: Sequence[tuple[float, float]], line: Trend) -> Gains | None:
    """Return the gains of the last doublings; None if there is no evaluation at half of the steps or before.

    The end is taken from the trend, because the last evaluation is as noisy as any other.
    """
    last = points[-1][0]
    end, half, quarter = line.at(math.log2(last)), _between(points, last / 2), _between(points, last / 4)
    if half is None:
        return None
    if quarter is None or half == quarter:
        return Gains(half, end, None)
    shrinks = min(1.0, max(0.0, (end - half) / (half - quarter)))
    return Gains(half, end, max(0.0, end + (end - half) * shrinks))


def _between(points: Sequence[tuple[float, float]], step: float) -> float | None:
    """Return the value at a step, on a line over the logarithm of the step between its neighbors."""
    for (first, before), (second, after) in pairwise(points):
        if 0 < first <= step <= second:
            return before + (after - before) * math.log2(step / first) / math.log2(second / first)
    return None


def _twice(evidence: Evidence, score: Progression) -> str:
    """Say what as many steps again would bring."""
    step = score.window[-1][0]
    doubling = gains(evidence.scores(score.name), score.line)
    if doubling is None:
        return ""
    seconds = evidence.status.seconds
    time = f" and another {show_seconds(seconds)}" if seconds else ""
    best = f"{max(0.0, doubling.at_best):.3g}"
    about = best if doubling.expected is None else f"{doubling.expected:.3g}"
    return (
        f"The last doubling brought it from {doubling.start:.3g} to {doubling.end:.3g}; the next ({2 * step:,.0f} steps"
        f"{time}) would bring it to {'' if about == best else f'about {about}, and '}{best} at best."
    )


def _score_charts(evidence: Evidence, judged: Sequence[Progression]) -> list[Chart]:
    charts = []
    for score in judged:
        lines = [Series(score.name, evidence.scores(score.name), True)]
        first, last = score.window[0][0], score.window[-1][0]
        xs = [first * (last / first) ** (number / 16) for number in range(17)]
        lines.append(Series("trend", [(x, score.line.at(math.log2(x))) for x in xs]))
        doubling = gains(evidence.scores(score.name), score.line)
        if score.course == "improving" and doubling is not None and doubling.expected is not None:
            lines.append(Series("twice the steps", [(last, doubling.end), (2 * last, doubling.expected)], True))
        charts.append(Chart(f"validation {score.name}", tuple(lines)))
    return charts


@dataclass(frozen=True)
class Turn:
    """The lowest validation loss and what followed; `before` and `after` are the training losses then and at the end.

    `rises` if the evaluations after the lowest one rise beyond noise.
    """

    step: float
    lowest: float
    end: float
    noise: float
    before: float | None
    after: float | None
    is_last: bool
    rises: bool


def turn_of(evidence: Evidence, losses: Sequence[tuple[float, float]]) -> Turn:
    at, (step, lowest) = min(enumerate(losses), key=lambda item: item[1][1])
    end, noise = fmean(value for _, value in losses[-2:]), noise_of([value for _, value in losses])
    before, after = _training_loss(evidence, losses, at), _training_loss(evidence, losses, len(losses) - 1)
    rises = _rises(losses[at:], end - lowest, lowest, noise)
    return Turn(step, lowest, end, noise, before, after, at == len(losses) - 1, rises)


def overfitting(evidence: Evidence) -> Finding | None:
    """Find the step from which on the model got better on training data only."""
    key, question = "overfitting", "Does it overfit?"
    if evidence.job.recipe is None:
        return None
    losses = evidence.scores("loss")
    if len(losses) < MIN_EVALUATIONS:
        why = f"{counted(len(losses), 'evaluation')} of the loss, and at least {MIN_EVALUATIONS} are needed"
        return unknown(key, "model", question, why)
    turn = turn_of(evidence, losses)
    answer, verdict = _how_fitted(evidence, turn)
    facts = [
        f"Validation loss was lowest at step {turn.step:,.0f} ({turn.lowest:.4g}); its noise is at most about"
        f" ±{turn.noise:.2g}, from the second differences of the evaluations.",
        "Overfitting means that validation loss rises beyond noise and 1 % while training loss falls.",
    ]
    if turn.before is not None and turn.after is not None and not turn.is_last:
        facts.append(f"Training loss around then was {turn.before:.4g}, at the end {turn.after:.4g}.")
    lines = (training_loss(evidence), Series("validation", losses, True))
    chart = Chart("loss", lines, marks=() if turn.is_last else ((turn.step, "lowest"),))
    numbers = {
        "best_step": turn.step, "best_loss": turn.lowest, "rise": turn.end - turn.lowest, "noise": turn.noise
    }  # fmt: skip
    return Finding(key, "model", question, answer, verdict, tuple(facts), (chart,), numbers)


def _how_fitted(evidence: Evidence, turn: Turn) -> tuple[str, Verdict]:
    if not turn.rises:
        when = "at the end" if turn.is_last else f"at step {turn.step:,.0f} and has not risen beyond noise"
        return f"No: validation loss was lowest {when}.", "good"
    rose = f"validation loss rose from {turn.lowest:.3g} to {turn.end:.3g}"
    if turn.before is None or turn.after is None or turn.after >= turn.before:
        wrong = f"No, but something else is wrong: {rose} after step {turn.step:,.0f}, and training loss did not fall."
        return wrong, "bad"
    measure = evidence.status.measure
    score = progression(measure, evidence.scores(measure), is_lower_better(evidence.job, measure))
    if measure != "loss" and score is not None and score.course == "improving":
        return (
            f"The loss does, from about step {turn.step:,.0f}: {rose} while training loss fell. But {measure} still"
            " improves: the model grows too sure of itself, not worse.",
            "note",
        )
    advice, steps = "", [checkpoint.step for checkpoint in evidence.checkpoints]
    if turn.step in steps:
        advice = f" Its checkpoint is kept: --checkpoint {turn.step:.0f}."
    elif steps:
        nearest = min(steps, key=lambda step: abs(step - turn.step))
        advice = f" No checkpoint of that step is kept (the nearest is {nearest:,}); set checkpoint.best_by to loss."
    return f"Yes, from about step {turn.step:,.0f}: {rose} while training loss fell to {turn.after:.3g}.{advice}", "bad"


def _rises(after: Sequence[tuple[float, float]], rise: float, best: float, noise: float) -> bool:
    """True if the evaluations after the best one rise beyond noise: the best of many is low by luck alone."""
    if len(after) < 3 or rise <= max(3 * noise, 0.01 * abs(best)):
        return False
    line = trend(after)
    if line is not None and len(after) >= MIN_EVALUATIONS:
        return line.low > 0
    return rise > max(6 * noise, 0.02 * abs(best))  # two evaluations are few: they must be far above


def _training_loss(evidence: Evidence, losses: Sequence[tuple[float, float]], at: int) -> float | None:
    """Return the mean training loss of the steps before an evaluation, back to the one before it."""
    start, end = losses[at - 1][0] if at else 0.0, losses[at][0]
    values = [value for step, value in values_of(evidence.steps, "loss") if start < step <= end]
    return fmean(values) if values else None


def stability(evidence: Evidence) -> Finding | None:
    """Divergence, spikes, skipped updates and clipping."""
    key, question = "stability", "Was training stable?"
    if evidence.job.recipe is None:
        return None
    norms = Chart("gradient norm", (Series("norm", values_of(evidence.steps, "gradient_norm")),))
    if (where := _where_it_broke(evidence)) is not None:
        return Finding(key, "model", question, f"No: the loss stopped being a number {where}.", "bad", (), (norms,))
    losses = values_of(evidence.steps, "loss")
    if len(losses) < _MIN_STEPS:
        return unknown(key, "model", question, f"{counted(len(losses), 'step')}, and at least {_MIN_STEPS} are needed")
    buckets, spikes = bucketed(losses, _BUCKETS), _spikes(losses)
    lowest = min(value for _, value in buckets)
    verdict: Verdict
    if (divergence := _divergence(buckets)) is not None:
        answer, verdict = f"No, it diverged: {divergence}. Lower the rate, or clip gradients.", "bad"
    elif len(spikes) > max(3, len(losses) // 200):
        answer, verdict = f"Mostly: the loss came down, with {counted(len(spikes), 'spike')}.", "note"
    elif buckets[0][1] > lowest:
        answer, verdict = "Yes: the loss came down without lasting jumps.", "good"
    else:
        answer, verdict = "Yes: the loss did not jump, but it did not come down either.", "note"
    loss_chart = Chart("loss", (training_loss(evidence),), marks=tuple((step, "spike") for step in spikes[:8]))
    return Finding(
        key, "model", question, answer, verdict, _stability_facts(evidence, evidence.steps, spikes),
        (loss_chart, norms), {"spikes": float(len(spikes)), "rise_from_lowest": buckets[-1][1] - lowest},
    )  # fmt: skip


def _where_it_broke(evidence: Evidence) -> str | None:
    """Say where or why the loss stopped being a number; None if it did not."""
    reason = evidence.status.reason
    for point in evidence.raw:
        if point.kind == "train" and not math.isfinite(point.values["loss"]):
            return f"at step {point.step:,}"
    if "not finite" in reason:
        return f"({reason})"
    causes = [generation.reason for generation in evidence.generations if generation.cause == "number"]
    return None if not causes else f"({causes[-1]})" if causes[-1] else ""


def _divergence(buckets: Sequence[tuple[float, float]]) -> str | None:
    """Say how the loss rose if it lost at least half of what it had gained, beyond noise; None if it did not."""
    place, (low_step, low) = min(enumerate(buckets), key=lambda item: item[1][1])
    rise, learned = buckets[-1][1] - low, buckets[0][1] - low
    if rise <= 6 * noise_of([value for _, value in buckets]) or rise <= max(0.5 * learned, 0.3 * abs(low)):
        return None
    first = next(step for step, value in buckets[place:] if value - low > rise / 4)
    return (
        f"training loss was {low:.3g} at step {low_step:,.0f}, rose from about step {first:,.0f}, and ended at"
        f" {buckets[-1][1]:.3g}"
    )


def _spikes(losses: Sequence[tuple[float, float]]) -> list[float]:
    """Return the steps whose loss is far above that of their neighbors."""
    steps: list[float] = []
    size = max(10, len(losses) // _BUCKETS)
    for start in range(0, len(losses), size):
        neighbors = losses[max(0, start - size // 2) : start + size + size // 2]
        ordered = sorted(value for _, value in neighbors)
        middle = ordered[len(ordered) // 2]
        spread = sorted(abs(value - middle) for value in ordered)[len(ordered) // 2]
        limit = middle + max(12 * spread, 0.2 * abs(middle))
        steps += [step for step, value in losses[start : start + size] if value > limit]
    return steps


def _stability_facts(evidence: Evidence, steps: Sequence[Point], spikes: Sequence[float]) -> tuple[str, ...]:
    facts = [
        f"{counted(len(spikes), 'spike')}: steps whose loss is 12 times further above the median of their neighbors"
        " than is usual there."
    ]
    skipped = sum("skipped" in point.values for point in steps)
    if skipped:
        facts.append(f"{counted(skipped, 'update')} skipped because of an overflow in fp16.")
    clip = evidence.job.train.clip
    norms = [value for _, value in values_of(steps, "gradient_norm")]
    if clip is not None and norms:
        share = sum(norm > clip for norm in norms) / len(norms)
        facts.append(f"Gradients were clipped to a norm of {clip:g} in {share:.0%} of the steps.")
    facts.append("Diverged means that the loss lost at least half of what it had gained, beyond noise.")
    return tuple(facts)


def training_loss(evidence: Evidence) -> Series:
    """Return the curve of the training loss, with the number that every other view shows: of one step it is noise."""
    summary = evidence.status
    name = "training" if summary.loss is None else f"training (last {counted(summary.loss_steps, 'step')})"
    return Series(name, values_of(evidence.steps, "loss"), value=summary.loss)


def learning_rate(evidence: Evidence) -> Finding | None:
    """The curve of the rate and its formula in words."""
    rates = values_of(evidence.steps, "rate")
    if evidence.job.recipe is None or not rates:
        return None
    schedule = evidence.job.train.schedule
    peak_step, peak = max(rates, key=lambda rate: rate[1])
    last_step, last = rates[-1]
    is_constant = peak == min(value for _, value in rates)
    if is_constant:
        curve = f"It was {last:.3g} at every step."
    else:
        curve = f"It was highest at step {peak_step:,.0f} ({peak:.3g}) and {last:.3g} at step {last_step:,.0f}."
    settings = schedule.model_dump(mode="json", exclude_none=True)
    words, scale = schedule.in_words, evidence.job.train.scale_rate
    if scale is not None:
        scaling = scale.in_words(evidence.job.train.batch)
        words = f"{words} {scaling[0].upper()}{scaling[1:]}."
    doubt, verdict = _warmup_doubt(evidence, peak_step, last_step, is_constant)
    return Finding(
        "rate", "model", "What does the learning rate do?", f"{doubt}{words} {curve}", verdict,
        ("The words are those of train.schedule in the job; the curve is what the steps recorded.",),
        (Chart("learning rate", (Series("learning rate", rates),)),
         Rows(("setting", "value"), tuple((name, str(value)) for name, value in settings.items()))),
        {"peak": peak, "peak_step": peak_step, "last": last},
    )  # fmt: skip


def _warmup_doubt(evidence: Evidence, peak_step: float, last_step: float, is_constant: bool) -> tuple[str, Verdict]:
    """Say if most of the run was a warm-up, or all of it."""
    state = evidence.status.state
    if is_constant or state not in ("finished", "stopped", "failed") or peak_step <= _LONG_WARMUP * last_step:
        return "", "good"
    if peak_step < last_step:
        return f"The warm-up took {peak_step / last_step:.0%} of the run, which is long. ", "note"
    if state != "finished":
        return f"The run ended at step {last_step:,.0f}, before the rate had reached its peak. ", "note"
    return (
        f"It was still rising when training ended at step {last_step:,.0f}: use a shorter warm-up, or train longer. ",
        "bad",
    )
