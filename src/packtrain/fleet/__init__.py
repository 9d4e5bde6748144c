"""Ways to start `packtrain node RUN` on machines. The kinds are listed in job/kinds.py."""

from __future__ import annotations

from packtrain.errors import PacktrainError
from packtrain.fleet.cloud import CloudFleet
from packtrain.fleet.fleet import (
    CancelsQueued,
    Fleet,
    FleetBuilder,
    LaunchPlan,
    Machine,
    Releases,
    Say,
    silent,
    states_of,
)
from packtrain.fleet.host import StartedNode
from packtrain.job.kinds import FLEETS, FleetKind, word_of
from packtrain.run.liveness import finish_unattended
from packtrain.run.run import Run
from packtrain.run.trust import trusts_fleet

__all__ = [
    "Fleet", "LaunchPlan", "Machine", "StartedNode", "fleet_of", "fleet_to_ask", "release", "request_stop", "states_of",
]  # fmt: skip


def fleet_of(kind: FleetKind) -> Fleet:
    assert isinstance(kind, FleetBuilder), kind
    return kind.build()


def fleet_to_ask(run: Run) -> Fleet | None:
    """Return the run's fleet if it may be asked about the run without a question to the person; else None.

    Whoever writes the store could name any machine, or a cluster whose login starts a program.
    """
    fleet = fleet_of(run.job.fleet.kind)
    return fleet if fleet.trains_here or trusts_fleet(run, run.job.fleet.kind) else None


def release(run: Run, say: Say = silent) -> None:
    """Give back machines that still cost money after the end of the run, wherever it has been.

    A fleet that cannot be asked is no error. One that this person has not accepted is not asked: whoever writes the
    store could name any.
    """
    from packtrain.fleet.down import launched_fleets

    def warn(reason: object) -> None:
        say(f"The machines of {run.name} may still cost money: {reason}; run `{run.command('down')}`")

    try:
        kinds = launched_fleets(run)
    except PacktrainError as error:
        warn(error)
        return
    for kind in kinds:
        try:
            fleet = fleet_of(kind)
            if fleet.trains_here or trusts_fleet(run, kind):
                if isinstance(fleet, Releases):
                    fleet.release(run, say)
            elif isinstance(fleet, CloudFleet):
                warn(f"it was not started on {word_of(FLEETS, kind)} from here")
        except PacktrainError as error:  # the other fleets cost money, too
            warn(error)


def request_stop(run: Run, reason: str, say: Say = silent) -> None:
    """Ask the run's machines to commit and leave; if it has none, it has stopped when this returns.

    Jobs in the queue of a fleet that may not be asked exit when they start.
    """
    run.request_stop(reason)
    try:
        fleet = fleet_to_ask(run)
        if fleet is not None and isinstance(fleet, CancelsQueued):
            fleet.cancel_queued(run)
    except PacktrainError as error:
        say(f"Could not cancel queued jobs; they exit when they start: {error}")
    finish_unattended(run)
