"""The report of a run as one HTML page. All text in it is escaped."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from html import escape

from packtrain.job import Job
from packtrain.report.goodput import LABELS, Goodput, RankTime
from packtrain.report.page import Series, line_chart, page
from packtrain.report.summary import Summary, step_seconds
from packtrain.run.records import Event, Point
from packtrain.units import show_count, show_dollars, show_seconds

_STYLE = """
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; } td, th { padding: .3rem .8rem .3rem 0; }
.cards { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1.25rem 0; }
.card { border: 1px solid var(--line); border-radius: 8px; padding: .6rem .9rem; min-width: 8rem; }
.card b { display: block; font-size: 1.35rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 1rem; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 8px; padding: .6rem; }
.bar { display: flex; height: 1.4rem; border-radius: 6px; overflow: hidden; } .bar span { background: currentColor; }
.label { color: var(--ink); } .time { white-space: nowrap; } .warning td { color: var(--s1); }
.state-finished { color: var(--s2); } .state-failed { color: var(--s1); }
code, pre { font: 13px/1.5 ui-monospace, monospace; }
pre { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; padding: .8rem; }
"""
_MAX_EVENTS, _MAX_RANKS = 200, 64  # a run of weeks on hundreds of ranks must still be a page that opens


def render(job: Job, summary: Summary, points: Sequence[Point], events: Sequence[Event]) -> str:
    sections = [
        f"<h1>{escape(summary.run)}</h1>",
        f'<p><b class="state-{summary.state}">{escape(summary.outcome)}</b></p>',
        f'<p class="dim">{escape(summary.description)}</p>',
        _cards(summary),
        *(f'<p class="dim">{escape(name)}: <code>{escape(one)}</code></p>' for name, one in summary.signatures.items()),
        _charts(points, summary.unit),
        _time(summary.goodput),
        _samples(points),
        _events(events),
        f"<h2>Job</h2><pre>{escape(json.dumps(job.model_dump(mode='json'), indent=2))}</pre>",
    ]
    # Names, texts and the job come from users: every piece above escapes them.
    return page(summary.run, "".join(sections), _STYLE)


def _cards(summary: Summary) -> str:
    cards = [(name.replace(".", " "), f"{value:.2f}") for name, value in summary.scores.items()]
    # A program does not report its steps; only its commits are known.
    for noun, count in (("step" if summary.unit else "commit", summary.step), ("generation", summary.generations)):
        cards.append((noun if count == 1 else f"{noun}s", show_count(count)))
    cards.append(("time", show_seconds(summary.seconds)))
    if summary.cost is not None:
        cards.append(("cost so far" if summary.cost.per_hour else "cost", show_dollars(summary.cost.so_far)))
        if summary.cost.expected is not None:
            cards.append(("cost expected", show_dollars(summary.cost.expected)))
    if summary.units_per_second is not None:
        cards.append((f"{summary.unit}/s", show_count(summary.units_per_second)))
    boxes = "".join(f'<div class="card"><b>{escape(value)}</b>{escape(name)}</div>' for name, value in cards)
    return f'<div class="cards">{boxes}</div>'


def _charts(points: Sequence[Point], unit: str) -> str:
    steps = [point for point in points if point.kind == "train"]
    valid = [point for point in points if point.kind == "valid"]
    # Every score of a recipe gets a chart; the loss has one together with that of training.
    measures = sorted(
        {name for point in valid for name in point.values if name != "loss" and not name.endswith("_seconds")}
    )

    def series(name: str, points: Sequence[Point], value: str, marked: bool = False) -> Series:
        return Series(name, [(float(one.step), one.values[value]) for one in points if value in one.values], marked)

    charts = [
        line_chart("loss", [series("training", steps, "loss"), series("validation", valid, "loss", True)]),
        *(line_chart(f"validation {name}", [series(name, valid, name, True)]) for name in measures),
        line_chart("learning rate", [series("learning rate", steps, "rate")]),
        line_chart("gradient norm", [series("norm", steps, "gradient_norm")]),
    ]
    if unit:
        speeds = [
            (float(one.step), one.values.get(unit, 0.0) / step_seconds(one)) for one in steps if step_seconds(one) > 0
        ]
        charts.append(line_chart(f"{unit}/s", [Series(unit, speeds)]))
    return f'<h2>Training</h2><div class="charts">{"".join(charts)}</div>' if any(charts) else ""


def _time(times: Goodput) -> str:
    if not times.seconds:
        return ""
    bars, keys = [], []
    parts = [(label, times.parts[name]) for name, label in LABELS.items() if times.parts.get(name)]
    for number, (label, seconds) in enumerate(parts):
        # Four colors, and paler ones after the first four parts.
        color, fade, share = f"s{number % 4}", 1 - (number // 4) * 0.25, seconds / times.seconds
        text = escape(f"{label}: {show_seconds(seconds)}, {share:.1%}")
        bars.append(f'<span class="{color}" style="width:{100 * share:.2f}%;opacity:{fade:.2f}" title="{text}"></span>')
        keys.append(f'<span class="key {color}" style="--fade:{fade:.2f}"><span class=label>{text}</span></span>')
    return (
        "<h2>Where the time went</h2>"
        f"<p>{times.fraction:.1%} of {show_seconds(times.seconds)} went into steps that counted.</p>"
        f'<div class="bar">{"".join(bars)}</div><p>{"".join(keys)}</p>{_ranks(times.ranks)}'
    )


def _ranks(ranks: Sequence[RankTime]) -> str:
    """Show the ranks side by side, so that a reader sees which of them waits for the others."""
    if len(ranks) < 2:
        return ""
    spans = [span for span in LABELS if any(one.seconds.get(span) for one in ranks)]
    rows = "".join(
        f"<tr><td>{one.rank}</td>"
        + "".join(f"<td>{one.seconds.get(span, 0.0) / sum(one.seconds.values()):.1%}</td>" for span in spans)
        + "</tr>"
        for one in ranks[:_MAX_RANKS]
    )
    cut = f"<p class=dim>first {_MAX_RANKS} of {len(ranks):,} ranks</p>" if len(ranks) > _MAX_RANKS else ""
    return cut + _table(["rank", *(LABELS[span] for span in spans)], rows)


def _samples(points: Sequence[Point]) -> str:
    """Show the newest samples."""
    rows = "".join(
        f"<tr><td>{escape(one.input)}</td><td>{escape(one.prediction)}</td><td>{escape(one.reference)}</td></tr>"
        for one in next((point.samples for point in reversed(points) if point.samples), ())
    )
    return f"<h2>Samples</h2>{_table(['input', 'prediction', 'reference'], rows)}" if rows else ""


def _events(events: Sequence[Event]) -> str:
    rows = "".join(
        f'<tr class="{"warning" if one.display == "warning" else ""}">'
        f"<td class=time>{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(one.time))}</td>"
        f"<td>{escape(one.kind)}</td><td>{escape(one.text)}</td></tr>"
        for one in events[-_MAX_EVENTS:]
    )
    cut = f"<p class=dim>last {_MAX_EVENTS} of {len(events):,}</p>" if len(events) > _MAX_EVENTS else ""
    return f"<h2>Events (UTC)</h2>{cut}{_table([], rows)}" if rows else ""


def _table(heads: Sequence[str], rows: str) -> str:
    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    return f"<table>{f'<tr>{head}</tr>' if head else ''}{rows}</table>"
