"""The table of a sweep, as Markdown, and as a page with a plot of parallel coordinates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from packtrain.errors import PacktrainError
from packtrain.job.part import is_name
from packtrain.observe.history import read_recent
from packtrain.observe.measure import Score, of_samples, scores_of
from packtrain.report.compare_render import STYLE
from packtrain.report.finding import Rows
from packtrain.report.markdown import plain, table_lines
from packtrain.report.page import escape, html_table, page
from packtrain.run.liveness import State, attempt, states_now
from packtrain.run.run import Run
from packtrain.run.sweeps import RungResult, Sweep, SweepPlan, Trial, is_paused
from packtrain.store import Store
from packtrain.units import Duration, counted, show_score

_WIDTH, _HEIGHT = 900, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 20, 90, 40, 30  # margins of the plot
_LOGARITHMIC = 9.0  # an axis that spans this factor has a logarithmic scale
_MAX_TEXT = 18  # characters of a value on an axis
_PLOT_STYLE = """
.plot { overflow-x: auto; } .plot svg { min-width: 640px; }
.axis { stroke: var(--dim); } .run { fill: none; stroke-width: 1.4; opacity: .75; }
.best { stroke-width: 3.5; opacity: 1; }
.early { stroke-dasharray: 4 3; opacity: .45; } .name { font-size: 12px; fill: var(--ink); }
.axis-text { paint-order: stroke; stroke: var(--paper); stroke-width: 4px; }
"""


@dataclass(frozen=True)
class SweepRow:
    """A run of a sweep. `state` is that of the run, or `waiting` before it starts; `standing` says it in words.

    `score` is the run's last one of the sweep's measure on the validation split, of so many `samples`; None if there is
    none yet. A run that was stopped early was so at a `rung`.
    """

    trial: int
    run: str
    state: str
    standing: str
    values: dict[str, str]
    score: float | None
    step: int
    stopped_early: bool
    loss: float | None = None
    samples: int | None = None
    rung: int = 0


@dataclass(frozen=True)
class SweepTable:
    """All runs of a sweep, the best first. `lower`: the measure should be low."""

    name: str
    job: str
    parameters: tuple[str, ...]
    measure: str
    lower: bool
    rungs: str
    rows: tuple[SweepRow, ...]

    @property
    def finished(self) -> int:
        """The number of runs that train no more."""
        over = ("finished", "failed", "stopped")
        return sum(row.stopped_early or (row.state in over and row.standing == row.state) for row in self.rows)

    @property
    def score_head(self) -> str:
        """The head of the scores, which says of how many samples they are if that is the same for all."""
        counts = {row.samples for row in self.rows if row.score is not None}
        return of_samples(self.measure, counts.pop()) if len(counts) == 1 else self.measure

    def score_of(self, row: SweepRow) -> str:
        """Return the score of a row as the table shows it below its head."""
        if row.score is None:
            return ""
        is_in_head = self.score_head != self.measure
        return of_samples(show_score(row.score), None if is_in_head else row.samples)

    @property
    def best(self) -> SweepRow | None:
        return next((row for row in self.rows if row.score is not None), None)


def sweep_table(store: Store, name: str) -> SweepTable:
    """Read how a sweep stands now."""
    sweep = Sweep(store, name)
    plan, settled = sweep.plan, sweep.rung_results()
    started = {start.trial for start in sweep.starts()}
    runs = {trial.number: sweep.run(trial) for trial in plan.trials if trial.number in started}
    states = dict(zip(runs, states_now(list(runs.values())), strict=True)) if runs else {}
    rows = [_row(plan, settled, trial, runs.get(trial.number), states.get(trial.number)) for trial in plan.trials]
    rows.sort(key=lambda row: _order(row, plan.lower))
    words = rungs_in_words(plan)
    return SweepTable(plan.name, plan.job, plan.parameters, plan.measure, plan.lower, words, tuple(rows))


def _row(
    plan: SweepPlan, settled: Sequence[RungResult], trial: Trial, run: Run | None, state: State | PacktrainError | None
) -> SweepRow:
    lost = next((number for number, rung in enumerate(settled, 1) if trial.number not in rung.survivors), None)
    early = lost is not None and state != "failed"
    if run is None or state is None:
        standing = "not started" if lost is None else f"dropped at rung {lost}"
        return SweepRow(trial.number, trial.run, "waiting", standing, trial.values, None, 0, early)
    reached = state if isinstance(state, PacktrainError) else attempt(lambda: _progress(run, plan))
    if isinstance(reached, PacktrainError) or isinstance(state, PacktrainError):
        return SweepRow(trial.number, trial.run, "?", str(reached), trial.values, None, 0, early)
    score, loss, step, paused = reached
    standing = f"stopped early at rung {lost}" if early else "paused at its rung" if paused else state
    value, samples = (None, None) if score is None else (score.value, score.samples)
    return SweepRow(
        trial.number, trial.run, state, standing, trial.values, value, step, early, loss, samples, lost or 0
    )


def _order(row: SweepRow, lower: bool) -> tuple[bool, float, float, float, int]:
    """Return the sort key: by score, equal ones by loss, those without a score last.

    Runs that were stopped early follow those that beat them: their scores are of fewer steps, and may be of fewer
    samples.
    """
    score = 0.0 if row.score is None else row.score if lower else -row.score
    early = -row.rung if row.stopped_early else -math.inf
    return row.score is None, early, score, math.inf if row.loss is None else row.loss, row.trial


def _progress(run: Run, plan: SweepPlan) -> tuple[Score | None, float | None, int, bool]:
    """Return the last score and loss, the last step, and True if the run only waits for the others at its rung."""
    points, result = read_recent(run, 1, bool(plan.measure)), run.result()
    scores = {name: score for name, score in scores_of(points, result).items() if math.isfinite(score.value)}
    loss = scores.get("valid.loss")
    return (
        scores.get(f"valid.{plan.measure}"),
        None if loss is None else loss.value,
        max((point.step for point in points), default=0),
        result is not None and is_paused(result),
    )


def rungs_in_words(plan: SweepPlan) -> str:
    """Return what happens: `8 runs train 100 steps, the best 4 until 200 steps, the best 2 to the end`."""
    count = len(plan.trials)
    if not plan.rungs:
        return f"{counted(count, 'run')} to the end"
    sentences = [f"{counted(count, 'run')} train {Duration(plan.rungs[0].at, plan.unit)}"]
    for rung, after in zip(plan.rungs, [*plan.rungs[1:], None], strict=True):
        until = "to the end" if after is None else f"until {Duration(after.at, plan.unit)}"
        sentences.append(f"the best {rung.keep if rung.keep > 1 else 'one'} {until}")
    return ", ".join(sentences)


def as_json(table: SweepTable) -> dict[str, object]:
    best = table.best
    return {**asdict(table), "finished": table.finished, "best": None if best is None else best.run}


def find_sweep(store: Store, name: str | None) -> str | None:
    is_known = name is not None and is_name(name) and not store.exists(f"runs/{name}/job.json")
    return name if is_known and name is not None and store.exists(f"sweeps/{name}/plan.json") else None


def write_sweep_report(store: Store, table: SweepTable) -> str:
    """Put the page of a sweep into the store, and return its URL."""
    key = Sweep(store, table.name).key("report.html")
    store.put(key, sweep_page(table).encode())
    return f"{store.url}/{key}"


# Markdown.


def sweep_markdown(table: SweepTable) -> str:
    """Return the table for a pull request, a wiki or a mail. No plot."""
    lines = [f"# {plain(table.name)}", "", f"{plain(table.job)}: {plain(table.rungs)}."]
    if table.best is not None:
        lines += ["", f"Best so far: {plain(_best_in_words(table, table.best))}"]
    rows = tuple(
        (row.run, row.standing, *(row.values.get(name, "-") for name in table.parameters), f"{row.step:,}",
         table.score_of(row))
        for row in table.rows
    )  # fmt: skip
    return "\n".join([*lines, "", *table_lines(Rows(_heads(table), rows)), ""])


def _heads(table: SweepTable) -> tuple[str, ...]:
    return ("run", "state", *table.parameters, "step", table.score_head)


def _best_in_words(table: SweepTable, best: SweepRow) -> str:
    values = ", ".join(f"{name} = {value}" for name, value in best.values.items())
    score = of_samples(f"{table.measure} {show_score(best.score or 0.0)}", best.samples)
    return f"{best.run}, {score}, with {values}."


# The page.


def sweep_page(table: SweepTable) -> str:
    best = table.best
    lines = [f"<h1>{escape(table.name)}</h1>", f'<p class="dim">{escape(table.job)}: {escape(table.rungs)}.</p>']
    if best is not None:
        name, comma, values = _best_in_words(table, best).partition(",")
        lines.append(f"<p>Best so far: <b>{escape(name)}</b>{comma}{escape(values)}</p>")
    lines.append(parallel_coordinates(table))
    rows = [
        [
            escape(row.run),
            escape(row.standing),
            *(f"<code>{escape(row.values.get(name, '-'))}</code>" for name in table.parameters),
            f"{row.step:,}",
            f"<b>{escape(table.score_of(row))}</b>",
        ]
        for row in table.rows
    ]
    lines.append(f"<h2>Runs</h2>{html_table(_heads(table), rows)}")
    return page(table.name, "".join(lines), STYLE + _PLOT_STYLE)


@dataclass(frozen=True)
class CoordinateAxis:
    """A vertical axis: where each value is, from 0 at the bottom to 1, and the words beside it."""

    name: str
    places: dict[str, float]
    ticks: tuple[tuple[float, str], ...]


def axis_of(name: str, values: Sequence[str]) -> CoordinateAxis:
    """Place numbers by size, on a logarithmic scale if they span much, and everything else in the order of words."""
    distinct = list(dict.fromkeys(values))
    numbers = {value: number for value in distinct if (number := _number(value)) is not None}
    if len(numbers) < len(distinct) or not numbers:
        step = 1 / max(1, len(distinct) - 1)
        places = {value: place * step if len(distinct) > 1 else 0.5 for place, value in enumerate(distinct)}
    else:
        low, high = min(numbers.values()), max(numbers.values())
        scale = math.log if low > 0 and high / low >= _LOGARITHMIC else float
        width = scale(high) - scale(low)
        places = {value: (scale(number) - scale(low)) / width if width else 0.5 for value, number in numbers.items()}
    ordered = sorted(places.items(), key=lambda item: item[1])
    shown = ordered if len(ordered) <= 6 else [ordered[0], ordered[len(ordered) // 2], ordered[-1]]
    return CoordinateAxis(name, places, tuple((place, value) for value, place in shown))


def _number(text: str) -> float | None:
    """Return the number of a value with or without a unit; None if it is a word."""
    try:
        number = float(text.split(maxsplit=1)[0].replace("_", "")) if text.split() else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def parallel_coordinates(table: SweepTable) -> str:
    """Draw a line for each run through its values and its score; better runs are bluer, the best is bold."""
    scored = [row for row in table.rows if row.score is not None]
    if not scored or not table.parameters:
        return ""
    axes = [axis_of(name, [row.values.get(name, "-") for row in table.rows]) for name in table.parameters]
    texts = {row.run: show_score(row.score or 0.0) for row in scored}
    score_axis = axis_of(table.measure, list(texts.values()))
    if table.lower:  # the better end is always at the top
        score_axis = CoordinateAxis(
            score_axis.name,
            {value: 1 - place for value, place in score_axis.places.items()},
            tuple((1 - place, text) for place, text in score_axis.ticks),
        )
    every = [*axes, score_axis]
    across = [_LEFT + number * (_WIDTH - _LEFT - _RIGHT) / max(1, len(every) - 1) for number in range(len(every))]
    elements = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="values and scores of all runs">']
    best = table.best
    for row in reversed(scored):  # the best one last, on top of the others
        values = [*(row.values.get(name, "-") for name in table.parameters), texts[row.run]]
        places = [axis.places[value] for axis, value in zip(every, values, strict=True)]
        line = " ".join(f"{x:.1f},{_down(place):.1f}" for x, place in zip(across, places, strict=True))
        kind = "best" if best is not None and row.run == best.run else "early" if row.stopped_early else ""
        hue = 25 + 190 * places[-1]
        title = ", ".join(f"{name} {value}" for name, value in row.values.items())
        elements.append(
            f'<polyline class="run {kind}" stroke="hsl({hue:.0f} 75% 50%)" points="{line}">'
            f"<title>{escape(row.run)}: {escape(title)}; {escape(table.measure)} {texts[row.run]}</title></polyline>"
        )
    for x, axis in zip(across, every, strict=True):
        anchor = "start" if x <= _LEFT else "middle"  # the name of the first one would not fit to its left
        name = axis.name if len(axis.name) <= 2 * _MAX_TEXT else f"...{axis.name[-2 * _MAX_TEXT + 3 :]}"
        elements += [
            f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>',
            f'<text class="name" x="{x:.1f}" y="{_TOP - 16}" text-anchor="{anchor}">{escape(name)}</text>',
        ]
        for place, text in axis.ticks:
            short = text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."
            elements.append(
                f'<text class="tick axis-text" x="{x + 6:.1f}" y="{_down(place) + 4:.1f}">{escape(short)}</text>'
            )
    return f'<figure class="plot"><figcaption>one line per run</figcaption>{"".join(elements)}</svg></figure>'


def _down(place: float) -> float:
    return _HEIGHT - _BOTTOM - place * (_HEIGHT - _TOP - _BOTTOM)
