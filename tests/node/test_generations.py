from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.node.generations import FAILURE, LeaseWatch, failures_in_a_row, proposal
from packtrain.runs import Generation, Member, Node
from parts.runs import a_generation, a_node

LOST = 12.0


def watched(*looks: tuple[float, list[Node]]) -> LeaseWatch:
    watch = LeaseWatch(LOST)
    for now, nodes in looks:
        watch.observe(nodes, now)
    return watch


# Leases.


def test_one_look_does_not_tell_whether_a_node_lives() -> None:
    watch = watched((0.0, [a_node("a", 5)]))
    assert not watch.alive("a", 1.0)
    assert not watch.lost("a", 1.0)


def test_a_node_that_was_seen_to_renew_is_alive() -> None:
    watch = watched((0.0, [a_node("a", 5)]), (2.0, [a_node("a", 6)]))
    assert watch.alive("a", 2.0 + LOST - 0.1)
    assert not watch.lost("a", 2.0 + LOST - 0.1)


def test_a_node_that_does_not_renew_for_long_is_lost() -> None:
    watch = watched((0.0, [a_node("a", 5)]), (2.0, [a_node("a", 6)]), (13.0, [a_node("a", 6)]))
    assert watch.lost("a", 2.0 + LOST)
    assert not watch.alive("a", 2.0 + LOST)


def test_a_lease_that_never_moved_is_lost_after_the_same_time() -> None:
    watch = watched((100.0, [a_node("a", 5)]))
    assert watch.lost("a", 100.0 + LOST)


def test_a_node_that_leaves_is_lost_at_once() -> None:
    watch = watched((0.0, [a_node("a", 5)]), (2.0, [a_node("a", 6)]), (3.0, [a_node("a", 7, left=True)]))
    assert watch.lost("a", 3.0)
    assert not watch.alive("a", 3.0)


def test_a_node_that_nobody_has_seen_is_lost() -> None:
    assert LeaseWatch(LOST).lost("a", 0.0)
    assert not LeaseWatch(LOST).alive("a", 0.0)


def test_a_lost_node_that_renews_again_is_alive_again() -> None:
    watch = watched((0.0, [a_node("a", 5)]), (2.0, [a_node("a", 6)]), (60.0, [a_node("a", 7)]))
    assert watch.alive("a", 61.0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 3), st.booleans()), max_size=12), st.floats(0, 20))
def test_age_is_judged_by_the_readers_clock_alone(looks: list[tuple[float, int, bool]], after: float) -> None:
    """Whatever the counter does, what matters is how long ago this reader saw it change."""
    watch, now, changed, before, renewed = LeaseWatch(LOST), 0.0, None, None, False
    for pause, renewal, left in looks:
        now += pause
        watch.observe([a_node("a", renewal, left=left)], now)
        if left:
            changed, before, renewed = None, None, False
        elif renewal != before:
            renewed = before is not None or renewed
            changed, before = now, renewal
    now += after
    assert watch.lost("a", now) == (changed is None or now - changed >= LOST)
    assert watch.alive("a", now) == (changed is not None and renewed and now - changed < LOST)


# Proposals.


def test_the_machines_that_came_first_are_chosen_and_the_first_of_them_is_met() -> None:
    late = a_node("a", joined=3)
    first, second = a_node("z", joined=1, port=4000, address="10.0.0.1"), a_node("b", joined=2, workers=2)
    assert proposal(None, [late, second, first], 2, "start", 7) == Generation(
        1, (Member("z", "10.0.0.1", 1), Member("b", "127.0.0.1", 2)), 4000, "start", 7
    )


def test_those_who_came_together_are_ordered_by_name_so_that_all_propose_the_same() -> None:
    nodes = [a_node(name, joined=1) for name in "cab"]
    assert proposal(None, nodes, 3, "start", 0) == proposal(None, nodes[::-1], 3, "start", 0)


def test_nothing_is_proposed_while_there_are_not_enough_machines() -> None:
    assert proposal(None, [a_node("a")], 2, "start", 0) is None
    assert proposal(None, [], 1, "start", 0) is None


def test_the_next_generation_has_the_next_number() -> None:
    proposed = proposal(a_generation(41), [a_node("a")], 1, "resumed", 0)
    assert proposed is not None
    assert proposed.number == 42


# Failures.


def generations(*reasons: str) -> list[Generation]:
    return [a_generation(number, reason=reason) for number, reason in enumerate(reasons, 1)]


def test_failures_are_counted_from_the_latest_back_to_what_was_none() -> None:
    failure = f"{FAILURE}it broke"
    assert failures_in_a_row([]) == 0
    assert failures_in_a_row(generations("start")) == 0
    assert failures_in_a_row(generations("start", failure, failure)) == 2
    assert failures_in_a_row(generations("start", failure, "resumed")) == 0
    assert failures_in_a_row(generations("start", failure, "resumed", failure)) == 1


def test_failures_with_progress_between_them_are_not_in_a_row() -> None:
    failed = [a_generation(number, reason=f"{FAILURE}it broke") for number in (1, 2, 3)]
    steps = (100, 200, 200)
    assert failures_in_a_row([replace(one, step=step) for one, step in zip(failed, steps, strict=True)]) == 2
