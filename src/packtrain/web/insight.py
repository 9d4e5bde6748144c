"""The one place where the dashboard asks others for what they know of a run: findings, predictions, sweeps."""

from __future__ import annotations

from typing import Any

from packtrain.run.run import Run
from packtrain.store import Store


def findings(run: Run) -> list[dict[str, Any]]:  # noqa: ARG001 - report/findings.py will say
    """Return the answers of the report: key, question, answer, verdict, evidence."""
    return []


def prediction(run: Run) -> list[dict[str, Any]]:  # noqa: ARG001 - plan/estimate.py will say
    """Return what was expected of the run against what happened: what, expected, seen, off."""
    return []


def sweeps(store: Store) -> list[dict[str, Any]]:  # noqa: ARG001 - sweep.py will say
    """Return all sweeps: name, job, runs, finished, best."""
    return []


def sweep(store: Store, name: str) -> dict[str, Any] | None:  # noqa: ARG001 - sweep.py will say
    """Return the table of a sweep: name, parameters, measure, rows; None if there is none of that name."""
    return None


def sweep_of(run: Run) -> str | None:  # noqa: ARG001 - sweep.py will say
    """Return the name of the sweep that the run is part of; None if it is on its own."""
    return None
