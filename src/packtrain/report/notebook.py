"""Runs in a notebook: a table of many, a panel of one that draws itself while it trains, a report in a frame.

Everything is HTML with styles in its elements and pictures as data: it needs no script and no widget, looks the same in
JupyterLab, VS Code and a notebook that is only read, and follows a light or a dark theme. All text is escaped.
"""

from __future__ import annotations

import base64
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from packtrain.backoff import SLOW_ANSWERS
from packtrain.errors import PacktrainError, harmless
from packtrain.observe.follower import RunFollower
from packtrain.observe.history import RECENT_STEPS, History
from packtrain.observe.measure import BestBy
from packtrain.observe.status import Status, status_of
from packtrain.report.page import MAX_POINTS, Series, escape
from packtrain.report.plot import Plot
from packtrain.run.liveness import StateWatch
from packtrain.run.records import Event
from packtrain.run.run import Run
from packtrain.store import StoreError
from packtrain.units import counted, show_dollars, show_score, show_seconds, show_speed

_UPDATE_SECONDS, _PRINT_SECONDS = 2.0, 15.0
_LOOK_SECONDS = 1.0  # of reading at a time: a long history is drawn while it is read
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


def runs_table(rows: Sequence[tuple[str, Status | PacktrainError]], store: str) -> str:
    """Return a table of runs, each with its overview or the error that keeps it from being read."""
    if not rows:
        return f'<p style="{_FONT};{_DIM}">No runs in {escape(store)}.</p>'
    heads = ["run", "state", "step", "loss", "score", "time", "cost", "job"]
    cells = [_row(name, row) for name, row in rows]
    columns = [column for column, head in enumerate(heads) if head != "cost" or any(row[column] for row in cells)]
    right = {2, 3, 5, 6}
    cell = "padding:.3em 1em .3em 0;border-bottom:1px solid #808a9640;white-space:nowrap;text-align:"

    def line(tag: str, texts: Sequence[str], extra: str = "") -> str:
        ends = {column: "right" if column in right else "left" for column in columns}
        return "".join(f'<{tag} style="{cell}{ends[at]}{extra}">{texts[at]}</{tag}>' for at in columns)

    body = "".join(f"<tr>{line('td', row)}</tr>" for row in cells)
    return (
        f'<table style="{_FONT};border-collapse:collapse;font-variant-numeric:tabular-nums">'
        f"<thead><tr>{line('th', heads, f';font-weight:normal;{_DIM}')}</tr></thead><tbody>{body}</tbody></table>"
    )


def _row(name: str, row: Status | PacktrainError) -> list[str]:
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


class LivePanel:
    """Reads a run's folder; each `look` returns its panel with what is new. Only what is new is read."""

    def __init__(self, run: Run, look_seconds: float = _LOOK_SECONDS) -> None:
        self._run, self._look_seconds = run, look_seconds
        self._follower = RunFollower(run, ("events", "metrics"))
        self._watch = StateWatch(run)
        self.has_ended = False
        """The run has ended, and all of its history was read."""

    def look(self) -> Shown:
        result = self._run.result()  # first, so that everything up to the result is in the panel
        self._follower.read(self._look_seconds)
        state = self._watch.look()
        history, leases = self._follower.history, self._watch.leases
        status = status_of(self._run, state if result is None else result.status, history.recent.points, result, leases)
        self.has_ended = self._follower.complete and status.state in ("finished", "failed", "stopped")
        alive = sum(not lease.left and self._watch.is_alive(lease.node) for lease in leases)
        working = alive if status.state == "running" else 0
        loss = "" if status.loss is None else f"loss {status.loss:.3f}"
        texts = (status.run, status.outcome, f"step {status.step:,}", loss, status.headline)
        return Shown(panel(status, history, self._follower.events, working), "  ".join(filter(None, texts)))


def panel(status: Status, history: History, events: Sequence[Event], working: int) -> str:
    """Return a run as HTML: its state, progress and numbers, its curves, and the last events."""
    color = _STATE_COLORS[status.state]
    bar = (
        f'<div style="background:#808a9633;border-radius:3px;height:6px;margin:.4em 0">'
        f'<div style="background:{color};border-radius:3px;height:6px;'
        f'width:{100 * (status.progress or 0.0):.1f}%"></div></div>'
    )
    reason = f": {_plain(status.reason)}" if status.reason else ""
    pictures = ""
    for title, series in _charts(status, history)[:_CHARTS]:
        data = base64.b64encode(Plot(title, tuple(series)).svg().encode()).decode()
        style = "width:49%;margin:.5em .5% 0 0"
        pictures += f'<img alt="{_plain(title)}" style="{style}" src="data:image/svg+xml;base64,{data}">'
    lines = "".join(
        f'<div><span style="{_DIM}">{time.strftime("%H:%M:%S", time.gmtime(event.time))} UTC</span> '
        f'<span style="color:{"#c9a227" if event.display == "warning" else "inherit"}">'
        f"{escape(event.kind)}: {_plain(event.text)}</span></div>"
        for event in [event for event in events if event.display != "report"][-_EVENTS:]
    )
    return (
        f'<div style="{_FONT};max-width:1160px">'
        f'<div><b style="font-size:16px">{escape(status.run)}</b>'
        f' <span style="color:{color}">● {status.state}{reason}</span>'
        f' <span style="{_DIM}">{_plain(status.description)}</span></div>'
        f"{bar if status.progress is not None else ''}{_facts(status, history, working)}"
        f"{f'<div>{pictures}</div>' if pictures else ''}{lines}</div>"
    )


def _facts(status: Status, history: History, working: int) -> str:
    facts = []
    if status.unit or status.step:
        facts.append(("step", f"{status.step:,}" + (f" of {status.goal:,}" if status.goal else "")))
    if status.seconds_left is not None:
        facts.append(("left", show_seconds(status.seconds_left)))
    if status.loss is not None:
        facts.append((f"loss (last {counted(status.loss_steps, 'step')})", f"{status.loss:.3f}"))
    if status.units_per_second:
        recent = counted(min(RECENT_STEPS, status.step), "step")
        facts.append((f"{status.unit}/s (last {recent})", show_speed(status.units_per_second)))
    # Without a validation split the score that counts is the one of the test split.
    facts += [(score.title, score.text) for score in dict.fromkeys((status.score, status.test)) if score is not None]
    if (best := history.best(BestBy(status.measure, status.lower))) is not None:
        facts.append((f"best {best.title}", f"{show_score(best.value)} at step {best.step:,}"))
    if status.seconds:
        facts.append(("time", show_seconds(status.seconds)))
    if status.cost is not None:
        facts.append(("cost", status.cost.line))
    if working:
        facts.append(("", counted(working, "machine")))
    return "<div>" + "".join(
        f'<span style="margin-right:1.2em;white-space:nowrap"><span style="{_DIM}">{_plain(name)}</span>'
        f" <b>{escape(value)}</b></span>"
        for name, value in facts
    ) + "</div>"  # fmt: skip


def _charts(status: Status, history: History) -> list[tuple[str, list[Series]]]:
    """Return titles and lines, the most important first: loss, the score that counts, others, speed, a program's."""
    names = history.names()
    scores = [name for name in names if name.startswith("valid.") and name != "valid.loss"]
    scores.sort(key=lambda name: name != f"valid.{status.measure}")
    charts = [("loss", [("train", "train.loss"), ("valid", "valid.loss")])]
    charts += [(name.replace(".", " "), [(name.removeprefix("valid."), name)]) for name in scores]
    charts += [(f"{status.unit}/s", [("speed", "train.throughput")])]
    charts += [(name.removeprefix("log."), [(name, name)]) for name in names if name.startswith("log.")]
    drawn = [
        (
            title,
            [
                Series(label, line, "valid" in name)
                for label, name in lines
                if (line := history.thinned(name, MAX_POINTS))
            ],
        )
        for title, lines in charts[: 2 * _CHARTS + 1]
    ]
    return [(title, series) for title, series in drawn if series]


def panel_of(run: Run) -> Shown:
    return LivePanel(run, math.inf).look()


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
    live, shown = LivePanel(run), Shown("", "")

    def show_below(note: str) -> None:
        place.update(Shown(f'{shown.html}<div style="{_FONT};{_DIM}">{_plain(note)}</div>', note))

    # A server that is slow to answer would be complained about in the middle of the drawing.
    tell, SLOW_ANSWERS.tell = SLOW_ANSWERS.tell, show_below
    try:
        while not live.has_ended:
            try:
                shown = live.look()
                place.update(shown)
            except StoreError as error:
                if not error.temporary:
                    raise
                show_below(str(error))
            if not live.has_ended:
                time.sleep(update_seconds)
    except KeyboardInterrupt:
        show_below(f"No longer drawn; {run.name} keeps running. watch() draws it again.")
    finally:
        SLOW_ANSWERS.tell = tell
