"""How the nodes of a run agree on the next generation: who proposes it, when, with which members and why.

Who: the first node of the latest generation. If there is no generation yet, or its first node is lost, the node that
claims the turn first (`proposers/` in the store, put-if-absent); if that one is lost, too, the next turn decides.

When: once it is clear how the latest generation ended (every other member has reported, renewed its lease since, or is
lost) and which nodes are alive.

Only the proposer reads every lease, and while workers run only the first node does: the others read the lease of one
node. So the requests of all nodes together grow with their number, not with its square.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from packtrain.errors import Mistake
from packtrain.node.address import check_private
from packtrain.node.causes import (
    COUNTED,
    OWN_FAILURES,
    blamed,
    lost_machine,
    most_specific,
    only_lost_others,
    reason_for,
    verdict,
)
from packtrain.node.deadline import seconds_left
from packtrain.node.lease import LeaseRenewer
from packtrain.node.workers import WorkerGroup, WorkerStop
from packtrain.run.checkpoint import last_step
from packtrain.run.liveness import LEASE_SECONDS, LeaseWatch
from packtrain.run.records import Cause, Generation, Lease, Member, NodeReport, TellEvent
from packtrain.run.run import Run, worker_writer
from packtrain.units import Machines

GATHER_SECONDS = 4.0  # for machines that were started together to be seen together
RENEWAL_SECONDS = 3 * LEASE_SECONDS  # in which a live node is seen to renew its lease
EXPLAIN_SECONDS = 6.0  # for the node whose failure broke the connections of the others to report why
GROW_SECONDS = 30.0  # a generation trains at least this long before it ends for the sake of a new machine ...
GROW_FACTOR = 3  # ... and this many times longer than it took to start
QUIET: tuple[Cause, ...] = ("ended", "preempted", "joined")
"""Causes that are not reported as a failure."""


# Pure decisions.


def excluded(culprits: Sequence[str | None]) -> set[str]:
    """Return the nodes that alone ended two generations in a row, given the node that ended each."""
    return {first for first, second in pairwise(culprits) if first is not None and first == second}


def chosen(alive: Sequence[Lease], machines: Machines, excluded: Collection[str] = ()) -> list[Lease]:
    """Return the members of the next generation, the nodes that came first; none while there are too few machines.

    Nodes that are `excluded` take part only if there are too few other machines, and so does a second node on one
    machine.
    """
    staying = sorted((lease for lease in alive if not lease.leaving), key=_by_age)
    trusted = [lease for lease in staying if lease.node not in excluded]
    # With too few others, a machine that failed twice is better than none.
    leases = _spread(trusted if _count_machines(trusted) >= machines.least else staying, machines)
    return leases if len(leases) >= machines.least else []


def newcomer(
    current: Generation, alive: Sequence[Lease], machines: Machines, excluded: Collection[str] = ()
) -> Lease | None:
    """Return the node that has waited longest beside a generation with room for its machine.

    A second node on one machine leaves its place to another machine, and never joins.
    """
    machine_of = {lease.node: _machine(lease) for lease in alive}
    occupied = {machine_of.get(member.node, member.node) for member in current.members}
    if len(occupied) >= machines.most:
        return None
    waiting = [lease for lease in alive if _machine(lease) not in occupied and lease.node not in excluded]
    return min((lease for lease in waiting if not lease.leaving), key=_by_age, default=None)


def _by_age(lease: Lease) -> tuple[int, str]:
    # By name among nodes of the same age, so that any node would make the same proposal.
    return lease.joined, lease.node


def _machine(lease: Lease) -> str:
    return lease.machine or lease.node


def _count_machines(leases: Iterable[Lease]) -> int:
    return len({_machine(lease) for lease in leases})


def _spread(leases: Sequence[Lease], machines: Machines) -> list[Lease]:
    """Return the oldest node of each machine, and second nodes only up to the least number; ordered by age."""
    oldest: dict[str, Lease] = {}
    for lease in leases:
        oldest.setdefault(_machine(lease), lease)
    chosen = list(oldest.values())[: machines.most]
    seconds = [lease for lease in leases if lease not in oldest.values()]
    return sorted([*chosen, *seconds[: max(0, machines.least - len(chosen))]], key=_by_age)


@dataclass(frozen=True)
class LostNode:
    """A member that is gone, while the workers of all others wait for its own."""

    node: str


class Assembly:
    """One node's view of the others."""

    def __init__(
        self,
        run: Run,
        lease: LeaseRenewer,
        clock: Callable[[], float] = time.monotonic,
        tell: TellEvent = lambda _kind, _text: None,
    ) -> None:
        self._run, self._lease, self._clock, self._tell = run, lease, clock, tell
        self._name, self._job = lease.lease.node, lease.lease.job
        self._machines = run.job.fleet.kind.machines
        self.watch = LeaseWatch()
        self._turn = (0, 0)  # the generation to propose, and how many nodes that claimed the turn were lost
        self._proposer: str | None = None
        self._gathering = (0, 0.0)  # for which generation, since when
        self._verdicts: dict[int, str | None] = {}
        self._history: list[Generation] = []
        self._told_excluded: set[str] = set()
        self._told_unsafe: set[str] = set()
        self._first_step = (0, 0.0)  # of which generation, and when

    # Leases.

    def look_at_all(self) -> None:
        self.watch.observe(self._run.leases(), self._clock())

    def look_at(self, node: str) -> Lease | None:
        lease = self._run.lease(node)
        self.watch.observe([lease] if lease is not None else [], self._clock())
        return lease

    def is_lost(self, node: str) -> bool:
        """True if the node is lost, judging by the looks so far."""
        return node != self._name and self.watch.lost(node, self._clock())

    def alive(self) -> list[Lease]:
        """Return the nodes that can take part now. This node's own lease is fresher here than in the store."""
        leases = {node: lease for node, lease in self.watch.leases.items() if node != self._name}
        alive = [
            lease
            for node, lease in leases.items()
            if lease.job == self._job and self.watch.alive(node, self._clock()) and self._is_safe(lease)
        ]
        return [self._lease.lease, *alive]

    def _is_safe(self, lease: Lease) -> bool:
        """False for a node at a public address, which only a node of another version or a forged lease can have."""
        try:
            check_private(lease.address, self._run.job.fleet.public_address)
        except Mistake as mistake:
            if lease.node not in self._told_unsafe:
                self._told_unsafe.add(lease.node)
                self._tell("warning", f"continuing without {lease.node}: {mistake}")
            return False
        return True

    # While workers run: does their generation have to end because of another node?

    def watch_others(self, group: WorkerGroup) -> LostNode | NodeReport | WorkerStop | None:
        """Watch all other nodes if this is the first one, or else the first one.

        LostNode and NodeReport mean that the generation has ended; WorkerStop that its workers have to commit and exit.
        """
        if group.is_first:
            return self._watch_all(group)
        first = group.generation.members[0].node
        lease = self.look_at(first)
        if self.is_lost(first):
            return LostNode(first)
        if lease is not None and lease.stopping == group.generation.number:
            return WorkerStop("ended", "requested by the first machine", self._clock())
        return None

    def _watch_all(self, group: WorkerGroup) -> LostNode | NodeReport | WorkerStop | None:
        self.look_at_all()
        generation, stop = group.generation, None
        for member in generation.members[1:]:
            lease, report = self.watch.leases.get(member.node), self._reported(member.node, generation)
            is_leaving = lease is not None and lease.leaving
            if self.is_lost(member.node) and not is_leaving:
                return LostNode(member.node)
            if report is not None and report.cause not in QUIET:
                return NodeReport(generation.number, "ended", "workers of another machine failed")
            if is_leaving:  # even if it is already lost: the workers here still have to commit
                stop = stop or WorkerStop("preempted", f"machine {member.node} is being preempted", self._clock())
        if stop is None and (joining := self._to_take_in(generation, group.began)) is not None:
            stop = WorkerStop("joined", f"machine {joining.node} joined", self._clock())
        return stop

    def _to_take_in(self, generation: Generation, began: float) -> Lease | None:
        """Return a node to restart the generation with, once it has trained so long that a restart costs little."""
        if self._clock() - began < GROW_SECONDS:
            return None
        joining = newcomer(generation, self.alive(), self._machines, excluded(self._culprits(generation)))
        if joining is None or self._run.job.program is not None:  # a program does not say when it starts to train
            return joining
        # Read until the first step is found, and then remembered: the stream of metrics grows.
        if self._first_step[0] != generation.number:
            age = seconds_since_first_step(self._run, generation.number)
            if age is None:
                return None
            self._first_step = (generation.number, self._clock() - age)
        stepped = self._first_step[1]
        trained, took = self._clock() - stepped, max(0.0, stepped - began)
        return joining if trained >= max(GROW_SECONDS, GROW_FACTOR * took) else None

    # Between generations: is it this node's turn, and what does it propose?

    def is_of_this_job(self, generation: Generation) -> bool:
        """False for a generation from before the run was resumed with another job; its nodes leave, or are gone."""
        return generation.job == self._job

    def is_proposer(self, latest: Generation | None) -> bool:
        """True if this node proposes the generation after the latest."""
        if latest is not None and self.is_of_this_job(latest):
            first = latest.members[0].node
            if first == self._name:
                return True
            self.look_at(first)
            if not self.is_lost(first):
                return False
        number = 1 if latest is None else latest.number + 1
        # No first node: a claim decides, so that not every node reads every lease.
        if self._turn[0] != number:  # a new generation: claims of the one before do not count
            self._turn, self._proposer = (number, 0), None
        if self._proposer is None:
            self._proposer = self._run.proposer(*self._turn, self._name)
        if self._proposer == self._name:
            return True
        self.look_at(self._proposer)
        if self.is_lost(self._proposer):
            self._turn, self._proposer = (number, self._turn[1] + 1), None
        return False

    def propose(self, latest: Generation | None, ending: NodeReport | None, since: float) -> str | None:
        """Propose the next generation, once it is clear how the latest ended and who is alive.

        `ending` is how it ended on this node, `since` when. Returns why the run is given up, if it is.
        """
        self.look_at_all()
        if latest is not None and ending is not None and self._is_unsettled(latest, ending, since):
            return None
        ended = self._how_it_ended(latest, ending)
        step = last_step(self._run)
        if latest is not None and ended.cause in COUNTED:
            # Judged only once: reports of nodes that leave in the meantime must not change it.
            if latest.number not in self._verdicts:
                tried = self._up_to(latest)
                self._verdicts[latest.number] = verdict(tried, ended, step, self._run.job.fleet.failures)
            if (given_up := self._verdicts[latest.number]) is not None:
                return given_up
        number, alive = 1 if latest is None else latest.number + 1, self.alive()
        culprit = None if latest is None or ended.cause not in COUNTED else self._culprit(latest, ending)
        if self._is_gathering(number, alive, ended):
            return None
        culprits = [] if latest is None else self._culprits(latest)
        members = chosen(alive, self._machines, excluded([*culprits, culprit]))
        if not members:
            return None
        leases = {**self.watch.leases, self._name: self._lease.lease}.values()
        # Durations are compared, never clocks: the node that has counted the longest has missed the least.
        used = max(self._lease.used_seconds(), *(lease.used_seconds for lease in leases))
        generation = Generation(
            number,
            tuple(Member(lease.node, lease.address, lease.workers) for lease in members),
            members[0].port,
            reason_for(ended),
            step,
            ended.cause,
            failed_step=ended.step,
            used_seconds=used,
            seconds_left=seconds_left(self._run.job.budget, self._run.job.fleet, leases, used, len(alive)),
            culprit=culprit,
            job=self._job,
            launches=self._run.count_launches(),
            restarted=ended.restarted,
        )
        # If another node's proposal wins, the next look finds that one.
        if self._run.propose(generation) and ended.lost is not None and ended is not ending:
            self._tell("lost", f"{ended.lost} stopped renewing its lease")
        return None

    def _is_unsettled(self, latest: Generation, ending: NodeReport, since: float) -> bool:
        """True while another member may still report what went wrong, or turn out to be lost.

        It has to renew its lease after the generation ended here. If all that is known here is that it waited for the
        others, or lost the connection to them, they get some time to say why.
        """
        other_nodes = [member.node for member in latest.members if member.node != self._name]
        silent = [node for node in other_nodes if not self.is_lost(node) and not self._reported(node, latest)]
        if only_lost_others(ending) and self._clock() - since < EXPLAIN_SECONDS:
            return bool(silent)
        return any(not self.watch.renewed_since(node, since) for node in silent)

    def _reported(self, node: str, generation: Generation) -> NodeReport | None:
        lease = self.watch.leases.get(node)
        report = lease.report if lease is not None else None
        return report if report is not None and report.generation == generation.number else None

    def _how_it_ended(self, latest: Generation | None, ending: NodeReport | None) -> NodeReport:
        if latest is None:
            return NodeReport(0, "start", "start")
        other_nodes = [member.node for member in latest.members if member.node != self._name]
        # This node was not a member, and all members are gone: a person has resumed the run.
        if ending is None and (not self.is_of_this_job(latest) or all(self.is_lost(node) for node in other_nodes)):
            return NodeReport(latest.number, "resumed", "resumed")
        reports = list(self._reports(latest, ending).values())
        if not reports:
            return NodeReport(latest.number, "ended", "the first machine was lost")
        requested = [report for report in reports if report.cause in ("preempted", "joined")]
        cause = most_specific(reports)
        if cause.cause in OWN_FAILURES:  # only the first machine knows, which may not be the one that failed
            cause = replace(cause, restarted=any(report.restarted for report in reports))
        # Programs exit in all sorts of ways when they are asked to stop: that is not a failure.
        return requested[0] if requested and cause.cause == "program" and not cause.fatal else cause

    def _reports(self, latest: Generation, ending: NodeReport | None) -> dict[str, NodeReport]:
        """Return what each member reports, and for one that is gone, that it is."""
        reports = {self._name: ending} if ending is not None else {}
        for node in (member.node for member in latest.members if member.node != self._name):
            lease, report = self.watch.leases.get(node), self._reported(node, latest)
            if report is not None:
                reports[node] = report
            elif lease is not None and lease.leaving:
                reports[node] = NodeReport(latest.number, "preempted", f"machine {node} was preempted")
            elif self.is_lost(node):
                reports[node] = lost_machine(latest.number, node)
        return reports

    def _up_to(self, latest: Generation) -> list[Generation]:
        """Return all generations up to this one; each record is read from the store only once."""
        last_number = self._history[-1].number if self._history else 0
        if last_number < latest.number:
            self._history += self._run.generations(last_number)
        return [generation for generation in self._history if generation.number <= latest.number]

    def _culprits(self, latest: Generation) -> list[str | None]:
        """Return the node that ended each generation before the latest; the record of its successor names it."""
        return [generation.culprit for generation in self._up_to(latest)]

    def _culprit(self, latest: Generation, ending: NodeReport | None) -> str | None:
        """Return the node that alone ended the latest generation, by an error of its own or because it was lost."""
        texts = {blamed(node, report): report.text for node, report in self._reports(latest, ending).items()}
        texts.pop(None, None)
        if len(texts) != 1 or len(latest.members) == 1:  # no or several culprits, or no other machine
            return None
        [(culprit, text)] = texts.items()
        if culprit is not None and culprit == latest.culprit and culprit not in self._told_excluded:
            self._told_excluded.add(culprit)
            self._tell("excluded", f"{culprit} failed two generations in a row; continuing without it: {text}")
        return culprit

    def _is_gathering(self, number: int, alive: Sequence[Lease], ended: NodeReport) -> bool:
        """True while more machines may be alive than are known to be.

        Machines that are started together appear one after the other, and a lease that was seen only once may be of a
        dead node.
        """
        if _count_machines(alive) >= self._machines.most or len(alive) < self._machines.least:
            return False  # waiting longer would change nothing
        at = self._clock()
        if self._gathering[0] != number:
            self._gathering = (number, at)
        waited = at - self._gathering[1]
        if ended.cause in ("start", "resumed") and waited < GATHER_SECONDS:
            return True
        unknown = [node for node in self.watch.leases if not self.watch.alive(node, at) and not self.is_lost(node)]
        return any(node != self._name for node in unknown) and waited < RENEWAL_SECONDS


def seconds_since_first_step(run: Run, generation: int) -> float | None:
    """Return the age of a recipe's first step in a generation; None before it.

    Wall clocks are compared, but of one machine: only the first node asks, and rank 0 is its worker.
    """
    # Oldest chunk first: the first step is in one of the first.
    for chunk in run.points().of(worker_writer(generation, 0)):
        for point in chunk:
            if point.kind == "train":
                return max(0.0, time.time() - point.time)
    return None
