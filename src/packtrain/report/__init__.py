"""Reports: what happened in a run, and why."""

from __future__ import annotations

from packtrain.report.render import render
from packtrain.report.summary import summary_of
from packtrain.run.liveness import state_of
from packtrain.run.run import Run, surviving

__all__ = ["report_place", "write_report"]


def write_report(run: Run) -> str:
    """Renders the report from what the store holds now, puts it there, and says where it is."""
    raw, result = run.points().read(), run.result()
    events = sorted(run.events().read(), key=lambda event: event.time)
    summary = summary_of(run, result.status if result else state_of(run), raw, result)
    run.store.put(run.key("report.html"), render(run.job, summary, surviving(raw), events).encode())
    return report_place(run)


def report_place(run: Run) -> str:
    return f"{run.store.url}/{run.key('report.html')}"
