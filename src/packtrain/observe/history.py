"""The history of a run: which of its points count, the last of them, and all of them as columns. Pure but for readers.

A generation that resumes from step s voids what earlier ones measured after s, and what it measures at s again replaces
what was measured before. `survivors` is the one place that knows this; it may be applied to any part of the points as
they arrive, in any order, as long as the starts that survive are kept.
"""

from __future__ import annotations

import itertools
import math
import time
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from packtrain.job import Job
from packtrain.observe.columns import Floats, Numbers, Rows, Table, as_json, extremes
from packtrain.observe.measure import BestBy, Score
from packtrain.observe.spans import BETWEEN_STEPS
from packtrain.run.points import PointBlock
from packtrain.run.records import Point, evaluates, loss_name
from packtrain.run.run import Run

KINDS = ("train", "valid", "test", "log")
RECENT_STEPS = 50
"""Of these last steps are the loss and the speed of a run: those of a single step are mostly noise."""
SAMPLED = "samples in chunk"
"""The column that says in which chunk the samples of an evaluation are."""
NO_SERIES = frozenset({"step", "generation", "time", SAMPLED})
_RECENT_EVALUATIONS = 3  # of each split: a restart may void the last ones
_RECENT_BYTES = 64 << 20  # of metrics: about 100,000 steps
_MOST_EPOCHS = 1000  # that are looked at one by one
_MAX_WAITING = 256  # blocks of rows
_MAX_CURVE = 400  # points that are kept of a curve of which only the shape is shown
_NO_LIMIT = int(np.iinfo(np.int64).max)
_KIND_NUMBERS = {"start": 0, **{kind: number for number, kind in enumerate(KINDS, 1)}}
_EDITIONS = itertools.count(int(time.time() * 1000))
_OF_LOST_STEPS = ("step", "generation", "time")

Batch = dict[str, Floats]
Layout = tuple[str, int, tuple[str, ...]]
"""Kind, generation and names of points: those that have the same are rows of one matrix."""


# Which points count.


def outlived(generations: Floats, steps: Floats, starts: Mapping[int, int]) -> NDArray[np.bool_]:
    """Return which points lie at a step from which, or from a later one, every later generation resumed."""
    numbers = sorted(starts)
    resumed = np.array([starts[number] for number in numbers], np.int64)
    # The lowest step that any generation from this one on resumed from; after the last there is no limit.
    limits = np.append(np.minimum.accumulate(resumed[::-1])[::-1], _NO_LIMIT)
    is_outlived: NDArray[np.bool_] = steps <= limits[np.searchsorted(numbers, generations, "right")]
    return is_outlived


def survivors(generations: Floats, steps: Floats, starts: Mapping[int, int], kinds: Floats | None = None) -> Rows:
    """Return the places of the points that count, by step, and of those at the same step by generation.

    Of several points of one kind at one step, that of the newest generation counts, or else the one that came last.
    """
    kinds = np.zeros(len(steps)) if kinds is None else kinds
    alive = np.flatnonzero(outlived(generations, steps, starts))
    order = alive[np.lexsort((generations[alive], kinds[alive], steps[alive]))]
    is_last = np.append((np.diff(steps[order]) != 0) | (np.diff(kinds[order]) != 0), True)[: len(order)]
    chosen: Rows = order[is_last]
    in_order: Rows = chosen[np.lexsort((chosen, generations[chosen], steps[chosen]))]
    return in_order


def surviving(points: Iterable[Point]) -> list[Point]:
    """Return the points that later generations resumed from, in the order of training."""
    read = list(points)
    in_order = sorted(read, key=lambda point: (point.generation, point.step))
    starts = {point.generation: point.step for point in in_order if point.kind == "start"}
    numbers = ([getattr(point, name) for point in read] for name in ("generation", "step"))
    generations, steps = (np.array(column, np.int64) for column in numbers)
    kinds = np.array([_KIND_NUMBERS[point.kind] for point in read])
    return [read[place] for place in survivors(generations, steps, starts, kinds)]


def read_points(run: Run) -> list[Point]:
    """Read the points that count, in order: no step twice, and none that a restart discarded."""
    return surviving(run.points().read())


def read_recent(run: Run, steps: int, evaluated: bool) -> list[Point]:
    """Read the end of `read_points`: that many steps and, if the run is `evaluated`, back to the last evaluation.

    Writers are named after their generation, so the newest generation is read first. By the time an older one is
    read, it is known which of its points a restart discarded. An end without steps is not searched for ever.
    """
    points, starts = list[Point](), list[Point]()
    for chunk in run.points().backward(_RECENT_BYTES):
        end = surviving([*starts, *chunk])
        starts = [point for point in end if point.kind == "start"]
        points += end
        steps -= sum(point.kind == run.job.step_kind for point in end)
        evaluated = evaluated and not any(point.kind == "valid" for point in end)
        if steps <= 0 and not evaluated:
            break
    return surviving(points)


# Steps, their loss, their pace.


def steps_in(points: Iterable[Point], step_kind: str) -> list[Point]:
    """Return the steps of training. Rows in which a program only evaluates its model count if there are no others."""
    steps = [point for point in points if point.kind == step_kind]
    return [point for point in steps if not point.is_evaluation] or steps


def loss_of(point: Point) -> float | None:
    """Return the training loss at a step; None if a program has not logged it there."""
    name = loss_name(point.values)
    return None if name is None else point.values[name]


def recent_losses(steps: Sequence[Point]) -> list[float]:
    """Return the training losses of the last steps; their mean is what every view shows as the loss of a run."""
    return [loss for point in steps[-RECENT_STEPS:] if (loss := loss_of(point)) is not None]


def step_seconds(point: Point) -> float:
    """Duration of a step, without the start, evaluation or save that came before it."""
    between = sum(point.values.get(f"{span}_seconds", 0.0) for span in BETWEEN_STEPS)
    return point.values["step_seconds"] - between


def throughput(steps: Sequence[Point], unit: str) -> float | None:
    """Return the units per second of some steps; None if that is not known."""
    if steps and steps[-1].kind == "log":  # a program says when it made a step, and not how long it took
        return _logged_speed(steps)
    seconds = sum(step_seconds(point) for point in steps)
    return sum(point.values.get(unit, 0.0) for point in steps) / seconds if seconds else None


def _logged_speed(steps: Sequence[Point]) -> float | None:
    # What comes before training, such as the size of the model, is often logged at step 0.
    latest = [point for point in steps if point.generation == steps[-1].generation and point.step > 0]
    # By one number that comes again: others may be logged at steps of another kind, such as epochs.
    counts = Counter(name for point in latest for name in point.values)
    repeated = {name: count for name, count in counts.items() if count > 1}
    name = loss_name(repeated) or max(repeated, key=repeated.__getitem__, default=None)
    # Of steps that were read from the output at one time, only the last was just made.
    timed = list({point.time: point for point in latest if name is None or name in point.values}.values())
    seconds = timed[-1].time - timed[0].time if timed else 0.0
    return max(0.0, (timed[-1].step - timed[0].step) / seconds) if seconds > 0 else None


def goal_step(job: Job, last: Point | None) -> int | None:
    """Return the step at which a recipe's duration ends; None if that is not known, as for a time.

    The steps of an epoch are known once some of them are made; later epochs may have batches of another size.
    """
    duration = job.train.duration if job.recipe is not None else None
    if duration is None or duration.unit == "seconds":
        return None
    if duration.unit == "steps":
        return int(duration.value)
    epochs = last.values["epoch"] if last is not None else 0.0
    if last is None or not 0 < epochs < math.inf:
        return None
    return max(last.step, round(last.step * _relative_steps(job, duration.value) / _relative_steps(job, epochs)))


def _relative_steps(job: Job, epochs: float) -> float:
    """Return a number that grows as the steps of so many epochs do: with batches twice as large, half as fast."""
    if max(epochs, job.train.duration.value) > _MOST_EPOCHS:
        return epochs
    complete = int(epochs)
    per_epoch = [1 / job.train.in_epoch(epoch).batch.value for epoch in range(complete + 1)]
    return sum(per_epoch[:complete]) + (epochs - complete) * per_epoch[complete]


def progress(job: Job, steps: Sequence[Point]) -> float | None:
    """Return the share of a recipe's duration that is done; a program does not tell."""
    if job.recipe is None:
        return None
    if not steps:
        return 0.0
    share = _reached(job, steps[-1]) / job.train.duration.value
    return min(1.0, max(0.0, share)) if math.isfinite(share) else None


def seconds_to_goal(job: Job, steps: Sequence[Point]) -> float | None:
    """Return the time until a recipe's duration ends at the pace of these steps; None if they show no pace."""
    if job.recipe is None or not steps:
        return None
    first, last, goal = steps[0], steps[-1], job.train.duration
    if goal.unit == "seconds":
        return max(0.0, goal.value - _reached(job, last))
    covered = _reached(job, last) - _reached(job, first)
    seconds = last.values["elapsed_seconds"] - first.values["elapsed_seconds"]
    return max(0.0, (goal.value - _reached(job, last)) * seconds / covered) if covered > 0 else None


def _reached(job: Job, step: Point) -> float:
    """Return how far a recipe is at a step, in the unit of its duration."""
    unit = job.train.duration.unit
    return float(step.step) if unit == "steps" else step.values["epoch" if unit == "epochs" else "elapsed_seconds"]


# The last points of a run.


class RecentPoints:
    """The last steps and evaluations of a run that count, exactly as they were recorded.

    Of a block of steps, only what is asked for becomes points.
    """

    def __init__(self, step_kind: str) -> None:
        self._step_kind = step_kind
        self._lines: dict[str, list[tuple[tuple[int, float], PointBlock | Point, str]]] = {}  # by kind, oldest first
        self._points: list[Point] | None = []

    def add(self, line: PointBlock | Point, source: str = "") -> None:
        """Add a line of a chunk; `source` names the chunk in an error."""
        names = line.values if isinstance(line, Point) else line.names
        row_bytes = 8 * (2 + len(names))
        # The last rows are enough, and thousands of runs may be listed. What is damaged is told when it is looked at.
        if isinstance(line, PointBlock) and line.rows > RECENT_STEPS and len(line.numbers) == line.rows * row_bytes:
            line = replace(line, rows=RECENT_STEPS, numbers=line.numbers[-RECENT_STEPS * row_bytes :])
        kind: str = line.kind
        if kind == "log" and all(map(evaluates, names)):
            kind = "logged evaluation"
        lines = self._lines.setdefault(kind, [])
        first = line.step if isinstance(line, Point) else float(np.frombuffer(line.numbers[:8].ljust(8), "<f8")[0])
        insort(lines, ((line.generation, first), line, source), key=itemgetter(0))
        if kind != "start":  # every start may void points that come later
            limit = _RECENT_EVALUATIONS if kind in ("valid", "test") else RECENT_STEPS
            while sum(1 if isinstance(later, Point) else later.rows for _, later, _ in lines[1:]) >= limit:
                del lines[0]
        self._points = None

    @property
    def points(self) -> list[Point]:
        if self._points is None:
            self._points = surviving(
                point
                for lines in self._lines.values()
                for _, line, source in lines
                for point in ([line] if isinstance(line, Point) else line.points(source, RECENT_STEPS))
            )
        return self._points

    @property
    def steps(self) -> list[Point]:
        return steps_in(self.points, self._step_kind)[-RECENT_STEPS:]

    @property
    def latest_steps(self) -> list[Point]:
        """The steps of the newest generation, which tell speed and time left; none until it has made some."""
        newest = max((point.generation for point in self.points), default=0)
        return [point for point in self.steps if point.generation == newest]


class LossCurve:
    """The shape of a run's loss in a few points: of some chunks from all over the run, and of all that is new."""

    def __init__(self, step_kind: str) -> None:
        self._step_kind = step_kind
        self._table, self._starts = Table(), dict[int, int]()

    def add(self, line: PointBlock | Point, source: str = "") -> None:
        """Add a line of a chunk; `source` names the chunk in an error."""
        if line.kind == "start" and isinstance(line, Point):
            self._starts[line.generation] = line.step
        name = loss_name(line.values if isinstance(line, Point) else line.names)
        if line.kind != self._step_kind or name is None:
            return
        if isinstance(line, Point):
            steps, losses = np.array([float(line.step)]), np.array([line.values[name]])
        else:
            numbers = line.matrix(source)
            steps, losses = numbers[:, 0], numbers[:, line.names.index(name) + 2]
        self._table.append({"step": steps, "generation": np.full(len(steps), float(line.generation)), "loss": losses})

    def losses(self, points: int) -> list[float | None]:
        """Return at most about that many losses, evenly spaced: lowest and highest of each part of the run."""
        table = self._table
        generations, steps = table.all("generation"), table.all("step")
        # The chunk with the start of a generation may be one that was not read: its first step tells nearly as much.
        firsts = {int(number): int(steps[generations == number].min()) - 1 for number in np.unique(generations)}
        table.select(survivors(generations, steps, firsts | self._starts))
        if table.rows > _MAX_CURVE:
            table.select(self._spread(_MAX_CURVE // 2))
        return as_json(table.all("loss")[self._spread(points)])

    def _spread(self, points: int) -> Rows:
        steps = self._table.all("step")
        if len(steps) <= points:
            return np.arange(len(steps))
        chosen = extremes(steps, self._table.all("loss"), int(steps[0]), int(steps[-1]) + 1, points)
        return np.searchsorted(steps, chosen)


# All points, as columns.


class History:
    """The points that count, as a table for each kind, however their chunks arrive.

    A million steps need a hundred megabytes, and not ten times that.
    """

    def __init__(self, unit: str, step_kind: str = "train") -> None:
        self.unit = unit
        """What a batch is counted in; empty for a program."""
        self.tables: dict[str, Table] = {kind: Table() for kind in KINDS}
        self.lost = Table()
        """Place and times of the steps that a restart discarded."""
        self.starts: dict[int, int] = {}
        self.recent = RecentPoints(step_kind)
        self.edition = next(_EDITIONS)
        """Another one after rows that a reader may have seen were discarded, or others were put before them."""
        self.sample_chunks: list[str] = []
        self._waiting: list[Numbers] = []  # rows that are yet to be added: many at once take little longer than one
        self._layout: Layout = ("", 0, ())

    @property
    def num_bytes(self) -> int:
        return sum(table.num_bytes for table in (*self.tables.values(), self.lost))

    def add(self, line: PointBlock | Point, key: str, source: str) -> None:
        """Add a line of the chunk of that key, which errors call `source`; `settle` when there is no more."""
        if isinstance(line, PointBlock):
            self._wait((line.kind, line.generation, line.names), line.matrix(source))
        elif line.kind == "start":
            self.settle()
            self._start(line.generation, line.step)
        else:
            values = dict(line.values)
            if line.samples:
                values[SAMPLED] = float(len(self.sample_chunks))
                self.sample_chunks.append(key)
            row = np.array([[line.step, line.time, *values.values()]], np.float64)
            self._wait((line.kind, line.generation, tuple(values)), row)
        self.recent.add(line, source)

    def settle(self) -> None:
        """Add the rows that wait."""
        if self._waiting:
            rows, self._waiting = np.concatenate(self._waiting), []
            self._append(self._layout[0], _columns_of(rows, self._layout, self.unit))

    def _wait(self, layout: Layout, rows: Numbers) -> None:
        if layout != self._layout or len(self._waiting) >= _MAX_WAITING:
            self.settle()
            self._layout = layout
        self._waiting.append(rows)

    def _start(self, generation: int, step: int) -> None:
        """Discard what a generation did not continue from."""
        self.starts[generation] = max(step, self.starts.get(generation, step))
        for kind, table in self.tables.items():
            is_outlived = outlived(table.all("generation"), table.all("step"), self.starts)
            if not is_outlived.all():
                self.edition = next(_EDITIONS)
                self._lose(kind, table.copied(np.flatnonzero(~is_outlived), table.names))
                table.select(np.flatnonzero(is_outlived))

    def _append(self, kind: str, batch: Batch) -> None:
        is_outlived = outlived(batch["generation"], batch["step"], self.starts)
        if not is_outlived.all():
            self._lose(kind, {name: numbers[~is_outlived] for name, numbers in batch.items()})
            batch = {name: numbers[is_outlived] for name, numbers in batch.items()}
        table, steps = self.tables[kind], batch["step"]
        if not len(steps):
            return
        is_next = steps[0] > table.last("step") and bool((np.diff(steps) > 0).all())
        table.append(batch)
        if not is_next:  # late, or measured again
            self.edition = next(_EDITIONS)
            generations, steps = table.all("generation"), table.all("step")
            chosen = survivors(generations, steps, self.starts)
            replaced = np.setdiff1d(np.arange(table.rows), chosen)
            newer = generations[chosen][np.searchsorted(steps[chosen], steps[replaced])]
            self._lose(kind, table.copied(replaced[generations[replaced] < newer], table.names))
            table.select(chosen)

    def _lose(self, kind: str, batch: Batch) -> None:
        if kind == "train":
            names = [name for name in batch if name in _OF_LOST_STEPS or name.endswith("_seconds")]
            self.lost.append({name: batch[name] for name in names})

    def names(self) -> list[str]:
        """Return the names of all series, such as `train.loss`."""
        return [
            f"{kind}.{name}" for kind, table in self.tables.items() for name in table.names if name not in NO_SERIES
        ]

    def axis(self, kind: str, x: str, rows: Rows) -> Floats:
        """Return the x of some rows. Evaluations do not have an epoch: it is that of the step."""
        table, train = self.tables[kind], self.tables["train"]
        if x != "epoch" or kind in ("train", "log"):
            return table.all(x)[rows]
        if not train.rows:
            return np.full(len(rows), np.nan)
        return np.interp(table.all("step")[rows], train.all("step"), train.all("epoch"))

    def thinned(self, series: str, points: int) -> list[tuple[float, float]]:
        """Return about that many (step, value) of a series which show the same picture as all; empty if it has none."""
        kind, _, name = series.partition(".")
        table = self.tables.get(kind)
        if table is None or name not in table.columns:
            return []
        rows = table.thinned(name, 0, table.rows, points)
        steps, values = table.all("step")[rows], table.all(name)[rows]
        is_finite = np.isfinite(values)
        return list(zip(steps[is_finite].tolist(), values[is_finite].tolist(), strict=True))

    def best(self, measure: BestBy) -> Score | None:
        """Return the best score of the evaluations, as exactly as columns have it."""
        table = self.tables["valid"]
        column = table.columns.get(measure.name)
        if column is None or not np.isfinite(column.all).any():
            return None
        values = np.where(np.isfinite(column.all), column.all, np.inf if measure.lower else -np.inf)
        place = int(values.argmin() if measure.lower else values.argmax())
        step = int(table.all("step")[column.rows_of(np.array([place]))[0]])
        return Score(f"valid.{measure.name}", float(values[place]), step)

    def sampled(self) -> Iterator[tuple[str, int, str]]:
        """Yield kind, step and chunk of each evaluation that has samples."""
        for kind, table in self.tables.items():
            if (column := table.columns.get(SAMPLED)) is not None:
                steps = table.all("step")[column.rows_of(np.arange(column.count))]
                for step, place in zip(steps.tolist(), column.all.tolist(), strict=True):
                    yield kind, int(step), self.sample_chunks[int(place)]

    def seconds_after(self, covered: Mapping[int, int]) -> Iterator[Point]:
        """Yield what goodput needs of the points: starts, the sums of the steps after `covered`, and of the lost ones.

        That has the last step of each generation that other records account for.
        """
        train = self.tables["train"]
        generations, steps = train.all("generation"), train.all("step")
        for generation, step in self.starts.items():
            row = int(np.searchsorted(generations, generation))
            yield Point("start", generation, step, float(train.all("time")[row]) if row < train.rows else 0.0, {})
        begin = 0
        while begin < train.rows:  # by their place, because to look at every step of a long run takes long
            end = int(np.searchsorted(generations, generations[begin], "right"))
            after = begin + int(np.searchsorted(steps[begin:end], covered.get(int(generations[begin]), -1), "right"))
            yield from _summed(train, np.arange(after, end))
            begin = max(end, begin + 1)
        generations, steps = self.lost.all("generation"), self.lost.all("step")
        for number in np.unique(generations):
            is_after = steps > covered.get(int(number), -1)
            for are_meant in (is_after, ~is_after):
                yield from _summed(self.lost, np.flatnonzero((generations == number) & are_meant))


def _columns_of(numbers: Numbers, layout: Layout, unit: str) -> Batch:
    """Return points as columns in the order of their steps. Each row has step, time, and a number for each name."""
    kind, generation, names = layout
    if (np.diff(numbers[:, 0]) < 0).any():
        numbers = numbers[np.argsort(numbers[:, 0], kind="stable")]
    batch: Batch = {name: numbers[:, place] for place, name in enumerate(names, 2)}
    batch |= {"step": numbers[:, 0], "generation": np.full(len(numbers), float(generation)), "time": numbers[:, 1]}
    if kind == "train" and unit in batch and "step_seconds" in batch:
        seconds = batch["step_seconds"].copy()
        for span in BETWEEN_STEPS:
            seconds -= batch.get(f"{span}_seconds", 0.0)
        with np.errstate(all="ignore"):
            batch["throughput"] = np.where(seconds > 0, batch[unit] / seconds, np.nan)
    return batch


def _summed(table: Table, rows: Rows) -> Iterator[Point]:
    """Yield some steps as one: the last of them, with the time of all."""
    if len(rows):
        values = {name: float(np.nansum(table.all(name)[rows])) for name in table.names if name.endswith("_seconds")}
        generation, step, end = (float(table.all(name)[rows[-1]]) for name in ("generation", "step", "time"))
        # A float has no number between the largest of the integers and the one after it.
        yield Point("train", min(int(generation), _NO_LIMIT), min(int(step), _NO_LIMIT), end, values)
