"""Who takes part in the next attempt: pure decisions over what the store holds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from packtrain.members import Cause, Generation, Member, Node
from packtrain.runs import LEASE_LOST_SECONDS
from packtrain.units import Machines

_BLIND_SECONDS = 4.0  # longer than this between two looks, and the reader could not look


@dataclass
class LeaseWatch:
    """Judges leases by this reader's own clock: what counts is when it saw a renewal, not when it was written.

    Time in which the reader saw nothing at all, because the store was away, does not count: nobody could renew.
    """

    lost_after_seconds: float = LEASE_LOST_SECONDS
    nodes: dict[str, Node] = field(default_factory=dict)
    """The leases as they were last seen, those of nodes that left included."""
    _seen: dict[str, tuple[int, float]] = field(default_factory=dict)
    _renewed: set[str] = field(default_factory=set)
    _looked: dict[str, float] = field(default_factory=dict)

    def observe(self, nodes: Iterable[Node], now: float) -> None:
        for node in nodes:
            self.nodes[node.node] = node
            blind = now - self._looked.get(node.node, now) - _BLIND_SECONDS
            self._looked[node.node] = now
            if node.left:
                self._seen.pop(node.node, None)
                self._renewed.discard(node.node)
                continue
            before = self._seen.get(node.node)
            if before is not None and before[0] != node.renewal:
                self._renewed.add(node.node)
            if before is None or before[0] != node.renewal:
                self._seen[node.node] = (node.renewal, now)
            elif blind > 0:
                self._seen[node.node] = (before[0], before[1] + blind)
                self._renewed.discard(node.node)  # nobody knows what became of it meanwhile

    def alive(self, node: str, now: float) -> bool:
        """Seen to renew its lease, and not long ago."""
        return node in self._renewed and now - self._seen[node][1] < self.lost_after_seconds

    def lost(self, node: str, now: float) -> bool:
        """Has left, or has not renewed for too long. A node can be neither alive nor lost: nobody knows yet."""
        return node not in self._seen or now - self._seen[node][1] >= self.lost_after_seconds

    def renewed_since(self, node: str, moment: float) -> bool:
        return node in self._renewed and self._seen[node][1] > moment


@dataclass(frozen=True)
class Why:
    """Why there is to be a new generation, and what it goes on from."""

    cause: Cause
    reason: str
    step: int = 0
    failed_step: int | None = None
    used_seconds: float = 0.0
    seconds_left: float | None = None
    culprit: str | None = None


def unwanted(culprits: Sequence[str | None]) -> set[str]:
    """The machines that alone ended two generations in a row; for each generation, which one ended it."""
    return {one for one, other in pairwise(culprits) if one is not None and one == other}


def proposal(
    previous: Generation | None, alive: Sequence[Node], machines: Machines, why: Why, unwanted: Collection[str] = ()
) -> Generation | None:
    """The next generation, of those who came first; None while there are not enough machines.

    Those who are `unwanted` take part only where it cannot do without them, and a second agent on a machine only
    where there are not enough others.
    """
    staying = sorted((node for node in alive if not node.leaving), key=_by_age)
    wanted = [node for node in staying if node.node not in unwanted]
    chosen = _spread(wanted if len(wanted) >= machines.least else staying, machines.most)
    if len(chosen) < machines.least:
        return None
    members = tuple(Member(node.node, node.address, node.workers) for node in chosen)
    number = 1 if previous is None else previous.number + 1
    return Generation(
        number,
        members,
        chosen[0].port,
        why.reason,
        why.step,
        why.cause,
        why.failed_step,
        why.used_seconds,
        why.seconds_left,
        why.culprit,
    )


def joiner(
    current: Generation, alive: Iterable[Node], machines: Machines, unwanted: Collection[str] = ()
) -> Node | None:
    """A machine that waits beside a generation which has room for it."""
    if len(current.members) >= machines.most:
        return None
    others = [node for node in alive if current.rank_of(node.node) is None and node.node not in unwanted]
    return min((node for node in others if not node.leaving), key=_by_age, default=None)


def _by_age(node: Node) -> tuple[int, str]:
    return node.joined, node.node


def _spread(nodes: Sequence[Node], most: int) -> list[Node]:
    """The first ones, each on a machine of its own as far as there are such; in their order."""
    first_there: dict[str, Node] = {}
    for node in nodes:
        first_there.setdefault(node.hostname, node)
    alone = list(first_there.values())
    return sorted([*alone, *(node for node in nodes if node not in alone)][:most], key=_by_age)
