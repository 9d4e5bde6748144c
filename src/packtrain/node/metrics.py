"""The numbers of a user's own program: what it logs, writes for TensorBoard or prints, as the run's metrics.

The first node reads them, on the machine that has rank 0: lines that `packtrain.log` appends to a file, and event files
that rank 0 has open, or that are in the program's directories. If there is nothing of that, it takes the numbers that
rank 0 prints beside a step.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from packtrain.node.event_file import EventFile, Scalar
from packtrain.run.checkpoint import Checkpoint
from packtrain.run.chunks import ChunkWriter
from packtrain.run.records import Generation, LogLine, Point, TellEvent, evaluates, loss_name
from packtrain.run.run import Run, worker_writer
from packtrain.store.records import MAX_NUMBER, MAX_SECONDS, DamagedRecord
from packtrain.train.control import Control

MAX_NAMES = 1000
"""Of a run's numbers. Each is a curve: a program that makes a new name at every step wants something else."""
_NAME_LENGTH = 200
_KEPT_NUMBERS = 2_000_000  # of all names; beyond its share, only every second, fourth, ... of a name is kept
_COMPARED = 1000  # steps from before a restart: names that are logged less often are not compared
_OPEN_STEPS = 10_000  # that more numbers may still arrive for
_READ_BYTES = 8 << 20
_MAX_TIME = 1e11  # of a clock that is not broken
_MAX_LINE_BYTES = 1 << 20
_SCANNED = 20_000  # files and folders at a time: a program may have its data set there
_SCAN_SECONDS = 10.0  # between two searches for event files
_EVENT_FILE = "events.out.tfevents."
_MAX_PRINTED = 50_000  # lines with numbers between two searches
_MAX_PRINTED_LENGTH = 1000
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
# As in `step 1,000/5,000`, `iter: 10`, `{"step": 10` and `[global_step=3]`, but not `max_steps=500` or `step 0.5`.
_STEP = re.compile(
    r"(?<![A-Za-z])(?:step|iter|iteration)(?![A-Za-z])['\"\s:=#\[]*(\d{1,3}(?:,\d{3})+|\d{1,15})(?![\w%]|[.:]\d)",
    re.IGNORECASE,
)
_EPOCH = re.compile(r"(?<![A-Za-z])epoch(?![A-Za-z])['\"\s:=#\[(]*(\d{1,9})(?!\w)", re.IGNORECASE)
_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|nan|[-+]?inf)(?![\w%]|[:/.,]\d)"  # without a unit, and no time
_FIRST_WORD = "train|training|val|valid|validation|eval|test|learning|(?-i:[A-Z])"
# A name may be one of two that differ only in the word before: `train loss: 2.1, val loss: 2.4`, `D loss: 1 G loss: 2`.
_NAMED = re.compile(rf"(?<![\w/.-])(?:({_FIRST_WORD})[ ])?([A-Za-z][\w/.-]*+)['\"]?\s*[:=]\s*{_NUMBER}", re.IGNORECASE)
_LOSS = re.compile(rf"(?<![\w/.-])(?:({_FIRST_WORD})[ _/])?(loss)\s+{_NUMBER}", re.IGNORECASE)
# What prints of a number that a library wraps: `tensor(2.3, device='cuda:0')`, `np.float64(2.3)`.
_WRAPPED = re.compile(r"\b(?:tensor|Tensor|Array|np\.float\d+)\(\s*([-+\w.]+)[^()]*\)")


@dataclass(frozen=True)
class Logged:
    """Numbers of one step; None is the step after the last. `epoch` is the one that a printed line names."""

    step: int | None
    time: float
    values: dict[str, float]
    epoch: int = 0


def parse_line(line: bytes) -> Logged | None:
    """Return the numbers of a line of `packtrain.log`; None if another process has written something else there."""
    try:
        entry = json.loads(line)
        step, moment, values = entry["step"], float(entry["time"]), entry["values"]
        if step is not None and (not 0 <= step <= MAX_NUMBER or step != int(step)):
            return None
        numbers = {name: float(value) for name, value in values.items()}
        return Logged(None if step is None else int(step), moment, numbers)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def parse_printed(line: LogLine) -> Logged | None:
    """Return the numbers of a line such as `iter 10: loss 4.64` or `step=10 loss=4.64 lr=1e-3`, if it has a step."""
    if len(line.text) > _MAX_PRINTED_LENGTH:
        return None
    text = _WRAPPED.sub(r"\1", _COLOR.sub("", line.text))
    step = _STEP.search(text)
    if step is None:
        return None
    remainder = f"{text[: step.start()]} {text[step.end() :]}"
    matches = (*_NAMED.findall(remainder), *_LOSS.findall(remainder))
    values = {_name_of(first_word.lower(), name): float(number) for first_word, name, number in matches}
    epoch = _EPOCH.search(remainder)
    number = int(step[1].replace(",", ""))
    return Logged(number, line.time, values, int(epoch[1]) if epoch is not None else 0) if values else None


def _name_of(first_word: str, name: str) -> str:
    if first_word:
        return f"{'train' if first_word == 'training' else first_word}_{name.lower()}"
    return "loss" if name.lower() == "loss" else name


@dataclass
class _NumberShare:
    """How many numbers of a name came, and how many were used."""

    came: int = 0
    used: int = 0


@dataclass
class _StepNumbers:
    """The numbers of a step; `moment` is the time of the one under `name`."""

    moment: float
    name: str
    values: dict[str, float]


@dataclass
class NumberTable:
    """Collects numbers by step. A step that gets more of them later is told again, with all that it has.

    A program may count steps in several ways, such as its validation by epochs: then a row has numbers of different
    times. Its time is that of the loss, or else of the number that comes most often; of a score only without others.
    `before` has the last step of each name in what the program has resumed from.
    """

    generation: int
    last_step: int
    tell: TellEvent
    before: dict[str, int] = field(default_factory=dict)
    reached: int | None = None  # of the steps that the program names
    restarted: bool = False  # the program counts from the beginning, although it was to resume
    _steps: dict[int, _StepNumbers] = field(default_factory=dict)
    _untold: set[int] = field(default_factory=set)
    _shares: dict[str, _NumberShare] = field(default_factory=dict)
    _warned: bool = False

    def add(self, logged: Logged) -> None:
        values = {name: value for name, value in logged.values.items() if self._is_kept(name, value)}
        step = self.last_step + 1 if logged.step is None else logged.step
        if logged.values:
            self.last_step = step
        if logged.step is not None and logged.values:
            self.reached = max(step, self.reached or 0)
            if logged.epoch <= 1:  # of a later one, the steps may be counted anew in each
                self._compare(step, logged.values)
        if values:
            moment = logged.time if 0 <= logged.time <= _MAX_TIME else time.time()  # also if it is not a number
            name = max(values, key=self._weight)
            row = self._steps.setdefault(step, _StepNumbers(moment, name, {}))
            if self._weight(name) >= self._weight(row.name):
                row.moment, row.name = moment, name
            row.values = {**row.values, **values}  # another dict: the one before may be in a point
            self._untold.add(step)

    def _compare(self, step: int, names: Iterable[str]) -> None:
        """Warn if a program that was to resume counts from the beginning; each name may have a counter of its own."""
        for name in names if step > 0 else ():  # step 0: see `_new_points`
            before = self.before.pop(name, 0)
            if step <= before / 2:
                self.before.clear()
                self.restarted = True
                self.tell(
                    "warning",
                    f"the program did not resume: {name!r} is back at step {step:,} after step {before:,}; older"
                    " checkpoints are kept; set program.resume to the arguments that make it resume",
                )

    def _weight(self, name: str) -> tuple[bool, bool, int]:
        """Say how likely it is that a number counts the steps of training."""
        return loss_name((name,)) is not None, not evaluates(name), self._shares[name].came

    def _is_kept(self, name: str, value: float) -> bool:
        share = self._shares.get(name)
        if share is None:
            if len(self._shares) >= MAX_NAMES or not 0 < len(name) <= _NAME_LENGTH:
                self._warn(name)
                return False
            share = self._shares[name] = _NumberShare()
        if name.endswith("_seconds") and not abs(value) <= MAX_SECONDS:  # no record may have such a time
            return False
        every = 1 << (share.used // (_KEPT_NUMBERS // max(20, len(self._shares))))
        share.came += 1
        is_kept = share.came % every == 0
        share.used += is_kept
        return is_kept

    def _warn(self, name: str) -> None:
        if not self._warned:
            self._warned = True
            why = f"more than {MAX_NAMES:,} names" if 0 < len(name) <= _NAME_LENGTH else "a name of unusual length"
            self.tell("warning", f"the program logs numbers under {why}; left some out")

    @property
    def num_new(self) -> int:
        return len(self._untold)

    def take(self) -> list[Point]:
        """Return the steps that have something new."""
        points = [
            Point("log", self.generation, step, row.moment, row.values)
            for step in sorted(self._untold)
            for row in (self._steps[step],)
        ]
        self._untold.clear()
        for step in list(self._steps)[: max(0, len(self._steps) - _OPEN_STEPS)]:
            del self._steps[step]
        return points


class ProgramMetrics:
    """Reads the numbers of the generation that `begin` names. `flush` reads what is new and puts it. Thread-safe."""

    def __init__(self, run: Run, folders: Iterable[Path], tell: TellEvent) -> None:
        self._run, self._folders, self._tell = run, tuple(folders), tell
        self._lock = threading.RLock()
        self._source: _Source | None = None
        self._writers: list[ChunkWriter[Point]] = []

    def begin(
        self,
        generation: Generation,
        control: Control,
        launcher: Callable[[], int | None],
        restored: Checkpoint | None = None,
    ) -> None:
        """Read from now on what this generation writes; the checkpoint is restored, and no worker runs yet."""
        with self._lock:
            if self._source is not None and self._source.generation == generation:  # a start that is tried again
                return
            self._collect(is_complete=True)
            from packtrain.observe.history import read_recent  # needs NumPy, which a node of a recipe can do without

            points: list[Point] = []
            with suppress(DamagedRecord):
                points = [point for point in read_recent(self._run, _COMPARED, False) if point.kind == "log"]
            before: dict[str, int] = {}
            if restored is not None:
                limit = math.inf if restored.reached is None else restored.reached
                before = {name: point.step for point in points if point.step <= limit for name in point.values}
            last = points[-1].step if points else -1
            table = NumberTable(generation.number, last, self._tell, before)
            self._source = _Source(generation, control.numbers, self._folders, table, launcher)
            self._writers.append(self._run.point_writer(worker_writer(generation.number, 0)))

    @property
    def reached(self) -> int | None:
        """The highest step that the program has named in this generation."""
        with self._lock:
            return None if self._source is None else self._source.table.reached

    @property
    def restarted(self) -> bool:
        """True if the program of this generation did not resume, but started from the beginning."""
        with self._lock:
            return self._source is not None and self._source.table.restarted

    def hear(self, line: LogLine) -> None:
        """Take a line that a worker has printed. Does not wait: a flush may wait for the store."""
        source = self._source
        if source is not None and line.rank == 0 and line.generation == source.generation.number:
            source.hear(line)

    def flush(self, is_complete: bool = False) -> None:
        """Put what is new. Printed numbers wait for the next search for event files, which `is_complete` does now."""
        with self._lock:
            self._collect(is_complete)
            while self._writers:
                self._writers[0].flush()
                if len(self._writers) == 1:
                    break
                del self._writers[0]

    def _collect(self, is_complete: bool) -> None:
        if self._source is not None:
            for point in self._source.read(is_complete):
                self._writers[-1].append(point)


class _Source:
    """Where the numbers of one generation come from."""

    def __init__(
        self,
        generation: Generation,
        lines: Path,
        folders: Iterable[Path],
        table: NumberTable,
        launcher: Callable[[], int | None],
    ) -> None:
        self.generation, self._lines, self._folders = generation, lines, tuple(folders)
        self.table, self._launcher = table, launcher
        self._offset = 0
        self._has_begun = False
        # Of an earlier generation: its numbers are known.
        self._files = {path: EventFile.at_end(path) for path in found_event_files(self._folders)}
        self._num_old = len(self._files)
        self._others: set[Path] = set()  # files of other ranks
        self._printed: deque[Logged] = deque(maxlen=_MAX_PRINTED)
        self._owners: dict[str, Path] = {}  # of tags: the folder that had each first
        self._scanned = -math.inf

    def read(self, is_complete: bool) -> Iterator[Point]:
        scanned = self._scanned
        for logged in self._logged():
            self.table.add(logged)
            if self.table.num_new >= _OPEN_STEPS:
                yield from self._new_points()
        for scalar, folder in self._scalars(is_complete):
            owner = self._owners.setdefault(scalar.tag, folder)
            name = scalar.tag if owner == folder else f"{folder.name}/{scalar.tag}"
            self.table.add(Logged(scalar.step, scalar.time, {name: scalar.value}))
        if self._scanned > scanned:  # not before: the program may have opened an event file in the meantime
            logs_others = self._offset > 0 or len(self._files) > self._num_old
            while self._printed:
                logged = self._printed.popleft()
                if not logs_others:
                    self.table.add(logged)
        yield from self._new_points()

    def hear(self, line: LogLine) -> None:
        logged = parse_printed(line)
        if logged is not None:
            self._printed.append(logged)

    def _new_points(self) -> Iterator[Point]:
        for point in self.table.take():
            # A program that resumes may log something at step 0 before it has read its checkpoint, as the first time.
            if point.step == 0 and self.generation.step > 0:
                continue
            if not self._has_begun:
                self._has_begun = True
                yield Point("start", point.generation, max(0, point.step - 1), point.time, {})
            yield point

    def _scalars(self, is_complete: bool) -> Iterator[tuple[Scalar, Path]]:
        if is_complete or time.monotonic() - self._scanned > _SCAN_SECONDS:
            self._scanned = time.monotonic()
            opened = open_event_files(self._launcher())
            self._others |= {path for path, rank in opened if rank != "0"}
            for path in (*(path for path, _ in opened), *found_event_files(self._folders)):
                if path not in self._files:
                    self._files[path] = EventFile(path)
        for path, file in self._files.items():
            if path not in self._others:
                for scalar in file.read():
                    yield scalar, path.parent

    def _logged(self) -> Iterator[Logged]:
        while True:
            try:
                with self._lines.open("rb") as file:
                    file.seek(self._offset)
                    data = file.read(_READ_BYTES)
            except OSError:  # nothing was logged yet
                return
            end = data.rfind(b"\n") + 1
            if not end and len(data) > _MAX_LINE_BYTES:  # no line of ours is that long
                end = len(data)
            self._offset += end
            for line in data[:end].splitlines():
                logged = parse_line(line)
                if logged is not None:
                    yield logged
            if not end or len(data) < _READ_BYTES:
                return


def open_event_files(launcher: int | None) -> list[tuple[Path, str]]:
    """Return the event files that workers have open, wherever they are, each with the worker's rank."""
    opened: list[tuple[Path, str]] = []
    with suppress(psutil.Error, OSError):
        processes = psutil.Process(launcher).children(recursive=True) if launcher is not None else []
        for process in processes:
            with suppress(psutil.Error, OSError):  # it has exited meanwhile
                paths = [Path(file.path) for file in process.open_files() if _EVENT_FILE in file.path]
                opened += [(path, process.environ().get("RANK", "0")) for path in paths]
    return opened


def found_event_files(folders: Iterable[Path]) -> list[Path]:
    """Return the event files in these folders. Links are not followed: they lead to a person's own files."""
    paths, entries_left = [], _SCANNED
    for folder in folders:
        for place, names, files in os.walk(folder.resolve()):
            paths += [Path(place, name) for name in files if _EVENT_FILE in name]
            entries_left -= len(names) + len(files)
            if entries_left < 0:
                return paths
    return paths
