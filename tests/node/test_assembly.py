from __future__ import annotations

from dataclasses import replace

from packtrain.node.assembly import GenerationStart, excluded, newcomer, proposal
from packtrain.run.records import Generation, Lease, Member
from packtrain.units import Machines
from parts.runs import a_generation, a_lease


def test_the_nodes_that_came_first_are_chosen_and_the_first_hosts_the_rendezvous() -> None:
    late = a_lease("a", joined=3)
    first, second = a_lease("z", joined=1, port=4000, address="10.0.0.1"), a_lease("b", joined=2, workers=2)
    assert proposal(None, [late, second, first], Machines(2, 2), GenerationStart("start", "start", 7)) == Generation(
        1, (Member("z", "10.0.0.1", 1), Member("b", "127.0.0.1", 2)), 4000, "start", 7
    )


def test_nodes_of_one_age_are_ordered_by_name_so_that_all_propose_the_same() -> None:
    leases = [a_lease(name, joined=1) for name in "cab"]
    assert proposal(None, leases, Machines(3, 3), GenerationStart("start", "start")) == proposal(
        None, leases[::-1], Machines(3, 3), GenerationStart("start", "start")
    )


def test_nothing_is_proposed_while_there_are_not_enough_machines() -> None:
    assert proposal(None, [a_lease("a")], Machines(2, 2), GenerationStart("start", "start")) is None
    assert proposal(None, [], Machines(1, 1), GenerationStart("start", "start")) is None


def test_the_next_generation_has_the_next_number() -> None:
    proposed = proposal(a_generation(41), [a_lease("a")], Machines(1, 1), GenerationStart("resumed", "resumed"))
    assert proposed is not None
    assert proposed.number == 42


def test_a_range_starts_with_the_least_and_takes_up_to_the_most_machines() -> None:
    leases = [a_lease(name, joined=number) for number, name in enumerate("abcd")]
    for count, members in ((1, None), (2, "ab"), (3, "abc"), (4, "abc")):
        proposed = proposal(None, leases[:count], Machines(2, 3), GenerationStart("start", "start"))
        assert (proposed and "".join(member.node for member in proposed.members)) == members


def test_a_preempted_machine_is_not_a_member_of_the_next_generation() -> None:
    leases = [a_lease("a", joined=1, leaving=True), a_lease("b", joined=2)]
    proposed = proposal(a_generation(1, "a", "b"), leases, Machines(1, 2), GenerationStart("preempted", "a leaves"))
    assert proposed is not None
    assert [member.node for member in proposed.members] == ["b"]
    assert proposal(a_generation(1, "a", "b"), leases, Machines(2, 2), GenerationStart("preempted", "a leaves")) is None


def test_the_record_says_why_the_generation_started() -> None:
    start = GenerationStart("memory", "failure: full", 7, failed_step=9, used_seconds=3.0, seconds_left=60.0)
    proposed = proposal(a_generation(1), [a_lease("a")], Machines(1, 1), start)
    assert proposed is not None
    assert (proposed.cause, proposed.reason, proposed.step, proposed.failed_step) == ("memory", "failure: full", 7, 9)
    assert (proposed.used_seconds, proposed.seconds_left) == (3.0, 60.0)


def test_the_node_that_waited_longest_joins_while_there_is_room() -> None:
    waiting = [a_lease("a", joined=1), a_lease("c", joined=4), a_lease("b", joined=3)]
    assert newcomer(a_generation(1, "a"), waiting, Machines(1, 2)) == waiting[2]
    assert newcomer(a_generation(1, "a"), waiting[:1], Machines(1, 2)) is None
    assert newcomer(a_generation(1, "a", "x"), waiting, Machines(1, 2)) is None
    assert newcomer(a_generation(1, "a"), [a_lease("b", leaving=True)], Machines(1, 2)) is None
    assert newcomer(a_generation(1, "a"), waiting, Machines(1, 2), {"b"}) == waiting[1]


def test_an_excluded_machine_takes_part_only_if_there_are_too_few_others() -> None:
    leases = [a_lease("a"), a_lease("b"), a_lease("c")]
    for least, members in ((2, ["b", "c"]), (3, ["a", "b", "c"])):
        proposed = proposal(a_generation(1), leases, Machines(least, 3), GenerationStart("program", "it broke"), {"a"})
        assert proposed is not None
        assert [member.node for member in proposed.members] == members


def test_a_machine_that_ended_two_generations_in_a_row_is_excluded() -> None:
    assert (
        excluded([]) == excluded([None, None, "a"]) == excluded(["a", "b", "a"]) == excluded(["a", None, "a"]) == set()
    )
    assert excluded([None, "a", "a", None, "b", "c", "c"]) == {"a", "c"}


def on(machine: str, name: str, joined: int = 1) -> Lease:
    return replace(a_lease(name, joined=joined), machine=machine)


def members(proposed: Generation | None) -> list[str]:
    return [member.node for member in proposed.members] if proposed is not None else []


def test_a_second_node_on_one_machine_takes_part_only_if_there_are_too_few_machines() -> None:
    start = GenerationStart("resumed", "resumed")
    alone = [on("a", "a-old"), on("a", "a-new", joined=5)]
    leases = [*alone, on("b", "b-new", joined=5)]
    for machines, expected in (
        (Machines(1, 2), ["a-old", "b-new"]),
        (Machines(2, 2), ["a-old", "b-new"]),
        (Machines(2, 3), ["a-old", "b-new"]),
        (Machines(3, 3), ["a-old", "a-new", "b-new"]),
    ):
        assert members(proposal(None, leases, machines, start)) == expected
    assert members(proposal(None, alone, Machines(1, 2), start)) == ["a-old"]
    assert members(proposal(None, alone, Machines(2, 2), start)) == ["a-old", "a-new"]


def test_an_excluded_machine_comes_before_a_second_node_of_another() -> None:
    leases = [on("a", "a-old"), on("a", "a-new", joined=5), on("b", "b-new", joined=5)]
    proposed = proposal(None, leases, Machines(2, 2), GenerationStart("program", "it broke"), {"b-new"})
    assert members(proposed) == ["a-old", "b-new"]


def test_only_a_machine_without_a_member_joins_also_in_place_of_a_second_node() -> None:
    old, new, other = on("a", "a-old"), on("a", "a-new", joined=2), on("b", "b-new", joined=3)
    assert newcomer(a_generation(1, "a-old"), [old, new], Machines(1, 2)) is None
    assert newcomer(a_generation(1, "a-old"), [old, new, other], Machines(1, 2)) == other
    both = a_generation(1, "a-old", "a-new")
    assert newcomer(both, [old, new, other], Machines(2, 2)) == other
    assert newcomer(a_generation(1, "a-old", "b-new"), [old, new, other], Machines(1, 2)) is None


def test_nodes_that_share_a_machine_on_purpose_count_as_machines() -> None:
    parts = [on("", "part-1"), on("", "part-2")]
    assert members(proposal(None, parts, Machines(1, 2), GenerationStart("start", "start"))) == ["part-1", "part-2"]
    assert newcomer(a_generation(1, "part-1"), parts, Machines(1, 2)) == parts[1]
