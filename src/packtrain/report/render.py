"""The report: one page that stands alone, with no script and nothing to fetch. All text is escaped."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from html import escape

from packtrain.job.job import Job
from packtrain.report.goodput import ORDER, Goodput, RankTime
from packtrain.report.page import Series, line_chart, page
from packtrain.report.summary import Summary, step_seconds
from packtrain.run.records import Event, Point, Sample
from packtrain.units import show_count, show_seconds

_STYLE = """
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; } td, th { padding: .3rem .8rem .3rem 0; }
.cards { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1.25rem 0; }
.card { border: 1px solid var(--line); border-radius: 8px; padding: .6rem .9rem; min-width: 8rem; }
.card b { display: block; font-size: 1.35rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 1rem; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 8px; padding: .6rem; }
.line { fill: none; stroke-width: 1.6; stroke: currentColor; } .dot { fill: currentColor; }
.s0 { color: var(--s0); } .s1 { color: var(--s1); } .s2 { color: var(--s2); } .s3 { color: var(--s3); }
.key { margin-right: .8rem; display: inline-block; } figcaption .key { margin: 0 0 0 .8rem; }
.key::before { content: "\\25CF  "; opacity: var(--shade, 1); } .said { color: var(--ink); }
.bar { display: flex; height: 1.4rem; border-radius: 6px; overflow: hidden; } .bar span { background: currentColor; }
code, pre { font: 13px/1.5 ui-monospace, monospace; }
pre { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; padding: .8rem; }
.state-finished { color: var(--s2); } .state-failed { color: var(--s1); } .warning td { color: var(--s1); }
.when { white-space: nowrap; }
"""
_SHOWN_EVENTS, _SHOWN_RANKS = 200, 64


def render(job: Job, summary: Summary, points: Sequence[Point], events: Sequence[Event]) -> str:
    samples = next((point.samples for point in reversed(points) if point.samples), ())
    body = [
        f"<h1>{escape(summary.run)}</h1>",
        f'<p><b class="state-{summary.state}">{summary.state}</b> {escape(_reason(summary))}</p>',
        f'<p class="dim">{escape(summary.what)}</p>',
        _cards(summary),
        _signatures(summary),
        _charts(points, summary.unit),
        _time_spent(summary.goodput),
        _samples(samples),
        _events(events),
        f"<h2>Job</h2><pre>{escape(json.dumps(job.model_dump(mode='json'), indent=2))}</pre>",
    ]
    return page(summary.run, "".join(body), _STYLE)


def _reason(summary: Summary) -> str:
    return f"- {summary.reason}" if summary.reason else ""


def _cards(summary: Summary) -> str:
    cards = [(name.replace(".", " "), f"{value:.2f}") for name, value in summary.scores.items()]
    counted = "step" if summary.unit else "commit"  # nobody sees the steps of a program
    cards += [(_several(counted, summary.step), show_count(summary.step)), ("time", show_seconds(summary.seconds))]
    if summary.units_per_second is not None:
        cards.append((f"{summary.unit} a second", show_count(summary.units_per_second)))
    cards.append((_several("attempt", summary.generations), show_count(summary.generations)))
    boxes = "".join(f'<div class="card"><b>{escape(value)}</b>{escape(name)}</div>' for name, value in cards)
    return f'<div class="cards">{boxes}</div>'


def _several(noun: str, number: int) -> str:
    return noun if number == 1 else f"{noun}s"


def _signatures(summary: Summary) -> str:
    return "".join(
        f'<p class="dim">{escape(name)}: <code>{escape(text)}</code></p>' for name, text in summary.signatures.items()
    )


def _charts(points: Sequence[Point], unit: str) -> str:
    steps = [point for point in points if point.kind == "train"]
    valid = [point for point in points if point.kind == "valid"]
    measures = sorted(
        {name for point in valid for name in point.values if name != "loss" and not name.endswith("_seconds")}
    )
    charts = [
        line_chart("loss", [_series("training", steps, "loss"), _series("validation", valid, "loss", True)]),
        *(line_chart(f"validation {name}", [_series(name, valid, name, True)]) for name in measures),
        line_chart("learning rate", [_series("rate", steps, "rate")]),
        line_chart("gradient norm", [_series("norm", steps, "gradient_norm")]),
    ]
    if unit:
        speeds = [(float(one.step), one.values[unit] / step_seconds(one)) for one in steps if step_seconds(one) > 0]
        charts.append(line_chart(f"{unit} a second", [Series(unit, speeds)]))
    return f'<h2>Training</h2><div class="charts">{"".join(charts)}</div>' if any(charts) else ""


def _series(name: str, points: Sequence[Point], value: str, marked: bool = False) -> Series:
    return Series(name, [(float(one.step), one.values[value]) for one in points if value in one.values], marked)


def _time_spent(times: Goodput) -> str:
    if not times.seconds:
        return ""
    bars, rows = [], []
    parts = [(words, times.parts[name]) for name, words in ORDER.items() if times.parts.get(name)]
    for number, (words, seconds) in enumerate(parts):
        share, shade = seconds / times.seconds, 1 - (number // 4) * 0.25
        text = f"{words}: {show_seconds(seconds)}, {share:.1%}"
        bars.append(
            f'<span class="s{number % 4}" style="width:{100 * share:.2f}%;opacity:{shade:.2f}"'
            f' title="{escape(text)}"></span>'
        )
        rows.append(
            f'<span class="key s{number % 4}" style="--shade:{shade:.2f}"><span class=said>{escape(text)}</span></span>'
        )
    said = f"{times.fraction:.1%} of {show_seconds(times.seconds)} went into steps that the model has kept."
    return (
        f'<h2>Where the time went</h2><p>{said}</p><div class="bar">{"".join(bars)}</div><p>{"".join(rows)}</p>'
        + _ranks(times.ranks)
    )


def _ranks(ranks: Sequence[RankTime]) -> str:
    """Each rank's time, side by side: who waits for whom."""
    if len(ranks) < 2:
        return ""
    spans = [span for span in ORDER if any(one.seconds.get(span) for one in ranks)]
    head = "".join(f"<th>{escape(span)}</th>" for span in spans)
    rows = "".join(
        f"<tr><td>{one.rank}</td>"
        + "".join(f"<td>{one.seconds.get(span, 0.0) / sum(one.seconds.values()):.1%}</td>" for span in spans)
        + "</tr>"
        for one in ranks[:_SHOWN_RANKS]
    )
    left_out = f"<p class=dim>the first {_SHOWN_RANKS} of {len(ranks):,} ranks</p>" if len(ranks) > _SHOWN_RANKS else ""
    return f"{left_out}<table><tr><th>rank</th>{head}</tr>{rows}</table>"


def _samples(samples: Iterable[Sample]) -> str:
    rows = "".join(
        f"<tr><td>{escape(one.input)}</td><td>{escape(one.output)}</td><td>{escape(one.wanted)}</td></tr>"
        for one in samples
    )
    head = "<tr><th>input</th><th>the model</th><th>wanted</th></tr>"
    return f"<h2>Samples</h2><table>{head}{rows}</table>" if rows else ""


def _events(events: Sequence[Event]) -> str:
    shown = events[-_SHOWN_EVENTS:]
    rows = "".join(
        f'<tr class="{"warning" if one.display == "warning" else ""}">'
        f"<td class=when>{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(one.time))}</td>"
        f"<td>{escape(one.kind)}</td><td>{escape(one.text)}</td></tr>"
        for one in shown
    )
    left_out = f"<p class=dim>the last {_SHOWN_EVENTS} of {len(events):,}</p>" if len(events) > len(shown) else ""
    return f"<h2>What happened (UTC)</h2>{left_out}<table>{rows}</table>" if rows else ""
