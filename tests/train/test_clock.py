"""Where the time goes: every moment is somewhere, on every rank."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from lives import Slow
from nursery import Nursery
from tiny import tiny_job, tiny_run

from packtrain.run.records import TimeSpent
from packtrain.run.run import Run
from packtrain.store import Store
from packtrain.train.control import Control
from packtrain.train.recorder import SPANS, Clock
from packtrain.train.trainer import Trainer
from packtrain.train.world import Outcome, World


def test_marks_leave_nothing_out() -> None:
    began = time.perf_counter()
    clock = Clock()
    for span in ("data", "forward", "data", "backward"):
        time.sleep(0.01)
        clock.mark(span)
    elapsed = time.perf_counter() - began
    taken = clock.take()
    assert taken.keys() == {"data", "forward", "backward"}
    assert taken["data"] >= 0.02
    assert sum(taken.values()) == pytest.approx(elapsed, abs=0.005)
    assert clock.take() == {}


def test_what_is_taken_begins_anew_and_time_from_before_can_be_added() -> None:
    clock = Clock()
    clock.add("start", 2.0)
    assert clock.spent("start") == 2.0
    assert clock.take() == {"start": 2.0}
    assert clock.spent("start") == 0.0


def test_who_waits_for_the_slowest_is_told_from_who_exchanges() -> None:
    """All are done at once: what the slowest took is the exchange, and what others took more they waited."""
    outcome = Outcome(0.0, False, False, False, 0.0, (0.5, 0.125, 0.25))
    assert [outcome.waited(rank) for rank in range(3)] == [0.375, 0.0, 0.125]


def summed(records: list[TimeSpent]) -> dict[str, float]:
    total: dict[str, float] = {}
    for record in records:
        for span, seconds in record.seconds.items():
            total[span] = total.get(span, 0.0) + seconds
    return total


class Timed(Clock):
    """Knows when it was made and when it was last asked."""

    def __init__(self) -> None:
        super().__init__()
        self.began = self.last_taken = time.perf_counter()

    def take(self) -> dict[str, float]:
        self.last_taken = time.perf_counter()
        return super().take()


SLOW = tiny_job(evaluate={"every": "4 steps"}, checkpoint={"every": "5 steps"})


def test_the_spans_of_a_run_add_up_to_its_time(directory_store: Store, control: Control) -> None:
    run = tiny_run(directory_store, SLOW)
    clock = Timed()
    Trainer(run, Slow(run.job), World(), 1, control, clock=clock).train()
    elapsed = clock.last_taken - clock.began
    total = summed(run.time_spent().read())
    assert total.keys() <= set(SPANS)
    assert sum(total.values()) == pytest.approx(elapsed, rel=0.02)
    assert total["forward"] >= 10 * Slow.forward_seconds
    assert total["data"] >= Slow.data_seconds
    assert total["evaluation"] >= 4 * Slow.evaluation_seconds
    assert min(total.values()) >= 0


def test_a_step_says_where_its_time_went(directory_store: Store, control: Control) -> None:
    run = tiny_run(directory_store, SLOW)
    Trainer(run, Slow(run.job), World(), 1, control).train()
    for point in run.metrics():
        if point.kind == "train":
            spans = [value for name, value in point.values.items() if name.removesuffix("_seconds") in SPANS]
            assert point.values["step_seconds"] == pytest.approx(sum(spans))
            assert point.values["forward_seconds"] >= Slow.forward_seconds


def test_every_rank_says_where_its_time_went_and_who_waited_for_whom(
    directory_store: Store, nursery: Nursery, tmp_path: Path
) -> None:
    """The second rank is the slow one: the first waits for it at every step, and it for nobody."""
    run = tiny_run(directory_store, tiny_job())
    nursery.succeed("train", 2, store=run.store.url, run=run.name, control=str(tmp_path / "control"), recipe="lame")
    spent = of_rank(run)
    assert spent.keys() == {0, 1}
    assert spent[0]["wait"] > 8 * Slow.forward_seconds
    assert spent[1]["forward"] > 10 * Slow.forward_seconds
    assert spent[1]["wait"] < spent[0]["wait"] / 2
    assert all(seconds >= 0 for spans in spent.values() for seconds in spans.values())


def of_rank(run: Run) -> dict[int, dict[str, float]]:
    records = run.time_spent().read()
    return {rank: summed([one for one in records if one.rank == rank]) for rank in {one.rank for one in records}}
