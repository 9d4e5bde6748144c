"""Fleets by the word that names them in a job file. Adding one is a file here and a line in FLEETS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from packtrain.fleet.fleet import Fleet, Machine, Start, Started
from packtrain.fleet.local import LocalFleet
from packtrain.fleet.mpi import MpiFleet
from packtrain.fleet.slurm import SlurmFleet
from packtrain.fleet.ssh import SshFleet
from packtrain.job.fleets import FleetKind, Local, Mpi, Slurm, Ssh

__all__ = ["FLEETS", "Fleet", "Machine", "Start", "Started", "fleet_of"]

FLEETS: Mapping[type[FleetKind], Callable[[Any], Fleet]] = {
    Local: LocalFleet,
    Ssh: SshFleet,
    Mpi: MpiFleet,
    Slurm: SlurmFleet,
}


def fleet_of(kind: FleetKind) -> Fleet:
    return FLEETS[type(kind)](kind)
