"""HTML pages that stand alone, and the line charts in them.

A page has no script and fetches nothing; charts are SVG text. Both look the same in every browser and in a mail, in
light and in dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The content security policy of a page: it may load nothing."""
WIDTH, HEIGHT = 560, 240
"""The size of a chart's view box."""

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --dim: #66727f; --paper: #fff; --line: #e3e8ee; --shade: #f3f5f8;
  --s0: #2a6fdb; --s1: #bd4d14; --s2: #1f7a4d; --s3: #8e4bab; }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #e6ebf0; --dim: #93a0ad; --paper: #14191f;
  --line: #2b343d;  --shade: #1d242c; --s0: #6aa5ff; --s1: #ff9a66; --s2: #5fd19c; --s3: #c58be0; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1180px;
  margin: 2rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.6rem; margin: 0; } p { margin: .25rem 0; } .dim, figcaption, th { color: var(--dim); }
table { border-collapse: collapse; width: 100%; } th { font-weight: normal; }
td, th { text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
figcaption { font-size: .85rem; } svg { width: 100%; height: auto; display: block; }
.grid { stroke: var(--line); } .mark { stroke: var(--dim); stroke-dasharray: 3 3; }
.tick { font-size: 11px; fill: var(--dim); }
.line { fill: none; stroke-width: 1.6; stroke: currentColor; } .dot { fill: currentColor; }
.s0 { color: var(--s0); } .s1 { color: var(--s1); } .s2 { color: var(--s2); } .s3 { color: var(--s3); }
.key { margin-right: .8rem; display: inline-block; } figcaption .key { margin: 0 0 0 .8rem; }
.key::before { content: "\\25CF  "; opacity: var(--fade, 1); }
"""
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 14, 30  # margins of a chart
_MAX_POINTS = 300
_MIN_TICK = 1e-300  # below it, floats run out of digits


def page(title: str, body: str, extra_style: str, policy: str = POLICY) -> str:
    """Return a whole page. `body` is HTML already; `extra_style` overrides the style of all pages."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{escape(title)} - Packtrain</title><style>{_STYLE}{extra_style}</style></head>"
        f"<body>{body}</body></html>\n"
    )


@dataclass(frozen=True)
class Series:
    """A line of a chart; `marked` puts a dot on each point, for series that have few.

    `color` is the number of its color; None is its place among the lines that are drawn.
    """

    name: str
    points: Sequence[tuple[float, float]]
    marked: bool = False
    color: int | None = None


def line_chart(
    title: str, series: Sequence[Series], x_label: str = "step", marks: Sequence[tuple[float, str]] = ()
) -> str:
    """Draw all series over common axes; return an empty string if there is no finite point to draw.

    `marks` are named places on the x axis, drawn as dashed lines.
    """
    finite = [replace(one, points=[(x, y) for x, y in one.points if math.isfinite(y)]) for one in series]
    drawn = [one for one in finite if one.points]  # a run that has just started has no evaluations
    if not drawn:
        return ""
    lines = [thin(one.points) for one in drawn]  # a page of a million steps stays small
    xs = [x for line in lines for x, _ in line]
    ys = [y for line in lines for _, y in line]
    x_low, x_high = min(xs), max(xs)
    y_ticks = nice_ticks(min(ys), max(ys))
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / ((x_high - x_low) or 1)  # a single point has no range
        up = (y - y_low) / ((y_high - y_low) or 1)
        return (
            round(_LEFT + across * (WIDTH - _LEFT - _RIGHT), 1),
            round(HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM), 1),
        )

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for tick in y_ticks:
        _, y = place(x_low, tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{tick:,g}</text>')
    for tick in nice_ticks(x_low, x_high):
        if x_low <= tick <= x_high:
            x, _ = place(tick, y_low)
            parts.append(f'<text class="tick" x="{x}" y="{HEIGHT - 12}" text-anchor="middle">{tick:,g}</text>')
    parts.append(f'<text class="tick" x="2" y="{HEIGHT - 12}">{escape(x_label)}</text>')
    for x_mark, name in marks:
        if x_low <= x_mark <= x_high:
            x, _ = place(x_mark, y_low)
            # Its name beside it, on the side that has room.
            anchor, beside = ("end", x - 4) if x > WIDTH / 2 else ("start", x + 4)
            parts.append(f'<line class="mark" x1="{x}" x2="{x}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>')
            parts.append(f'<text class="tick" x="{beside}" y="{_TOP + 9}" text-anchor="{anchor}">{escape(name)}</text>')
    colors = [place if one.color is None else one.color for place, one in enumerate(drawn)]
    for number, one, points in zip(colors, drawn, lines, strict=True):
        places = [place(x, y) for x, y in points]
        line = " ".join(f"{across},{down}" for across, down in places)
        parts.append(f'<polyline class="line s{number}" points="{line}"/>')
        if one.marked:
            parts += [
                f'<circle class="dot s{number}" cx="{across}" cy="{down}" r="3">'
                f"<title>{escape(x_label)} {x:,g}: {_number(y)}</title></circle>"
                for (across, down), (x, y) in zip(places, points, strict=True)
            ]
    parts.append("</svg>")
    legend = "".join(
        f'<span class="key s{number}">{escape(one.name)} <b>{_number(one.points[-1][1])}</b></span>'
        for number, one in zip(colors, drawn, strict=True)
    )
    return f"<figure><figcaption>{escape(title)} {legend}</figcaption>{''.join(parts)}</figure>"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return a few hundred points at most: the means of equal runs of neighbors, and both ends unchanged."""
    if len(points) <= _MAX_POINTS:
        return list(points)
    edges = [round(number * len(points) / _MAX_POINTS) for number in range(_MAX_POINTS + 1)]
    means = []
    for start, end in pairwise(edges):
        part = points[start:end]
        means.append((sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)))
    return [points[0], *means, points[-1]]


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers, from at most `low` to at least `high`."""
    if high <= low:
        low, high = low - (abs(low) / 10 or 1), high + (abs(high) / 10 or 1)
    raw = max(high / count - low / count, _MIN_TICK)  # dividing first: the difference may overflow
    exponent = math.floor(math.log10(raw))
    power = 10.0**exponent
    step = next((factor * power for factor in (1, 2, 2.5, 5) if factor * power >= raw), 10 * power)
    first, last = math.floor(low / step), math.ceil(high / step)
    # Rounded, because products such as 3 * 0.1 = 0.30000000000000004 are hard to read.
    return [round(number * step, 2 - exponent) for number in range(first, last + 1)]
