"""Who takes part in the next attempt: pure decisions over what the store holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from packtrain.runs import LEASE_LOST_SECONDS, Generation, Member, Node

FAILURE = "failure: "


@dataclass
class LeaseWatch:
    """Judges leases by this reader's own clock: what counts is when it saw a renewal, not when it was written."""

    lost_after_seconds: float = LEASE_LOST_SECONDS
    _seen: dict[str, tuple[int, float]] = field(default_factory=dict)
    _renewed: set[str] = field(default_factory=set)

    def observe(self, nodes: Iterable[Node], now: float) -> None:
        for node in nodes:
            if node.left:
                self._seen.pop(node.node, None)
                self._renewed.discard(node.node)
                continue
            before = self._seen.get(node.node)
            if before is not None and before[0] != node.renewal:
                self._renewed.add(node.node)
            if before is None or before[0] != node.renewal:
                self._seen[node.node] = (node.renewal, now)

    def alive(self, node: str, now: float) -> bool:
        """Seen to renew its lease, and not long ago."""
        return node in self._renewed and now - self._seen[node][1] < self.lost_after_seconds

    def lost(self, node: str, now: float) -> bool:
        """Has left, or has not renewed for too long. A node can be neither alive nor lost: nobody knows yet."""
        return node not in self._seen or now - self._seen[node][1] >= self.lost_after_seconds


def proposal(
    previous: Generation | None, alive: Sequence[Node], machines: int, reason: str, step: int
) -> Generation | None:
    """The next generation, of those who came first; None while there are not enough machines."""
    chosen = sorted(alive, key=lambda node: (node.joined, node.node))[:machines]
    if len(chosen) < machines:
        return None
    members = tuple(Member(node.node, node.address, node.workers) for node in chosen)
    number = 1 if previous is None else previous.number + 1
    return Generation(number, members, chosen[0].port, reason, step)


def failures_in_a_row(generations: Sequence[Generation]) -> int:
    """How many generations up to the latest began because the one before had failed, with nothing committed between."""
    count = 0
    for generation in reversed(generations):
        if not generation.reason.startswith(FAILURE) or generation.step != generations[-1].step:
            break
        count += 1
    return count
