"""Ways to start `packtrain node RUN` on machines. The kinds are listed in job/kinds.py."""

from __future__ import annotations

from packtrain.fleet.fleet import Fleet, LaunchPlan, Machine, StartedNode, states_of
from packtrain.job.kinds import FleetKind

__all__ = ["Fleet", "LaunchPlan", "Machine", "StartedNode", "fleet_of", "states_of"]


def fleet_of(kind: FleetKind) -> Fleet:
    fleet: Fleet = kind.build()
    return fleet
