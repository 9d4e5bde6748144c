"""What is killed on one machine, each compared with a run that nothing happened to."""

from __future__ import annotations

from parts.places import Place, assert_nothing_left, assert_same_as, kill, wait_until


def members(place: Place) -> list[str]:
    latest = place.run().latest_generation()
    return [member.node for member in latest.members] if latest else []


def causes(place: Place) -> list[str]:
    return [generation.cause for generation in place.run().generations()]


def test_a_worker(place: Place, uninterrupted: Place) -> None:
    place.detach()
    place.wait_for_commit()
    kill(place.workers_of(members(place)[1]))
    assert place.wait_for_result() == "finished"
    assert causes(place) == ["start", "program"]
    assert place.run().store.list(place.run().key("stacks/")) == [], "it did not hang"
    assert_same_as(uninterrupted, place)
    assert_nothing_left(place)


def test_the_agent_where_the_others_meet_whose_place_another_takes(place: Place, uninterrupted: Place) -> None:
    place.detach()
    place.wait_for_commit()
    first = members(place)[0]
    agent = place.machine(first)[0]
    workers = place.workers_of(first)
    kill([agent])
    wait_until(lambda: not any(one.is_running() for one in workers), "its workers to die with it", 60)
    place.add_node()
    assert place.wait_for_result() == "finished"
    assert first not in members(place)
    assert_same_as(uninterrupted, place)
    assert_nothing_left(place)
    lines = [line.text for line in place.run().log_lines().read() if line.node == first]
    assert any("checkpoint: committed" in line for line in lines), "what it wrote is kept"


def test_a_stop_twice_and_one_right_after_the_start(place: Place, uninterrupted: Place) -> None:
    place.extra["PACE"] = "0.15"
    place.detach()
    place.wait_for_commit()
    for _ in range(2):
        assert place.packtrain("stop").returncode == 0
    assert place.wait_for_result() == "stopped"
    assert_nothing_left(place)

    assert place.packtrain("resume", "--detach").returncode == 0
    assert place.packtrain("stop").returncode == 0
    assert place.wait_for_result() == "stopped"
    assert_nothing_left(place)

    place.extra["PACE"] = "0"
    assert place.packtrain("resume").returncode == 0
    assert_same_as(uninterrupted, place)
    assert_nothing_left(place)
