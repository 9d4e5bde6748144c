"""A worker that hangs: what is long enough to be one, and what it leaves behind."""

from __future__ import annotations

import faulthandler
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._dynamo.callback import CallbackTrigger, callback_handler

from packtrain.store import Store
from packtrain.train.control import Control
from packtrain.train.watchdog import EXIT_HANG, TIMES_MEDIAN, Watchdog, limit
from packtrain.train.world import World
from parts.sandbox import wait_until
from train.forking import WorkerForker
from train.tiny import tiny_job, tiny_run
from train.workers import losses


def test_the_first_phases_of_a_kind_may_take_long() -> None:
    assert limit([], 60.0) == limit([0.1, 0.1], 60.0) == 600.0
    assert limit([], 1000.0) == 1000.0


def test_later_phases_may_take_ten_times_the_median_but_at_least_the_patience() -> None:
    assert limit([0.1, 0.2, 0.3], 60.0) == 60.0
    assert limit([20.0, 30.0, 25.0], 60.0) == TIMES_MEDIAN * 25.0 == 250.0
    assert limit([20.0, 3000.0, 25.0], 60.0) == 250.0, "one slow phase does not raise the limit"


def test_a_watchdog_that_sees_no_hang_leaves_no_file(tmp_path: Path) -> None:
    watchdog = Watchdog(60.0, tmp_path / "stacks", pytest.fail)
    for _ in range(5):
        watchdog.begin("step")
    watchdog.pause()
    watchdog.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("excuse", ["compiles", "writes a trace"])
def test_a_step_with_an_excuse_may_take_longer_and_the_others_are_told(tmp_path: Path, excuse: str) -> None:
    told: list[None] = []

    class Others(World):
        def announce_waiting(self) -> None:
            told.append(None)

    def seconds_left() -> float:
        assert watchdog._phase is not None
        return watchdog._seconds_left(watchdog._phase)

    watchdog = Watchdog(60.0, tmp_path / "stacks", pytest.fail, Others())
    watchdog.watch_compiler()
    for _ in range(4):
        watchdog.begin("step")
    assert seconds_left() <= 60.0
    assert not told
    compiling = callback_handler.install_callbacks(CallbackTrigger.LAZY_BACKWARD, "0/0")
    with compiling if excuse == "compiles" else watchdog.excused():
        assert 60.0 < seconds_left() <= 600.0
        assert told
    assert seconds_left() <= 60.0
    watchdog.close()
    assert not callback_handler.start_callbacks
    assert not callback_handler.end_callbacks


def test_a_step_that_hangs_leaves_its_stacks_and_reports_why(
    directory_store: Store, forker: WorkerForker, tmp_path: Path
) -> None:
    run = tiny_run(directory_store, tiny_job(checkpoint={"every": "2 steps"}))
    control = tmp_path / "control"
    [exited] = forker.run("hang", store=directory_store.url, run=run.name, control=str(control), at=7)
    assert exited.code == EXIT_HANG
    stacks = (control / "stacks-0.txt").read_text()
    assert "wait_forever" in stacks
    [told] = Control(control).errors()
    assert (told.cause, told.fatal, told.rank, told.step) == ("hang", False, 0, 7)
    assert told.text.startswith("step 7 has taken ")
    assert told.text.endswith("; treating it as a hang")
    assert run.result() is None


def test_a_process_stuck_in_c_code_is_ended_too(directory_store: Store, forker: WorkerForker, tmp_path: Path) -> None:
    run = tiny_run(directory_store)
    control = tmp_path / "control"
    [exited] = forker.run("hang", store=directory_store.url, run=run.name, control=str(control), at=7, deaf=True)
    assert exited.code == 1
    assert "hold_the_interpreter" in (control / "stacks-0.txt").read_text()


def test_ranks_waiting_for_a_rank_without_data_are_not_a_hang(
    directory_store: Store, forker: WorkerForker, tmp_path: Path
) -> None:
    run = tiny_run(directory_store, tiny_job(train={"patience": "2 s"}))
    where = {"store": directory_store.url, "run": run.name, "control": str(tmp_path / "control")}
    forker.succeed("train", 2, **where, recipe="starved")
    assert run.result() is not None
    assert Control(tmp_path / "control").errors() == []


def test_searching_for_a_bad_sample_may_take_long(directory_store: Store, forker: WorkerForker, tmp_path: Path) -> None:
    run = tiny_run(directory_store, tiny_job(train={"patience": "1 s", "batch": "2 samples"}))
    [exited] = forker.run(
        "train", store=directory_store.url, run=run.name, control=str(tmp_path / "control"), recipe="accused"
    )
    assert exited.code == 1
    assert "bad samples: 7 of data.train.0" in exited.log
    assert max(losses(run)) >= 3, "the usual time of a step was known"


def test_a_phase_that_waits_for_the_store_may_take_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks = 0.0, []
    arm = faulthandler.dump_traceback_later

    def count(seconds: float, **options: Any) -> None:
        arm(seconds, **options)
        looks.append(now)

    monkeypatch.setattr(faulthandler, "dump_traceback_later", count)
    monkeypatch.setattr("packtrain.train.watchdog.LOOK_SECONDS", 0.01)
    monkeypatch.setattr("packtrain.train.watchdog.time", SimpleNamespace(monotonic=lambda: now))
    watchdog = Watchdog(0.0, tmp_path / "stacks", pytest.fail)
    for _ in range(5):
        watchdog.begin("data", least_seconds=600.0)
        now += 1.0
    now += 500.0  # past ten times the median
    wait_until(lambda: looks.count(now) >= 2 or not watchdog._thread.is_alive(), "two looks of the watchdog")
    watchdog.close()
    assert looks.count(now) >= 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("processes")
def test_connecting_that_never_ends_is_reported_and_ends_the_worker() -> None:
    script = (
        "import time\nfrom packtrain.train.watchdog import must_end_within\n"
        "with must_end_within(60, 'nothing', print): pass\n"
        "with must_end_within(0.2, 'connecting', lambda text: print(text, flush=True)): time.sleep(600)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90, check=False)
    assert (ended.returncode, ended.stdout) == (EXIT_HANG, "connecting has taken 0 s; treating it as a hang\n")
