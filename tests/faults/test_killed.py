"""Killed workers and nodes, and a stopped run, compared with an uninterrupted run."""

from __future__ import annotations

from parts.sandbox import Sandbox, assert_nothing_left, assert_same_as, kill, wait_until


def members(sandbox: Sandbox) -> list[str]:
    latest = sandbox.run().latest_generation()
    return [member.node for member in latest.members] if latest else []


def causes(sandbox: Sandbox) -> list[str]:
    return [generation.cause for generation in sandbox.run().generations()]


def test_a_run_survives_a_killed_worker_a_killed_node_and_a_stop(sandbox: Sandbox, uninterrupted: Sandbox) -> None:
    """All of it happens to one run."""
    sandbox.pace(0.15)
    sandbox.detach()
    sandbox.wait_for_commit()
    kill_a_worker(sandbox)
    first = kill_the_node_that_hosts_the_rendezvous(sandbox)
    stop_twice_and_once_right_after_the_start(sandbox)
    sandbox.pace(0)
    assert sandbox.packtrain("resume").returncode == 0
    assert first not in members(sandbox)
    assert_same_as(uninterrupted, sandbox)
    assert_nothing_left(sandbox)
    lines = [line.text for line in sandbox.run().log_lines().read() if line.node == first]
    assert any("checkpoint: committed" in line for line in lines), "what the dead machine wrote is kept"


def kill_a_worker(sandbox: Sandbox) -> None:
    kill(sandbox.workers_of(members(sandbox)[1]))
    sandbox.wait_for_commit(40)
    assert causes(sandbox) == ["start", "program"]
    assert sandbox.run().store.list(sandbox.run().key("stacks/")) == [], "it did not hang"


def kill_the_node_that_hosts_the_rendezvous(sandbox: Sandbox) -> str:
    """Its workers die with it, and another node takes its place."""
    first = members(sandbox)[0]
    node = sandbox.machine(first)[0]
    workers = sandbox.workers_of(first)
    kill([node])
    wait_until(lambda: not any(one.is_running() for one in workers), "its workers to die with it", 60)
    sandbox.add_node()
    wait_until(lambda: len(causes(sandbox)) == 3, "the next generation")
    assert first not in members(sandbox)
    sandbox.wait_for_commit(60)
    assert causes(sandbox)[:2] == ["start", "program"]
    return first


def stop_twice_and_once_right_after_the_start(sandbox: Sandbox) -> None:
    for _ in range(2):
        assert sandbox.packtrain("stop").returncode == 0
    assert sandbox.wait_for_result() == "stopped"
    assert_nothing_left(sandbox)

    assert sandbox.packtrain("resume", "--detach").returncode == 0
    assert sandbox.packtrain("stop").returncode == 0
    assert sandbox.wait_for_result() == "stopped"
    assert_nothing_left(sandbox)
