"""What the workers of a machine have to do because of the other machines of their generation."""

from __future__ import annotations

from dataclasses import dataclass

from packtrain.members import Report
from packtrain.node.assembly import Assembly
from packtrain.node.attempt import Asked, Attempt

QUIET = ("ended", "notice", "joined")
"""Causes that nobody needs to be told of as a failure."""


@dataclass(frozen=True)
class Lost:
    """The machine that is gone, and the workers of all others wait for."""

    node: str


def watch_others(assembly: Assembly, attempt: Attempt, now: float) -> Lost | Report | Asked | None:
    """The first machine watches all others, and they watch the first. A report is how the attempt ends here, and
    Asked why its workers are to commit and end."""
    return _watch_all(assembly, attempt, now) if attempt.is_first else _watch_first(assembly, attempt, now)


def _watch_first(assembly: Assembly, attempt: Attempt, now: float) -> Lost | Asked | None:
    name, number = attempt.generation.members[0].node, attempt.generation.number
    first = assembly.look_at(name)
    if assembly.is_lost(name):
        return Lost(name)
    if first is not None and first.stopping == number:
        return Asked("ended", "the first machine asks for it", now)
    return None


def _watch_all(assembly: Assembly, attempt: Attempt, now: float) -> Lost | Report | Asked | None:
    assembly.look_at_all()
    generation, asked = attempt.generation, None
    for member in generation.members[1:]:
        node = assembly.watch.nodes.get(member.node)
        report = node.report if node is not None else None
        if assembly.is_lost(member.node) and not (node is not None and node.leaving):
            return Lost(member.node)
        if report is not None and report.generation == generation.number and report.cause not in QUIET:
            return Report(generation.number, "ended", "workers of another machine failed")
        if node is not None and node.leaving:  # it may be gone before the workers here have committed
            asked = asked or Asked("notice", f"machine {member.node} has to leave", now)
    newcomer = assembly.joiner(generation, attempt.began)
    return asked or (Asked("joined", f"machine {newcomer.node} joins", now) if newcomer is not None else None)
