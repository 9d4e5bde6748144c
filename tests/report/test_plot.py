from __future__ import annotations

import io
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image, ImageColor

from packtrain.errors import Mistake
from packtrain.report.page import Series
from packtrain.report.plot import Axis, Plot, plot_of
from packtrain.run.records import Point
from parts.runs import MEASURED

SVG = "{http://www.w3.org/2000/svg}"


def trained(steps: int, **values: float) -> list[Point]:
    """Return a run of that many steps, each a tenth of an epoch and an hour long, evaluated after the last."""
    points = [
        Point(
            "train", 1, step, 0.0, {**MEASURED, "epoch": step / 10, "elapsed_seconds": 3600.0 * step, "loss": 9 - step}
        )
        for step in range(1, steps + 1)
    ]
    return [*points, Point("valid", 1, steps, 0.0, {"loss": 5.0, "bleu": 7.0, **values})]


def names(plot: Plot) -> list[str]:
    return [one.name for one in plot.series]


def test_a_name_without_a_kind_is_that_of_training_and_of_validation() -> None:
    plot = plot_of({"a-1": trained(3)}, ["loss"])
    assert names(plot) == ["train.loss", "valid.loss"]
    assert plot.series[0].points == [(1.0, 8.0), (2.0, 7.0), (3.0, 6.0)]
    assert plot.series[1].points == [(3.0, 5.0)]


def test_several_runs_are_told_apart_by_their_names() -> None:
    runs = {"a-1": trained(3), "a-2": trained(4)}
    assert names(plot_of(runs, ["valid.bleu"])) == ["a-1", "a-2"]
    assert names(plot_of(runs, ["loss"])) == ["a-1 train.loss", "a-1 valid.loss", "a-2 train.loss", "a-2 valid.loss"]


@pytest.mark.parametrize(("axis", "last"), [("step", 3.0), ("epoch", 0.3), ("hours", 3.0)])
def test_an_evaluation_is_where_its_step_is_on_every_axis(axis: Axis, last: float) -> None:
    for series in plot_of({"a-1": trained(3)}, ["loss"], axis).series:
        assert series.points[-1][0] == pytest.approx(last)


@pytest.mark.parametrize(
    ("points", "name", "axis", "words"),
    [
        (trained(3), "los", "step", "did you mean 'loss'?"),
        (trained(3), "loss", "steps", "did you mean 'step'?"),
        ([], "loss", "step", "nothing was measured yet"),
        (trained(3, bleu=float("nan")), "bleu", "step", "finite"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(points: list[Point], name: str, axis: Axis, words: str) -> None:
    with pytest.raises(Mistake, match=r"^plot") as caught:
        plot_of({"a-1": points}, [name], axis)
    assert words in str(caught.value)


def test_the_picture_is_a_document_of_its_own_with_a_legend() -> None:
    many = Plot("<loss>\x1b", tuple(Series(f"run & {number}", [(0.0, 1.0), (1.0, number)]) for number in range(12)))
    root = ElementTree.fromstring(many.svg())  # noqa: S314
    assert root.tag == f"{SVG}svg"
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert r"<loss>\x1b" in texts
    assert "run & 11 11" in texts
    assert len(list(root.iter(f"{SVG}polyline"))) == 12
    assert ".s11{color:" in many.svg()
    assert "var(" not in many.svg(), "other programs than browsers do not know variables"


def test_a_picture_is_saved_in_the_format_of_its_suffix(tmp_path: Path) -> None:
    plot = plot_of({"a-1": trained(3)}, ["loss"])
    assert plot.save(tmp_path / "loss.svg").read_text() == plot._repr_svg_()
    with Image.open(plot.save(tmp_path / "loss.PNG")) as picture:
        assert picture.format == "PNG"
    with pytest.raises(Mistake, match=r"loss\.pdf': the file name must end in \.svg or \.png$"):
        plot.save(tmp_path / "loss.pdf")


def test_a_png_has_the_lines_dots_and_texts_of_the_svg() -> None:
    rising, falling = [(0.0, 0.0), (1.0, 10.0)], [(0.0, 10.0), (1.0, 0.0)]
    plot = Plot("loss", (Series("first", rising), Series("second", falling, marked=True)))
    picture = Image.open(io.BytesIO(plot.png()))
    root = ElementTree.fromstring(plot.svg())  # noqa: S314
    assert picture.size == tuple(2 * int(root.attrib[side]) for side in ("width", "height"))
    top = float(root.find(f"{SVG}g").attrib["transform"].partition(",")[2][:-1])  # type: ignore[union-attr]
    lines = [line.attrib["points"].split() for line in root.iter(f"{SVG}polyline")]
    for number, points in enumerate(lines):
        (x1, y1), (x2, y2) = (tuple(map(float, point.split(","))) for point in points)
        quarter = ((3 * x1 + x2) / 4, (3 * y1 + y2) / 4 + top)
        at = round(2 * quarter[0]), round(2 * quarter[1])
        assert picture.getpixel(at) == ImageColor.getrgb(re.findall(r"\.s\d+{color:(#\w+)}", plot.svg())[number])
    dot = next(iter(root.find(f"{SVG}g").iter(f"{SVG}circle")))  # type: ignore[union-attr]
    above = round(2 * float(dot.attrib["cx"])), round(2 * (float(dot.attrib["cy"]) + top - 2))
    assert picture.getpixel(above) != (255, 255, 255)
    for text in root.iter(f"{SVG}text"):
        y = float(text.attrib["y"]) + (top if text.get("class") == "tick" else 0)
        band = picture.crop((0, round(2 * (y - 10)), picture.width, round(2 * y)))
        assert min(band.convert("L").tobytes()) < 200, text.text
