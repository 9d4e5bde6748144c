"""Reports: what a run's records answer, as a page, as Markdown and as values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from packtrain.observe.evidence import Evidence, gather
from packtrain.observe.status import status_json
from packtrain.report import account, learning, origin, speed
from packtrain.report.finding import Finding, Rows, Text
from packtrain.report.render import newest_samples, render
from packtrain.report.sample_view import MAX_SAMPLES
from packtrain.run.run import Run

__all__ = ["QUESTIONS", "finding_json", "findings_of", "report_json", "report_page", "report_url", "write_report"]

QUESTIONS: tuple[Callable[[Evidence], Finding | None], ...] = (
    learning.trained,
    learning.overfitting,
    learning.stability,
    learning.learning_rate,
    speed.duration,
    speed.devices,
    speed.data_loading,
    speed.network,
    speed.balance,
    speed.scaling,
    speed.step_times,
    account.faults,
    account.money,
    account.forecast,
    account.data_set,
    account.checkpoints,
    origin.machines,
    origin.reproduce,
)
"""In the order in which people ask. Each is a pure function; None if the question does not apply to the run."""


def findings_of(evidence: Evidence) -> list[Finding]:
    return [finding for ask in QUESTIONS if (finding := ask(evidence)) is not None]


def write_report(run: Run) -> str:
    """Render the report from the current contents of the store, put it there, and return its URL."""
    run.store.put(run.key("report.html"), report_page(run).encode())
    return report_url(run)


def report_page(run: Run) -> str:
    """Return the report as one page that needs nothing else."""
    evidence = gather(run)
    names = {sample.picture for sample in newest_samples(evidence)[:MAX_SAMPLES] if sample.picture is not None}
    pictures_by_name = {name: run.picture(name) for name in names}
    pictures = {name: data for name, data in pictures_by_name.items() if data is not None}
    return render(evidence, findings_of(evidence), pictures)


def report_json(evidence: Evidence) -> dict[str, Any]:
    """Return the answers for scripts, with their numbers and tables. The series are in the metrics."""
    return {
        **status_json(evidence.status),
        "findings": [finding_json(finding) for finding in findings_of(evidence)],
        "source": asdict(evidence.source) if evidence.source else None,
        "hardware": [
            {"node": lease.node, "hostname": lease.hostname, **asdict(lease.facts)} for lease in evidence.leases
        ],
        "samples": [asdict(sample) for sample in newest_samples(evidence)],
    }


def finding_json(finding: Finding) -> dict[str, Any]:
    """Return one answer as plain values, without its series."""
    tables = [asdict(figure) for figure in finding.figures if isinstance(figure, Rows)]
    fields = {name: value for name, value in vars(finding).items() if name != "figures"}
    texts = [asdict(figure) for figure in finding.figures if isinstance(figure, Text)]
    return {**fields, "tables": tables, "texts": texts}


def report_url(run: Run) -> str:
    return f"{run.store.url}/{run.key('report.html')}"
