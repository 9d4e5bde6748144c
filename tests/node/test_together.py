"""Several machines of one run, on a clock that only the test moves: who takes part, and who decides it."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from packtrain.node.assembly import GROW_FACTOR
from packtrain.run.checkpoint import Superseded, commit, committed
from packtrain.run.liveness import LEASE_LOST_SECONDS
from packtrain.run.records import Point, Result
from packtrain.store import Store
from parts.agents import Company, Make, company_of, look_through
from parts.faulty import FaultyStore
from parts.runs import new_run, program_job

LOST = int(LEASE_LOST_SECONDS) + 6


def made_first_step(company: Company, generation: int, seconds_ago: float) -> None:
    writer = company.run.point_writer(f"{generation:06d}-rank-0")
    for kind, ago in (("start", seconds_ago + 1), ("train", seconds_ago), ("train", 0.0)):
        writer.append(Point(kind, generation, 1, time.time() - ago, {}))  # type: ignore[arg-type]
    writer.flush()


# Elastic membership.


def test_a_range_begins_with_the_least_and_takes_in_another_when_it_appears(make: Make) -> None:
    company = make("2..3", 2)
    company.wait(10)
    assert company.members() == [0, 1]
    company.add()
    company.wait(40)
    assert company.agents[0]._attempt is not None
    assert company.agents[0]._attempt.asked is None, "not before it has made a step"
    made_first_step(company, 1, seconds_ago=46)
    company.wait(4)
    assert [agent._attempt.asked is not None for agent in company.agents if agent._attempt] == [True, True]
    company.end_workers(0)
    company.wait(4)
    assert company.members() == [0, 1, 2]
    assert company.causes() == ["start", "joined"]


def test_a_generation_that_took_long_to_begin_works_longer_before_it_takes_in_another(make: Make) -> None:
    company = make("1..2", 1)
    company.wait(8)
    company.add()
    company.wait(52)
    attempt = company.agents[0]._attempt
    assert attempt is not None
    took = company.now - attempt.began - 20
    assert 30 < took < 40
    made_first_step(company, 1, seconds_ago=20)
    company.wait(GROW_FACTOR * took - 30)
    assert attempt.asked is None
    company.wait(40)
    assert attempt.asked is not None


def test_of_a_program_nobody_knows_when_it_began_to_work(
    directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(directory_store, program_job(fleet={"local": {"machines": "1..2"}}))
    with company_of(run, monkeypatch, str(tmp_path / "cache")) as company:
        company.add()
        company.wait(8)
        company.add()
        company.wait(40)
        attempt = company.agents[0]._attempt
        assert attempt is not None
        assert attempt.asked is not None


def test_machines_that_are_started_together_begin_together(make: Make) -> None:
    company = make("1..3", 3)
    company.wait(8)
    assert company.members() == [0, 1, 2]
    assert company.causes() == ["start"]


def test_a_full_generation_lets_others_wait(make: Make) -> None:
    company = make("1..2", 2)
    company.wait(10)
    company.add()
    company.wait(60)
    assert company.members() == [0, 1]
    assert len(company.causes()) == 1


def test_a_range_goes_on_with_fewer_when_one_dies(make: Make) -> None:
    company = make("2..3", 3)
    company.wait(10)
    company.kill(company.agents[2])
    company.wait(LOST)
    assert company.members() == [0, 1]
    assert company.causes() == ["start", "machine"]


def test_below_the_least_it_waits_for_a_replacement(make: Make) -> None:
    company = make(2, 2)
    company.wait(10)
    company.kill(company.agents[1])
    company.wait(60)
    assert len(company.causes()) == 1
    assert company.agents[0]._attempt is None, "its workers would wait for those that are gone"
    company.add()
    company.wait(10)
    assert company.members() == [0, 2]
    assert company.causes() == ["start", "machine"]


def test_the_first_machine_may_die_like_any_other(make: Make) -> None:
    company = make("2..3", 3)
    company.wait(10)
    company.kill(company.agents[0])
    company.wait(2 * LOST)
    assert company.members() == [1, 2]
    assert company.causes() == ["start", "machine"]


def test_whoever_calls_after_the_first_may_die_too(make: Make) -> None:
    company = make("1..4", 4)
    company.wait(10)
    first = company.agents[0]
    company.kill(first)
    company.run.proposer(2, 0, first.name)  # as if it had claimed the call and died before it proposed
    company.wait(2 * LOST)
    assert company.members() == [1, 2, 3]
    assert company.causes() == ["start", "machine"]


def test_only_one_machine_reads_every_lease(make: Make, directory_store: Store) -> None:
    company = make(6, 0)
    stores = [FaultyStore(directory_store) for _ in range(6)]
    for store in stores:
        company.add(store)
    company.wait(10)
    assert len(company.members()) == 6
    for store in stores:
        store.operations.clear()
    company.wait(20)
    leases = [sum("nodes/" in key for operation, key in store.operations if operation == "find") for store in stores]
    assert leases[0] == 20 * 6
    assert leases[1:] == [20] * 5


# Failures.


def test_what_one_machine_knows_explains_the_errors_of_the_others(make: Make) -> None:
    company = make(3, 3)
    company.wait(10)
    company.fail(company.agents[2], cause="memory", step=7)
    company.wait(8)
    latest = company.run.latest_generation()
    assert latest is not None
    assert (latest.number, latest.cause, latest.failed_step, latest.reason) == (2, "memory", 7, "failure: it broke")


def test_a_machine_that_fails_alone_takes_the_others_along(make: Make) -> None:
    """Their workers may wait for it in a collective for minutes."""
    company = make(2, 2)
    company.wait(10)
    company.end_workers(1, company.agents[1])
    company.wait(8)
    assert company.causes() == ["start", "program"]
    assert company.members() == [0, 1]


def test_the_same_step_twice_ends_the_run(make: Make) -> None:
    company = make(2, 2)
    for _ in range(2):
        company.wait(10)
        company.fail(company.agents[1], step=7)
    company.wait(10)
    result = company.run.result()
    assert result is not None
    assert (result.status, result.reason) == ("failed", "it broke (step 7 failed twice in the same way)")


def test_lost_machines_are_told_from_errors_that_they_cause(make: Make) -> None:
    company = make("1..2", 2)
    company.wait(10)
    company.kill(company.agents[1])
    company.fail(company.agents[1])
    company.wait(LOST)
    latest = company.run.latest_generation()
    assert latest is not None
    assert (latest.cause, len(latest.members)) == ("machine", 1)
    assert len(company.causes()) == 2, "nothing is tried with a machine of which nothing was heard since"


def test_a_store_that_is_away_never_counts(make: Make) -> None:
    company = make(1, 1)
    for _ in range(6):
        company.wait(5)
        company.fail(company.agents[0], cause="store", text="the store is away")
    company.wait(5)
    assert company.run.result() is None
    assert company.causes() == ["start", *["store"] * 6]


# Notices.


def test_a_notice_on_one_machine_has_all_of_them_commit(make: Make) -> None:
    company = make("1..2", 2)
    company.wait(10)
    company.give_notice(company.agents[1])
    company.wait(4)
    assert all(agent._attempt and agent._attempt.control.asked_to_stop() for agent in company.agents)
    company.end_workers(0)
    company.wait(8)
    assert company.members() == [0]
    assert company.causes() == ["start", "preempted"]
    assert company.agents[1].name in company.gone


def test_a_notice_to_the_first_machine_is_no_failure_either(make: Make) -> None:
    company = make("1..2", 2)
    company.wait(10)
    company.give_notice(company.agents[0])
    company.wait(4)
    company.end_workers(0)
    company.wait(10)
    assert company.members() == [1]
    assert company.causes() == ["start", "preempted"]


def test_the_first_commits_in_peace_when_the_one_with_the_notice_is_gone_already(make: Make) -> None:
    company = make("1..2", 2)
    first, other = company.agents
    company.wait(10)
    company.give_notice(other)
    company.wait(4)
    company.end_workers(0, other)
    company.wait(30)
    assert other.name in company.gone
    assert first._attempt is not None
    assert first._attempt.launch is not None
    assert first._attempt.launch.poll() is None, "a large checkpoint takes its time"
    company.end_workers(0, first)
    company.wait(8)
    assert company.causes() == ["start", "preempted"]


def test_a_launcher_that_waits_for_one_who_left_is_not_waited_for(make: Make) -> None:
    company = make("1..2", 2)
    first, other = company.agents
    company.wait(10)
    company.give_notice(other)
    company.wait(4)
    company.end_workers(0, other)
    assert first._attempt is not None
    first._attempt.launch.workers = False  # type: ignore[union-attr]
    company.wait(16)
    assert company.causes() == ["start", "preempted"]


def test_those_who_end_after_the_first_has_left_with_a_notice_count_no_failure(make: Make) -> None:
    company = make("1..2", 2)
    company.wait(10)
    company.give_notice(company.agents[0])
    company.wait(4)
    company.end_workers(0, company.agents[0])
    company.wait(12)
    assert company.members() == [1]
    assert company.causes() == ["start", "preempted"]


def test_a_notice_with_a_deadline_leaves_in_time(make: Make) -> None:
    company = make("1..2", 2)
    company.wait(10)
    company.give_notice(company.agents[1], seconds=30)
    company.wait(28)
    assert company.agents[1].name in company.gone, "its workers did not end by themselves"


def test_a_notice_after_a_stop_leaves_less_time_than_the_stop_did(make: Make) -> None:
    company = make(1, 1)
    company.wait(10)
    company.run.request_stop("enough")
    company.wait(5)
    assert not company.gone
    company.give_notice(company.agents[0], seconds=30)
    company.wait(28)
    assert company.agents[0].name in company.gone
    result = company.run.result()
    assert result is not None
    assert result.status == "stopped"


# Stops and budgets.


def test_a_stop_reaches_every_machine_and_the_first_says_that_it_is_over(make: Make) -> None:
    company = make(3, 3)
    company.wait(10)
    company.run.request_stop("enough")
    company.run.request_stop("enough, I said")
    company.wait(5)
    assert all(agent._attempt and agent._attempt.asked for agent in company.agents)
    company.end_workers(0)
    company.wait(5)
    result = company.run.result()
    assert result is not None
    assert (result.status, result.reason) == ("stopped", "enough")
    assert len(company.gone) == 3


@pytest.mark.parametrize("moment", range(12))
def test_a_stop_at_any_moment_ends_the_run(make: Make, moment: int) -> None:
    company = make("1..2", 2)
    company.wait(moment)
    company.run.request_stop("enough")
    company.wait(4)
    company.end_workers(0)
    company.wait(6)
    result = company.run.result()
    assert result is not None
    assert result.status == "stopped"
    assert len(company.gone) == 2


def test_hours_are_the_runs_and_count_on_through_its_generations(make: Make) -> None:
    company = make(1, 1, budget={"hours": 0.05})
    company.wait(60)
    company.end_workers(1)
    company.wait(60)
    company.kill(company.agents[0])
    company.add()
    company.wait(30)
    latest = company.run.latest_generation()
    assert latest is not None
    assert latest.used_seconds > 100
    assert latest.seconds_left is not None
    assert latest.seconds_left < 80
    company.wait(80)
    attempt = company.agents[1]._attempt
    assert attempt is not None
    assert attempt.asked is not None
    company.end_workers(0)
    company.wait(4)
    result = company.run.result()
    assert result is not None
    assert (result.status, result.reason) == ("stopped", "the budget of 0.05 hours is used up")


def test_dollars_are_paid_for_every_machine(make: Make) -> None:
    company = make("1..2", 2, budget={"dollars": 1.0})
    company.wait(10)
    latest = company.run.latest_generation()
    assert latest is not None
    assert latest.seconds_left == pytest.approx(1800, abs=20)


# A split network: whatever each side sees, one line of commits survives.


@pytest.mark.parametrize("seed", range(100))
def test_a_split_never_commits_twice(seed: int, make: Make, directory_store: Store, tmp_path: Path) -> None:
    """Machines lose the store and find it again at random, and those with workers try to commit all the time."""
    chance = random.Random(seed)  # noqa: S311
    company = make("1..3", 0)
    stores = [FaultyStore(directory_store) for _ in range(3)]
    for store in stores:
        company.add(store)
    (tmp_path / "file").write_bytes(b"x")
    steps: dict[str, int] = {}
    for second in range(60):
        company.now += 1.0
        for agent, store in zip(company.agents, stores, strict=True):
            if chance.random() < 0.08:
                operations = ("put", "put_if_absent", "put_file", "find", "list", "folders", "entry")
                store.refuse(*([] if store.fault("put", "") else operations))
            if second % 2 == 0:
                agent._lease.renew()
            try:
                look_through(agent)
            except Exception as error:
                assert "away" in str(error)
            attempt = agent._attempt
            if attempt is not None and attempt.is_first and chance.random() < 0.3:
                steps[agent.name] = steps.get(agent.name, 0) + 1
                try:
                    done = commit(
                        agent._run, steps[agent.name], attempt.generation.number, None, {"f": tmp_path / "file"}
                    )
                except Superseded:
                    continue
                except Exception as error:
                    assert "away" in str(error)
                    continue
                latest = company.run.latest_generation()
                assert latest is not None
                assert done.generation == latest.number
                assert latest.members[0].node == agent.name
    generations = [one.generation for one in committed(company.run)]
    assert generations == sorted(generations)


def test_a_commit_that_arrives_after_the_next_generation_has_begun_is_taken_back(
    make: Make, directory_store: Store, tmp_path: Path
) -> None:
    """Its manifest was on its way when the network was cut, and nobody waited for it."""
    company = make("1..2", 0)
    slow = FaultyStore(directory_store)
    company.add(slow)
    company.add()
    company.wait(10)
    (tmp_path / "file").write_bytes(b"x")
    first, files = company.agents[0], {"f": tmp_path / "file"}
    commit(first._run, 20, 1, None, files)

    def go_on_without_it(operation: str, key: str) -> None:
        if operation == "put" and key.endswith("manifest.json"):
            slow.fault = lambda *_: None
            company.kill(first)
            company.wait(LOST)

    slow.fault = go_on_without_it  # type: ignore[assignment]
    with pytest.raises(Superseded, match="taken back"):
        commit(first._run, 40, 1, None, files)
    assert company.members() == [1]
    assert [one.step for one in committed(company.run)] == [20]


def test_a_result_ends_everybody(make: Make) -> None:
    company = make("1..3", 3)
    company.wait(10)
    company.run.finish(Result("finished", "done", 1, 1.0))
    company.wait(12)
    assert len(company.gone) == 3
