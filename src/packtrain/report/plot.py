"""Curves of one run or several as a picture that a notebook shows and that saves as a file.

The picture is SVG without a background, in colors that can be read on white and on black paper: a notebook's theme is
not known to what is shown in it. As PNG, for slides and mails, the same picture is drawn on white.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from packtrain.errors import Mistake, harmless, nearest
from packtrain.report.frame import in_order
from packtrain.report.page import HEIGHT, WIDTH, Series, escape, line_chart
from packtrain.run.records import Point

Axis = Literal["step", "epoch", "hours"]

_COLORS = (
    "#3b82e0", "#e0703a", "#35a873", "#a566c4", "#c9a227", "#3fa9bd", "#e05c8a", "#8a8f98", "#7a9a3a", "#6f6fd8",
)  # fmt: skip
_TEXT, _GRID_OPACITY, _LINE = "#808a96", 0.25, 1.6
_SIZE, _TITLE_SIZE = 11, 13  # of text
_STYLE = (
    f"text{{font:{_SIZE}px system-ui,sans-serif;fill:{_TEXT}}}.grid{{stroke:{_TEXT};stroke-opacity:{_GRID_OPACITY}}}"
    f".line{{fill:none;stroke-width:{_LINE};stroke:currentColor}}.dot{{fill:currentColor}}.key{{fill:currentColor}}"
    f".title{{font-size:{_TITLE_SIZE}px;font-weight:600}}"
)
_PLACES = ("x1", "y1", "x2", "y2", "cx", "cy", "r")
_PNG_SCALE = 2  # pixels per unit of the picture
_OVERSAMPLING = 4  # of lines, which Pillow draws without smooth edges
_KEY_HEIGHT, _CHARACTER_WIDTH = 16, 6.2  # of the legend


@dataclass(frozen=True)
class Plot:
    """A chart of several lines. A notebook shows it; `save` writes it."""

    title: str
    series: tuple[Series, ...]
    x_label: str = "step"

    def svg(self) -> str:
        """Return the picture as a document of its own."""
        lasts = [next((y for _, y in reversed(line.points) if math.isfinite(y)), math.nan) for line in self.series]
        names = [f"{harmless(line.name)} {last:.4g}" for line, last in zip(self.series, lasts, strict=True)]
        key_width = 32 + _CHARACTER_WIDTH * max(map(len, names))
        across = max(1, int(WIDTH // key_width))
        top = 22 + _KEY_HEIGHT * -(-len(self.series) // across)
        keys = []
        for number, name in enumerate(names):
            x, y = 4 + number % across * key_width, 32 + number // across * _KEY_HEIGHT
            keys.append(f'<circle class="key s{number}" cx="{x + 4}" cy="{y - 4}" r="4"/>')
            keys.append(f'<text x="{x + 13}" y="{y}">{escape(name)}</text>')
        title = escape(harmless(self.title))  # a control character would make the document invalid
        figure = line_chart(title, self.series, self.x_label)
        drawn = figure[figure.index(">", figure.index("<svg")) + 1 : figure.index("</svg>")]
        colors = "".join(f".s{number}{{color:{_COLORS[number % len(_COLORS)]}}}" for number in range(len(self.series)))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT + top}" width="{WIDTH}"'
            f' height="{HEIGHT + top}" role="img" aria-label="{title}"><style>{_STYLE}{colors}</style>'
            f'<text class="title" x="2" y="14">{title}</text>{"".join(keys)}'
            f'<g transform="translate(0,{top})">{drawn}</g></svg>\n'
        )

    def png(self) -> bytes:
        return _drawn(ElementTree.fromstring(self.svg()))  # noqa: S314 - written here

    def save(self, path: str | Path) -> Path:
        """Write the picture as an .svg or .png file, and return its path."""
        target = Path(path)
        suffix = target.suffix.lower()
        if suffix not in (".svg", ".png"):
            raise Mistake(f"{str(path)!r}: the file name must end in .svg or .png")
        target.write_bytes(self.png() if suffix == ".png" else self.svg().encode())
        return target

    def _repr_svg_(self) -> str:
        return self.svg()


def _drawn(picture: ElementTree.Element) -> bytes:
    """Return a picture that `Plot.svg` has made as PNG: its lines, dots and texts are all that is in it."""
    from PIL import Image, ImageColor, ImageDraw, ImageFont

    def color_of(element: ElementTree.Element) -> tuple[int, ...]:
        number = next((name[1:] for name in element.get("class", "").split() if name[1:].isdecimal()), None)
        return ImageColor.getrgb(_TEXT if number is None else _COLORS[int(number) % len(_COLORS)])

    size = [int(picture.get(side, "0")) * _PNG_SCALE for side in ("width", "height")]
    scale = _PNG_SCALE * _OVERSAMPLING
    image = Image.new("RGB", (size[0] * _OVERSAMPLING, size[1] * _OVERSAMPLING), "white")
    draw = ImageDraw.Draw(image)
    texts: list[tuple[ElementTree.Element, float]] = []

    def draw_all(parent: ElementTree.Element, top: float) -> None:
        for element in parent:
            kind, place = element.tag.rpartition("}")[2], {name: float(element.get(name, "0")) for name in _PLACES}
            if kind == "g":  # moved down by its only attribute, `translate(0,54)`
                draw_all(element, top + float(element.attrib["transform"].rpartition(",")[2].rstrip(")")))
            elif kind == "line":
                grid = tuple(round(255 - _GRID_OPACITY * (255 - level)) for level in color_of(element))
                ends = (place["x1"], place["y1"] + top, place["x2"], place["y2"] + top)
                draw.line([end * scale for end in ends], grid, scale)
            elif kind == "polyline":
                pairs = [pair.split(",") for pair in element.attrib["points"].split()]
                points = [(float(x) * scale, (float(y) + top) * scale) for x, y in pairs]
                draw.line(points, color_of(element), round(_LINE * scale), joint="curve")
            elif kind == "circle":
                center = (place["cx"] * scale, (place["cy"] + top) * scale)
                draw.circle(center, place["r"] * scale, color_of(element))
            elif kind == "text":
                texts.append((element, top))

    draw_all(picture, 0.0)
    image = image.resize((size[0], size[1]), Image.Resampling.BOX)
    draw = ImageDraw.Draw(image)
    for element, top in texts:  # in the final size: fonts have smooth edges already
        font_size = _TITLE_SIZE if element.get("class") == "title" else _SIZE
        anchor = {"middle": "ms", "end": "rs"}.get(element.get("text-anchor", ""), "ls")
        at = (float(element.attrib["x"]) * _PNG_SCALE, (float(element.attrib["y"]) + top) * _PNG_SCALE)
        font = ImageFont.load_default(font_size * _PNG_SCALE)
        draw.text(at, element.text or "", color_of(element), font, anchor)
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def plot_of(
    points: Mapping[str, Sequence[Point]], names: Sequence[str], x: Axis = "step", title: str | None = None
) -> Plot:
    """Return the lines of these measurements, for each of the runs: `points` are theirs by the name of the run.

    A name is a column of `metrics()`, such as `valid.bleu`; `loss` is both `train.loss` and `valid.loss`.
    """
    if x not in ("step", "epoch", "hours"):
        raise Mistake(f"plot(x={x!r}): unknown axis; {nearest(str(x), ('step', 'epoch', 'hours'))}")
    names_measured = {name for points_of_run in points.values() for name in names_of(points_of_run)}
    chosen = [column for name in names for column in _matching(name, names_measured)]
    series = []
    for run, its in points.items():
        for column in dict.fromkeys(chosen):
            line = _line(its, column, x)
            if any(math.isfinite(place) and math.isfinite(y) for place, y in line):
                label = run if len(chosen) == 1 else column if len(points) == 1 else f"{run} {column}"
                series.append(Series(label, line, column.startswith(("valid.", "test."))))
    if not series:
        raise Mistake(f"plot({', '.join(map(repr, names))}): none of its values is a finite number")
    return Plot(title or ", ".join(names), tuple(series), x)


def names_of(points: Sequence[Point]) -> set[str]:
    return {point.column(name) for point in points if point.kind != "start" for name in point.values}


def _matching(name: str, measured: set[str]) -> list[str]:
    if not measured:
        raise Mistake(f"plot({name!r}): nothing was measured yet")
    columns = [column for column in (name, f"train.{name}", f"valid.{name}") if column in measured]
    if not columns:
        plain = {column for column in measured if not column.endswith("_seconds")}
        hint = nearest(name, plain | {column.partition(".")[2] for column in plain})
        raise Mistake(f"plot({name!r}): not measured; {hint}")
    return columns


def _line(points: Sequence[Point], column: str, x: Axis) -> list[tuple[float, float]]:
    """Return a measurement over an axis. An evaluation is at the epoch and time of the step before it."""
    line, place = list[tuple[float, float]](), 0.0
    ordered = in_order(points)
    for point in ordered:
        if point.kind == "train" and x != "step":
            place = point.values["epoch"] if x == "epoch" else point.values["elapsed_seconds"] / 3600
        elif point.kind == "log" and x != "step":  # of a program's time, only when it logged is known
            place = point.values.get("epoch", place) if x == "epoch" else (point.time - ordered[0].time) / 3600
        name = column if point.kind == "log" else column.removeprefix(f"{point.kind}.")
        if point.column(name) == column and name in point.values:
            line.append((float(point.step) if x == "step" else place, point.values[name]))
    return line
