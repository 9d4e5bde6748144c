"""A worker that is killed at any operation on the store and at any named point of the loop, and the one after it.

The oracle is a run that nothing happened to: the same points, the same weights, bit for bit.
"""

from __future__ import annotations

import signal
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from packtrain.run.checkpoint import committed
from packtrain.run.run import Run
from packtrain.store import Store
from packtrain.train.control import Control
from train.forking import WorkerForker
from train.tiny import tiny_job, tiny_run
from train.workers import history, train_and_die, weights

STEPS = 6
UNHURT = 3  # so many lives in a row that were over before the hour came: there is no later one


@pytest.fixture
def oracle(directory_store: Store, forker: WorkerForker, tmp_path: Path) -> Run:
    run = killed_run(directory_store)
    forker.succeed("train_and_die", store=directory_store.url, run=run.name, control=str(tmp_path / "oracle"))
    assert [step for kind, step in history(run) if kind == "train"] == list(range(1, STEPS + 1))
    assert [step for kind, step in history(run) if kind == "valid"] == [3, 6]
    return run


def killed_run(store: Store) -> Run:
    job = tiny_job(
        train={"duration": f"{STEPS} steps", "ema": 0.9},
        checkpoint={"every": "2 steps"},
        evaluate={"every": "3 steps"},
    )
    return tiny_run(store, job)


def is_killed(forker: WorkerForker, run: Run, control: Path, **hour: Any) -> bool:
    """Whether the first life was cut short; the second must go on from there to the same end."""
    [first] = forker.run("train_and_die", store=run.store.url, run=run.name, control=f"{control}-1", **hour)
    assert first.code in (0, -signal.SIGKILL), first.log
    if run.result() is None:
        assert first.code
        # Nothing happens to this one: it needs no process of its own.
        train_and_die(store=run.store.url, run=run.name, control=f"{control}-2", generation=2)
    return first.code != 0


def kill_everywhere(forker: WorkerForker, oracle: Run, tmp_path: Path, kind: str, **how: Any) -> int:
    wanted, digests = history(oracle), weights(oracle)
    unhurt = 0
    for number in count(1):
        run = killed_run(oracle.store)
        killed = is_killed(forker, run, tmp_path / f"control-{number}", **{kind: number}, **how)
        result = run.result()
        assert result is not None
        assert (result.status, result.step) == ("finished", STEPS), number
        assert history(run) == wanted, number
        assert weights(run) == digests, number
        unhurt = 0 if killed else unhurt + 1
        if unhurt == UNHURT:
            return number - UNHURT
    raise AssertionError("there is always a last hour")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_run_killed_at_any_store_operation_ends_like_an_uninterrupted_one(
    forker: WorkerForker, oracle: Run, tmp_path: Path, after: bool
) -> None:
    assert kill_everywhere(forker, oracle, tmp_path, "operation", after=after) > 20


@pytest.mark.timeout(900)
def test_a_run_killed_anywhere_in_the_loop_ends_like_an_uninterrupted_one(
    forker: WorkerForker, oracle: Run, tmp_path: Path
) -> None:
    assert kill_everywhere(forker, oracle, tmp_path, "mark") > 5 * STEPS


def test_a_run_killed_repeatedly_ends_like_an_uninterrupted_one(
    forker: WorkerForker, oracle: Run, tmp_path: Path
) -> None:
    run = killed_run(oracle.store)
    marks = 24  # of a life
    for generation in count(1):
        before = committed(run)
        control = str(Control(tmp_path / str(generation)).directory)
        where = {"store": run.store.url, "run": run.name, "control": control}
        [exited] = forker.run("train_and_die", 1, **where, generation=generation, mark=marks, recipe="slow")
        if exited.code == 0:
            break
        if committed(run) == before:  # a commit takes as long as the machine lets it: the next life is longer
            marks += 12
        assert generation < 50, "a life is long enough for a commit"
    assert generation > 1
    assert history(run) == history(oracle)
    assert weights(run) == weights(oracle)
