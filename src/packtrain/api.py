"""The Python interface: start a run or open one, read it, use its model."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, overload

from packtrain.errors import Mistake, PacktrainError
from packtrain.export.predict import DecodeOptions, load_predictor
from packtrain.fleet import release, request_stop
from packtrain.fleet.down import take_down
from packtrain.job.kinds import FLEETS, FleetKind, word_of
from packtrain.launch.check import check
from packtrain.launch.create import create
from packtrain.launch.load import load
from packtrain.launch.parent import read_name
from packtrain.launch.resume import edited_since, reopen
from packtrain.launch.start import start, wait_until_joined
from packtrain.observe.history import read_points
from packtrain.observe.status import Status, read_end
from packtrain.pack.build import PlainProgress
from packtrain.process import say
from packtrain.report import write_report
from packtrain.report.frame import frame_of, library_of
from packtrain.report.notebook import Report, draw, panel_of, place_to_draw, runs_table
from packtrain.report.plot import Axis, Plot, plot_of
from packtrain.run.checkpoint import Choice
from packtrain.run.liveness import State, StateWatch, attempt, state_of, states_now
from packtrain.run.records import LogLine, Point, Result
from packtrain.run.run import Run, open_run, run_names
from packtrain.run.trust import Accept, CodeReview
from packtrain.store import default_store, open_store
from packtrain.units import counted

_READERS = 16
_MAX_REPORT_BYTES = 256 << 20


class RunHandle:
    """A run in Python. Every method reads the store when it is called."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.name = run.name

    def __repr__(self) -> str:
        return f"<run {self.name} in {self._run.store.url}>"

    def _repr_html_(self) -> str:
        """Show the run as it is now: state, progress, curves, last events."""
        return panel_of(self._run).html

    def state(self) -> State:
        return state_of(self._run)

    def metrics(self, library: str | None = None) -> Any:
        """Return a DataFrame with a row per step and a column per measurement, such as train.loss and valid.bleu.

        It is one of pandas, or of polars if only that is installed; `library` names one of them.
        """
        return frame_of(self.points(), library_of(library))

    def points(self) -> list[Point]:
        """Return every step and evaluation that survived, in order."""
        return read_points(self._run)

    def plot(self, *names: str, against: RunHandle | Iterable[RunHandle] = (), x: Axis = "step") -> Plot:
        """Return a picture of these measurements over `step`, `epoch` or `hours`, `against` those of other runs.

        `"loss"` is that of training and of validation; `"valid.loss"` is one line. A notebook shows the picture, and
        `save("loss.png")` or `save("loss.svg")` writes it.
        """
        handles = [against] if isinstance(against, RunHandle) else list(against)
        return plot_of({handle.name: handle.points() for handle in (self, *handles)}, names or ("loss",), x)

    def watch(self) -> None:
        """Draw the run in the notebook until it ends; interrupting the cell ends the drawing, not the run."""
        draw(self._run, *place_to_draw())

    def logs(self) -> list[LogLine]:
        return sorted(self._run.log_lines().read(), key=lambda line: line.time)

    def result(self) -> Result | None:
        return self._run.result()

    def wait(self, seconds: float | None = None) -> Result | None:
        """Wait until the run ends, or for that many seconds; return the result, or None if there is none by then."""
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        while (result := self._run.result()) is None and time.monotonic() < deadline:
            time.sleep(0.5)
        if result is not None:
            watch = StateWatch(self._run)  # machines bring their last lines, and the report, after the result
            while watch.look() == "running" and time.monotonic() < deadline:
                time.sleep(0.2)
            release(self._run, print)
        return result

    def stop(self) -> None:
        """Ask the run's machines to commit and stop; `wait` returns when they have. Without any, it stops at once."""
        if self._run.result() is None:
            request_stop(self._run, "stopped by user (Python)", print)

    def down(self, trust_fleet: bool = False) -> list[str]:
        """End the run's machines now, wait until none is left, and return their names; `resume` continues the run.

        `trust_fleet` if it was started elsewhere, and you know which machines it names.
        """

        def accept(kinds: Sequence[FleetKind]) -> None:
            if not trust_fleet:
                where = ", ".join(word_of(FLEETS, kind) for kind in kinds)
                raise Mistake(
                    f"{self.name} was not started from here on {where}; look at it, then pass trust_fleet=True"
                )

        return take_down(self._run, accept, print)

    def resume(self, trust_code: bool = False, overrides: Sequence[str] = ()) -> None:
        """Resume the run; `trust_code` if it was started elsewhere, and you know what it runs.

        `overrides` change where it runs, what it may cost and how long it trains, as `packtrain resume --set` does.
        """
        state = self.state()
        # Unlike the command, which follows a running run: a call that does nothing would hide a mistake.
        if state == "running" or (state == "finished" and not overrides and self._run.is_complete()):
            raise Mistake(f"{self.name} is {state}; only a run that stopped or failed can be resumed")
        if (line := edited_since(self._run, overrides)) is not None:
            say(f"note: {line}")
        self._run = reopen(self._run, _trusting(trust_code), overrides=overrides)
        wait_until_joined(self._run, start(self._run, tied=False))

    def report(self) -> Report:
        """Write the report of the run so far; a notebook shows it, and its `url` is where it is stored."""
        url = write_report(self._run)
        return Report(url, self._run.store.get(self._run.key("report.html"), _MAX_REPORT_BYTES).decode())

    def predict(
        self,
        inputs: Sequence[str],
        beam: int | None = None,
        checkpoint: Choice = "last",
        nucleus: float | None = None,
        temperature: float | None = None,
        seed: int | None = None,
        trust_code: bool = False,
    ) -> list[str]:
        """Return the model's output for each input; search options left out are the recipe's defaults.

        A recipe of your own is code from the store: `trust_code` if the run was started elsewhere, and you know it.
        """
        options = DecodeOptions(beam, nucleus, temperature, seed=seed)
        predictor = load_predictor(self._run, checkpoint, accept=_trusting(trust_code))
        return [prediction.text for prediction in predictor.predict(inputs, options)]


class Runs(Sequence[RunHandle]):
    """The runs of a store, newest first. A notebook shows them as a table of how they are now."""

    def __init__(self, runs: Sequence[Run], url: str) -> None:
        self._runs, self._url = tuple(runs), url

    def __len__(self) -> int:
        return len(self._runs)

    @overload
    def __getitem__(self, index: int) -> RunHandle: ...
    @overload
    def __getitem__(self, index: slice) -> Runs: ...
    def __getitem__(self, index: int | slice) -> RunHandle | Runs:
        if isinstance(index, slice):
            return Runs(self._runs[index], self._url)
        return RunHandle(self._runs[index])

    def __repr__(self) -> str:
        return f"<{counted(len(self), 'run')} in {self._url}: {', '.join(run.name for run in self._runs)}>"

    def _repr_html_(self) -> str:
        states = states_now(self._runs)
        with ThreadPoolExecutor(_READERS) as readers:
            overviews = readers.map(_overview, self._runs, states)
        rows = zip((run.name for run in self._runs), overviews, strict=True)
        return runs_table(list(rows), self._url)

    def plot(self, *names: str, x: Axis = "step") -> Plot:
        """Return a picture of these measurements, with a line for each run."""
        return plot_of({run.name: read_points(run) for run in self._runs}, names or ("loss",), x)


def _overview(run: Run, state: State | PacktrainError) -> Status | PacktrainError:
    return state if isinstance(state, PacktrainError) else attempt(lambda: read_end(run, state))


def run(job: str | Path, overrides: Sequence[str] = (), parent: str | None = None, fresh: bool = False) -> RunHandle:
    """Pack if needed, start a run and return; it keeps running without this process.

    `parent` is a checkpoint of another run to start from, as `packtrain run --from` takes it; with `fresh`, only its
    weights are taken.
    """
    name = None if parent is None else read_name(parent, fresh=fresh)
    created = create(check(load(job, overrides), PlainProgress(say), name), lambda label, line: say(f"{label}: {line}"))
    wait_until_joined(created, start(created, tied=False))
    return RunHandle(created)


def open_(name: str | None = None, store: str | None = None) -> RunHandle:
    """Open a run by its name, the newest of a job, or the newest in the store: by default that of the commands."""
    return RunHandle(open_run(open_store(store or default_store()), name))


def runs(store: str | None = None) -> Runs:
    """Return all runs of a store, newest first."""
    opened = open_store(store or default_store())
    return Runs([Run(opened, name) for name in reversed(run_names(opened))], opened.url)


def _trusting(is_trusted: bool) -> Accept:
    def accept(review: CodeReview) -> None:
        if not is_trusted:
            raise Mistake(f"{review.reason}; look at it, then pass trust_code=True")

    return accept
