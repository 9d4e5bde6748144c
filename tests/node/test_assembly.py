from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from packtrain.job import Job
from packtrain.node.assembly import (
    EXPLAIN_SECONDS,
    GATHER_SECONDS,
    GROW_FACTOR,
    GROW_SECONDS,
    RENEWAL_SECONDS,
    Assembly,
    LostNode,
    chosen,
    excluded,
    newcomer,
    seconds_since_first_step,
)
from packtrain.node.causes import lost_machine
from packtrain.node.lease import LeaseRenewer
from packtrain.node.workers import WorkerGroup, WorkerStop
from packtrain.run.checkpoint import commit
from packtrain.run.liveness import LEASE_LOST_SECONDS
from packtrain.run.records import Cause, Generation, Lease, Member, NodeReport, Point
from packtrain.run.run import Run
from packtrain.store import Store
from packtrain.units import Machines
from parts.nodes import FakeSampler
from parts.runs import MEASURED, a_generation, a_lease, new_run, program_job, recipe_job


def test_the_nodes_that_came_first_are_chosen() -> None:
    late = a_lease("a", joined=3)
    first, second = a_lease("z", joined=1), a_lease("b", joined=2)
    assert chosen([late, second, first], Machines(2, 2)) == [first, second]


def test_nodes_of_one_age_are_ordered_by_name_so_that_all_propose_the_same() -> None:
    leases = [a_lease(name, joined=1) for name in "cab"]
    assert chosen(leases, Machines(3, 3)) == chosen(leases[::-1], Machines(3, 3))


def test_nothing_is_proposed_while_there_are_not_enough_machines() -> None:
    assert chosen([a_lease("a")], Machines(2, 2)) == []
    assert chosen([], Machines(1, 1)) == []


def test_a_range_starts_with_the_least_and_takes_up_to_the_most_machines() -> None:
    leases = [a_lease(name, joined=number) for number, name in enumerate("abcd")]
    for count, names in ((1, ""), (2, "ab"), (3, "abc"), (4, "abc")):
        assert "".join(lease.node for lease in chosen(leases[:count], Machines(2, 3))) == names


def test_a_preempted_machine_is_not_a_member_of_the_next_generation() -> None:
    leases = [a_lease("a", joined=1, leaving=True), a_lease("b", joined=2)]
    assert chosen(leases, Machines(1, 2)) == leases[1:]
    assert chosen(leases, Machines(2, 2)) == []


def test_the_node_that_waited_longest_joins_while_there_is_room() -> None:
    waiting = [a_lease("a", joined=1), a_lease("c", joined=4), a_lease("b", joined=3)]
    assert newcomer(a_generation(1, "a"), waiting, Machines(1, 2)) == waiting[2]
    assert newcomer(a_generation(1, "a"), waiting[:1], Machines(1, 2)) is None
    assert newcomer(a_generation(1, "a", "x"), waiting, Machines(1, 2)) is None
    assert newcomer(a_generation(1, "a"), [a_lease("b", leaving=True)], Machines(1, 2)) is None
    assert newcomer(a_generation(1, "a"), waiting, Machines(1, 2), {"b"}) == waiting[1]


def test_an_excluded_machine_takes_part_only_if_there_are_too_few_others() -> None:
    leases = [a_lease("a"), a_lease("b"), a_lease("c")]
    assert chosen(leases, Machines(2, 3), {"a"}) == leases[1:]
    assert chosen(leases, Machines(3, 3), {"a"}) == leases


def test_a_machine_that_ended_two_generations_in_a_row_is_excluded() -> None:
    assert (
        excluded([]) == excluded([None, None, "a"]) == excluded(["a", "b", "a"]) == excluded(["a", None, "a"]) == set()
    )
    assert excluded([None, "a", "a", None, "b", "c", "c"]) == {"a", "c"}


def on(machine: str, name: str, joined: int = 1) -> Lease:
    return replace(a_lease(name, joined=joined), machine=machine)


def nodes(leases: Iterable[Lease]) -> list[str]:
    return [lease.node for lease in leases]


def members(proposed: Generation | None) -> list[str]:
    return [member.node for member in proposed.members] if proposed is not None else []


def test_a_second_node_on_one_machine_takes_part_only_if_there_are_too_few_machines() -> None:
    alone = [on("a", "a-old"), on("a", "a-new", joined=5)]
    leases = [*alone, on("b", "b-new", joined=5)]
    for machines, expected in (
        (Machines(1, 2), ["a-old", "b-new"]),
        (Machines(2, 2), ["a-old", "b-new"]),
        (Machines(2, 3), ["a-old", "b-new"]),
        (Machines(3, 3), ["a-old", "a-new", "b-new"]),
    ):
        assert nodes(chosen(leases, machines)) == expected
    assert nodes(chosen(alone, Machines(1, 2))) == ["a-old"]
    assert nodes(chosen(alone, Machines(2, 2))) == ["a-old", "a-new"]


def test_an_excluded_machine_comes_before_a_second_node_of_another() -> None:
    leases = [on("a", "a-old"), on("a", "a-new", joined=5), on("b", "b-new", joined=5)]
    assert nodes(chosen(leases, Machines(2, 2), {"b-new"})) == ["a-old", "b-new"]


def test_only_a_machine_without_a_member_joins_also_in_place_of_a_second_node() -> None:
    old, new, other = on("a", "a-old"), on("a", "a-new", joined=2), on("b", "b-new", joined=3)
    assert newcomer(a_generation(1, "a-old"), [old, new], Machines(1, 2)) is None
    assert newcomer(a_generation(1, "a-old"), [old, new, other], Machines(1, 2)) == other
    both = a_generation(1, "a-old", "a-new")
    assert newcomer(both, [old, new, other], Machines(2, 2)) == other
    assert newcomer(a_generation(1, "a-old", "b-new"), [old, new, other], Machines(1, 2)) is None


def test_nodes_that_share_a_machine_on_purpose_count_as_machines() -> None:
    parts = [on("", "part-1"), on("", "part-2")]
    assert chosen(parts, Machines(1, 2)) == parts
    assert newcomer(a_generation(1, "part-1"), parts, Machines(1, 2)) == parts[1]


# One node's view of the others, on a clock that only the test moves.


class NodeView:
    """The node `me` of a run; the test writes the leases of the other nodes."""

    def __init__(self, store: Store, machines: object = "1..3", job: Callable[..., Job] = recipe_job, **sections: Any):
        fleet = {"local": {"machines": machines}, "price": 1.0, **sections.pop("fleet", {})}
        self.run = new_run(store, job(fleet=fleet, **sections))
        self.job = self.run.job_digest
        self.now = 1000.0
        self.told: list[tuple[str, str]] = []
        lease = a_lease("me", job=self.job)
        sampler: Any = FakeSampler()
        self.lease = LeaseRenewer(self.run, lease, sampler, clock=lambda: self.now, background=False)
        self.assembly = Assembly(self.run, self.lease, lambda: self.now, self.tell)
        self._renewals = 0

    def tell(self, kind: str, text: str) -> None:
        self.told.append((kind, text))

    def renew(self, *nodes: str, **fields: Any) -> None:
        self._renewals += 1
        for node in nodes:
            self.run.renew(a_lease(node, self._renewals, **{"job": self.job, **fields}))

    def see(self, *nodes: str, **fields: Any) -> None:
        """See these nodes renew their leases, a second apart."""
        for _ in range(2):
            self.renew(*nodes, **fields)
            self.assembly.look_at_all()
            self.now += 1.0

    def lose(self, node: str) -> None:
        """Look often enough at a lease that is not renewed."""
        self.renew(node)
        for _ in range(int(LEASE_LOST_SECONDS) + 1):
            self.assembly.look_at(node)
            self.now += 1.0

    def generation(self, number: int, *nodes: str, **fields: Any) -> Generation:
        """Start a generation of these nodes."""
        generation = replace(a_generation(number, *nodes), job=self.job, **fields)
        self.run.propose(generation)
        return generation

    def group(self, generation: Generation, rank: int) -> WorkerGroup:
        unused: Any = None
        return WorkerGroup(generation, rank, unused, unused, False, self.now)

    def latest(self) -> Generation:
        latest = self.run.latest_generation()
        assert latest is not None
        return latest

    def proposed(self, *arguments: Any) -> list[str]:
        """Propose, and return the members of the latest generation."""
        assert self.assembly.propose(*arguments) is None
        return members(self.run.latest_generation())


View = Callable[..., NodeView]


@pytest.fixture
def view(directory_store: Store) -> View:
    return partial(NodeView, directory_store)


BROKE = NodeReport(1, "program", "it broke", step=7)
CUT_OFF = NodeReport(1, "program", "Connection closed by peer")


# Which nodes can take part.


def test_a_node_takes_part_once_it_is_seen_to_renew_its_lease(view: View) -> None:
    me = view()
    me.renew("a")
    me.assembly.look_at_all()
    assert [lease.node for lease in me.assembly.alive()] == ["me"]
    me.renew("a")
    me.assembly.look_at_all()
    assert [lease.node for lease in me.assembly.alive()] == ["me", "a"]
    me.now += LEASE_LOST_SECONDS
    assert [lease.node for lease in me.assembly.alive()] == ["me"]


def test_a_node_counts_itself_with_the_lease_that_it_has_not_written_yet(view: View) -> None:
    me = view()
    me.lease.renew()
    me.assembly.look_at_all()
    me.lease.renew()
    me.assembly.look_at_all()
    me.lease.offer_port(4321)
    assert [(lease.node, lease.port) for lease in me.assembly.alive()] == [("me", 4321)]


def test_a_node_of_another_job_takes_no_part(view: View) -> None:
    me = view()
    me.see("a", job="another")
    assert [lease.node for lease in me.assembly.alive()] == ["me"]


def test_a_node_at_a_public_address_takes_no_part_which_is_told_once(view: View) -> None:
    me = view()
    me.see("a", "b", address="93.184.216.34")
    for _ in range(2):
        assert [lease.node for lease in me.assembly.alive()] == ["me"]
    assert [(kind, text.partition(" is a")[0]) for kind, text in me.told] == [
        ("warning", "continuing without a: 93.184.216.34"),
        ("warning", "continuing without b: 93.184.216.34"),
    ]


def test_a_node_at_a_public_address_takes_part_if_the_job_allows_it(view: View) -> None:
    me = view(fleet={"public_address": True})
    me.see("a", address="93.184.216.34")
    assert [lease.node for lease in me.assembly.alive()] == ["me", "a"]
    assert me.told == []


def test_a_node_never_considers_itself_lost(view: View) -> None:
    me = view()
    assert not me.assembly.is_lost("me")
    assert me.assembly.is_lost("a"), "it has no lease"
    me.see("a")
    assert not me.assembly.is_lost("a")
    me.now += LEASE_LOST_SECONDS
    assert me.assembly.is_lost("a")
    assert not me.assembly.is_lost("me")


def test_looking_at_one_node_returns_its_lease(view: View) -> None:
    me = view()
    assert me.assembly.look_at("a") is None
    me.renew("a")
    assert me.assembly.look_at("a") == me.run.lease("a")
    assert set(me.assembly.watch.leases) == {"a"}


# While workers run.


def test_other_machines_follow_the_first_one_when_it_asks_its_workers_to_stop(view: View) -> None:
    me = view()
    group = me.group(me.generation(3, "first", "me"), rank=1)
    me.see("first")
    assert me.assembly.watch_others(group) is None
    me.renew("first", stopping=2)
    assert me.assembly.watch_others(group) is None, "that was another generation"
    me.renew("first", stopping=3)
    assert me.assembly.watch_others(group) == WorkerStop("ended", "requested by the first machine", me.now)


def test_other_machines_notice_that_the_first_one_is_lost(view: View) -> None:
    me = view()
    group = me.group(me.generation(3, "first", "me"), rank=1)
    me.see("first")
    me.run.store.delete(me.run.lease_key("first"))
    assert me.assembly.watch_others(group) is None, "not yet"
    me.now += LEASE_LOST_SECONDS
    assert me.assembly.watch_others(group) == LostNode("first")


def test_the_first_machine_notices_that_another_one_is_lost(view: View) -> None:
    me = view()
    group = me.group(me.generation(1, "me", "a", "b"), rank=0)
    me.see("a", "b")
    assert me.assembly.watch_others(group) is None
    for _ in range(int(LEASE_LOST_SECONDS)):
        me.renew("a")
        me.now += 1.0
        ended = me.assembly.watch_others(group)
    assert ended == LostNode("b")


def test_the_first_machine_does_not_wait_for_a_machine_that_never_came(view: View) -> None:
    me = view()
    assert me.assembly.watch_others(me.group(me.generation(1, "me", "a"), rank=0)) == LostNode("a")


def test_a_failure_that_another_machine_reports_ends_the_generation(view: View) -> None:
    me = view()
    group = me.group(me.generation(2, "me", "a"), rank=0)
    me.see("a", report=replace(BROKE, generation=1))
    assert me.assembly.watch_others(group) is None, "that was the generation before"
    me.renew("a", report=NodeReport(2, "ended", "the workers exited before the run was complete"))
    assert me.assembly.watch_others(group) is None, "that is not a failure"
    me.renew("a", report=replace(BROKE, generation=2))
    assert me.assembly.watch_others(group) == NodeReport(2, "ended", "workers of another machine failed")


def test_the_first_preemption_of_another_machine_stops_the_workers(view: View) -> None:
    me = view()
    group = me.group(me.generation(1, "me", "a", "b", "c"), rank=0)
    me.see("a")
    me.see("b", "c", leaving=True)
    assert me.assembly.watch_others(group) == WorkerStop("preempted", "machine b is being preempted", me.now)
    me.renew("a", "b", left=True, leaving=True)
    assert me.assembly.watch_others(group) == WorkerStop("preempted", "machine a is being preempted", me.now), (
        "even if it has left: the workers here still have to commit"
    )


def test_a_lost_machine_ends_the_generation_even_while_another_is_preempted(view: View) -> None:
    me = view()
    group = me.group(me.generation(1, "me", "a", "b"), rank=0)
    me.see("a", leaving=True)
    assert me.assembly.watch_others(group) == LostNode("b")


# A machine that joins.


@pytest.fixture
def wall_clock(monkeypatch: pytest.MonkeyPatch) -> float:
    """A wall clock that stands still."""
    now = 1_700_000_000.0
    monkeypatch.setattr("packtrain.node.assembly.time", SimpleNamespace(time=lambda: now))
    return now


def test_a_program_takes_in_another_machine_after_the_least_time_of_a_generation(view: View) -> None:
    me = view(job=program_job)
    group = me.group(me.generation(1, "me"), rank=0)
    me.now += GROW_SECONDS - 2.1
    me.see("a")
    assert me.assembly.watch_others(group) is None
    me.now += 0.1
    assert me.assembly.watch_others(group) == WorkerStop("joined", "machine a joined", me.now)


def test_a_recipe_takes_in_another_machine_after_it_has_trained_for_the_least_time(
    view: View, wall_clock: float
) -> None:
    me = view()
    group = me.group(me.generation(1, "me"), rank=0)
    me.now += GROW_SECONDS - 2.0
    me.see("a")
    assert me.assembly.watch_others(group) is None, "it has not made a step"
    write_steps(me.run, 1, wall_clock - GROW_SECONDS)
    assert me.assembly.watch_others(group) == WorkerStop("joined", "machine a joined", me.now)


def test_a_generation_that_started_slowly_trains_three_times_as_long_before_another_machine_joins(
    view: View, wall_clock: float
) -> None:
    me = view()
    group = me.group(me.generation(1, "me"), rank=0)
    me.now += 30.0
    write_steps(me.run, 1, wall_clock - 12.0)
    me.see("a")
    assert me.assembly.watch_others(group) is None
    stepped = group.began + 20.0
    until = stepped + GROW_FACTOR * 20.0
    for moment, stop in ((until - 0.5, None), (until, WorkerStop("joined", "machine a joined", until))):
        me.now = moment
        me.renew("a")
        assert me.assembly.watch_others(group) == stop


def test_the_first_step_is_remembered_for_one_generation_only(view: View, wall_clock: float) -> None:
    me = view()
    write_steps(me.run, 1, wall_clock - GROW_SECONDS)
    first = me.group(me.generation(1, "me"), rank=0)
    me.now += GROW_SECONDS
    me.see("a")
    assert me.assembly.watch_others(first) is not None
    for entry in me.run.store.list(me.run.key("points/")):
        me.run.store.delete(entry.key)
    assert me.assembly.watch_others(first) is not None
    second = replace(me.group(me.generation(2, "me"), rank=0), began=first.began)
    assert me.assembly.watch_others(second) is None


def test_a_machine_that_failed_twice_in_a_row_does_not_join(view: View) -> None:
    me = view(job=program_job)
    for number in (1, 2):
        me.generation(number, "me", "a", culprit="a")
    group = me.group(me.generation(3, "me"), rank=0)
    me.now += GROW_SECONDS
    me.see("a")
    assert me.assembly.watch_others(group) is None
    me.see("b")
    assert me.assembly.watch_others(group) == WorkerStop("joined", "machine b joined", me.now)


def test_no_machine_joins_a_generation_that_is_full(view: View) -> None:
    me = view("1..2", job=program_job)
    group = me.group(me.generation(1, "me", "a"), rank=0)
    me.now += GROW_SECONDS
    me.see("a", "b")
    assert me.assembly.watch_others(group) is None


def write_steps(run: Run, generation: int, first: float) -> None:
    writer = run.point_writer(f"{generation:06d}-rank-0")
    for kind, moment in (("start", first - 9.0), ("train", first), ("train", first + 5.0)):
        writer.append(Point(kind, generation, 1, moment, MEASURED))  # type: ignore[arg-type]
        writer.flush()


def test_the_age_of_the_first_step_is_that_of_rank_0_in_this_generation(view: View, wall_clock: float) -> None:
    run = view().run
    write_steps(run, 1, wall_clock - 500.0)
    assert seconds_since_first_step(run, 2) is None
    write_steps(run, 2, wall_clock - 40.0)
    assert seconds_since_first_step(run, 2) == 40.0
    write_steps(run, 3, wall_clock + 10.0)
    assert seconds_since_first_step(run, 3) == 0.0, "the clock was set back"


# Who proposes.


def test_the_first_machine_of_the_latest_generation_proposes_the_next(view: View) -> None:
    me = view()
    assert me.assembly.is_proposer(me.generation(1, "me", "a"))
    me.see("a")
    assert not me.assembly.is_proposer(me.generation(2, "a", "me"))


def test_the_machine_that_claims_the_turn_proposes_the_first_generation(view: View) -> None:
    me = view()
    assert me.assembly.is_proposer(None)
    assert me.run.proposer(1, 0, "a") == "me"


def test_another_machine_that_claimed_the_turn_proposes_unless_it_is_lost(view: View) -> None:
    me = view()
    me.run.proposer(1, 0, "a")
    me.see("a")
    assert not me.assembly.is_proposer(None)
    me.now += LEASE_LOST_SECONDS
    me.run.store.delete(me.run.lease_key("a"))
    assert not me.assembly.is_proposer(None), "the next turn has begun"
    me.run.proposer(1, 1, "b")
    assert not me.assembly.is_proposer(None), "and another machine was quicker; it is lost, too"
    assert me.assembly.is_proposer(None)
    assert me.run.proposer(1, 2, "c") == "me"


def test_a_machine_that_was_never_looked_at_before_is_not_lost(view: View) -> None:
    me = view()
    me.renew("a", "b")
    assert not me.assembly.is_proposer(me.generation(1, "a", "me"))
    me.run.proposer(3, 0, "b")
    gone = me.generation(2, "gone", "me")
    for _ in range(2):
        assert not me.assembly.is_proposer(gone), "it is the turn of b, which may be alive"


def test_if_the_first_machine_is_lost_a_claim_decides_for_each_generation(view: View) -> None:
    me = view()
    first = me.generation(1, "gone", "me")
    assert me.assembly.is_proposer(first)
    assert me.run.proposer(2, 0, "a") == "me"
    second = me.generation(2, "gone", "me")
    me.run.proposer(3, 0, "a")
    me.see("a")
    assert not me.assembly.is_proposer(second)
    assert me.run.proposer(3, 1, "b") == "b", "this node has not claimed that turn"


def test_the_first_machine_of_a_former_job_does_not_propose(view: View) -> None:
    me = view()
    me.see("a")
    former = replace(me.generation(1, "a", "me"), job="another")
    assert not me.assembly.is_of_this_job(former)
    assert me.assembly.is_proposer(former)
    assert me.run.proposer(2, 0, "a") == "me"


# What is proposed, and when.


def test_the_first_generation_waits_a_few_seconds_for_machines_that_were_started_together(view: View) -> None:
    me = view("1..3")
    assert me.proposed(None, None, 0.0) == []
    me.now += GATHER_SECONDS - 0.5
    assert me.proposed(None, None, 0.0) == []
    me.now += 0.5
    assert me.proposed(None, None, 0.0) == ["me"]
    assert me.latest() == Generation(
        1, (Member("me", "127.0.0.1", 1),), 29500, "start", cause="start", used_seconds=GATHER_SECONDS, job=me.job
    )


def test_a_generation_that_is_full_starts_at_once(view: View) -> None:
    me = view("1..2")
    me.see("a")
    assert me.proposed(None, None, 0.0) == ["a", "me"]


def test_nodes_of_one_machine_do_not_make_a_generation_full(view: View) -> None:
    me = view("1..2")
    me.see("a", "b", machine="shared")
    me.see("c", machine="shared")
    assert me.proposed(None, None, 0.0) == ["a", "me"]
    alone = view("1..3", name="alone")
    alone.see("a", "b", machine="shared")
    assert alone.proposed(None, None, 0.0) == []


def test_the_wait_for_more_machines_starts_once_there_are_enough(view: View) -> None:
    me = view("2..3")
    assert me.proposed(None, None, 0.0) == []
    me.now += 60.0
    me.see("a")
    assert me.proposed(None, None, 0.0) == []
    me.renew("a")
    me.now += GATHER_SECONDS
    assert me.proposed(None, None, 0.0) == ["a", "me"]


def test_every_generation_has_its_own_wait(view: View) -> None:
    me = view("1..3")
    me.proposed(None, None, 0.0)
    for number in (1, 2):
        me.now += GATHER_SECONDS
        me.proposed(None if number == 1 else me.latest(), None, 0.0)
        assert me.latest().number == number
        me.proposed(me.latest(), None, 0.0)
        assert me.latest().number == number
    assert (me.latest().cause, me.latest().reason) == ("resumed", "resumed")


def test_a_lease_that_was_seen_once_is_watched_until_it_should_have_been_renewed(view: View) -> None:
    me = view("1..3")
    latest = me.generation(1, "me")
    me.renew("b", "c")
    me.renew("c", left=True)
    assert me.proposed(latest, BROKE, me.now) == ["me"]
    assert me.latest().number == 1
    me.now += RENEWAL_SECONDS - 0.5
    me.proposed(latest, BROKE, me.now)
    assert me.latest().number == 1
    me.now += 0.5
    me.proposed(latest, BROKE, me.now)
    assert me.latest().number == 2


def test_nobody_is_waited_for_after_a_failure_if_all_leases_are_known(view: View) -> None:
    me = view("1..3")
    latest = me.generation(1, "me", "a")
    me.see("a")
    me.renew("c", left=True)
    assert me.proposed(latest, BROKE, me.now - 1.5) == ["a", "me"]
    assert me.latest().number == 2


def test_the_record_of_a_generation_tells_how_the_one_before_ended(view: View, tmp_path: Path) -> None:
    me = view("1..2", budget={"hours": 1.0})
    latest = me.generation(1, "me", "a")
    (tmp_path / "file").write_bytes(b"x")
    commit(me.run, 5, 1, None, {"f": tmp_path / "file"})
    me.see("a", used_seconds=600.0)
    assert me.proposed(latest, BROKE, me.now - 1.5) == ["a", "me"]
    assert me.latest() == Generation(
        2,
        (Member("a", "127.0.0.1", 1), Member("me", "127.0.0.1", 1)),
        29500,
        "failure: it broke",
        step=5,
        cause="program",
        failed_step=7,
        used_seconds=600.0,
        seconds_left=3000.0,
        culprit="me",
        job=me.job,
    )


def test_dollars_of_the_budget_are_shared_by_the_machines_that_are_alive(view: View) -> None:
    me = view("1..2", budget={"dollars": 1.0})
    me.see("a", machine_seconds=1800.0, dollars_per_hour=1.0)
    me.proposed(None, None, 0.0)
    assert me.latest().seconds_left == 900.0


def test_the_time_that_this_node_has_counted_is_used_if_it_is_the_longest(view: View) -> None:
    me = view("1..2")
    me.see("a", used_seconds=1.0)
    me.now += 5.0
    me.renew("a", used_seconds=1.0)
    me.proposed(None, None, 0.0)
    assert me.latest().used_seconds == 7.0


def test_a_machine_that_has_yet_to_report_is_waited_for(view: View) -> None:
    me = view("1..2")
    latest = me.generation(1, "me", "a")
    me.see("a")
    ended = me.now
    me.now += 1.0
    assert me.proposed(latest, BROKE, ended) == ["me", "a"]
    assert me.latest().number == 1, "it may be gone"
    me.renew("a")
    me.proposed(latest, BROKE, ended)
    assert me.latest().number == 2


def test_a_machine_that_is_lost_or_has_reported_is_not_waited_for(view: View) -> None:
    me = view("1..3")
    latest = me.generation(1, "me", "a", "b")
    me.see("a", report=CUT_OFF)
    assert me.proposed(latest, BROKE, me.now) == ["a", "me"]


def test_a_lost_connection_waits_for_the_machine_that_explains_it(view: View) -> None:
    me = view("1..2")
    latest = me.generation(1, "me", "a")
    me.see("a")
    ended = me.now - 1.5
    me.now = ended + EXPLAIN_SECONDS - 0.5
    me.renew("a")
    me.proposed(latest, CUT_OFF, ended)
    assert me.latest().number == 1
    me.renew("a", report=replace(BROKE, cause="memory", text="full"))
    me.proposed(latest, CUT_OFF, ended)
    assert (me.latest().number, me.latest().cause, me.latest().reason) == (2, "memory", "failure: full")
    assert me.latest().culprit == "a"


def test_a_lost_connection_that_nobody_explains_is_the_cause_after_a_while(view: View) -> None:
    me = view("1..2")
    latest = me.generation(1, "me", "a")
    me.see("a")
    ended = me.now - 1.5
    me.now = ended + EXPLAIN_SECONDS
    me.renew("a")
    me.proposed(latest, CUT_OFF, ended)
    assert (me.latest().number, me.latest().reason) == (2, "failure: Connection closed by peer")
    assert me.latest().culprit is None


def test_only_a_lost_connection_of_a_program_waits_for_an_explanation(view: View) -> None:
    me = view("1..2")
    latest = me.generation(1, "me", "a")
    me.see("a")
    me.proposed(latest, replace(CUT_OFF, cause="store"), me.now - 1.5)
    assert (me.latest().number, me.latest().cause) == (2, "store")


# How the latest generation ended.


def test_a_lost_machine_is_named_as_the_cause(view: View) -> None:
    me = view("1..3")
    latest = me.generation(1, "me", "a", "b")
    me.see("a", report=CUT_OFF)
    me.proposed(latest, CUT_OFF, me.now)
    assert (me.latest().cause, me.latest().reason) == ("machine", "failure: machine b was lost")


def test_a_preempted_machine_is_named_as_the_cause(view: View) -> None:
    me = view("1..2")
    latest = me.generation(1, "me", "a")
    me.see("a", leaving=True)
    me.proposed(latest, CUT_OFF, me.now - EXPLAIN_SECONDS)
    assert (me.latest().cause, me.latest().reason) == ("preempted", "machine a was preempted")


@pytest.mark.parametrize("asked", ["joined", "preempted"])
def test_a_program_that_fails_when_it_is_asked_to_stop_has_not_failed(view: View, asked: Cause) -> None:
    me = view("1..2")
    latest = me.generation(1, "me", "a")
    me.see("a", report=BROKE)
    me.proposed(latest, NodeReport(1, asked, "it was asked"), me.now)
    assert (me.latest().cause, me.latest().reason, me.latest().culprit) == (asked, "it was asked", None)


@pytest.mark.parametrize("report", [replace(BROKE, cause="disk"), replace(BROKE, fatal=True)])
def test_any_other_failure_counts_even_if_the_program_was_asked_to_stop(view: View, report: NodeReport) -> None:
    me = view("1..2")
    latest = me.generation(1, "me", "a")
    me.see("a", report=report)
    given_up = me.assembly.propose(latest, NodeReport(1, "preempted", "it leaves"), me.now)
    if report.fatal:
        assert given_up == "it broke"
    else:
        assert (me.latest().cause, me.latest().reason) == ("disk", "failure: it broke")


def test_a_node_that_replaces_the_first_machine_knows_only_that_it_was_lost(view: View) -> None:
    me = view("1..2")
    latest = me.generation(1, "gone", "a")
    me.see("a")
    me.proposed(latest, None, me.now)
    assert (me.latest().cause, me.latest().reason) == ("machine", "failure: machine gone was lost")
    quiet = me.generation(3, "a")
    me.proposed(quiet, None, me.now)
    assert (me.latest().cause, me.latest().reason) == ("ended", "the first machine was lost")


def test_a_run_whose_machines_are_all_gone_was_resumed(view: View) -> None:
    me = view("1..1")
    me.proposed(me.generation(1, "gone", "too"), None, me.now)
    assert (me.latest().cause, me.latest().reason) == ("resumed", "resumed")


def test_a_run_with_another_job_was_resumed_even_if_its_former_machines_are_still_there(view: View) -> None:
    me = view("1..1")
    me.see("a")
    me.proposed(replace(me.generation(1, "a"), job="another"), None, me.now)
    assert (me.latest().number, me.latest().cause, me.latest().reason) == (2, "resumed", "resumed")


# Failures.


def test_a_run_is_given_up_after_the_failures_that_the_job_allows(view: View) -> None:
    me = view("1..1", fleet={"failures": 1})
    first = me.generation(1, "me")
    second = me.generation(2, "me", cause="program")
    broke = replace(BROKE, step=None)
    assert me.assembly.propose(second, replace(broke, generation=2), me.now) == "it broke (after 1 restart)"
    assert me.assembly.propose(first, broke, me.now) is None, "later generations do not count"


@pytest.mark.parametrize(("failures", "given_up"), [(2, "it broke (after 2 restarts)"), (3, None)])
def test_failures_are_counted_once_however_often_a_node_has_proposed(
    view: View, failures: int, given_up: str | None
) -> None:
    me = view("1..1", fleet={"failures": failures})
    broke = replace(BROKE, step=None)
    me.generation(1, "me")
    assert me.assembly.propose(me.generation(2, "me", cause="program"), broke, me.now) is None
    assert me.latest().number == 3
    assert me.assembly.propose(me.latest(), replace(broke, generation=3), me.now) == given_up


def test_a_failure_after_a_commit_is_not_the_same_failure(view: View, tmp_path: Path) -> None:
    me = view("1..1", fleet={"failures": 1})
    me.generation(1, "me")
    second = me.generation(2, "me", cause="program")
    (tmp_path / "file").write_bytes(b"x")
    commit(me.run, 5, 2, None, {"f": tmp_path / "file"})
    assert me.assembly.propose(second, replace(BROKE, generation=2), me.now) is None
    assert (me.latest().number, me.latest().step) == (3, 5)


def test_whether_a_run_is_given_up_is_decided_once_for_each_generation(view: View) -> None:
    me = view("1..3")
    latest = me.generation(1, "me", "a")
    me.see("a")
    me.renew("b")
    assert me.assembly.propose(latest, BROKE, me.now - 1.5) is None
    assert me.latest().number == 1, "the lease of b was seen only once"
    me.renew("a", report=replace(BROKE, fatal=True))
    assert me.assembly.propose(latest, BROKE, me.now - 1.5) is None
    second = me.generation(2, "me")
    fatal = NodeReport(2, "number", "the loss is not finite", fatal=True)
    for _ in range(2):
        assert me.assembly.propose(second, fatal, me.now) == "the loss is not finite"
    assert me.latest().number == 2


def test_a_machine_that_fails_twice_in_a_row_is_excluded_which_is_told_once(view: View) -> None:
    me = view("1..2")
    latest = me.generation(2, "me", "a", culprit="a")
    me.see("a", report=replace(BROKE, generation=2))
    me.renew("b")
    for _ in range(2):
        me.proposed(latest, replace(CUT_OFF, generation=2), me.now - EXPLAIN_SECONDS)
    assert me.told == [("excluded", "a failed two generations in a row; continuing without it: it broke")]
    me.now += RENEWAL_SECONDS
    me.renew("a", report=replace(BROKE, generation=2))
    assert me.proposed(latest, replace(CUT_OFF, generation=2), me.now - EXPLAIN_SECONDS) == ["me"]
    assert me.latest().culprit == "a"


def test_nobody_is_the_culprit_if_several_machines_failed_or_there_was_only_one(view: View) -> None:
    me = view("1..2")
    latest = me.generation(1, "me", "a")
    me.see("a", report=BROKE)
    me.proposed(latest, BROKE, me.now)
    assert me.latest().culprit is None
    alone = me.generation(3, "me", culprit="me")
    me.proposed(alone, replace(BROKE, generation=3, step=8), me.now)
    assert (me.latest().number, me.latest().culprit) == (4, None)
    assert me.told == []


def test_the_first_machine_says_whether_the_program_started_again_whoever_failed(view: View) -> None:
    me = view("1..2")
    latest = me.generation(1, "me", "a")
    me.see("a", report=BROKE)
    me.proposed(latest, replace(CUT_OFF, restarted=True), me.now - EXPLAIN_SECONDS)
    assert (me.latest().number, me.latest().reason, me.latest().restarted) == (2, "failure: it broke", True)


def test_a_lost_machine_does_not_say_that_the_program_started_again(view: View) -> None:
    me = view("1..2")
    latest = me.generation(1, "me", "a")
    me.proposed(latest, replace(CUT_OFF, restarted=True), me.now - EXPLAIN_SECONDS)
    assert (me.latest().cause, me.latest().restarted) == ("machine", False)


def test_a_machine_that_was_lost_is_the_culprit_even_if_it_is_back(view: View) -> None:
    me = view("1..2")
    latest = me.generation(1, "me", "a")
    me.see("a")
    me.proposed(latest, lost_machine(1, "a"), me.now - 1.5)
    assert (me.latest().number, me.latest().cause, me.latest().culprit) == (2, "machine", "a")
    assert me.told == [], "who lost it has told it"


def test_the_one_that_proposes_tells_of_a_lost_machine_if_the_others_only_lost_the_connection(view: View) -> None:
    me = view("1..2")
    latest = me.generation(1, "me", "a")
    me.proposed(latest, CUT_OFF, me.now - EXPLAIN_SECONDS)
    assert (me.latest().cause, me.latest().culprit) == ("machine", "a")
    assert me.told == [("lost", "a stopped renewing its lease")]


def test_a_hang_waits_for_the_machine_that_explains_it(view: View) -> None:
    me = view("1..2")
    latest = me.generation(1, "me", "a")
    hangs = NodeReport(1, "hang", "step 7 has taken 60 s", 7)
    me.see("a")
    ended = me.now - 1.5
    me.proposed(latest, hangs, ended)
    assert me.latest().number == 1
    me.renew("a", report=BROKE)
    me.proposed(latest, hangs, ended)
    assert (me.latest().cause, me.latest().culprit) == ("program", "a")


def test_a_node_that_was_no_member_is_not_the_culprit(view: View) -> None:
    me = view("1..3")
    latest = me.generation(1, "a", "b")
    me.see("a", report=BROKE)
    me.see("b", report=CUT_OFF)
    me.proposed(latest, None, me.now)
    assert me.latest().culprit == "a"
