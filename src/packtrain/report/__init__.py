"""Reports: a page with the scores, curves, time and events of a run."""

from __future__ import annotations

from packtrain.report.render import render
from packtrain.report.summary import summary_of
from packtrain.run.liveness import state_of
from packtrain.run.run import Run, surviving

__all__ = ["report_url", "write_report"]


def write_report(run: Run) -> str:
    """Render the report from the current contents of the store, put it there, and return its URL."""
    raw, result = run.points().read(), run.result()
    events = sorted(run.events().read(), key=lambda event: event.time)
    summary = summary_of(run, result.status if result else state_of(run), raw, result)
    run.store.put(run.key("report.html"), render(run.job, summary, surviving(raw), events).encode())
    return report_url(run)


def report_url(run: Run) -> str:
    return f"{run.store.url}/{run.key('report.html')}"
