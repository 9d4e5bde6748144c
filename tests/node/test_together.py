"""Several machines of one run, on a clock that only the test moves: who takes part, and who decides it."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from pathlib import Path

import pytest

from packtrain.job.job import BudgetSettings
from packtrain.node.assembly import GROW_FACTOR
from packtrain.node.deadline import left_at_start
from packtrain.run.checkpoint import Superseded, commit, committed
from packtrain.run.liveness import LEASE_LOST_SECONDS
from packtrain.run.outputs import kept_files
from packtrain.run.records import Generation, Member, Point, Result
from packtrain.run.run import Run
from packtrain.store import Store
from parts.faulty import FaultyStore
from parts.nodes import Cluster, Make, cluster_of, look_until_settled
from parts.runs import MEASURED, a_lease, new_run, program_job, read_files, write_files

LOST = int(LEASE_LOST_SECONDS) + 6


def made_first_step(cluster: Cluster, generation: int, seconds_ago: float) -> None:
    writer = cluster.run.point_writer(f"{generation:06d}-rank-0")
    for kind, ago in (("start", seconds_ago + 1), ("train", seconds_ago), ("train", 0.0)):
        writer.append(Point(kind, generation, 1, time.time() - ago, MEASURED))  # type: ignore[arg-type]
    writer.flush()


# Elastic membership.


def test_a_range_starts_with_the_least_and_takes_in_another_machine_later(make: Make) -> None:
    cluster = make("2..3", 2)
    cluster.wait(10)
    assert cluster.members() == [0, 1]
    cluster.add()
    cluster.wait(40)
    assert cluster.nodes[0].group is not None
    assert cluster.nodes[0].group.stop is None, "not before it has made a step"
    made_first_step(cluster, 1, seconds_ago=46)
    cluster.wait(4)
    assert [node.group.stop is not None for node in cluster.nodes if node.group] == [True, True]
    cluster.end_workers(0)
    cluster.wait(4)
    assert cluster.members() == [0, 1, 2]
    assert cluster.causes() == ["start", "joined"]


def test_a_generation_that_took_long_to_start_trains_longer_before_it_takes_in_another(make: Make) -> None:
    cluster = make("1..2", 1)
    cluster.wait(8)
    cluster.add()
    cluster.wait(52)
    group = cluster.nodes[0].group
    assert group is not None
    took = cluster.now - group.began - 20
    assert 30 < took < 40
    made_first_step(cluster, 1, seconds_ago=20)
    cluster.wait(GROW_FACTOR * took - 30)
    assert group.stop is None
    cluster.wait(40)
    assert group.stop is not None


def test_a_program_takes_in_another_machine_after_a_fixed_time(
    directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(directory_store, program_job(fleet={"local": {"machines": "1..2"}}))
    with cluster_of(run, monkeypatch, str(tmp_path / "cache")) as cluster:
        cluster.add()
        cluster.wait(8)
        cluster.add()
        cluster.wait(40)
        group = cluster.nodes[0].group
        assert group is not None
        assert group.stop is not None


def test_two_nodes_of_one_machine_do_not_take_the_place_of_another_that_starts_later(make: Make) -> None:
    cluster = make("1..2", 0)
    for _ in range(2):
        cluster.add(machine="a")
    cluster.wait(3)
    cluster.add(machine="b")
    cluster.wait(8)
    assert cluster.members() == [0, 2]


def test_a_machine_that_comes_late_replaces_the_second_node_of_another(make: Make) -> None:
    cluster = make(2, 0)
    for _ in range(2):
        cluster.add(machine="a")
    cluster.wait(10)
    assert cluster.members() == [0, 1], "better than none, if no other machine comes"
    cluster.add(machine="b")
    made_first_step(cluster, 1, seconds_ago=46)
    cluster.wait(40)
    cluster.end_workers(0)
    cluster.wait(40)
    assert cluster.members() == [0, 2]
    assert cluster.causes() == ["start", "joined"], "and the other node does not join again"


def test_a_node_at_a_public_address_takes_no_part(make: Make) -> None:
    cluster = make("1..2", 1)
    for renewal in range(12):
        cluster.run.renew(a_lease("forged", renewal, address="93.184.216.34", job=cluster.run.job_digest))
        cluster.wait(1)
    assert cluster.members() == [0]
    cluster.nodes[0].events.flush()
    warned = [event.text for event in cluster.run.events().read() if event.kind == "warning"]
    assert [text.partition(" is a")[0] for text in warned] == ["continuing without forged: 93.184.216.34"]


@pytest.mark.parametrize("address", ["93.184.216.34", "evil.example.org", "0.0.0.0"])
def test_no_worker_is_started_in_a_generation_with_a_public_address(make: Make, address: str) -> None:
    cluster = make(2, 1)
    members = (Member("forged", address, 1), Member(cluster.nodes[0].name, "127.0.0.1", 1))
    cluster.run.propose(Generation(1, members, 29500, "start"))
    cluster.wait(3)
    result = cluster.run.result()
    assert cluster.nodes[0].group is None
    assert result is not None
    assert result.status == "failed"
    assert address in result.reason


def test_a_failure_is_told_once_and_the_next_generation_only_says_that_it_starts_again(make: Make) -> None:
    cluster = make(1, 1)
    cluster.wait(8)
    cluster.fail(cluster.nodes[0], "it broke")
    cluster.wait(8)
    cluster.nodes[0].events.flush()
    events = [(event.kind, event.text) for event in cluster.run.events().read()]
    assert [event for event in events if "it broke" in event[1]] == [("failure", "it broke")]
    assert ("generation", "2: started 1 worker again") in events


def test_machines_started_together_form_one_generation(make: Make) -> None:
    cluster = make("1..3", 3)
    cluster.wait(8)
    assert cluster.members() == [0, 1, 2]
    assert cluster.causes() == ["start"]


def test_a_full_generation_takes_in_no_more_machines(make: Make) -> None:
    cluster = make("1..2", 2)
    cluster.wait(10)
    cluster.add()
    cluster.wait(60)
    assert cluster.members() == [0, 1]
    assert len(cluster.causes()) == 1


def test_a_range_continues_with_fewer_machines_when_one_dies(make: Make) -> None:
    cluster = make("2..3", 3)
    cluster.wait(10)
    cluster.kill(cluster.nodes[2])
    cluster.wait(LOST)
    assert cluster.members() == [0, 1]
    assert cluster.causes() == ["start", "machine"]


def test_with_too_few_machines_the_run_waits_for_a_replacement(make: Make) -> None:
    cluster = make(2, 2)
    cluster.wait(10)
    cluster.kill(cluster.nodes[1])
    cluster.wait(60)
    assert len(cluster.causes()) == 1
    assert cluster.nodes[0].group is None, "its workers would wait for those that are gone"
    cluster.add()
    cluster.wait(10)
    assert cluster.members() == [0, 2]
    assert cluster.causes() == ["start", "machine"]


def test_the_first_machine_can_die_like_any_other(make: Make) -> None:
    cluster = make("2..3", 3)
    cluster.wait(10)
    cluster.kill(cluster.nodes[0])
    cluster.wait(2 * LOST)
    assert cluster.members() == [1, 2]
    assert cluster.causes() == ["start", "machine"]


def with_outputs(make: Make) -> Cluster:
    """Two machines whose program has written `out/log` on the first one."""
    cluster = make("1..2", 2, program_job, outputs=["out"], checkpoint={"every": "1 s"})
    for node in cluster.nodes:
        (node.directory.path / "code").mkdir()
        node.workspace.prepare()
    cluster.wait(10)
    write_files(cluster.nodes[0].directory.path / "code", {"out/log": b"first"})
    cluster.wait(4)
    return cluster


def outputs(cluster: Cluster) -> dict[str, bytes]:
    return {name: cluster.run.store.get(file.key) for name, file in kept_files(cluster.run).items()}


def test_the_outputs_of_a_program_outlive_its_first_machine(make: Make) -> None:
    cluster = with_outputs(make)
    first, second = cluster.nodes
    cluster.kill(first)
    cluster.wait(2 * LOST)
    assert cluster.members() == [1]
    assert read_files(second.directory.path / "code") == {"train.py": b"", "out/log": b"first"}
    write_files(second.directory.path / "code", {"out/new": b"second"})
    cluster.wait(4)
    assert outputs(cluster) == {"out/log": b"first", "out/new": b"second"}


def test_a_machine_that_was_cut_off_changes_no_outputs(make: Make) -> None:
    cluster = with_outputs(make)
    first, second = cluster.nodes
    cluster.kill(first)
    cluster.wait(2 * LOST)
    write_files(second.directory.path / "code", {"out/log": b"first, second"})
    cluster.wait(4)
    write_files(first.directory.path / "code", {"out/log": b"first, late", "out/late": b""})
    with suppress(Superseded):  # only what is in the store matters here
        first.program.commit(1)
    assert outputs(cluster) == {"out/log": b"first, second"}


def test_the_proposer_after_the_first_machine_can_die_too(make: Make) -> None:
    cluster = make("1..4", 4)
    cluster.wait(10)
    first = cluster.nodes[0]
    cluster.kill(first)
    cluster.run.proposer(2, 0, first.name)  # as if it had claimed the turn and died before it proposed
    cluster.wait(2 * LOST)
    assert cluster.members() == [1, 2, 3]
    assert cluster.causes() == ["start", "machine"]


def test_only_one_machine_reads_every_lease(make: Make, directory_store: Store) -> None:
    cluster = make(6, 0)
    stores = [FaultyStore(directory_store) for _ in range(6)]
    for store in stores:
        cluster.add(store)
    cluster.wait(10)
    assert len(cluster.members()) == 6
    for store in stores:
        store.operations.clear()
    cluster.wait(20)
    leases = [sum("nodes/" in key for operation, key in store.operations if operation == "find") for store in stores]
    assert leases[0] == 20 * 6
    assert leases[1:] == [20] * 5


# Failures.


def test_the_machine_with_its_own_error_explains_those_of_the_others(make: Make) -> None:
    cluster = make(3, 3)
    cluster.wait(10)
    cluster.fail(cluster.nodes[2], cause="memory", step=7)
    cluster.wait(8)
    latest = cluster.run.latest_generation()
    assert latest is not None
    assert (latest.number, latest.cause, latest.failed_step, latest.reason) == (2, "memory", 7, "failure: it broke")


def test_a_failure_on_one_machine_restarts_all(make: Make) -> None:
    """Their workers may wait for it in a collective for minutes."""
    cluster = make(2, 2)
    cluster.wait(10)
    cluster.end_workers(1, cluster.nodes[1])
    cluster.wait(8)
    assert cluster.causes() == ["start", "program"]
    assert cluster.members() == [0, 1]


def test_a_step_that_fails_twice_ends_the_run(make: Make) -> None:
    cluster = make(2, 2)
    for _ in range(2):
        cluster.wait(10)
        cluster.fail(cluster.nodes[1], step=7)
    cluster.wait(10)
    result = cluster.run.result()
    assert result is not None
    assert (result.status, result.reason) == ("failed", "it broke (step 7 failed twice in the same way)")


def test_a_lost_machine_is_the_cause_and_not_the_errors_that_follow(make: Make) -> None:
    cluster = make("1..2", 2)
    cluster.wait(10)
    cluster.kill(cluster.nodes[1])
    cluster.fail(cluster.nodes[1])
    cluster.wait(LOST)
    latest = cluster.run.latest_generation()
    assert latest is not None
    assert (latest.cause, len(latest.members)) == ("machine", 1)
    assert len(cluster.causes()) == 2, "nothing is tried with a machine of which nothing was heard since"


def test_an_absent_store_never_counts_as_a_failure(make: Make) -> None:
    cluster = make(1, 1)
    for _ in range(6):
        cluster.wait(5)
        cluster.fail(cluster.nodes[0], cause="store", text="the store is away")
    cluster.wait(5)
    assert cluster.run.result() is None
    assert cluster.causes() == ["start", *["store"] * 6]


# Notices.


def test_a_preemption_notice_on_one_machine_makes_all_commit(make: Make) -> None:
    cluster = make("1..2", 2)
    cluster.wait(10)
    cluster.preempt(cluster.nodes[1])
    cluster.wait(4)
    assert all(node.group and node.group.control.stop_requested() for node in cluster.nodes)
    cluster.end_workers(0)
    cluster.wait(8)
    assert cluster.members() == [0]
    assert cluster.causes() == ["start", "preempted"]
    assert cluster.nodes[1].name in cluster.gone


def test_a_preemption_of_the_first_machine_is_no_failure_either(make: Make) -> None:
    cluster = make("1..2", 2)
    cluster.wait(10)
    cluster.preempt(cluster.nodes[0])
    cluster.wait(4)
    cluster.end_workers(0)
    cluster.wait(10)
    assert cluster.members() == [1]
    assert cluster.causes() == ["start", "preempted"]


def test_the_first_machine_finishes_its_commit_after_the_preempted_one_is_gone(make: Make) -> None:
    cluster = make("1..2", 2)
    first, other = cluster.nodes
    cluster.wait(10)
    cluster.preempt(other)
    cluster.wait(4)
    cluster.end_workers(0, other)
    cluster.wait(30)
    assert other.name in cluster.gone
    assert first.group is not None
    assert first.group.launcher is not None
    assert first.group.launcher.poll() is None, "a large checkpoint takes its time"
    cluster.end_workers(0, first)
    cluster.wait(8)
    assert cluster.causes() == ["start", "preempted"]


def test_a_launcher_that_waits_for_a_machine_that_left_is_killed(make: Make) -> None:
    cluster = make("1..2", 2)
    first, other = cluster.nodes
    cluster.wait(10)
    cluster.preempt(other)
    cluster.wait(4)
    cluster.end_workers(0, other)
    assert first.group is not None
    first.group.launcher.workers = False  # type: ignore[union-attr]
    cluster.wait(16)
    assert cluster.causes() == ["start", "preempted"]


def test_workers_that_exit_after_the_preempted_first_machine_count_no_failure(make: Make) -> None:
    cluster = make("1..2", 2)
    cluster.wait(10)
    cluster.preempt(cluster.nodes[0])
    cluster.wait(4)
    cluster.end_workers(0, cluster.nodes[0])
    cluster.wait(12)
    assert cluster.members() == [1]
    assert cluster.causes() == ["start", "preempted"]


def test_a_preempted_machine_leaves_before_its_time_is_up(make: Make) -> None:
    cluster = make("1..2", 2)
    cluster.wait(10)
    cluster.preempt(cluster.nodes[1], seconds=30)
    cluster.wait(28)
    assert cluster.nodes[1].name in cluster.gone, "its workers did not end by themselves"


def test_a_preemption_after_a_stop_request_shortens_the_grace_time(make: Make) -> None:
    cluster = make(1, 1)
    cluster.wait(10)
    cluster.run.request_stop("enough")
    cluster.wait(5)
    assert not cluster.gone
    cluster.preempt(cluster.nodes[0], seconds=30)
    cluster.wait(28)
    assert cluster.nodes[0].name in cluster.gone
    result = cluster.run.result()
    assert result is not None
    assert result.status == "stopped"


# Stops and budgets.


def test_a_stop_reaches_every_machine_and_the_first_writes_the_result(make: Make) -> None:
    cluster = make(3, 3)
    cluster.wait(10)
    cluster.run.request_stop("enough")
    cluster.run.request_stop("enough, I said")
    cluster.wait(5)
    assert all(node.group and node.group.stop for node in cluster.nodes)
    cluster.end_workers(0)
    cluster.wait(5)
    result = cluster.run.result()
    assert result is not None
    assert (result.status, result.reason) == ("stopped", "enough")
    assert len(cluster.gone) == 3


@pytest.mark.parametrize("moment", range(12))
def test_a_stop_at_any_moment_ends_the_run(make: Make, moment: int) -> None:
    cluster = make("1..2", 2)
    cluster.wait(moment)
    cluster.run.request_stop("enough")
    cluster.wait(4)
    cluster.end_workers(0)
    cluster.wait(6)
    result = cluster.run.result()
    assert result is not None
    assert result.status == "stopped"
    assert len(cluster.gone) == 2


def test_hours_of_the_budget_add_up_over_generations(make: Make) -> None:
    cluster = make(1, 1, budget={"hours": 0.05})
    cluster.wait(60)
    cluster.end_workers(1)
    cluster.wait(60)
    cluster.kill(cluster.nodes[0])
    cluster.add()
    cluster.wait(30)
    latest = cluster.run.latest_generation()
    assert latest is not None
    assert latest.used_seconds > 100
    assert latest.seconds_left is not None
    assert latest.seconds_left < 80
    cluster.wait(80)
    group = cluster.nodes[1].group
    assert group is not None
    assert group.stop is not None
    cluster.end_workers(0)
    cluster.wait(4)
    result = cluster.run.result()
    assert result is not None
    assert (result.status, result.reason) == ("stopped", "the budget of 0.05 hours is used up")


def test_dollars_are_paid_for_every_machine(make: Make) -> None:
    cluster = make("1..2", 2, budget={"dollars": 1.0})
    cluster.wait(10)
    latest = cluster.run.latest_generation()
    assert latest is not None
    assert latest.seconds_left == pytest.approx(1800, abs=20)


# A split network: whatever each side sees, one line of commits survives.


@pytest.mark.usefixtures("thorough")
@pytest.mark.parametrize("seed", range(100))
def test_a_split_never_commits_twice(seed: int, make: Make, directory_store: Store, tmp_path: Path) -> None:
    """Machines lose the store and find it again at random, and those with workers try to commit all the time."""
    chance = random.Random(seed)  # noqa: S311
    cluster = make("1..3", 0)
    stores = [FaultyStore(directory_store) for _ in range(3)]
    for store in stores:
        cluster.add(store)
    (tmp_path / "file").write_bytes(b"x")
    steps: dict[str, int] = {}
    for second in range(60):
        cluster.now += 1.0
        for node, store in zip(cluster.nodes, stores, strict=True):
            if chance.random() < 0.08:
                operations = ("put", "put_if_absent", "put_file", "find", "list", "folders", "entry")
                store.refuse(*([] if store.fault("put", "") else operations))
            if second % 2 == 0:
                node.lease.renew()
            try:
                look_until_settled(node)
            except Exception as error:
                assert "away" in str(error)
            group = node.group
            if group is not None and group.is_first and chance.random() < 0.3:
                steps[node.name] = steps.get(node.name, 0) + 1
                try:
                    done = commit(node.run, steps[node.name], group.generation.number, None, {"f": tmp_path / "file"})
                except Superseded:
                    continue
                except Exception as error:
                    assert "away" in str(error)
                    continue
                latest = cluster.run.latest_generation()
                assert latest is not None
                assert done.generation == latest.number
                assert latest.members[0].node == node.name
    generations = [one.generation for one in committed(cluster.run)]
    assert generations == sorted(generations)


def test_a_commit_that_arrives_after_the_next_generation_has_started_is_withdrawn(
    make: Make, directory_store: Store, tmp_path: Path
) -> None:
    """Its manifest was on its way when the network was cut, and nobody waited for it."""
    cluster = make("1..2", 0)
    slow = FaultyStore(directory_store)
    cluster.add(slow)
    cluster.add()
    cluster.wait(10)
    (tmp_path / "file").write_bytes(b"x")
    first, files = cluster.nodes[0], {"f": tmp_path / "file"}
    commit(first.run, 20, 1, None, files)

    def go_on_without_it(operation: str, key: str) -> None:
        if operation == "put" and key.endswith("manifest.json"):
            slow.fault = lambda *_: None
            cluster.kill(first)
            cluster.wait(LOST)

    slow.fault = go_on_without_it
    with pytest.raises(Superseded, match="withdrawn"):
        commit(first.run, 40, 1, None, files)
    assert cluster.members() == [1]
    assert [one.step for one in committed(cluster.run)] == [20]


def test_a_result_ends_every_node(make: Make) -> None:
    cluster = make("1..3", 3)
    cluster.wait(10)
    cluster.run.finish(Result("finished", "done", 1, 1.0))
    cluster.wait(12)
    assert len(cluster.gone) == 3


# A run that was resumed with another job while machines of the former one were cut off.


def resumed_with(cluster: Cluster, **fields: object) -> Run:
    """Give the run another job, as `packtrain resume --set` does."""
    changed = cluster.run.changed(cluster.run.job.model_copy(update=fields))
    changed.put_job()
    return changed


def test_machines_that_were_cut_off_leave_a_run_that_was_resumed_elsewhere(make: Make) -> None:
    cluster = make("2..3", 2)
    cluster.wait(10)
    old = cluster.there()
    cluster.gone |= {node.name for node in old}  # cut off: their workers still run
    cluster.run = resumed_with(cluster, budget=BudgetSettings(hours=5))
    cluster.add()
    cluster.add()
    cluster.wait(LOST)
    assert cluster.members() == [2, 3]
    cluster.gone.clear()
    cluster.wait(6)
    assert [node.is_over for node in cluster.nodes] == [True, True, False, False]
    assert [node.group for node in old] == [None, None]
    assert cluster.members() == [2, 3]
    assert cluster.run.result() is None


def test_a_moved_run_does_not_wait_for_machines_of_its_former_fleet(make: Make) -> None:
    """They were silent when the client looked, and are back before the new ones have joined."""
    cluster = make(1, 1)
    cluster.wait(6)
    cluster.run = resumed_with(cluster, budget=BudgetSettings(hours=5))
    cluster.add()
    cluster.wait(8)
    assert cluster.members() == [1]
    assert cluster.causes() == ["start", "resumed"]
    assert cluster.nodes[0].is_over


def test_no_generation_is_proposed_by_a_machine_whose_job_is_no_longer_the_run_s(make: Make) -> None:
    cluster = make(1, 1)
    cluster.wait(6)
    resumed_with(cluster, budget=BudgetSettings(hours=5))
    cluster.end_workers(1)
    cluster.wait(4)
    assert cluster.nodes[0].is_over
    assert cluster.causes() == ["start"]


def test_a_new_budget_counts_what_the_run_has_used_before(make: Make) -> None:
    cluster = make(1, 1, budget={"hours": 1.5})
    cluster.wait(3600)
    cluster.leave(cluster.nodes[0])
    cluster.gone.add(cluster.nodes[0].name)
    for hours, left in ((3.0, 2 * 3600), (None, None), (0.5, 0.0)):
        run = resumed_with(cluster, budget=BudgetSettings(hours=hours))
        # Without a node: one with nothing left ends its process, which is that of the tests.
        seconds = left_at_start(run, run.latest_generation())
        assert seconds == (None if left is None else pytest.approx(left, abs=10))
