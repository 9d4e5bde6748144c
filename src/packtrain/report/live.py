"""A run that is being watched: what is new in its folder, gathered into a view that terminals and notebooks draw.

A view has a bounded size, whatever the length of the run: curves of a few hundred points, the last events and the last
lines of output. Only what is new is read, and never more than a chunk at a time is held.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from packtrain.backoff import SLOW_ANSWERS
from packtrain.job import Job
from packtrain.recipes import measure_of
from packtrain.report.cost import seconds_to_goal, share_done
from packtrain.report.goodput import LABELS
from packtrain.report.page import Series
from packtrain.report.score import Score, better_score
from packtrain.report.summary import RECENT_STEPS, Overview, add_step, overview_of, step_seconds, units_per_second
from packtrain.run.liveness import State, StateWatch
from packtrain.run.records import Event, Generation, Lease, LogLine, Point, Telemetry
from packtrain.run.run import Run
from packtrain.store import StoreError

Line = tuple[tuple[float, float], ...]

_MAX_POINTS = 400  # of a curve: more than a terminal has columns, or a chart of a page has pixels to tell apart
_MAX_LOGGED = 20  # curves of a program's own numbers
_KEPT_EVENTS, _KEPT_LINES, _KEPT_CHARACTERS = 200, 200, 500
_LOG_CHUNKS = 20  # of each machine: they are small
_LOOK_SECONDS = 1.0  # of reading at a time: a long history is drawn while it is read
_POLL_SECONDS = 1.0


class GrowingLine:
    """A line that grows: the means of equally many neighbors, twice as many whenever there are too many means.

    A restart discards the steps after its checkpoint. A mean that also has steps from before stays as it is.
    """

    def __init__(self, max_points: int = _MAX_POINTS) -> None:
        self._max_points, self._each = max_points, 1
        self._means: list[tuple[float, float, float, int]] = []  # first step, sums of steps and values, their number

    def add(self, step: float, value: float) -> None:
        if not math.isfinite(value):
            return
        if self._means and self._means[-1][3] < self._each:
            first, steps, values, count = self._means[-1]
            self._means[-1] = (first, steps + step, values + value, count + 1)
            return
        if len(self._means) >= self._max_points:
            self._each *= 2
            pairs = zip(self._means[::2], self._means[1::2], strict=True)
            self._means = [(a[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]) for a, b in pairs]
        self._means.append((step, step, value, 1))

    def cut(self, step: float) -> None:
        """Forget what came after a step."""
        while self._means and self._means[-1][0] > step:
            self._means.pop()

    def line(self) -> Line:
        return tuple((steps / count, values / count) for _, steps, values, count in self._means)


@dataclass(frozen=True)
class MachineView:
    """A machine as its lease shows it."""

    node: str
    hostname: str
    workers: int
    state: Literal["working", "starting", "lost", "left"]
    telemetry: Telemetry


@dataclass(frozen=True)
class RunView:
    """A run at a moment. `curves` are named as in `train.loss`, `valid.bleu` and `log.accuracy`; `speed` is units/s.

    `spans` are the shares of the last steps' time. `is_complete` is False while older parts of its history are still
    being read.
    """

    overview: Overview
    progress: float | None
    units_per_second: float | None
    seconds_left: float | None
    budget_seconds_left: float | None
    best: Score | None
    curves: Mapping[str, Line]
    spans: Mapping[str, float]
    generation: int
    machines: tuple[MachineView, ...]
    events: tuple[Event, ...]
    lines: tuple[LogLine, ...]
    is_complete: bool

    def charts(self) -> list[tuple[str, list[Series]]]:
        """Return titles and lines, the most important first: loss, scores, speed, learning rate, gradient norm."""
        scores = [f"valid.{self.overview.measure}"]
        scores += sorted(
            name for name in self.curves if name.startswith("valid.") and name not in (*scores, "valid.loss")
        )
        named = [("loss", {"train": "train.loss", "valid": "valid.loss"})]
        named += [(name.replace(".", " "), {name.partition(".")[2]: name}) for name in scores]
        named += [(f"{self.overview.unit}/s", {"speed": "speed"})]
        named += [("learning rate", {"rate": "train.rate"}), ("gradient norm", {"norm": "train.gradient_norm"})]
        named += [(name.removeprefix("log."), {name: name}) for name in self.curves if name.startswith("log.")]
        charts = [
            (
                title,
                [Series(name, self.curves[key], "valid" in key) for name, key in lines.items() if key in self.curves],
            )
            for title, lines in named
        ]
        return [(title, series) for title, series in charts if series]

    @property
    def has_ended(self) -> bool:
        return self.is_complete and self.overview.state in ("finished", "failed", "stopped")


class History:
    """The points of a run, reduced to what a view needs of them. Pure: the caller reads them in their order."""

    def __init__(self, job: Job) -> None:
        self._unit = job.train.batch.unit if job.recipe is not None else ""
        self._step_kind = job.step_kind
        self._measure = measure_of(job)
        self._curves: defaultdict[str, GrowingLine] = defaultdict(GrowingLine)
        self._bests: list[Score] = []  # so far, one after the other: a restart may discard some
        self._steps: deque[Point] = deque(maxlen=RECENT_STEPS)
        self._evaluations: dict[str, Point] = {}
        self._logged: set[str] = set()
        self.started: Point | None = None

    def add(self, point: Point) -> None:
        if point.kind == self._step_kind:
            add_step(self._steps, point)
        if point.kind == "start":
            self._restart(point)
        elif point.kind == "train":
            for name in ("loss", "rate", "gradient_norm"):
                self._put(f"train.{name}", point, point.values.get(name))
            seconds = step_seconds(point)
            if self._unit in point.values and seconds > 0:
                self._put("speed", point, point.values[self._unit] / seconds)
        elif point.kind == "log":
            for name, value in point.values.items():
                if name in self._logged or len(self._logged) < _MAX_LOGGED:
                    self._logged.add(name)
                    self._put(f"log.{name}", point, value)
        else:
            self._evaluations[point.kind] = point
            for name, value in point.values.items():
                if not name.endswith("_seconds"):
                    self._put(f"{point.kind}.{name}", point, value)
            best = better_score(self._measure, self.best, point)
            if best is not None and best is not self.best:
                self._bests.append(best)

    def _put(self, name: str, point: Point, value: float | None) -> None:
        if value is not None:
            self._curves[name].add(point.step, value)

    def _restart(self, point: Point) -> None:
        self.started = point
        for curve in self._curves.values():
            curve.cut(point.step)
        self._bests = [score for score in self._bests if score.step <= point.step]
        # Speed and time left are those of the current generation, but its first steps are yet to come.
        self._steps = deque((one for one in self._steps if one.step <= point.step), maxlen=RECENT_STEPS)

    @property
    def steps(self) -> list[Point]:
        """The last steps, of the current generation if it has made any."""
        steps = list(self._steps)
        return [one for one in steps if one.generation == steps[-1].generation]

    @property
    def points(self) -> list[Point]:
        return [*self.steps, *self._evaluations.values()]

    @property
    def best(self) -> Score | None:
        return self._bests[-1] if self._bests else None

    def curves(self) -> dict[str, Line]:
        return {name: line for name, curve in self._curves.items() if (line := curve.line())}

    def spans(self) -> dict[str, float]:
        seconds = {span: sum(one.values.get(f"{span}_seconds", 0.0) for one in self._steps) for span in LABELS}
        whole = sum(max(0.0, one) for one in seconds.values())
        return {span: one / whole for span, one in seconds.items() if one > 0} if whole else {}


class LiveRun:
    """Reads a run's folder; each `look` returns a view that includes what is new."""

    def __init__(self, run: Run, look_seconds: float = _LOOK_SECONDS) -> None:
        self._run, self._look_seconds = run, look_seconds
        self._history = History(run.job)
        self._points, self._event_stream = run.points(), run.events()
        # Of the output only the end is shown, which is in the last chunks of each machine.
        self._line_stream = run.log_lines().skip(but=_LOG_CHUNKS)
        self._events: deque[Event] = deque(maxlen=_KEPT_EVENTS)
        self._lines: deque[LogLine] = deque(maxlen=_KEPT_LINES)
        self._watch = StateWatch(run)
        self._generation: Generation | None = None

    def look(self) -> RunView:
        started = time.monotonic()
        result = self._run.result()  # first, so that everything up to the result is in the view
        is_complete = self._read_points(started + self._look_seconds)
        for events in self._event_stream.chunks():
            self._events.extend(replace(one, text=one.text[:_KEPT_CHARACTERS]) for one in events)
        for lines in self._line_stream.chunks():
            self._lines.extend(replace(one, text=one.text[:_KEPT_CHARACTERS]) for one in lines)
        judged = self._watch.look()
        state: State = judged if result is None else result.status
        self._generation = self._run.latest_generation(self._generation)
        job, steps = self._run.job, self._history.steps
        overview = overview_of(self._run, state, self._history.points, result, self._watch.leases)
        return RunView(
            overview=overview,
            progress=1.0 if state == "finished" else share_done(job, steps[-1] if steps else None),
            units_per_second=units_per_second(steps, overview.unit) if overview.unit else None,
            seconds_left=seconds_to_goal(job, steps) if state == "running" else None,
            budget_seconds_left=self._budget_left() if state == "running" else None,
            best=self._history.best,
            curves=self._history.curves(),
            spans=self._history.spans(),
            generation=self._generation.number if self._generation else 0,
            machines=tuple(self._machine(lease, result is not None) for lease in self._watch.leases),
            events=tuple(sorted(self._events, key=lambda one: one.time)),
            lines=tuple(sorted(self._lines, key=lambda one: (one.generation, one.time))),
            is_complete=is_complete,
        )

    def _read_points(self, deadline: float) -> bool:
        """Take in what is new; False if there is more than fits into the time of a look."""
        for points in self._points.chunks():
            for point in points:
                self._history.add(point)
            if time.monotonic() > deadline:
                return False
        return True

    def _budget_left(self) -> float | None:
        started, generation = self._history.started, self._generation
        if started is None or generation is None or generation.seconds_left is None:
            return None
        steps = self._history.steps
        return max(0.0, generation.seconds_left - ((steps[-1].time if steps else started.time) - started.time))

    def _machine(self, lease: Lease, is_over: bool) -> MachineView:
        lost = not self._watch.is_alive(lease.node)
        member = self._generation is not None and self._generation.rank_of(lease.node) is not None
        state: Literal["working", "starting", "lost", "left"] = (
            "left" if lease.left or is_over else "lost" if lost else "working" if member else "starting"
        )
        return MachineView(lease.node, lease.hostname, lease.workers, state, lease.telemetry)


class RunWatcher:
    """Looks at a run in a thread of its own: whoever draws the view never waits for a store that is away.

    `trouble` says what keeps it from looking at the moment, and `trouble_since` since when (monotonic).
    """

    def __init__(self, run: Run, poll_seconds: float = _POLL_SECONDS) -> None:
        self._run, self._poll_seconds = run, poll_seconds
        self.view: RunView | None = None
        self.trouble = ""
        self.trouble_since = 0.0
        self._error: Exception | None = None
        self._news, self._over = threading.Event(), threading.Event()
        self._tell: Callable[[str], None] | None = None

    def __enter__(self) -> RunWatcher:
        # A server that is slow to answer would be complained about in the middle of a drawing.
        self._tell, SLOW_ANSWERS.tell = SLOW_ANSWERS.tell, self._note_slowness
        threading.Thread(target=self._work, name="watcher", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        SLOW_ANSWERS.tell = self._tell

    def wait(self, seconds: float) -> bool:
        """Wait for another look; True if there was one. Raises what made looking impossible."""
        is_new = self._news.wait(seconds)
        self._news.clear()
        if self._error is not None:
            raise self._error
        return is_new

    def _work(self) -> None:
        live: LiveRun | None = None
        while not self._over.is_set():
            try:
                live = live or LiveRun(self._run)
                self.view = live.look()
                self._note("")
                self._news.set()
                if not self.view.is_complete:
                    continue
            except StoreError as error:
                if not error.temporary:
                    return self._fail(error)
                self._note(str(error))
            except Exception as error:
                return self._fail(error)
            self._over.wait(self._poll_seconds)
        return None

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._news.set()

    def _note_slowness(self, text: str) -> None:
        self._note("" if text.endswith("answers again") else text)

    def _note(self, trouble: str) -> None:
        if bool(trouble) != bool(self.trouble):
            self.trouble_since = time.monotonic()
        if trouble != self.trouble:
            self.trouble = trouble
            self._news.set()
