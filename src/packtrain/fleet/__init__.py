"""Ways to start `packtrain node RUN` on machines. The kinds are listed in job/kinds.py."""

from __future__ import annotations

from packtrain.errors import PacktrainError
from packtrain.fleet.fleet import Fleet, LaunchPlan, Machine, Say, StartedNode, silent, states_of
from packtrain.job.kinds import FleetKind
from packtrain.run.liveness import finish_unattended
from packtrain.run.run import Run

__all__ = ["Fleet", "LaunchPlan", "Machine", "StartedNode", "fleet_of", "request_stop", "states_of"]


def fleet_of(kind: FleetKind) -> Fleet:
    fleet: Fleet = kind.build()
    return fleet


def request_stop(run: Run, reason: str, say: Say = silent) -> None:
    """Ask the run's machines to commit and leave; if it has none, it has stopped when this returns."""
    run.request_stop(reason)
    try:
        fleet_of(run.job.fleet.kind).cancel_queued(run)
    except PacktrainError as error:
        say(f"Could not cancel queued jobs; they exit when they start: {error}")
    finish_unattended(run)
