"""A run in the terminal while it trains: `packtrain show -w`.

Each part of the picture is a list of lines, drawn for the size that the terminal has at that moment, from 80x24 up.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import fmean

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from packtrain.cli.common import STATE_STYLES, hints
from packtrain.cli.follow import follow, print_summary
from packtrain.cli.screen import console
from packtrain.cli.servers import termination_as_interrupt
from packtrain.errors import EXIT_DONE, EXIT_INTERRUPTED, harmless
from packtrain.report.goodput import LABELS
from packtrain.report.live import MachineView, RunView, RunWatcher
from packtrain.report.page import Series
from packtrain.report.summary import summarize
from packtrain.run.liveness import EXIT_CODES
from packtrain.run.run import Run
from packtrain.units import counted, show_bytes, show_dollars, show_score, show_seconds, show_speed

_MACHINE_STYLES = {"working": "green", "starting": "cyan", "lost": "red", "left": "dim"}
_LINE_STYLES = ("cyan", "yellow", "green", "magenta")
_SPAN_STYLES = {"forward": "cyan", "backward": "blue", "communication": "magenta", "wait": "red", "data": "yellow"}
_REDRAW_SECONDS, _KEY_SECONDS = 1.0, 0.1
_CHART_WIDTH, _CHART_HEIGHT, _MAX_CHART_HEIGHT = 38, 8, 18  # the least that shows a curve; more is not clearer
_TWO_COLUMNS = 120  # from this width on, output is beside machines and events
_BAR_WIDTH = 24
# The bits of a braille character: two columns of four dots.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))

Lines = list[Text]


def watch(run: Run) -> int:
    """Draw the run until it ends or the person quits, and return the exit code of `packtrain show`."""
    screen = console()
    if not screen.is_terminal or screen.is_dumb_terminal or not screen.encoding.lower().startswith("utf"):
        return follow(run, [], foreground=False)
    try:
        with termination_as_interrupt(), RunWatcher(run) as watcher:
            _draw(screen, watcher)
        interrupted = False
    except KeyboardInterrupt:
        interrupted = True
    view = watcher.view
    if view is None or not view.has_ended:
        state = view.overview.state if view else ""
        screen.say((run.name, "bold"), " keeps running." if state == "running" else f" is {state}." if state else "")
        screen.say_lines(hints(run, "follow", "stop") if state == "running" else hints(run, "status"))
        return EXIT_INTERRUPTED if interrupted else EXIT_DONE
    state = view.overview.state
    print_summary(screen, run, summarize(run, state))
    return EXIT_CODES[state]


def _draw(screen: Console, watcher: RunWatcher) -> None:
    """Draw what is new, and at least every second, until the run ends or `q` is typed."""
    picture = TerminalBoard(watcher)
    drawn, size = 0.0, screen.size
    with _keys() as keys, Live(picture, console=screen, screen=True, auto_refresh=False) as live:
        while True:
            is_new = watcher.wait(0)
            if is_new or screen.size != size or time.monotonic() - drawn >= _REDRAW_SECONDS:
                drawn, size = time.monotonic(), screen.size
                live.refresh()
            if watcher.view is not None and watcher.view.has_ended:
                return
            if "q" in keys(_KEY_SECONDS).lower():
                return


@contextmanager
def _keys() -> Iterator[Keys]:
    """Deliver keys as they are typed, without showing them; none where standard input is no terminal."""
    import termios
    import tty

    if not sys.stdin.isatty():
        yield Keys(None)
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)  # Ctrl-C still interrupts
    try:
        yield Keys(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class Keys:
    """Returns what was typed within some seconds."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def __call__(self, seconds: float) -> str:
        if self._descriptor is None:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([self._descriptor], [], [], seconds)
        typed = os.read(self._descriptor, 1024) if ready else b""
        if ready and not typed:  # the terminal is gone
            self._descriptor = None
        return typed.decode(errors="replace")


class TerminalBoard:
    """The picture, for whatever size the terminal has when it is drawn."""

    def __init__(self, watcher: RunWatcher) -> None:
        self._watcher = watcher

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        watcher, (width, height) = self._watcher, (options.max_width, options.height or options.size.height)
        trouble = ""
        if watcher.trouble:
            trouble = f"{watcher.trouble} (for {show_seconds(time.monotonic() - watcher.trouble_since)})"
        lines = board(watcher.view, trouble, width, height)
        yield Text("\n", end="").join(lines)


def board(view: RunView | None, trouble: str, width: int, height: int) -> Lines:
    """Return exactly `height` lines of exactly `width` columns."""
    if view is None:
        lines = [Text(trouble or "reading the run ...", "yellow" if trouble else "dim")]
    else:
        lines = _head(view, trouble, width)
        room = height - len(lines) - 1
        charts = _charts(view.charts(), width, _chart_room(view, width, room))
        lines += [*charts, *_below(view, width, room - len(charts))]
    keeps = "" if view is None or view.has_ended else "; the run keeps running"
    lines = _fit(lines, width, height - 1)
    return [*lines, *_fit([Text.assemble(("q", "bold"), (f" quits{keeps}", "dim"))], width, 1)][:height]


def _fit(lines: Iterable[Text], width: int, height: int) -> Lines:
    """Return that many lines of that width: cut, or filled with blanks."""
    fitted = [one.copy() for one in lines][:height]
    fitted += [Text() for _ in range(height - len(fitted))]
    for line in fitted:
        line.truncate(max(0, width), overflow="ellipsis", pad=True)
    return fitted


def _beside(blocks: Sequence[Lines], widths: Sequence[int], gap: int = 2) -> Lines:
    """Return the blocks side by side."""
    height = max(map(len, blocks))
    fitted = [_fit(block, width, height) for block, width in zip(blocks, widths, strict=True)]
    return [Text(" " * gap).join(row) for row in zip(*fitted, strict=True)]


def _title(text: str, width: int, extra: str = "") -> Text:
    start = Text.assemble(("── ", "dim"), (text, "bold"), (f" {extra} " if extra else " ", "dim"))
    return start.append("─" * max(0, width - start.cell_len), "dim")


# The head: state, progress, numbers, where the time goes.


def _head(view: RunView, trouble: str, width: int) -> Lines:
    one = view.overview
    reason = f": {harmless(one.reason)}" if one.reason else ""
    first = Text.assemble(
        (one.run, "bold"), "  ", (f"● {one.state}{reason}", STATE_STYLES[one.state]), "  ",
        (harmless(one.description), "dim"),
    )  # fmt: skip
    lines = [first, _progress(view, width), _numbers(view)]
    if view.spans:
        lines.append(_spans(view.spans, width))
    if trouble:
        lines.append(Text(harmless(trouble), "yellow"))
    elif one.state == "interrupted":
        lines.append(Text("no machine is working on this run; resume it to continue", "yellow"))
    elif not view.is_complete:
        lines.append(Text("reading the history of the run ...", "dim"))
    return lines


def _progress(view: RunView, width: int) -> Text:
    """Return bar, step, time and money, as much of it as fits."""
    one, line = view.overview, Text()
    if view.progress is not None:
        bar = _BAR_WIDTH if width >= _TWO_COLUMNS else _BAR_WIDTH // 2
        filled = round(bar * view.progress)
        line.append("━" * filled, STATE_STYLES[one.state]).append("╌" * (bar - filled), "dim")
        line.append(f" {view.progress:.0%}  ", "bold")
    parts = [f"step {one.step:,}" + (f" of {one.goal:,}" if one.goal else "")] if one.unit or one.step else []
    if view.seconds_left is not None:
        parts.append(f"{show_seconds(view.seconds_left)} left")
    if one.cost is not None:
        expected = "" if one.cost.expected is None else f" of {show_dollars(one.cost.expected)}"
        parts.append(f"{show_dollars(one.cost.so_far)}{expected}")
    if view.budget_seconds_left is not None:
        parts.append(f"budget {show_seconds(view.budget_seconds_left)}")
    if one.seconds:
        parts.append(f"{show_seconds(one.seconds)} so far" if one.state == "running" else show_seconds(one.seconds))
    if view.generation > 1:
        parts.append(f"generation {view.generation}")
    return line.append(_fitting(parts, width - line.cell_len))


def _fitting(parts: Sequence[str], room: int) -> str:
    """Return the parts in their order, without those for which there is no room: the most important are first."""
    line = ""
    for part in parts:
        longer = f"{line}  {part}" if line else part
        line = longer if len(longer) <= room else line
    return line


def _numbers(view: RunView) -> Text:
    one = view.overview
    pairs = [] if one.loss is None else [("loss", f"{one.loss:.3f}")]  # of the last steps, as everywhere
    if one.rate is not None:
        pairs.append(("lr", f"{one.rate:.2g}"))
    if view.units_per_second:
        pairs.append((f"{one.unit}/s", show_speed(view.units_per_second)))
    if one.score is not None:
        pairs.append((harmless(one.score.title), one.score.text))
    if view.best is not None and view.best.step != one.step:
        pairs.append(("best", f"{show_score(view.best.value)} at {view.best.step:,}"))
    parts = [part for name, value in pairs for part in ((f"{name} ", "dim"), (f"{value}  ", "bold"))]
    return Text.assemble(*parts) if parts else Text("no steps yet", "dim")


def _spans(spans: Mapping[str, float], width: int) -> Text:
    line = Text.assemble(("time ", "dim"))
    for span in LABELS:
        line.append("█" * round(_BAR_WIDTH * spans.get(span, 0.0)), _SPAN_STYLES.get(span, "dim"))
    for span in sorted(spans, key=lambda name: -spans[name]):
        words = f"{LABELS[span] if width >= _TWO_COLUMNS else span} {spans[span]:.0%}"
        if spans[span] >= 0.01 and line.cell_len + 2 + len(words) <= width:
            line.append("  ").append(words, _SPAN_STYLES.get(span, "dim"))
    return line


# Curves.


def _chart_room(view: RunView, width: int, room: int) -> int:
    """Return the number of lines for curves: half, or more if there is little to say below them."""
    wanted = 6 + min(len(view.machines), 4)
    return min(max(room - wanted - 6, room // 2), room) if width >= _CHART_WIDTH and room >= _CHART_HEIGHT else 0


def _charts(charts: Sequence[tuple[str, Sequence[Series]]], width: int, room: int) -> Lines:
    """Draw as many charts as there is room for, in rows of equal charts."""
    if not charts or room < 4:
        return []
    across = max(1, min(len(charts), width // _CHART_WIDTH))
    rows = max(1, min(-(-len(charts) // across), room // (_CHART_HEIGHT + 4)))
    height = min(room // rows, _MAX_CHART_HEIGHT)
    each = (width - 2 * (across - 1)) // across
    lines: Lines = []
    for row in range(rows):
        shown = charts[row * across : (row + 1) * across]
        lines += _beside([chart(title, series, each, height) for title, series in shown], [each] * len(shown))
    return lines


def chart(title: str, series: Sequence[Series], width: int, height: int) -> Lines:
    """Draw lines over common axes: a title with the last values, the curves, and the steps below them."""
    head = Text.assemble((harmless(title), "bold"))
    for number, one in enumerate(series):
        name = f"  ● {harmless(one.name)} " if len(series) > 1 else "  "
        head.append(name, _LINE_STYLES[number % 4]).append(_short(one.points[-1][1]), _LINE_STYLES[number % 4])
    points = [point for one in series for point in one.points]
    (left, right), (low, high) = ((min(axis), max(axis)) for axis in zip(*points, strict=True))
    labels = {0: _short(high), height - 3: _short(low)}
    if height > 6:
        labels[(height - 3) // 2] = _short(high + (low - high) * ((height - 3) // 2) / (height - 3))
    margin = max(map(len, labels.values())) + 1
    canvas = Canvas(width - margin - 1, height - 2)
    for number, one in enumerate(series):
        # One dot per column: the mean of all points that fall into it.
        columns: defaultdict[int, list[float]] = defaultdict(list)
        for x, y in one.points:
            columns[round(canvas.across * _share(x, left, right))].append(_share(y, low, high))
        places = [(x, round(canvas.down * (1 - fmean(ys)))) for x, ys in sorted(columns.items())]
        canvas.line(places, _LINE_STYLES[number % 4])
    lines = [head]
    for row, drawn in enumerate(canvas.rows()):
        axis = f"{labels.get(row, ''):>{margin - 1}} {'┤' if row in labels else '│'}"
        lines.append(Text.assemble((axis, "dim"), drawn))
    first, last = f"{left:,.0f} ", f" {right:,.0f}"
    rule = "─" * max(0, width - margin - 1 - len(first) - len(last))
    lines.append(Text(f"{'':>{margin}}└{first}{rule}{last}", "dim"))
    return lines


def _share(value: float, low: float, high: float) -> float:
    spread = high / 2 - low / 2  # halves: the difference of two large numbers overflows
    return (value / 2 - low / 2) / spread if spread > 0 else 0.5


def _short(value: float) -> str:
    """Show a number in few characters: `0.00071`, `2.312`, `12.3k`."""
    size = abs(value)
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if limit <= size < 1e12:
            return f"{value / (1e3 if letter == 'k' else limit):.3g}{letter}"
    return f"{value:.4g}" if size >= 1 or value == 0 else f"{value:.2g}"


class Canvas:
    """Braille characters to draw lines with; each has two dots across and four down, and one color."""

    def __init__(self, columns: int, rows: int) -> None:
        self._columns, self._rows = max(1, columns), max(1, rows)
        self.across, self.down = 2 * self._columns - 1, 4 * self._rows - 1
        self._dots: dict[tuple[int, int], tuple[int, str]] = {}

    def line(self, places: Sequence[tuple[int, int]], style: str) -> None:
        self._dot(*places[0], style)
        for (x, y), (to_x, to_y) in pairwise(places):
            length = max(abs(to_x - x), abs(to_y - y), 1)
            for part in range(1, length + 1):
                self._dot(round(x + (to_x - x) * part / length), round(y + (to_y - y) * part / length), style)

    def _dot(self, x: int, y: int, style: str) -> None:
        cell = (y // 4, x // 2)
        bits, _ = self._dots.get(cell, (0, ""))
        self._dots[cell] = (bits | _DOTS[x % 2][y % 4], style)

    def rows(self) -> Iterator[Text]:
        for row in range(self._rows):
            line = Text()
            for column in range(self._columns):
                bits, style = self._dots.get((row, column), (0, ""))
                line.append(chr(0x2800 + bits) if bits else " ", style)
            yield line


# Below the curves: machines, events, output.


def _below(view: RunView, width: int, room: int) -> Lines:
    if room < 2:
        return []
    machines = min(len(view.machines), max(1, room // 4))
    if width >= _TWO_COLUMNS:
        left = (width - 2) // 2
        column = [*_machines(view, left, machines), *_events(view, left, room - machines - 2)]
        return _beside([column[:room], _output(view, width - left - 2, room)], [left, width - left - 2])
    events = max(1, min(len(_shown(view)), (room - machines - 3) // 3))
    lines = [*_machines(view, width, machines), *_events(view, width, events)]
    return [*lines, *_output(view, width, room - len(lines))]


def _machines(view: RunView, width: int, room: int) -> Lines:
    states = [one.state for one in view.machines]
    words = ", ".join(f"{states.count(state)} {state}" for state in _MACHINE_STYLES if state in states)
    # Those that need a look first: lost ones, then those at work.
    order = ("lost", "starting", "working", "left")
    shown = sorted(view.machines, key=lambda one: order.index(one.state))[:room]
    names = max((len(harmless(one.hostname)) for one in shown), default=0)
    return [_title("machines", width, words or "none yet"), *(_machine(one, min(names, 20), width) for one in shown)]


def _machine(one: MachineView, name_width: int, width: int) -> Text:
    used = one.telemetry
    line = Text.assemble((f"{harmless(one.hostname)[:name_width]:<{name_width}}  ", "bold"))
    line.append(f"{one.state:<8}  ", _MACHINE_STYLES[one.state])
    line.append(f"{counted(one.workers, 'worker')}  ")
    if one.state in ("working", "starting"):
        parts = [f"CPU {used.cpu_fraction:>4.0%}", f"memory {used.memory_fraction:>4.0%}"]
        if used.gpus:
            busy = sum(gpu.used_fraction for gpu in used.gpus) / len(used.gpus)
            full = sum(gpu.memory_used_bytes for gpu in used.gpus) / max(1, sum(gpu.memory_bytes for gpu in used.gpus))
            parts.insert(0, f"GPU {busy:>4.0%} ({full:.0%} memory)")
        parts.append(f"↑{show_bytes(used.sent_bytes_per_second)}/s ↓{show_bytes(used.received_bytes_per_second)}/s")
        parts.append(f"disk {show_bytes(used.disk_free_bytes)} free")
        line.append(_fitting(parts, width - line.cell_len))
    return line


def _shown(view: RunView) -> list[Text]:
    return [
        Text.assemble(
            (f"{time.strftime('%H:%M:%S', time.localtime(one.time))}  ", "dim"),
            (f"{one.kind:<10}  ", "yellow" if one.display == "warning" else "dim"),
            (harmless(one.text), "yellow" if one.display == "warning" else ""),
        )
        for one in view.events
        if one.display != "report"
    ]


def _events(view: RunView, width: int, room: int) -> Lines:
    shown = _shown(view)[-room:] if room > 0 else []
    return [_title("events", width), *(shown or [Text("none yet", "dim")])]


def _output(view: RunView, width: int, room: int) -> Lines:
    lines = [
        Text.assemble((f"{'-' if one.rank is None else one.rank:>2} ", "dim"), harmless(one.text))
        for one in view.lines[-max(0, room - 1) :]
    ]
    return [_title("output", width), *(lines or [Text("none yet", "dim")])][: max(0, room)]
