"""Several runs side by side: what differs in their jobs, why one is faster, and which scores differ beyond noise.

Everything but `gather` is a pure function of values, so that tests can use made runs whose truth is known.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, stdev
from typing import Any, Literal

import yaml

from packtrain.job import Job
from packtrain.observe.columns import thinned
from packtrain.observe.goodput import Goodput
from packtrain.observe.history import surviving
from packtrain.observe.measure import Score, score_title
from packtrain.observe.spans import LABELS, ON_DEVICE, STEP_SPANS
from packtrain.observe.status import status_in_full
from packtrain.recipes import RECIPES, recipe_class
from packtrain.report.page import MAX_POINTS
from packtrain.run.liveness import State
from packtrain.run.records import Point
from packtrain.run.run import Run
from packtrain.units import counted

MAX_RUNS = 10
"""Letters and colors that a reader can still tell apart."""
_MIN_STEPS = 4  # to speak about the speed of a run
_MIN_EVALUATIONS = 4  # to remove a trend and still see a spread
_NEAR_END = 1 / 3  # of the evaluations
_BLOCKS = 10  # of steps, whose means say how exact a mean is
_MAX_LOGGED = 20  # curves of programs' own numbers
_PER_TOKEN = ("loss", "perplexity")
_SAME_BATCH = 0.02  # batches of tokens differ a little from step to step
_LARGE, _ALIKE = 0.05, 0.25  # shares of a step that count as large, and of a factor that count as equal
_BEYOND, _BELOW = 1.1, 0.9  # of the speed-up that the number of workers gives
# Student's t, two-sided 95 %, by degrees of freedom; above the last it is nearly that of the normal distribution.
_T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)

NoiseVerdict = Literal["beyond noise", "within noise", "unknown"]


@dataclass(frozen=True)
class ComparedRun:
    """A run as a comparison needs it. `points` survived; `workers` and `machines` are those of its last generation.

    `score` is the one that counts. `lower` has the scores that should be low, `limits` the most that a score can be
    where it is between 0 and that, and `counts` of how many samples each score is. `code` is a digest, empty if the run
    has no code of its own.
    """

    letter: str
    name: str
    state: str
    job: Job
    points: Sequence[Point]
    seconds: float = 0.0
    step: int = 0
    workers: int = 1
    machines: int = 1
    unit: str = ""
    measure: str = ""
    lower: frozenset[str] = frozenset(_PER_TOKEN)
    scores: Mapping[str, float] = field(default_factory=dict)
    goodput: Goodput = field(default_factory=Goodput)
    pack: str = ""
    code: str = ""
    limits: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    score: Score | None = None

    @property
    def steps(self) -> list[Point]:
        return [point for point in self.points if point.kind == "train"]


@dataclass(frozen=True)
class FieldDifference:
    """A field of the jobs that is not the same in all runs; an absent one is `-`."""

    field: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class SpeedTerm:
    """Seconds of a step in one span. `without`: the speed-up of everything else."""

    span: str
    label: str
    base: float
    other: float
    saved: float
    without: float | None


@dataclass(frozen=True)
class SpeedUp:
    """Why one run makes its steps faster than another. `factor` is None if a run has too few steps.

    `terms` add up to the time of a step; those of the other run are scaled to the batch of the first if theirs differ.
    `ideal` is what the number of workers alone would give. `plus_minus` is one standard error of the factor.
    """

    base: str
    other: str
    factor: float | None
    plus_minus: float
    ideal: float
    base_seconds: float
    other_seconds: float
    terms: tuple[SpeedTerm, ...]
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class PairedTest:
    """A difference of a score on the same samples, by bootstrap (export/bootstrap.py)."""

    value: float
    low: float
    high: float
    p_value: float
    significant: bool


@dataclass(frozen=True)
class ScoreGap:
    """The difference of a score of two runs, and what decides if it is more than noise.

    `noise` is how far two equal runs may be apart, in 95 of 100 cases; None if that is not known. `samples` says of how
    many samples the scores of both are.
    """

    base: str
    other: str
    score: str
    base_value: float
    other_value: float
    noise: float | None
    verdict: NoiseVerdict
    better: str
    decided: str
    samples: tuple[int | None, int | None] = (None, None)

    @property
    def title(self) -> str:
        """The name of the score, and of how many samples it is: `valid bleu (100 samples)`."""
        counts = [f"{count:,}" for count in dict.fromkeys(self.samples) if count is not None]
        return score_title(self.score) + (f" ({' and '.join(counts)} samples)" if counts else "")


@dataclass(frozen=True)
class TimeToScore:
    """The training time of each run until a score that all of them reached; None for one without it."""

    score: str
    value: float
    seconds: tuple[float, ...]
    steps: tuple[int, ...]


@dataclass(frozen=True)
class Curve:
    """A measurement of all runs over steps: (step, value) by run."""

    name: str
    lines: tuple[tuple[tuple[float, float], ...], ...]
    marked: bool


@dataclass(frozen=True)
class RunComparison:
    runs: tuple[ComparedRun, ...]
    fields: tuple[FieldDifference, ...]
    speeds: tuple[SpeedUp, ...]
    gaps: tuple[ScoreGap, ...]
    reached: TimeToScore | None
    curves: tuple[Curve, ...]


Tests = Mapping[tuple[str, str], Mapping[str, PairedTest]]
"""Paired tests by the letters of two runs and the name of a score."""


def gather(run: Run, letter: str, state: State) -> ComparedRun:
    """Read everything that `compare_runs` needs of a run."""
    raw, result, generations = run.points().read(), run.result(), run.generations()
    status = status_in_full(run, state, raw, result)
    members = generations[-1].members if generations else ()
    recipe = recipe_class(str(run.job.recipe)) if run.job.recipe in RECIPES else None
    pack = "" if run.job.recipe is None else run.pack_name()
    return ComparedRun(
        letter,
        run.name,
        state,
        run.job,
        surviving(raw),
        status.seconds,
        status.step,
        sum(member.workers for member in members) or 1,
        len(members) or 1,
        status.unit,
        status.measure,
        frozenset(_PER_TOKEN) if recipe is None else recipe.lower_is_better,
        status.scores,
        status.goodput,
        pack,
        hashlib.sha256(run.code).hexdigest()[:12] if run.job.has_own_code else "",
        {} if recipe is None else recipe.limits,
        status.counts,
        status.score,
    )


def compare_runs(runs: Sequence[ComparedRun], tests: Tests | None = None) -> RunComparison:
    """Compare every run with the first; `tests` are paired tests of their models, where somebody made them."""
    base, peers = runs[0], runs[1:]
    spread = seed_spreads(runs)
    return RunComparison(
        tuple(runs),
        differing_fields(runs),
        tuple(speed_up(base, peer) for peer in peers if base.unit and base.unit == peer.unit),
        tuple(gap for peer in peers for gap in score_gaps(base, peer, spread, (tests or {}))),
        time_to_score(runs),
        curves_of(runs),
    )


def as_json(comparison: RunComparison) -> dict[str, Any]:
    """Return the comparison as plain data; curves are thinned to a few hundred points each."""
    return {
        "runs": [
            {
                "letter": run.letter, "run": run.name, "state": run.state, "step": run.step, "seconds": run.seconds,
                "machines": run.machines, "workers": run.workers, "unit": run.unit,
                "units_per_second": units_per_second(run), "score": None if run.score is None else asdict(run.score),
                "scores": dict(run.scores), "samples": dict(run.counts), "time": run.goodput.parts,
            }
            for run in comparison.runs
        ],
        "fields": [asdict(difference) for difference in comparison.fields],
        "speeds": [asdict(speed) for speed in comparison.speeds],
        "scores": [asdict(gap) for gap in comparison.gaps],
        "time_to_score": None if comparison.reached is None else asdict(comparison.reached),
        "curves": {
            curve.name: {
                run.letter: thinned(line, MAX_POINTS) for run, line in zip(comparison.runs, curve.lines, strict=True)
            }
            for curve in comparison.curves
        },
    }  # fmt: skip


# The jobs.


def flat_fields(job: Job) -> dict[str, str]:
    """Return every field of a job by its dotted name, as a person would write it; lists are one value."""
    flat: dict[str, str] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, below in value.items():
                add(f"{name}.{key}" if name else key, below)
        elif isinstance(value, (dict, list)):
            flat[name] = str(yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)).strip()
        elif value is not None:
            flat[name] = str(value).lower() if isinstance(value, bool) else str(value)

    add("", job.model_dump(mode="json"))
    return flat


def differing_fields(runs: Sequence[ComparedRun]) -> tuple[FieldDifference, ...]:
    """Return the fields that are not the same in all jobs, then what else the runs were made of."""
    flats = [flat_fields(run.job) for run in runs]
    for flat, run in zip(flats, runs, strict=True):
        # Not in the job file, but as decisive: the data as packed, the code, and the workers that came in the end.
        made_of = {
            "(pack)": run.pack,
            "(code)": run.code,
            "(machines)": str(run.machines),
            "(workers)": str(run.workers),
        }
        flat |= {name: value for name, value in made_of.items() if value}
    names = dict.fromkeys(name for flat in flats for name in flat)
    rows = [FieldDifference(name, tuple(flat.get(name, "-") for flat in flats)) for name in names]
    return tuple(row for row in rows if len(set(row.values)) > 1)


# Speed.


@dataclass(frozen=True)
class StepTimes:
    """Mean seconds of a step by span, units of a batch, and the standard error of the whole."""

    count: int
    units: float
    spans: Mapping[str, float]
    error: float

    @property
    def seconds(self) -> float:
        return sum(self.spans.values())


def step_times(run: ComparedRun) -> StepTimes:
    """Return the mean over all steps but the first of each generation, which compiles, allocates and fills caches."""
    firsts: dict[int, int] = {}
    for point in run.steps:
        firsts.setdefault(point.generation, point.step)
    steps = [point for point in run.steps if firsts[point.generation] != point.step]
    if not steps:
        return StepTimes(0, 0.0, {}, 0.0)
    spans = {span: fmean(max(0.0, point.values.get(f"{span}_seconds", 0.0)) for point in steps) for span in STEP_SPANS}
    totals = [sum(max(0.0, point.values.get(f"{span}_seconds", 0.0)) for span in STEP_SPANS) for point in steps]
    units = fmean(point.values.get(run.unit, 0.0) for point in steps)
    # The standard error of the mean is from the means of blocks: neighbors are too alike to count each.
    size = len(totals) // _BLOCKS
    means = [fmean(totals[start : start + size]) for start in range(0, size * _BLOCKS, size)] if size else totals
    error = stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0
    return StepTimes(len(steps), units, spans, error)


def units_per_second(run: ComparedRun) -> float | None:
    times = step_times(run)
    return times.units / times.seconds if times.seconds and times.units else None


def speed_up(base: ComparedRun, peer: ComparedRun) -> SpeedUp:
    """Explain the speed of `other` relative to `base`, span by span."""
    base_times, peer_times, ideal = step_times(base), step_times(peer), peer.workers / base.workers
    if min(base_times.count, peer_times.count) < _MIN_STEPS or not (
        base_times.seconds and peer_times.seconds and base_times.units and peer_times.units
    ):
        short = base if base_times.count < _MIN_STEPS else peer
        reason = f"Not enough data: {short.letter} has fewer than {_MIN_STEPS} steps whose time is known."
        return SpeedUp(base.letter, peer.letter, None, 0.0, ideal, 0.0, 0.0, (), (reason,))
    # A larger batch takes longer without being slower: compare the time for the same number of units.
    same = abs(peer_times.units / base_times.units - 1) <= _SAME_BATCH
    scale = 1.0 if same else base_times.units / peer_times.units
    peer_times = replace(
        peer_times,
        spans={span: seconds * scale for span, seconds in peer_times.spans.items()},
        error=peer_times.error * scale,
    )
    factor = base_times.seconds / peer_times.seconds
    terms = []
    for span in STEP_SPANS:
        first, second = base_times.spans[span], peer_times.spans[span]
        remaining = peer_times.seconds - second
        without = (base_times.seconds - first) / remaining if remaining > 0 else None
        if first or second:
            terms.append(SpeedTerm(span, LABELS[span], first, second, first - second, without))
    plus_minus = factor * math.hypot(base_times.error / base_times.seconds, peer_times.error / peer_times.seconds)
    speed = SpeedUp(
        base.letter, peer.letter, factor, plus_minus, ideal, base_times.seconds, peer_times.seconds, tuple(terms), ()
    )  # fmt: skip
    per = "per step" if same else f"per {base_times.units:,.0f} {base.unit} (the batch of {base.letter})"
    return replace(speed, sentences=tuple(_explained(speed, per, base, peer)))


def _explained(speed: SpeedUp, per: str, base: ComparedRun, peer: ComparedRun) -> Iterable[str]:
    factor = speed.factor or 1.0
    if abs(factor - 1) <= 2 * speed.plus_minus:
        yield (
            f"{peer.letter} and {base.letter} are equally fast within the noise of their steps"
            f" ({factor:.2f} times, ± {speed.plus_minus:.2f})."
        )
    else:
        how = f"{factor:.2f} times as fast as {base.letter}"
        seconds = f"{show_step(speed.other_seconds)} instead of {show_step(speed.base_seconds)} {per}"
        yield f"{peer.letter} is {how} (± {speed.plus_minus:.2f}): {seconds}."
        yield from _largest(speed)
    if speed.ideal != 1:
        yield from _scaling(speed, factor, base, peer)


def _largest(speed: SpeedUp) -> Iterable[str]:
    """Name the term that makes most of the difference, unless all of them changed alike."""
    total = speed.base_seconds - speed.other_seconds
    step_factor = speed.other_seconds / speed.base_seconds
    large = [term for term in speed.terms if term.base >= _LARGE * speed.base_seconds]
    is_alike = all(abs(term.other / term.base / step_factor - 1) <= _ALIKE for term in large)
    if speed.ideal == 1 and len(large) > 1 and is_alike:
        yield (
            f"Every part of a step is about as much {'faster' if total > 0 else 'slower'}: it is the machines"
            " (other ones, or busy with something else), or the size of the model."
        )
        return
    term = max(speed.terms, key=lambda term: term.saved if total > 0 else -term.saved)
    verb = "saved" if total > 0 else "added"
    remainder = "" if term.without is None else f"; everything else is {term.without:.2f} times as fast"
    yield (
        f"{show_step(abs(term.saved))} of the {show_step(abs(total))} {verb} is {term.label}"
        f" ({show_step(term.base)} -> {show_step(term.other)}){remainder}."
    )


def _scaling(speed: SpeedUp, factor: float, base: ComparedRun, peer: ComparedRun) -> Iterable[str]:
    """Say what the number of workers explains, and what it does not."""
    workers = f"{counted(peer.workers, 'worker')} instead of {base.workers}"
    first, second = (
        sum(getattr(term, side) for term in speed.terms if term.span in ON_DEVICE) for side in ("base", "other")
    )
    computing = (
        f"computing itself is {first / second:.2f} times as fast" if first and second else "computing is unknown"
    )
    if factor > max(1.0, speed.ideal) * _BEYOND:
        # Whatever shrank by more than the workers explain.
        cause = max(speed.terms, key=lambda term: term.base / speed.ideal - term.other)
        yield (
            f"{workers} explain {speed.ideal:.2g} times at most ({computing}): the rest is {cause.label},"
            " which is a change of something else."
        )
    elif factor < speed.ideal * _BELOW:
        cause = max(speed.terms, key=lambda term: term.other - term.base / speed.ideal)
        lost = cause.other - cause.base / speed.ideal
        yield (
            f"{workers} could give {speed.ideal:.2g} times; {factor / speed.ideal:.0%} of that is reached"
            f" ({computing})."
            f" The largest loss is {cause.label}: {show_step(lost)} per step more than if it had shrunk with them."
        )
    else:
        yield f"{workers} explain it: {speed.ideal:.2g} times is ideal, {factor / speed.ideal:.0%} of that is reached."


def show_step(seconds: float) -> str:
    """Show the time of a step: `1.24 s`, `38 ms`, `0.4 ms`."""
    if seconds >= 0.9995:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.00995 else f"{seconds * 1000:.1f} ms"


# Scores.


@dataclass(frozen=True)
class Spread:
    """A standard deviation, and how many numbers it rests on, less those that were fitted."""

    deviation: float
    freedom: int


def spread_near_end(run: ComparedRun, measure: str) -> Spread | None:
    """Return how much the last evaluations vary around a line; None if there are too few."""
    scores = [
        (float(point.step), point.values[measure])
        for point in run.points
        if point.kind == "valid" and math.isfinite(point.values.get(measure, math.nan))
    ]
    near = scores[-max(_MIN_EVALUATIONS, round(len(scores) * _NEAR_END)) :]
    if len(near) < _MIN_EVALUATIONS:
        return None
    # A run that still improves has a trend, which is no noise.
    mean_x, mean_y = fmean(x for x, _ in near), fmean(y for _, y in near)
    width = sum((x - mean_x) ** 2 for x, _ in near)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in near) / width if width else 0.0
    residue = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in near)
    return Spread(math.sqrt(residue / (len(near) - 2)), len(near) - 2)


def seed_spreads(runs: Sequence[ComparedRun]) -> dict[str, Spread]:
    """Return the spread of each score among runs whose jobs differ only in the seed, pooled over all such groups."""
    groups: defaultdict[str, list[ComparedRun]] = defaultdict(list)
    for run in runs:
        groups[_without_seed(run)].append(run)
    spreads = {}
    for name in {name for run in runs for name in run.scores}:
        values = [[run.scores[name] for run in group if name in run.scores] for group in groups.values()]
        alike = [group for group in values if len(group) > 1 and all(map(math.isfinite, group))]
        freedom = sum(len(group) - 1 for group in alike)
        if freedom:
            squares = sum((value - fmean(group)) ** 2 for group in alike for value in group)
            spreads[name] = Spread(math.sqrt(squares / freedom), freedom)
    return spreads


def _without_seed(run: ComparedRun) -> str:
    """Return everything that decides a score, but the seed: machines and stores do not."""
    flat = flat_fields(run.job) | {"(pack)": run.pack, "(code)": run.code}
    return str([item for item in flat.items() if not item[0].startswith(("train.seed", "fleet", "budget", "store"))])


def score_gaps(base: ComparedRun, peer: ComparedRun, seeds: Mapping[str, Spread], tests: Tests) -> tuple[ScoreGap, ...]:
    """Return the difference of every score that both runs have; that of the test split first."""
    shared = [name for name in base.scores if name in peer.scores]
    shared.sort(key=lambda name: not name.startswith("test."))
    paired = tests.get((base.letter, peer.letter), {})
    gaps = []
    for name in shared:
        measure = name.partition(".")[2] or name
        first, second = base.scores[name], peer.scores[name]
        noise, verdict, decided = _judged(base, peer, name, seeds.get(name), paired.get(name))
        is_lower = measure in base.lower or (base.job.recipe is None and measure.endswith("loss"))
        other_leads = (second > first) != is_lower
        better = "" if first == second or verdict != "beyond noise" else peer.letter if other_leads else base.letter
        samples = base.counts.get(name), peer.counts.get(name)
        gaps.append(ScoreGap(base.letter, peer.letter, name, first, second, noise, verdict, better, decided, samples))
    return tuple(gaps)


def _judged(
    base: ComparedRun, peer: ComparedRun, name: str, seeds: Spread | None, paired: PairedTest | None
) -> tuple[float | None, NoiseVerdict, str]:
    """Return the noise, the verdict and its reason: by the best evidence that there is."""
    split, _, measure = name.partition(".")
    gap = abs(peer.scores[name] - base.scores[name])
    if (fault := _unlike(base, peer, split, measure)) is not None:
        return None, "unknown", fault
    if not math.isfinite(gap):
        return None, "unknown", "a score is not a number"
    if paired is not None:
        text = f"paired bootstrap on the same samples: p = {paired.p_value:.3f}"
        return None, "beyond noise" if paired.significant else "within noise", text
    counts = {run.counts[name] for run in (base, peer) if name in run.counts}
    if len(counts) > 1:
        return None, "unknown", "the scores use different numbers of samples"
    if _without_seed(base) == _without_seed(peer):
        return None, "within noise", "the jobs differ in nothing that decides a score but the seed"
    if seeds is not None and seeds.freedom > 1:
        noise = _t(seeds.freedom) * seeds.deviation * math.sqrt(2)
        return noise, _verdict(gap, noise), f"spread of runs that differ only in the seed (± {seeds.deviation:.2g})"
    base_spread, peer_spread = spread_near_end(base, measure), spread_near_end(peer, measure)
    if base_spread is None or peer_spread is None:
        few = base if base_spread is None else peer
        return _judged_widely(base, peer, name, f"{few.letter} has fewer than {_MIN_EVALUATIONS} evaluations")
    noise = _t(base_spread.freedom + peer_spread.freedom) * math.hypot(base_spread.deviation, peer_spread.deviation)
    evidence = (
        f"spread of the evaluations near the end (± {base_spread.deviation:.2g} and ± {peer_spread.deviation:.2g})"
    )
    return noise, _verdict(gap, noise), evidence


def _judged_widely(base: ComparedRun, peer: ComparedRun, name: str, few: str) -> tuple[float | None, NoiseVerdict, str]:
    """Judge by a noise that is surely too large: a wider gap is a difference, and of any other nothing can be told."""
    bounds = [_noise_bound(run, name) for run in (base, peer)]
    if bounds[0] is None or bounds[1] is None:
        return None, "unknown", f"not enough data: {few}"
    noise = bounds[0] + bounds[1]
    if abs(peer.scores[name] - base.scores[name]) <= noise:
        return noise, "unknown", f"not enough data: {few}, and noise alone might be up to {noise:.3g}"
    return noise, "beyond noise", f"{few}, but noise alone would be {noise:.3g} at most"


def _noise_bound(run: ComparedRun, name: str) -> float | None:
    """Return more than a score of this run is off by chance, in 95 of 100 cases; None if nothing bounds it."""
    measure = name.partition(".")[2]
    spread = spread_near_end(run, measure)
    if spread is not None:
        return _t(spread.freedom) * spread.deviation
    wander, limit, count = _wander(run, measure), run.limits.get(measure), run.counts.get(name, 0)
    if limit is None or not count:
        return None if wander is None else 2 * wander
    # The mean of numbers between 0 and a limit has a standard error of at most half the limit over the root of n.
    chance = limit / math.sqrt(count)
    # Another seed gives another model: by how much is not known, so as much again.
    return chance + max(chance, wander or 0.0)


def _wander(run: ComparedRun, measure: str) -> float | None:
    """Return how far the last evaluation was from the one before, trend included; for a loss, steps do as well."""
    values = [value for value, *_ in _history(run, measure)]
    if len(values) > 1:
        return abs(values[-1] - values[-2])
    losses = [point.values["loss"] for point in run.steps]
    near = losses[-round(len(losses) * _NEAR_END) :]
    if measure != "loss" or len(near) < _MIN_STEPS or not all(map(math.isfinite, near)):
        return None
    return max(near) - min(near)


def _verdict(gap: float, noise: float) -> NoiseVerdict:
    return "beyond noise" if gap > noise else "within noise"


def _t(freedom: int) -> float:
    return _T_95[freedom - 1] if freedom <= len(_T_95) else 2.0


def _unlike(base: ComparedRun, peer: ComparedRun, split: str, measure: str) -> str | None:
    """Return why two scores of one name do not compare, or None."""
    if base.job.recipe != peer.job.recipe:
        return "the runs have different recipes"
    if base.job.recipe is None:
        return None
    data, peer_data = base.job.data, peer.job.data
    differs = getattr(data, split, ()) != getattr(peer_data, split, ())
    if split == "valid" and (data.held_out is not None or peer_data.held_out is not None):
        # Held out of the training data, which must be the same then.
        paths = [[source.paths for source in settings.train] for settings in (data, peer_data)]
        differs = differs or data.held_out != peer_data.held_out or paths[0] != paths[1]
    if differs:
        return f"the {split} data differs"
    words = [(job.data.vocabulary, job.data.joint, job.data.train) for job in (base.job, peer.job)]
    if measure in _PER_TOKEN and base.unit == "tokens" and words[0] != words[1] and base.pack != peer.pack:
        return "per token, and the vocabularies differ"
    return None


def time_to_score(runs: Sequence[ComparedRun]) -> TimeToScore | None:
    """Return when each run first had the best validation score that all of them reached."""
    measure = runs[0].measure
    lower = measure in runs[0].lower
    histories = [_history(run, measure) for run in runs]
    if not measure or not all(histories) or any(run.measure != measure for run in runs):
        return None
    if any(_unlike(runs[0], run, "valid", measure) for run in runs[1:]):
        return None
    bests = [(min if lower else max)(value for value, *_ in history) for history in histories]
    target = max(bests) if lower else min(bests)
    firsts = [
        next(evaluation for evaluation in history if (evaluation[0] <= target if lower else evaluation[0] >= target))
        for history in histories
    ]
    return TimeToScore(
        f"valid.{measure}", target, tuple(seconds for _, seconds, _ in firsts), tuple(step for *_, step in firsts)
    )


def _history(run: ComparedRun, measure: str) -> list[tuple[float, float, int]]:
    """Return value, elapsed seconds and step of every evaluation."""
    elapsed, evaluations = 0.0, []
    for point in run.points:  # in the order of training: a step comes before its evaluation
        if point.kind == "train":
            elapsed = point.values["elapsed_seconds"]
        elif point.kind == "valid" and math.isfinite(point.values.get(measure, math.nan)):
            evaluations.append((point.values[measure], elapsed, point.step))
    return evaluations


# Curves.


def curves_of(runs: Sequence[ComparedRun]) -> tuple[Curve, ...]:
    """Return the training loss, every score of evaluations, the learning rate and the speed, over steps."""
    measures = dict.fromkeys(
        name
        for run in runs
        for point in run.points
        if point.kind == "valid"
        for name in point.values
        if not name.endswith("_seconds")
    )
    first = runs[0].measure
    ordered = sorted(measures, key=lambda name: (name != first, name != "loss", name))
    kinds = [("train", "loss"), *(("valid", name) for name in ordered), ("train", "rate")]
    curves = [
        Curve(f"{kind}.{name}", tuple(_line(run, kind, name) for run in runs), kind == "valid") for kind, name in kinds
    ]
    logged = dict.fromkeys(name for run in runs for point in run.points if point.kind == "log" for name in point.values)
    curves += [
        Curve(name, tuple(_line(run, "log", name) for run in runs), False) for name in list(logged)[:_MAX_LOGGED]
    ]
    return tuple(curve for curve in curves if any(curve.lines))


def _line(run: ComparedRun, kind: str, name: str) -> tuple[tuple[float, float], ...]:
    return tuple(
        (float(point.step), point.values[name]) for point in run.points if point.kind == kind and name in point.values
    )
