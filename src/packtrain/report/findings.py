"""All findings of a run, in the order in which people ask."""

from __future__ import annotations

from collections.abc import Callable

from packtrain.observe.evidence import Evidence
from packtrain.report import account, learning, origin, speed
from packtrain.report.finding import Finding

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
"""Each is a pure function; None if the question does not apply to the run."""


def findings_of(evidence: Evidence) -> list[Finding]:
    return [finding for ask in QUESTIONS if (finding := ask(evidence)) is not None]
