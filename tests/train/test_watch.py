"""A worker that hangs: what is long enough to be one, and what it leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from lives import losses
from nursery import Nursery
from tiny import tiny_job, tiny_run

from packtrain.store import Store
from packtrain.train.control import Control
from packtrain.train.watchdog import EXIT_HANG, TIMES_ITS_LIKE, Watch, limit


def test_the_first_of_a_kind_may_take_long() -> None:
    assert limit([], 60.0) == limit([0.1, 0.1], 60.0) == 600.0
    assert limit([], 1000.0) == 1000.0


def test_later_ones_may_take_ten_times_what_their_like_took_but_never_less_than_the_patience() -> None:
    assert limit([0.1, 0.2, 0.3], 60.0) == 60.0
    assert limit([20.0, 30.0, 25.0], 60.0) == TIMES_ITS_LIKE * 25.0 == 250.0
    assert limit([20.0, 3000.0, 25.0], 60.0) == 250.0, "one that took long does not make all of them long"


def test_a_watch_with_nothing_to_find_leaves_nothing(tmp_path: Path) -> None:
    watch = Watch(60.0, tmp_path / "stacks", pytest.fail)
    for _ in range(5):
        watch.begin("step")
    watch.rest()
    watch.close()
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_hangs_leaves_the_stacks_and_tells_why(
    directory_store: Store, nursery: Nursery, tmp_path: Path
) -> None:
    run = tiny_run(directory_store, tiny_job(checkpoint={"every": "2 steps"}))
    control = tmp_path / "control"
    [lived] = nursery.live("hang", store=directory_store.url, run=run.name, control=str(control), at=7)
    assert lived.code == EXIT_HANG
    stacks = (control / "stacks-0.txt").read_text()
    assert "wait_for_what_never_comes" in stacks
    [told] = Control(control).errors()
    assert (told.cause, told.hopeless, told.rank, told.step) == ("hang", False, 0, 7)
    assert told.text.startswith("step 7 has taken ")
    assert told.text.endswith(": taken for a hang")
    assert run.result() is None


def test_a_process_that_lets_no_python_run_is_ended_all_the_same(
    directory_store: Store, nursery: Nursery, tmp_path: Path
) -> None:
    run = tiny_run(directory_store)
    control = tmp_path / "control"
    [lived] = nursery.live("hang", store=directory_store.url, run=run.name, control=str(control), at=7, deaf=True)
    assert lived.code == 1
    assert "hold_the_interpreter" in (control / "stacks-0.txt").read_text()


def test_ranks_that_wait_for_one_without_data_are_not_taken_for_a_hang(
    directory_store: Store, nursery: Nursery, tmp_path: Path
) -> None:
    run = tiny_run(directory_store, tiny_job(train={"patience": "2 s"}))
    where = {"store": directory_store.url, "run": run.name, "control": str(tmp_path / "control")}
    nursery.succeed("train", 2, **where, recipe="starved")
    assert run.result() is not None
    assert Control(tmp_path / "control").errors() == []


def test_to_find_the_sample_that_is_not_a_number_may_take_long(
    directory_store: Store, nursery: Nursery, tmp_path: Path
) -> None:
    run = tiny_run(directory_store, tiny_job(train={"patience": "1 s", "batch": "2 samples"}))
    [lived] = nursery.live(
        "train", store=directory_store.url, run=run.name, control=str(tmp_path / "control"), recipe="accused"
    )
    assert lived.code == 1
    assert "its samples 7 of data.train.0 make a loss that is not finite" in lived.log
    assert max(losses(run)) >= 3, "what a step takes was known"


def test_what_waits_for_the_store_may_take_longer(tmp_path: Path) -> None:
    watch = Watch(60.0, tmp_path / "stacks", pytest.fail)
    for _ in range(5):
        watch.begin("data", least=600.0)
    assert watch._now is not None
    _, _, since, deadline = watch._now
    assert deadline - since == pytest.approx(600.0)
    watch.close()
