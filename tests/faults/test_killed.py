"""What is killed or stopped on one machine, compared with a run that nothing happened to."""

from __future__ import annotations

from parts.places import Place, assert_nothing_left, assert_same_as, kill, wait_until


def members(place: Place) -> list[str]:
    latest = place.run().latest_generation()
    return [member.node for member in latest.members] if latest else []


def causes(place: Place) -> list[str]:
    return [generation.cause for generation in place.run().generations()]


def test_a_worker_and_an_agent_are_killed_and_the_run_is_stopped(place: Place, uninterrupted: Place) -> None:
    """All of it happens to one run."""
    place.pace(0.15)
    place.detach()
    place.wait_for_commit()
    kill_a_worker(place)
    first = kill_the_agent_where_the_others_meet(place)
    stop_twice_and_once_right_after_the_start(place)
    place.pace(0)
    assert place.packtrain("resume").returncode == 0
    assert first not in members(place)
    assert_same_as(uninterrupted, place)
    assert_nothing_left(place)
    lines = [line.text for line in place.run().log_lines().read() if line.node == first]
    assert any("checkpoint: committed" in line for line in lines), "what the dead machine wrote is kept"


def kill_a_worker(place: Place) -> None:
    kill(place.workers_of(members(place)[1]))
    place.wait_for_commit(40)
    assert causes(place) == ["start", "program"]
    assert place.run().store.list(place.run().key("stacks/")) == [], "it did not hang"


def kill_the_agent_where_the_others_meet(place: Place) -> str:
    """Its workers die with it, and another takes its place."""
    first = members(place)[0]
    agent = place.machine(first)[0]
    workers = place.workers_of(first)
    kill([agent])
    wait_until(lambda: not any(one.is_running() for one in workers), "its workers to die with it", 60)
    place.add_node()
    wait_until(lambda: len(causes(place)) == 3, "the next generation")
    assert first not in members(place)
    place.wait_for_commit(60)
    assert causes(place)[:2] == ["start", "program"]
    return first


def stop_twice_and_once_right_after_the_start(place: Place) -> None:
    for _ in range(2):
        assert place.packtrain("stop").returncode == 0
    assert place.wait_for_result() == "stopped"
    assert_nothing_left(place)

    assert place.packtrain("resume", "--detach").returncode == 0
    assert place.packtrain("stop").returncode == 0
    assert place.wait_for_result() == "stopped"
    assert_nothing_left(place)
