from __future__ import annotations

import math
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtrain.report.live import GrowingLine, History, LiveRun, RunWatcher
from packtrain.report.score import Score
from packtrain.run.records import Event, LogLine, Point, Result, Telemetry
from packtrain.run.run import Run
from packtrain.store import Store
from parts.faulty import FaultyStore
from parts.runs import MEASURED, a_generation, a_lease, new_run, recipe_job


def trained(step: int, generation: int = 1, **values: float) -> Point:
    return Point("train", generation, step, 100.0 + step, {**MEASURED, "loss": 10.0 - step / 10, **values})


def validated(step: int, generation: int = 1, **values: float) -> Point:
    return Point("valid", generation, step, 100.0 + step, values)


def write(run: Run, *points: Point, generation: int = 1) -> None:
    writer = run.point_writer(f"{generation:06d}-rank-0-{points[0].step}")
    for point in points:
        writer.append(point)
    writer.flush()


# Curves.


@given(st.integers(1, 2000))
def test_a_curve_is_small_and_spans_all_that_was_added(count: int) -> None:
    curve = GrowingLine(max_points=8)
    for step in range(count):
        curve.add(step, 2.0 * step)
    line = curve.line()
    assert len(line) <= 8
    assert all(y == pytest.approx(2 * x) for x, y in line)
    assert [x for x, _ in line] == sorted({x for x, _ in line})
    assert line[-1][0] >= (count - 1) * 0.5


def test_a_value_that_is_not_a_number_is_left_out_of_a_curve() -> None:
    curve = GrowingLine()
    for step, value in enumerate([1.0, math.nan, math.inf, 2.0]):
        curve.add(step, value)
    assert curve.line() == ((0.0, 1.0), (3.0, 2.0))


def test_a_restart_discards_the_steps_after_its_checkpoint() -> None:
    history = History(recipe_job())
    for point in (trained(1), trained(2), validated(2, bleu=9.0), trained(3), validated(3, bleu=20.0)):
        history.add(point)
    assert history.best == Score("valid.bleu", 20.0, 3)
    history.add(Point("start", 2, 2, 200.0, {}))
    assert history.best == Score("valid.bleu", 9.0, 2)
    history.add(trained(3, 2, loss=1.0))
    assert history.curves()["train.loss"] == ((1.0, 9.9), (2.0, 9.8), (3.0, 1.0))
    assert history.curves()["valid.bleu"] == ((2.0, 9.0),)
    assert [point.generation for point in history.steps] == [2]


# Views.


def test_a_view_has_what_is_new_and_reads_nothing_twice(directory_store: Store) -> None:
    store = FaultyStore(directory_store)
    run = new_run(store, recipe_job(budget={"dollars": 8}, fleet={"local": {}, "price": 2.0}))
    live = LiveRun(run)
    assert live.look().overview.state == "waiting"
    run.propose(a_generation(1, "a"))
    used = Telemetry(cpu_fraction=0.5)
    run.renew(a_lease("a", 1, machine_seconds=1800.0, dollars_per_hour=2.0, telemetry=used))
    write(run, Point("start", 1, 0, 100.0, {}), trained(1, samples=4.0, forward_seconds=0.75), trained(2, samples=4.0))
    events, lines = run.event_writer("a"), run.log_writer("a")
    events.append(Event(1.0, "generation", "1: started 1 worker", 1))
    lines.append(LogLine(1.0, 1, "a", 0, "out", "x" * 10_000))
    for writer in (events, lines):
        writer.flush()
    view = live.look()
    assert (view.overview.step, view.progress, view.units_per_second) == (2, 0.2, 4.0)
    assert view.overview.cost is not None
    assert view.overview.cost.so_far == 1.0
    assert view.spans == {"forward": 1.0}
    assert [(one.node, one.state, one.telemetry) for one in view.machines] == [("a", "working", used)]
    assert [event.text for event in view.events] == ["1: started 1 worker"]
    assert len(view.lines[0].text) == 500
    assert [title for title, _ in view.charts()] == ["loss", "samples/s", "learning rate"]
    live.look()
    asked = [key for operation, key in store.operations if operation == "find" and key.endswith(".jsonl")]
    read = [key for key in asked if directory_store.exists(key)]  # the next chunk is asked for until it is there
    assert sorted(set(read)) == sorted(read)
    assert len(read) == 3


def test_a_long_history_is_read_in_parts(directory_store: Store) -> None:
    run = new_run(directory_store, recipe_job())
    for step in range(1, 4):
        write(run, trained(step))
    run.finish(Result("finished", "reached 3 steps", 3, 1.0))
    live = LiveRun(run, look_seconds=0.0)
    seen = []
    while not (view := live.look()).has_ended:
        seen.append(view.overview.step)
    assert seen == [1, 2, 3]
    assert (view.overview.step, view.progress) == (3, 1.0)


def test_a_machine_that_has_left_and_one_that_is_not_in_the_generation(directory_store: Store) -> None:
    run = new_run(directory_store)
    run.propose(a_generation(1, "a"))
    for lease in (a_lease("a"), a_lease("b"), replace(a_lease("c"), left=True)):
        run.renew(lease)
    states = {one.node: one.state for one in LiveRun(run).look().machines}
    assert states == {"a": "working", "b": "starting", "c": "left"}


# Watching.


def test_a_watcher_says_that_the_store_is_away_and_continues_when_it_is_back(directory_store: Store) -> None:
    run, place = new_run(directory_store, recipe_job()), Path(directory_store.url)
    with RunWatcher(run, poll_seconds=0.01) as watcher:
        while watcher.view is None:
            watcher.wait(1.0)
        place.rename(place.with_name("away"))
        while not watcher.trouble:
            watcher.wait(1.0)
        assert "the store is not there" in watcher.trouble
        place.with_name("away").rename(place)
        write(run, trained(1))
        run.finish(Result("finished", "reached 1 step", 1, 1.0))
        while not watcher.view.has_ended:
            watcher.wait(1.0)
        assert (watcher.view.overview.step, watcher.trouble) == (1, "")


def test_a_run_that_cannot_be_read_ends_watching_with_its_error(directory_store: Store) -> None:
    run = new_run(directory_store)
    directory_store.put(run.key("result.json"), b"{")
    with RunWatcher(run) as watcher, pytest.raises(Exception, match=r"result\.json of run job-1 .* is damaged"):
        while True:
            watcher.wait(1.0)


def test_nothing_is_left_running_after_watching(directory_store: Store) -> None:
    with RunWatcher(new_run(directory_store), poll_seconds=0.01) as watcher:
        watcher.wait(10.0)
    for thread in threading.enumerate():
        if thread.name == "watcher":
            thread.join(60)
            assert not thread.is_alive()
