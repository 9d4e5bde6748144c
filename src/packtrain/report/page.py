"""HTML pages that stand alone, and the line charts in them.

A page has no script and fetches nothing; charts are SVG text. Both look the same in every browser and in a mail, in
light and in dark mode.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packtrain.errors import harmless
from packtrain.observe.columns import thinned
from packtrain.observe.spans import COLORS

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The content security policy of a page: it may load nothing."""
WIDTH, HEIGHT = 560, 240
"""The size of a chart's view box."""


def style_sheet(name: str) -> str:
    """Return a file beside this module, on lines of its own in the page."""
    return "\n" + Path(__file__).with_name(name).read_text("utf-8")


_STYLE = style_sheet("page.css")
_LIGHT = "".join(f" --{name}: {light};" for name, (light, _) in COLORS.items())
_DARK = "".join(f" --{name}: {dark};" for name, (_, dark) in COLORS.items())
_COLORS = (
    f":root {{{_LIGHT} }}\n@media screen and (prefers-color-scheme: dark) {{ :root {{{_DARK} }} }}\n"
    + "".join(f".{name} {{ color: var(--{name}); }}\n" for name in COLORS)
)  # fmt: skip
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 14, 30  # margins of a chart
MAX_POINTS = 300
"""Of a line: more than a chart has pixels to tell apart."""
TEXT_LENGTH = 600  # characters of a text that are shown
_SHORT = 20  # characters of a cell that does not wrap
_MIN_TICK = 1e-300  # below it, floats run out of digits


def page(title: str, body: str, extra_style: str, policy: str = POLICY) -> str:
    """Return a whole page. `body` is HTML already; `extra_style` overrides the style of all pages."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{escape(title)} - Packtrain</title><style>{_COLORS}{_STYLE}{extra_style}</style></head>"
        f"<body>{body}</body></html>\n"
    )


def wide(rows: str) -> str:
    """Return a table that scrolls sideways where it does not fit, by keyboard, too."""
    return f'<div class="wide" tabindex="0" role="group" aria-label="table"><table>{rows}</table></div>'


def html_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; cells are HTML already, heads are text."""
    head = "".join(f"<th>{escape(head_text)}</th>" for head_text in heads)
    # Short values stay on one line: a number that is apart from its unit is hard to read.
    lines = ["".join(f"<td{' class=value' if len(cell) <= _SHORT else ''}>{cell}</td>" for cell in row) for row in rows]
    return wide(f"<tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}")


@dataclass(frozen=True)
class Series:
    """A line of a chart; `marked` puts a dot on each point, for series that have few.

    `color` is the number of its color; None is its place among the lines that are drawn. `value` stands beside its
    name, and is its last one if None.
    """

    name: str
    points: Sequence[tuple[float, float]]
    marked: bool = False
    color: int | None = None
    value: float | None = None


def escape(text: str) -> str:
    """Return text as HTML that means nothing, with what would turn its direction escaped as in a terminal."""
    return html.escape(harmless(text, keep="\n\t"))


def cut(text: str, length: int = TEXT_LENGTH) -> str:
    """Return a text as HTML, without the end of a long one."""
    return escape(text if len(text) <= length else f"{text[:length]} ...")


def line_chart(
    title: str, series: Sequence[Series], x_label: str = "step", marks: Sequence[tuple[float, str]] = ()
) -> str:
    """Draw all series over common axes; return an empty string if there is no finite point to draw.

    `marks` are named places on the x axis, drawn as dashed lines.
    """
    finite = [
        replace(line, points=[(x, y) for x, y in line.points if math.isfinite(x) and math.isfinite(y)])
        for line in series
    ]
    drawn = [line for line in finite if line.points]  # a run that has just started has no evaluations
    if not drawn:
        return ""
    colored = [replace(line, color=place if line.color is None else line.color) for place, line in enumerate(drawn)]
    lines = [
        replace(line, points=thinned(line.points, MAX_POINTS)) for line in colored
    ]  # a page of a million steps stays small
    scale = Scale.around([point for line in lines for point in line.points])
    elements = []
    for tick in scale.ticks:
        y = scale.down(tick)
        elements.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        elements.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{tick:,g}</text>')
    for tick in nice_ticks(scale.left, scale.right):
        if scale.left <= tick <= scale.right:
            x = scale.across(tick)
            elements.append(f'<text class="tick" x="{x}" y="{HEIGHT - 12}" text-anchor="middle">{tick:,g}</text>')
    elements.append(f'<text class="tick" x="2" y="{HEIGHT - 12}">{escape(x_label)}</text>')
    for place, name in marks:
        if scale.left <= place <= scale.right:
            x = scale.across(place)
            # Its name beside it, on the side that has room.
            anchor, beside = ("end", x - 4) if x > WIDTH / 2 else ("start", x + 4)
            elements += [
                f'<line class="mark" x1="{x}" x2="{x}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>',
                f'<text class="tick" x="{beside}" y="{_TOP + 9}" text-anchor="{anchor}">{escape(name)}</text>',
            ]
    elements += [_line(scale, line, x_label) for line in lines]
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(elements)}</svg>'
    legend = "".join(
        f'<span class="key s{line.color}">{escape(line.name)} <b>{_number(value)}</b></span>'
        for line in colored
        for value in [line.points[-1][1] if line.value is None else line.value]
    )
    return f"<figure><figcaption>{escape(title)} {legend}</figcaption>{svg}</figure>"


@dataclass(frozen=True)
class Scale:
    """Where values are in a chart: those of the x axis from `left` to `right`, the others between its outer ticks."""

    left: float
    right: float
    ticks: Sequence[float]

    @classmethod
    def around(cls, points: Sequence[tuple[float, float]]) -> Scale:
        xs, ys = [x for x, _ in points], [y for _, y in points]
        return cls(min(xs), max(xs), nice_ticks(min(ys), max(ys)))

    def across(self, x: float) -> float:
        share = (x - self.left) / ((self.right - self.left) or 1)  # a single point has no range
        return round(_LEFT + share * (WIDTH - _LEFT - _RIGHT), 1)

    def down(self, y: float) -> float:
        share = (y - self.ticks[0]) / ((self.ticks[-1] - self.ticks[0]) or 1)
        return round(HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM), 1)


def _line(scale: Scale, series: Series, x_label: str) -> str:
    places = [(scale.across(x), scale.down(y)) for x, y in series.points]
    line = " ".join(f"{across},{down}" for across, down in places)
    dots = [
        f'<circle class="dot s{series.color}" cx="{across}" cy="{down}" r="3">'
        f"<title>{escape(x_label)} {x:,g}: {_number(y)}</title></circle>"
        for (across, down), (x, y) in zip(places, series.points, strict=True)
        if series.marked
    ]
    return f'<polyline class="line s{series.color}" points="{line}"/>{"".join(dots)}'


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers, from at most `low` to at least `high`."""
    if high <= low:
        low, high = low - (abs(low) / 10 or 1), high + (abs(high) / 10 or 1)
    # Dividing first: the difference may overflow, and of neighboring floats it is 0.
    raw = max(high / count - low / count, math.ulp(max(abs(low), abs(high))), _MIN_TICK)
    exponent = math.floor(math.log10(raw))
    power = 10.0**exponent
    step = next((factor * power for factor in (1, 2, 2.5, 5) if factor * power >= raw), 10 * power)
    first, last = math.floor(low / step), math.ceil(high / step)
    # Rounded, because products such as 3 * 0.1 = 0.30000000000000004 are hard to read.
    return [round(number * step, 2 - exponent) for number in range(first, last + 1)]
