"""The Python interface: start a run or open one, read it, use its model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from packtrain.errors import Mistake
from packtrain.export.predict import Choice, DecodeOptions, load_predictor
from packtrain.fleet import release, request_stop
from packtrain.fleet.down import take_down
from packtrain.job.kinds import FLEETS, FleetKind, word_of
from packtrain.pack.build import PlainProgress
from packtrain.report import write_report
from packtrain.run.liveness import State, state_of
from packtrain.run.records import LogLine, Point, Result
from packtrain.run.run import Run, open_run
from packtrain.run.trust import Accept, CodeReview
from packtrain.start import create, load, reopen, start, wait_until_joined
from packtrain.store import open_store

_MAX_REPORT_BYTES = 256 << 20


class RunHandle:
    """A run in Python. Every method reads the store when it is called."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.name = run.name

    def __repr__(self) -> str:
        return f"<run {self.name} in {self._run.store.url}>"

    def _repr_html_(self) -> str:
        """Show the report in a notebook, in a frame that keeps its style from the rest."""
        from html import escape

        write_report(self._run)  # the stored one may be older than the run
        page = self._run.store.get(self._run.key("report.html"), _MAX_REPORT_BYTES).decode()
        return f'<iframe sandbox srcdoc="{escape(page)}" style="width:100%;height:640px;border:0"></iframe>'

    def state(self) -> State:
        return state_of(self._run)

    def metrics(self) -> list[Point]:
        """Return every step and evaluation that survived, in order."""
        return self._run.metrics()

    def logs(self) -> list[LogLine]:
        return sorted(self._run.log_lines().read(), key=lambda line: line.time)

    def result(self) -> Result | None:
        return self._run.result()

    def wait(self, seconds: float | None = None) -> Result | None:
        """Wait until the run ends, or for that many seconds; return the result, or None if there is none by then."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while (result := self._run.result()) is None and (deadline is None or time.monotonic() < deadline):
            time.sleep(0.5)
        if result is not None:
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
        if state == "running" or (state == "finished" and not overrides):
            raise Mistake(f"{self.name} is {state}; only a run that stopped or failed can be resumed")
        self._run = reopen(self._run, _trusting(trust_code), print, overrides)
        wait_until_joined(start(self._run, tied=False))

    def report(self) -> str:
        """Write the report and return its location."""
        return write_report(self._run)

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
        return [made.text for made in predictor.predict(inputs, options)]


def run(job: str | Path, overrides: Sequence[str] = ()) -> RunHandle:
    """Pack if needed, start a run and return; it keeps running without this process."""
    created = create(load(job, overrides), PlainProgress(print))
    wait_until_joined(start(created, tied=False))
    return RunHandle(created)


def open_(name: str | None = None, store: str = "./store") -> RunHandle:
    """Open a run by its name, the newest of a job, or the newest in the store."""
    return RunHandle(open_run(open_store(store), name))


def _trusting(given: bool) -> Accept:
    def accept(review: CodeReview) -> None:
        if not given:
            raise Mistake(f"{review.reason}; look at it, then pass trust_code=True")

    return accept
