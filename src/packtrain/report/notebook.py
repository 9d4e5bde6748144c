"""Runs in a notebook: a table of many, a panel of one that draws itself while it trains, a report in a frame.

Everything is HTML with styles in its elements and pictures as data: it needs no script and no widget, looks the same in
JupyterLab, VS Code and a notebook that is only read, and follows a light or a dark theme. All text is escaped.
"""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from packtrain.errors import PacktrainError, harmless
from packtrain.report.live import LiveRun, RunView, RunWatcher
from packtrain.report.page import escape
from packtrain.report.plot import Plot
from packtrain.report.summary import RECENT_STEPS, Overview
from packtrain.run.run import Run
from packtrain.units import counted, show_dollars, show_score, show_seconds, show_speed

_UPDATE_SECONDS, _PRINT_SECONDS = 2.0, 15.0
_CHARTS, _EVENTS, _TEXT_LENGTH = 2, 4, 120
_DIM = "color:#808a96"
_FONT = "font:13px/1.5 system-ui,sans-serif"
_STATE_COLORS = {
    "finished": "#35a873", "running": "#3b82e0", "waiting": "#3b82e0", "stopped": "#c9a227", "interrupted": "#c9a227",
    "failed": "#d9534f",
}  # fmt: skip


@dataclass(frozen=True)
class Shown:
    """HTML that a notebook shows; elsewhere it is its text."""

    html: str
    text: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Report:
    """A report: `url` is where it is stored, and `html` the whole page."""

    url: str
    html: str

    def _repr_html_(self) -> str:
        """Show the page in a frame, which keeps its style from the rest."""
        return f'<iframe sandbox srcdoc="{escape(self.html)}" style="width:100%;height:640px;border:0"></iframe>'

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"<report {self.url}>"


def _plain(text: str) -> str:
    """Return a text from the store as HTML that is only text."""
    return escape(harmless(text)[:_TEXT_LENGTH])


# Many runs.


def runs_table(rows: Sequence[tuple[str, Overview | PacktrainError]], store: str) -> str:
    """Return a table of runs, each with its overview or the error that keeps it from being read."""
    if not rows:
        return f'<p style="{_FONT};{_DIM}">No runs in {escape(store)}.</p>'
    heads = ["run", "state", "step", "loss", "score", "time", "cost", "job"]
    cells = [_row(name, row) for name, row in rows]
    kept = [column for column, head in enumerate(heads) if head != "cost" or any(one[column] for one in cells)]
    right = {2, 3, 5, 6}
    cell = "padding:.3em 1em .3em 0;border-bottom:1px solid #808a9640;white-space:nowrap;text-align:"

    def line(tag: str, texts: Sequence[str], extra: str = "") -> str:
        ends = {column: "right" if column in right else "left" for column in kept}
        return "".join(f'<{tag} style="{cell}{ends[at]}{extra}">{texts[at]}</{tag}>' for at in kept)

    body = "".join(f"<tr>{line('td', one)}</tr>" for one in cells)
    return (
        f'<table style="{_FONT};border-collapse:collapse;font-variant-numeric:tabular-nums">'
        f"<thead><tr>{line('th', heads, f';font-weight:normal;{_DIM}')}</tr></thead><tbody>{body}</tbody></table>"
    )


def _row(name: str, row: Overview | PacktrainError) -> list[str]:
    if isinstance(row, PacktrainError):
        return [f"<b>{escape(name)}</b>", "?", "", "", "", "", "", _plain(str(row))]
    return [
        f"<b>{escape(name)}</b>",
        f'<span style="color:{_STATE_COLORS[row.state]}">● {row.state}</span>',
        f"{row.step:,}" + (f" of {row.goal:,}" if row.goal and row.state != "finished" else ""),
        "" if row.loss is None else f"{row.loss:.3f}",
        _plain(row.headline),
        show_seconds(row.seconds) if row.seconds else "",
        "" if row.cost is None else show_dollars(row.cost.so_far),
        _plain(row.description),
    ]


# One run.


def panel(view: RunView, note: str = "") -> str:
    """Return a run as HTML: its state, progress and numbers, its curves, and the last events."""
    one = view.overview
    color = _STATE_COLORS[one.state]
    share = f"{100 * (view.progress or 0.0):.1f}"
    bar = (
        f'<div style="background:#808a9633;border-radius:3px;height:6px;margin:.4em 0">'
        f'<div style="background:{color};border-radius:3px;height:6px;width:{share}%"></div></div>'
    )
    reason = f": {_plain(one.reason)}" if one.reason else ""
    return (
        f'<div style="{_FONT};max-width:1160px">'
        f'<div><b style="font-size:16px">{escape(one.run)}</b> <span style="color:{color}">● {one.state}{reason}</span>'
        f' <span style="{_DIM}">{_plain(one.description)}</span></div>'
        f"{bar if view.progress is not None else ''}{_facts(view)}{_pictures(view)}{_events(view)}"
        f"{f'<div style={_quoted(_DIM)}>{_plain(note)}</div>' if note else ''}</div>"
    )


def _quoted(style: str) -> str:
    return f'"{style}"'


def _facts(view: RunView) -> str:
    one = view.overview
    facts = [("step", f"{one.step:,}" + (f" of {one.goal:,}" if one.goal else ""))] if one.unit or one.step else []
    if view.seconds_left is not None:
        facts.append(("left", show_seconds(view.seconds_left)))
    if one.loss is not None:
        facts.append((f"loss (last {counted(one.loss_steps, 'step')})", f"{one.loss:.3f}"))
    if view.units_per_second:
        recent = counted(min(RECENT_STEPS, one.step), "step")
        facts.append((f"{one.unit}/s (last {recent})", show_speed(view.units_per_second)))
    # Without a validation split the score that counts is the one of the test split.
    facts += [(score.title, score.text) for score in dict.fromkeys((one.score, one.test)) if score is not None]
    if view.best is not None:
        facts.append((f"best {view.best.title}", f"{show_score(view.best.value)} at step {view.best.step:,}"))
    if one.seconds:
        facts.append(("time", show_seconds(one.seconds)))
    if one.cost is not None:
        facts.append(("cost", one.cost.line))
    working = sum(machine.state == "working" for machine in view.machines)
    if working:
        facts.append(("", counted(working, "machine")))
    return "<div>" + "".join(
        f'<span style="margin-right:1.2em;white-space:nowrap"><span style="{_DIM}">{_plain(name)}</span>'
        f" <b>{escape(value)}</b></span>"
        for name, value in facts
    ) + "</div>"  # fmt: skip


def _pictures(view: RunView) -> str:
    pictures = []
    for title, series in view.charts()[:_CHARTS]:
        svg = Plot(title, tuple(series)).svg()
        data = base64.b64encode(svg.encode()).decode()
        pictures.append(
            f'<img alt="{_plain(title)}" style="width:49%;margin:.5em .5% 0 0" src="data:image/svg+xml;base64,{data}">'
        )
    return f"<div>{''.join(pictures)}</div>" if pictures else ""


def _events(view: RunView) -> str:
    shown = [event for event in view.events if event.display != "report"][-_EVENTS:]
    return "".join(
        f'<div><span style="{_DIM}">{time.strftime("%H:%M:%S", time.gmtime(event.time))} UTC</span> '
        f'<span style="color:{"#c9a227" if event.display == "warning" else "inherit"}">'
        f"{escape(event.kind)}: {_plain(event.text)}</span></div>"
        for event in shown
    )


def panel_of(run: Run) -> Shown:
    """Return the panel of a run as it is now."""
    live = LiveRun(run)
    view = live.look()
    while not view.is_complete:
        view = live.look()
    return Shown(panel(view), _text(view))


def _text(view: RunView) -> str:
    one = view.overview
    parts = [one.run, one.outcome, f"step {one.step:,}"]
    if one.loss is not None:
        parts.append(f"loss {one.loss:.3f}")
    return "  ".join([*parts, *([one.headline] if one.headline else [])])


class Display(Protocol):
    """A place whose contents can be replaced."""

    def update(self, shown: Shown) -> None: ...


class PrintedLines:
    """A place for those who are not in a notebook: every update is a line, unless it says nothing new."""

    def __init__(self) -> None:
        self._last = ""

    def update(self, shown: Shown) -> None:
        if shown.text != self._last:
            print(shown.text, flush=True)
        self._last = shown.text


def place_to_draw() -> tuple[Display, float]:
    """Return a place in the notebook that this code runs in, or else lines, and the seconds between two updates."""
    if "IPython" in sys.modules:  # a notebook has imported it; nobody else has to have it
        from IPython import get_ipython
        from IPython.display import display

        if hasattr(get_ipython(), "kernel"):
            # A display handle: its updates find the output by an id, in every front end and without a widget.
            return display(Shown("", ""), display_id=True), _UPDATE_SECONDS
    return PrintedLines(), _PRINT_SECONDS


def draw(run: Run, place: Display, update_seconds: float = _UPDATE_SECONDS) -> None:
    """Draw a run in one place until it ends. An interrupt ends the drawing, not the run."""
    view: RunView | None = None
    try:
        with RunWatcher(run, update_seconds) as watcher:
            while view is None or not view.has_ended:
                if not watcher.wait(update_seconds):
                    continue
                view, trouble = watcher.view, watcher.trouble
                if view is not None:
                    place.update(Shown(panel(view, trouble), _text(view)))
                elif trouble:
                    place.update(Shown(f'<div style="{_FONT};{_DIM}">{_plain(trouble)}</div>', trouble))
    except KeyboardInterrupt:
        note = f"No longer drawn; {run.name} keeps running. watch() draws it again."
        if view is not None:
            place.update(Shown(panel(view, note), note))
