"""How the machines of a run find together: who proposes the next generation, and what it says.

The first machine of a generation reads every lease; the others read its lease alone. Where there is no first one,
at the start or when it is lost, whoever is first to claim the call reads them all. So the requests of all machines
together grow with their number, not with its square.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from packtrain.node.attempt import Asked, Attempt
from packtrain.node.causes import COUNTED, is_consequence, is_own_failure, most_telling, reason_for, verdict
from packtrain.node.deadline import seconds_left
from packtrain.node.lease import LeaseRenewer
from packtrain.run.checkpoint import committed
from packtrain.run.liveness import LEASE_SECONDS, LeaseWatch
from packtrain.run.records import Cause, Generation, Lease, Member, NodeReport, TellEvent
from packtrain.run.run import Run
from packtrain.units import Machines

GATHER_SECONDS = 4.0  # for machines that were started together to be seen together
RENEWAL_SECONDS = 3 * LEASE_SECONDS  # in which a lease that lives is seen to be renewed
EXPLAIN_SECONDS = 6.0  # for the machine that broke the others' connections to say why
GROW_SECONDS = 30.0  # the least time that a generation works before it ends for the sake of a new machine ...
GROW_FACTOR = 3  # ... and how many times longer than it took to begin


class Assembly:
    def __init__(
        self,
        run: Run,
        lease: LeaseRenewer,
        clock: Callable[[], float] = time.monotonic,
        tell: TellEvent = lambda _kind, _text: None,
    ) -> None:
        self._run, self._lease, self._clock, self._tell = run, lease, clock, tell
        self._machines = run.job.fleet.kind.machines
        self.watch = LeaseWatch()
        self._turn = (0, 0)  # of which generation, and how many who claimed the call are lost
        self._holder: str | None = None
        self._gathering = (0, 0.0)  # for which generation, since when
        self._judged: dict[int, str | None] = {}
        self._history: list[Generation] = []
        self._left_out: set[str] = set()  # of whom it was told
        self._stepped = (0, 0.0)  # which generation, and when it made its first step

    @property
    def name(self) -> str:
        return self._lease.node.node

    # Leases.

    def look_at_all(self) -> None:
        self.watch.observe(self._run.leases(), self._clock())

    def look_at(self, name: str) -> Lease | None:
        node = self._run.lease(name)
        self.watch.observe([node] if node is not None else [], self._clock())
        return node

    def is_lost(self, name: str) -> bool:
        """By what was seen so far."""
        return name != self.name and self.watch.lost(name, self._clock())

    def alive(self) -> list[Lease]:
        """Those who take part now. This machine's own lease is as it is here: the store may have an older one."""
        now = self._clock()
        others = [node for name, node in self.watch.leases.items() if name != self.name and self.watch.alive(name, now)]
        return [self._lease.node, *others]

    def joiner(self, generation: Generation, began: float) -> Lease | None:
        """A machine that the generation should take in, once it has worked for so long that a new beginning is a small
        part of the time. Of a program nobody knows when it has begun to work."""
        if self._clock() - began < GROW_SECONDS:
            return None
        newcomer = joiner(generation, self.alive(), self._machines, unwanted(self._culprits(generation)))
        if newcomer is None or self._run.job.program is not None:
            return newcomer
        if self._stepped[0] != generation.number:
            age = seconds_since_first_step(self._run, generation.number)
            if age is None:
                return None
            self._stepped = (generation.number, self._clock() - age)
        stepped = self._stepped[1]
        worked, took = self._clock() - stepped, max(0.0, stepped - began)
        return newcomer if worked >= max(GROW_SECONDS, GROW_FACTOR * took) else None

    # Proposals.

    def is_caller(self, latest: Generation | None) -> bool:
        """Whether it is for this machine to propose the generation after the latest."""
        if latest is not None:
            first = latest.members[0].node
            if first == self.name:
                return True
            self.look_at(first)
            if not self.is_lost(first):
                return False
        number = 1 if latest is None else latest.number + 1
        if self._turn[0] != number:
            self._turn, self._holder = (number, 0), None
        if self._holder is None:
            self._holder = self._run.proposer(*self._turn, self.name)
        if self._holder == self.name:
            return True
        self.look_at(self._holder)
        if self.is_lost(self._holder):
            self._turn, self._holder = (number, self._turn[1] + 1), None
        return False

    def call(self, latest: Generation | None, own: NodeReport | None, since: float) -> str | None:
        """Proposes the next generation once it is clear how the latest ended and who is there; why the run is given
        up, if it is. `own` is how it ended on this machine, `since` when."""
        self.look_at_all()
        number = 1 if latest is None else latest.number + 1
        if latest is not None and own is not None and self._unsettled(latest, own, since):
            return None
        ended = self._how_it_ended(latest, own)
        step = max((checkpoint.step for checkpoint in committed(self._run)), default=0)
        if ended.cause in COUNTED and latest is not None:
            if latest.number not in self._judged:
                tried = self._up_to(latest)
                self._judged[latest.number] = verdict(tried, ended, step, self._run.job.fleet.failures)
            if (given_up := self._judged[latest.number]) is not None:
                return given_up
        culprit = None if latest is None else self._blamed(latest, own)
        alive = self.alive()
        if self._still_gathering(number, len(alive), ended):
            return None
        why = replace(self._why(ended, step, len(alive)), culprit=culprit)
        culprits = [] if latest is None else self._culprits(latest)
        proposed = proposal(latest, alive, self._machines, why, unwanted([*culprits, culprit]))
        if proposed is not None:
            self._run.propose(proposed)
        return None

    def _why(self, ended: NodeReport, step: int, there: int) -> Why:
        nodes = {**self.watch.leases, self.name: self._lease.node}.values()
        used = max(self._lease.used_seconds(), *(node.used_seconds for node in nodes))
        left = seconds_left(self._run.job.budget, self._run.job.fleet, nodes, used, there)
        return Why(ended.cause, reason_for(ended), step, ended.step, used, left)

    def _up_to(self, latest: Generation) -> list[Generation]:
        """All generations so far. Of those that were read before, none is read again."""
        known = self._history[-1].number if self._history else 0
        if known < latest.number:
            self._history += self._run.generations(known)
        return [one for one in self._history if one.number <= latest.number]

    def _culprits(self, latest: Generation) -> list[str | None]:
        """Which machine ended each generation before the latest, as the records of those after them tell everybody."""
        return [one.culprit for one in self._up_to(latest)]

    def _blamed(self, latest: Generation, own: NodeReport | None) -> str | None:
        """The machine that alone ended the latest generation, by an error of its own. After two in a row it is left out
        while there are enough others."""
        told = {name: self._reported(name, latest) for name in (member.node for member in latest.members)}
        told[self.name] = own
        guilty = [name for name, report in told.items() if report is not None and is_own_failure(report)]
        if len(guilty) != 1 or len(latest.members) == 1:
            return None
        [culprit] = guilty
        if culprit == latest.culprit and culprit not in self._left_out:
            self._left_out.add(culprit)
            report = told[culprit]
            assert report is not None
            words = f"{culprit} ended two generations in a row, and others go on without it: {report.text}"
            self._tell("excluded", words)
        return culprit

    def _unsettled(self, latest: Generation, own: NodeReport, since: float) -> bool:
        """Whether another machine of the generation may still say, or be, what is wrong.

        It has to be heard of since the generation ended here. Where all that is known here is that a connection
        broke, the others get some time to say why.
        """
        others = [member.node for member in latest.members if member.node != self.name]
        silent = [name for name in others if not self.is_lost(name) and not self._reported(name, latest)]
        if own.cause == "program" and is_consequence(own.text) and self._clock() - since < EXPLAIN_SECONDS:
            return bool(silent)
        return any(not self.watch.renewed_since(name, since) for name in silent)

    def _reported(self, name: str, generation: Generation) -> NodeReport | None:
        node = self.watch.leases.get(name)
        report = node.report if node is not None else None
        return report if report is not None and report.generation == generation.number else None

    def _how_it_ended(self, latest: Generation | None, own: NodeReport | None) -> NodeReport:
        if latest is None:
            return NodeReport(0, "start", "start")
        reports = [own] if own is not None else []
        others = [member.node for member in latest.members if member.node != self.name]
        if own is None and all(self.is_lost(name) for name in others):
            return NodeReport(latest.number, "resumed", "resumed")
        for name in others:
            node, report = self.watch.leases.get(name), self._reported(name, latest)
            if report is not None:
                reports.append(report)
            elif node is not None and node.leaving:
                reports.append(NodeReport(latest.number, "preempted", f"machine {name} had to leave"))
            elif self.is_lost(name):
                reports.append(NodeReport(latest.number, "machine", f"machine {name} is lost"))
        if not reports:
            return NodeReport(latest.number, "ended", "the first machine is lost")
        asked = [report for report in reports if report.cause in ("preempted", "joined")]
        told = most_telling(reports)
        # Programs end in all sorts of ways when they are asked to.
        return asked[0] if asked and told.cause == "program" and not told.fatal else told

    def _still_gathering(self, number: int, count: int, ended: NodeReport) -> bool:
        """Whether more machines may be there than have been seen to be alive: those that are started together appear
        one after the other, and of a lease that was seen once nobody knows."""
        if count >= self._machines.most or count < self._machines.least:
            return False
        if self._gathering[0] != number:
            self._gathering = (number, self._clock())
        waited = self._clock() - self._gathering[1]
        if ended.cause in ("start", "resumed") and waited < GATHER_SECONDS:
            return True
        now = self._clock()
        unknown = [name for name in self.watch.leases if not self.watch.alive(name, now) and not self.is_lost(name)]
        return any(name != self.name for name in unknown) and waited < RENEWAL_SECONDS


# Who takes part in the next attempt: pure decisions over what the store holds.


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
    previous: Generation | None, alive: Sequence[Lease], machines: Machines, why: Why, unwanted: Collection[str] = ()
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
    current: Generation, alive: Iterable[Lease], machines: Machines, unwanted: Collection[str] = ()
) -> Lease | None:
    """A machine that waits beside a generation which has room for it."""
    if len(current.members) >= machines.most:
        return None
    others = [node for node in alive if current.rank_of(node.node) is None and node.node not in unwanted]
    return min((node for node in others if not node.leaving), key=_by_age, default=None)


def _by_age(node: Lease) -> tuple[int, str]:
    return node.joined, node.node


def _spread(nodes: Sequence[Lease], most: int) -> list[Lease]:
    """The first ones, each on a machine of its own as far as there are such; in their order."""
    first_there: dict[str, Lease] = {}
    for node in nodes:
        first_there.setdefault(node.hostname, node)
    alone = list(first_there.values())
    return sorted([*alone, *(node for node in nodes if node not in alone)][:most], key=_by_age)


# When a generation of a recipe made its first step.


def seconds_since_first_step(run: Run, generation: int) -> float | None:
    """By the clock of this machine, if it is the first one, whose worker wrote the moment down; None before that."""
    for entry in run.store.list(run.key(f"metrics/{generation:06d}-rank-0")):
        for line in run.store.get(entry.key).splitlines():
            point = json.loads(line)
            if point["kind"] == "train":
                return max(0.0, time.time() - float(point["time"]))
    return None


# What the workers of a machine have to do because of the other machines of their generation.


QUIET = ("ended", "preempted", "joined")
"""Causes that nobody needs to be told of as a failure."""


@dataclass(frozen=True)
class Lost:
    """The machine that is gone, and the workers of all others wait for."""

    node: str


def watch_others(assembly: Assembly, attempt: Attempt, now: float) -> Lost | NodeReport | Asked | None:
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


def _watch_all(assembly: Assembly, attempt: Attempt, now: float) -> Lost | NodeReport | Asked | None:
    assembly.look_at_all()
    generation, asked = attempt.generation, None
    for member in generation.members[1:]:
        node = assembly.watch.leases.get(member.node)
        report = node.report if node is not None else None
        if assembly.is_lost(member.node) and not (node is not None and node.leaving):
            return Lost(member.node)
        if report is not None and report.generation == generation.number and report.cause not in QUIET:
            return NodeReport(generation.number, "ended", "workers of another machine failed")
        if node is not None and node.leaving:  # it may be gone before the workers here have committed
            asked = asked or Asked("preempted", f"machine {member.node} has to leave", now)
    newcomer = assembly.joiner(generation, attempt.began)
    return asked or (Asked("joined", f"machine {newcomer.node} joins", now) if newcomer is not None else None)
