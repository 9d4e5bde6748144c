"""Reports: what happened in a run, and why."""

from __future__ import annotations

from packtrain.report.render import render
from packtrain.report.summary import summary_of
from packtrain.runs import Run

__all__ = ["report_place", "write_report"]


def write_report(run: Run) -> str:
    """Renders the report from what the store holds now, puts it there, and says where it is."""
    points, result = run.metrics(), run.result()
    events = sorted(run.events().read(), key=lambda event: event.time)
    summary = summary_of(run, result.status if result else run.state(), points, result)
    run.store.put(run.key("report.html"), render(run.job, summary, points, events).encode())
    return report_place(run)


def report_place(run: Run) -> str:
    return f"{run.store.url}/{run.key('report.html')}"
