"""A comparison of runs as text for a terminal or a pipe, and as one HTML page. All text in the page is escaped."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from itertools import takewhile

from packtrain.observe.columns import thinned
from packtrain.observe.measure import Score, of_samples
from packtrain.observe.spans import LABELS
from packtrain.report.compare import (
    ComparedRun,
    Curve,
    RunComparison,
    ScoreGap,
    SpeedUp,
    show_step,
    units_per_second,
)
from packtrain.report.page import MAX_POINTS, Series, escape, html_table, line_chart, nice_ticks, page, style_sheet
from packtrain.units import show_score, show_seconds, show_speed

_CHART_WIDTH, _CHART_HEIGHT = 80, 12
_SHORT = 20  # characters of what values share that stay before what differs

STYLE = style_sheet("compare.css")
"""The style of pages about several runs: as the report has it, with more colors."""


# Text.


def text_lines(comparison: RunComparison, width: int) -> list[str]:
    """Return the comparison as lines for that many columns. Only values of the jobs are cut to them."""
    lines = [*_run_lines(comparison.runs, width), "", *_field_lines(comparison, width)]
    for speed in comparison.speeds:
        lines += ["", f"Speed: {speed.other} against {speed.base}"]
        lines += [line for sentence in speed.sentences for line in _wrapped(sentence, "  ", width)]
        if speed.factor is not None:
            table = _table(["", speed.base, speed.other, "saved", "all else"], _speed_rows(speed))
            lines += [f"  {line}" for line in table]
    if comparison.gaps:
        lines += ["", "Scores"]
    for gap in comparison.gaps:
        values = f"{gap.base} {show_score(gap.base_value)}  {gap.other} {show_score(gap.other_value)}"
        lines.append(f"  {gap.title:<14}  {values}  {gap_words(gap)}")
        lines += _wrapped(gap.decided, "    ", width)
    if comparison.reached is not None:
        times = (
            f"{run.letter} {show_seconds(seconds)} (step {step:,})"
            for run, seconds, step in zip(
                comparison.runs, comparison.reached.seconds, comparison.reached.steps, strict=True
            )
        )
        named = comparison.reached.score.replace(".", " ")
        lines += [
            "",
            *_wrapped(f"Time to {named} {show_score(comparison.reached.value)}: {', '.join(times)}", "", width),
        ]
    for curve in comparison.curves[:2]:
        lines += ["", *text_chart(curve, [run.letter for run in comparison.runs], min(width, _CHART_WIDTH))]
    return lines


def _run_lines(runs: Sequence[ComparedRun], width: int) -> list[str]:
    """Return the table of runs, or two if one is too wide. What all speeds or scores have in common is in the head."""
    speeds = [_speed(run) for run in runs]
    units = {speed.rpartition(" ")[2] for speed in speeds if speed}
    scored = [run.score for run in runs if run.score is not None]
    titles, counts = {score.title for score in scored}, {score.samples for score in scored}
    if len(units) == 1:
        speeds = [speed.rpartition(" ")[0] for speed in speeds]
    scores = ["" if run.score is None else _score_cell(run.score, len(titles) == 1, len(counts) == 1) for run in runs]
    speed, score = units.pop() if len(units) == 1 else "speed", "score"
    if len(titles) == 1:
        score = of_samples(titles.pop(), counts.pop() if len(counts) == 1 else None)
    heads = ["", "run", "state", "step", "time", "workers"]
    rows = [
        [run.letter, run.name, run.state, f"{run.step:,}", show_seconds(run.seconds), str(run.workers)] for run in runs
    ]
    results = [[*shown] for shown in zip(speeds, scores, strict=True)]
    lines = _table([*heads, speed, score], [row + shown for row, shown in zip(rows, results, strict=True)])
    if max(map(len, lines)) <= width:
        return lines
    score_rows = [[run.letter, *shown] for run, shown in zip(runs, results, strict=True)]
    return [*_table(heads, rows), "", *_table(["", speed, score], score_rows)]


def _score_cell(score: Score, has_title: bool, has_samples: bool) -> str:
    """Return a score, without what the head of its column says; `Scores` below has everything."""
    title = "" if has_title else f"{score.title} "
    samples = "" if has_samples or score.samples is None or not has_title else f" of {score.samples:,}"
    return f"{title}{show_score(score.value)}{samples}"


def _field_lines(comparison: RunComparison, width: int) -> list[str]:
    if not comparison.fields:
        return ["The jobs are the same."]
    lines = ["What differs"]
    column = min(32, max(len(row.field) for row in comparison.fields))
    room = width - len("    A ")
    for row in comparison.fields:
        shown = _from_difference(row.values, room)
        cut = [value if len(value) <= room else f"{value[: room - 3]}..." for value in shown]
        values = [f"{run.letter} {value}" for run, value in zip(comparison.runs, cut, strict=True)]
        line = f"  {row.field:<{column}}  {'  '.join(values)}"
        lines += [line] if len(line) <= width else [f"  {row.field}", *(f"    {value}" for value in values)]
    return lines


def _from_difference(values: Sequence[str], room: int) -> list[str]:
    """Return values that are too long without the start that all of them share: what differs must be seen."""
    shared = takewhile(lambda characters: len(set(characters)) == 1, zip(*values, strict=False))
    start = len(list(shared)) - _SHORT
    if start <= 3 or max(map(len, values)) <= room:
        return list(values)
    return [f"...{value[start:]}" for value in values]


def _speed_rows(speed: SpeedUp) -> list[list[str]]:
    """Return the terms of a step as rows; the last one is the whole step."""

    def row(label: str, base: float, peer: float, without: float | None) -> list[str]:
        saved = show_step(base - peer) if base >= peer else f"-{show_step(peer - base)}"
        return [label, show_step(base), show_step(peer), saved, "" if without is None else f"{without:.2f} x"]

    rows = [row(term.label, term.base, term.other, term.without) for term in speed.terms]
    return [*rows, row("a step", speed.base_seconds, speed.other_seconds, None)]


def gap_words(gap: ScoreGap) -> str:
    """Return the verdict in words: `B is better by 1.20 (noise: 0.44)`."""
    noise = "" if gap.noise is None else f" (noise: {show_score(gap.noise)})"
    apart = show_score(abs(gap.other_value - gap.base_value))
    if gap.verdict == "unknown":
        return "cannot tell"
    if gap.verdict == "within noise":
        return f"{apart} apart, within the noise{noise}"
    return f"{gap.better} is better by {apart}{noise}"


def text_chart(curve: Curve, letters: Sequence[str], columns: int = _CHART_WIDTH) -> list[str]:
    """Draw a curve of each run with its letter; where runs meet, the last one is seen."""
    lines = [[(x, y) for x, y in thinned(line, MAX_POINTS) if math.isfinite(y)] for line in curve.lines]
    points = [point for line in lines for point in line]
    if not points:
        return []
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    ticks = nice_ticks(min(y for _, y in points), max(y for _, y in points), 4)
    margin = max(len(f"{tick:g}") for tick in ticks) + 2
    width = columns - margin - 2
    grid = [[" "] * width for _ in range(_CHART_HEIGHT)]
    for letter, line in zip(letters, lines, strict=True):
        for x, y in line:
            across = round((x - x_low) / ((x_high - x_low) or 1) * (width - 1))
            up = round((y - ticks[0]) / ((ticks[-1] - ticks[0]) or 1) * (_CHART_HEIGHT - 1))
            grid[_CHART_HEIGHT - 1 - up][across] = letter
    labels = {
        _CHART_HEIGHT - 1 - round((tick - ticks[0]) / ((ticks[-1] - ticks[0]) or 1) * (_CHART_HEIGHT - 1)): f"{tick:g}"
        for tick in ticks
    }
    drawn = [f"{labels.get(row, ''):>{margin}} |{''.join(cells)}".rstrip() for row, cells in enumerate(grid)]
    axis = f"{'step':>{margin}} {x_low:<{width - 10},.0f}{x_high:>10,.0f}"
    return [curve.name.replace(".", " "), *drawn, axis]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table as lines: the first columns to the left, numbers to the right;"""
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    lines = []
    for row in [heads, *rows]:
        cells = [
            f"{cell:>{width}}" if any(row[column][:1].isdigit() for row in rows) and column else f"{cell:<{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _wrapped(text: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _speed(run: ComparedRun) -> str:
    speed = units_per_second(run)
    return "" if speed is None else f"{show_speed(speed)} {run.unit}/s"


# The page.


def compare_page(comparison: RunComparison) -> str:
    title = (
        " and ".join(run.name for run in comparison.runs)
        if len(comparison.runs) < 4
        else f"{len(comparison.runs)} runs"
    )
    run_rows = [
        [
            _named(comparison, run.letter), escape(run.name), escape(run.state), f"{run.step:,}",
            show_seconds(run.seconds), str(run.machines), str(run.workers), escape(_speed(run)),
            "" if run.score is None else escape(f"{run.score.title} {run.score.text}"),
        ]
        for run in comparison.runs
    ]  # fmt: skip
    field_rows = [
        [f"<code>{escape(row.field)}</code>", *(f"<code>{escape(value)}</code>" for value in row.values)]
        for row in comparison.fields
    ]
    fields = "<h2>Jobs</h2><p>The jobs are the same.</p>"
    if field_rows:
        table = html_table(["field", *(run.letter for run in comparison.runs)], field_rows)
        fields = f"<h2>What differs in the jobs</h2>{table}"
    spans = [span for span in LABELS if any(run.goodput.parts.get(span) for run in comparison.runs)]
    time_rows = [
        [escape(LABELS[span]), *(show_seconds(run.goodput.parts.get(span, 0.0)) for run in comparison.runs)]
        for span in spans
    ]
    time_rows.append(["<b>all</b>", *(show_seconds(run.goodput.seconds) for run in comparison.runs)])
    times = html_table(["", *(run.letter for run in comparison.runs)], time_rows)
    sections = [
        f"<h1>{escape(title)}</h1>",
        html_table(["", "run", "state", "step", "time", "machines", "workers", "speed", "score"], run_rows),
        _scores_section(comparison),
        "".join(_speed_section(comparison, speed) for speed in comparison.speeds),
        fields,
        _curves_section(comparison),
        f"<h2>Time of the whole run</h2>{times}" if spans else "",
    ]
    return page(title, "".join(sections), STYLE)


def _named(comparison: RunComparison, letter: str) -> str:
    place = next(place for place, run in enumerate(comparison.runs) if run.letter == letter)
    return f'<b class="s{place}">{escape(letter)}</b>'


def _scores_section(comparison: RunComparison) -> str:
    if not comparison.gaps:
        return ""
    rows = [
        [
            escape(gap.title),
            f'<span class="value">{_named(comparison, gap.base)} {show_score(gap.base_value)}</span>',
            f'<span class="value">{_named(comparison, gap.other)} {show_score(gap.other_value)}</span>',
            f"<b>{escape(gap_words(gap))}</b>",
            escape(gap.decided),
        ]
        for gap in comparison.gaps
    ]
    reached = ""
    if comparison.reached is not None:
        times = ", ".join(
            f"{_named(comparison, run.letter)} {show_seconds(seconds)}"
            for run, seconds in zip(comparison.runs, comparison.reached.seconds, strict=True)
        )
        score = f"{escape(comparison.reached.score.replace('.', ' '))} {show_score(comparison.reached.value)}"
        reached = f"<p>Training time to {score}, which all of them reached: {times}.</p>"
    return f"<h2>Scores</h2>{html_table(['score', '', '', 'verdict', 'decided by'], rows)}{reached}"


def _speed_section(comparison: RunComparison, speed: SpeedUp) -> str:
    head = f"<h2>Speed of {escape(speed.other)} against {escape(speed.base)}</h2>"
    text = "".join(f"<p>{escape(sentence)}</p>" for sentence in speed.sentences)
    if speed.factor is None:
        return head + text
    longest = max(speed.base_seconds, speed.other_seconds)
    bars = ""
    for letter, side in ((speed.base, "base"), (speed.other, "other")):
        segments = "".join(
            f'<span class="s{number}" style="width:{100 * getattr(term, side) / longest:.2f}%" '
            f'title="{escape(term.label)}: {show_step(getattr(term, side))}"></span>'
            for number, term in enumerate(speed.terms)
        )
        bars += f'<p>{_named(comparison, letter)}</p><div class="bar">{segments}</div>'
    keys = "".join(
        f'<span class="key s{number}"><span class="label">{escape(term.label)}</span></span>'
        for number, term in enumerate(speed.terms)
    )
    rows = [[escape(label), *cells] for label, *cells in _speed_rows(speed)]
    rows[-1][0] = f"<b>{rows[-1][0]}</b>"
    return f"{head}{text}{bars}<p>{keys}</p>{html_table(['', speed.base, speed.other, 'saved', 'all else'], rows)}"


def _curves_section(comparison: RunComparison) -> str:
    charts = "".join(
        line_chart(
            curve.name.replace(".", " "),
            [
                # With its number: a color means the same run in every chart, also if another has no points.
                Series(f"{run.letter} {run.name}", line, curve.marked, place)
                for place, (run, line) in enumerate(zip(comparison.runs, curve.lines, strict=True))
            ],
        )
        for curve in comparison.curves
    )
    return f'<h2>Curves</h2><div class="charts">{charts}</div>' if charts else ""
