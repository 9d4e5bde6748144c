from __future__ import annotations

from dataclasses import replace

from packtrain.node.assembly import Why, joiner, proposal, unwanted
from packtrain.run.records import Generation, Member
from packtrain.units import Machines
from parts.runs import a_generation, a_lease

# Proposals.


def test_the_machines_that_came_first_are_chosen_and_the_first_of_them_is_met() -> None:
    late = a_lease("a", joined=3)
    first, second = a_lease("z", joined=1, port=4000, address="10.0.0.1"), a_lease("b", joined=2, workers=2)
    assert proposal(None, [late, second, first], Machines(2, 2), Why("start", "start", 7)) == Generation(
        1, (Member("z", "10.0.0.1", 1), Member("b", "127.0.0.1", 2)), 4000, "start", 7
    )


def test_those_who_came_together_are_ordered_by_name_so_that_all_propose_the_same() -> None:
    nodes = [a_lease(name, joined=1) for name in "cab"]
    assert proposal(None, nodes, Machines(3, 3), Why("start", "start")) == proposal(
        None, nodes[::-1], Machines(3, 3), Why("start", "start")
    )


def test_nothing_is_proposed_while_there_are_not_enough_machines() -> None:
    assert proposal(None, [a_lease("a")], Machines(2, 2), Why("start", "start")) is None
    assert proposal(None, [], Machines(1, 1), Why("start", "start")) is None


def test_the_next_generation_has_the_next_number() -> None:
    proposed = proposal(a_generation(41), [a_lease("a")], Machines(1, 1), Why("resumed", "resumed"))
    assert proposed is not None
    assert proposed.number == 42


def test_a_range_takes_all_up_to_the_most_and_begins_with_the_least() -> None:
    nodes = [a_lease(name, joined=number) for number, name in enumerate("abcd")]
    for count, members in ((1, None), (2, "ab"), (3, "abc"), (4, "abc")):
        proposed = proposal(None, nodes[:count], Machines(2, 3), Why("start", "start"))
        assert (proposed and "".join(member.node for member in proposed.members)) == members


def test_a_machine_that_is_to_leave_is_not_taken_along() -> None:
    nodes = [a_lease("a", joined=1, leaving=True), a_lease("b", joined=2)]
    proposed = proposal(a_generation(1, "a", "b"), nodes, Machines(1, 2), Why("preempted", "a leaves"))
    assert proposed is not None
    assert [member.node for member in proposed.members] == ["b"]
    assert proposal(a_generation(1, "a", "b"), nodes, Machines(2, 2), Why("preempted", "a leaves")) is None


def test_why_it_began_stands_in_the_record() -> None:
    why = Why("memory", "failure: full", 7, failed_step=9, used_seconds=3.0, seconds_left=60.0)
    proposed = proposal(a_generation(1), [a_lease("a")], Machines(1, 1), why)
    assert proposed is not None
    assert (proposed.cause, proposed.reason, proposed.step, proposed.failed_step) == ("memory", "failure: full", 7, 9)
    assert (proposed.used_seconds, proposed.seconds_left) == (3.0, 60.0)


def test_whoever_waited_longest_joins_while_there_is_room() -> None:
    waiting = [a_lease("a", joined=1), a_lease("c", joined=4), a_lease("b", joined=3)]
    assert joiner(a_generation(1, "a"), waiting, Machines(1, 2)) == waiting[2]
    assert joiner(a_generation(1, "a"), waiting[:1], Machines(1, 2)) is None
    assert joiner(a_generation(1, "a", "x"), waiting, Machines(1, 2)) is None
    assert joiner(a_generation(1, "a"), [a_lease("b", leaving=True)], Machines(1, 2)) is None
    assert joiner(a_generation(1, "a"), waiting, Machines(1, 2), {"b"}) == waiting[1]


def test_a_machine_that_is_not_wanted_takes_part_only_where_it_must() -> None:
    nodes = [a_lease("a"), a_lease("b"), a_lease("c")]
    for least, members in ((2, ["b", "c"]), (3, ["a", "b", "c"])):
        proposed = proposal(a_generation(1), nodes, Machines(least, 3), Why("program", "it broke"), {"a"})
        assert proposed is not None
        assert [member.node for member in proposed.members] == members


def test_a_machine_that_ended_two_generations_in_a_row_is_not_wanted_any_more() -> None:
    assert (
        unwanted([]) == unwanted([None, None, "a"]) == unwanted(["a", "b", "a"]) == unwanted(["a", None, "a"]) == set()
    )
    assert unwanted([None, "a", "a", None, "b", "c", "c"]) == {"a", "c"}


def test_a_second_agent_of_a_machine_comes_after_all_machines() -> None:
    old = replace(a_lease("a-old"), hostname="a")
    nodes = [old, replace(a_lease("a-new", joined=5), hostname="a"), replace(a_lease("b-new", joined=5), hostname="b")]
    for most, members in ((2, ["a-old", "b-new"]), (3, ["a-old", "a-new", "b-new"])):
        proposed = proposal(None, nodes, Machines(2, most), Why("resumed", "resumed"))
        assert proposed is not None
        assert [member.node for member in proposed.members] == members
