"""Fleets by the word that names them in a job file. Adding one is a file here and a line in FLEETS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from packtrain.fleet.fleet import Fleet, Start, Started
from packtrain.fleet.local import LocalFleet
from packtrain.job import FleetKind, Local

__all__ = ["FLEETS", "Fleet", "Start", "Started", "fleet_of"]

FLEETS: Mapping[type[FleetKind], Callable[[Any], Fleet]] = {Local: LocalFleet}


def fleet_of(kind: FleetKind) -> Fleet:
    return FLEETS[type(kind)](kind)
