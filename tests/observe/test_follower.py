"""What the dashboard knows of a run is what the records say, however they arrive."""

from __future__ import annotations

import json
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.observe.follower import TELEMETRY, EndFollower, RunFollower
from packtrain.observe.goodput import goodput
from packtrain.observe.history import LossCurve, read_points
from packtrain.run.records import Event, Point, Telemetry, TelemetrySample, TimeSpent
from packtrain.run.run import Run, worker_writer
from packtrain.store import Store
from parts.dashboard import a_start, a_step, an_evaluation, trained_run, write_points
from parts.faulty import FaultyStore
from parts.runs import a_generation, new_run, recipe_job


def followed(run: Run) -> RunFollower:
    follower = RunFollower(run)
    follower.read(60)
    return follower


def losses(follower: RunFollower, kind: str = "train") -> dict[int, float]:
    table = follower.history.tables[kind]
    return dict(zip(table.all("step").astype(int).tolist(), table.all("loss").tolist(), strict=True))


def expected(run: Run, kind: str = "train") -> dict[int, float]:
    return {point.step: float(np.float32(point.values["loss"])) for point in read_points(run) if point.kind == kind}


def test_the_numbers_of_a_program_are_columns_of_their_own_names(directory_store: Store) -> None:
    run = new_run(directory_store)
    points = [Point("log", 1, step, 1e9 + step, {"loss": 1 / step, "time": 5.0}) for step in range(1, 5)]
    writer = write_points(run, a_start(1), *points, Point("log", 1, 6, 1e9 + 6, {"val/loss": 0.5}))
    follower = followed(run)
    assert follower.history.names() == ["log.loss", "log.val/loss"]
    assert losses(follower, "log")[4] == 0.25
    # More numbers of a step that was told before.
    writer.append(Point("log", 1, 4, 1e9 + 7, {"loss": 0.25, "val/loss": 0.75}))
    writer.flush()
    follower.read(60)
    assert follower.history.tables["log"].all("step").tolist() == [1, 2, 3, 4, 6]
    assert follower.history.tables["log"].all("val/loss")[3:].tolist() == [0.75, 0.5]
    write_points(run, a_start(2, 2), Point("log", 2, 3, 1e9 + 9, {"loss": 9.0}), generation=2)
    follower.read(60)
    assert losses(follower, "log") == {1: 1.0, 2: 0.5, 3: 9.0}


def test_columns_have_what_the_records_have(any_store: Store) -> None:
    run = trained_run(any_store)
    follower = followed(run)
    assert losses(follower) == expected(run)
    assert follower.history.tables["valid"].all("bleu").tolist() == [12.5]
    assert follower.complete and follower.problem is None
    assert {"train.loss", "train.throughput", "valid.bleu"} <= set(follower.history.names())
    assert follower.sampled_steps() == [10]


def test_nothing_is_read_twice(any_store: Store) -> None:
    run = new_run(any_store, recipe_job())
    writer = write_points(run, a_start(1), a_step(1))
    counting = FaultyStore(any_store)
    follower = RunFollower(Run(counting, run.name))
    follower.read(60)
    for step in range(2, 5):
        writer.append(a_step(step))
        writer.flush()
        counting.operations.clear()
        follower.read(60)
        assert losses(follower) == expected(run)
        chunks = [key for name, key in counting.operations if name == "find" and "metrics" in key]
        assert len(chunks) <= 2, "the new chunk, and that there is no other"


def test_a_restart_discards_what_it_does_not_continue(directory_store: Store) -> None:
    run = new_run(directory_store, recipe_job())
    write_points(run, a_start(1), *(a_step(step, 1.0) for step in range(1, 9)), an_evaluation(8, loss=1.0))
    follower = followed(run)
    edition = follower.history.edition
    write_points(run, a_start(2, 5), a_step(6, 2.0, 2), a_step(7, 2.0, 2), generation=2)
    follower.read(60)
    assert follower.history.edition != edition
    assert losses(follower) == expected(run) == {**dict.fromkeys(range(1, 6), 1.0), 6: 2.0, 7: 2.0}
    assert losses(follower, "valid") == {}


def test_points_of_an_old_generation_that_arrive_late_find_their_place(directory_store: Store) -> None:
    run = new_run(directory_store, recipe_job())
    old = write_points(run, a_start(1), a_step(1))
    write_points(run, a_start(2, 3), a_step(4, 2.0, 2), generation=2)
    follower = followed(run)
    for step in (2, 3, 4, 5):
        old.append(a_step(step))
    old.flush()
    follower.read(60)
    assert losses(follower) == expected(run) == {1: 1.0, 2: 1.0, 3: 1.0, 4: 2.0}


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_any_history_reads_as_the_records_say(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    from packtrain.store import open_store

    run = new_run(open_store(str(tmp_path_factory.mktemp("store")), create=True), recipe_job())
    follower = RunFollower(run)
    last = 0
    for generation in range(1, data.draw(st.integers(1, 4)) + 1):
        start = data.draw(st.integers(0, last))
        writer = write_points(run, a_start(generation, start), generation=generation)
        last = start + data.draw(st.integers(0, 6))
        for step in range(start + 1, last + 1):
            writer.append(a_step(step, float(generation), generation))
            if data.draw(st.booleans()):
                writer.append(an_evaluation(step, generation, loss=float(generation)))
            if data.draw(st.booleans()):
                writer.flush()
                follower.read(60)
        writer.flush()
    follower.read(60)
    for kind in ("train", "valid"):
        assert losses(follower, kind) == expected(run, kind)


def test_time_is_accounted_for_as_in_the_report(directory_store: Store) -> None:
    run = new_run(directory_store, recipe_job())
    spans = {"forward_seconds": 0.5, "backward_seconds": 0.4}
    write_points(run, a_start(1), *(a_step(step, 1.0, 1, **spans) for step in range(1, 9)))
    write_points(run, a_start(2, 4), *(a_step(step, 1.0, 2, **spans) for step in range(5, 12)), generation=2)
    for generation, step in ((1, 6), (2, 7), (2, 9)):
        for rank in (0, 1):
            writer = run.time_spent_writer(f"{worker_writer(generation, rank)}-{step}")
            writer.append(TimeSpent(1e9 + step, generation, rank, step, {"start": 0.5, "forward": 3.0, "data": 1.0}))
            writer.flush()
    generations = [a_generation(1), a_generation(2)]
    mine = followed(run).goodput(generations)
    theirs = goodput(generations, run.points().read(), run.time_spent().read())
    assert mine.parts == pytest.approx(theirs.parts)
    assert [rank.seconds for rank in mine.ranks] == [rank.seconds for rank in theirs.ranks]


def test_one_damaged_chunk_does_not_hide_the_others(directory_store: Store) -> None:
    run = trained_run(directory_store)
    directory_store.put(run.key("metrics/000001-rank-0/00000001.jsonl"), b'{"kind": "train", "step": "x"}\n')
    directory_store.put(run.key("metrics/000001-rank-0/00000002.jsonl"), encoded(a_step(21, 0.5)))
    follower = followed(run)
    assert losses(follower)[21] == 0.5
    assert "00000001.jsonl" in str(follower.problem) and "damaged" in str(follower.problem)


def encoded(point: Point) -> bytes:
    return json.dumps({**vars(point), "samples": []}).encode() + b"\n"


@pytest.mark.parametrize(
    "line",
    [
        b"{}", b"[]", b"null", b"1", b"{", b"\xff", b'{"kind": "train"}', b'{"kind": ["train"]}',
        b'{"kind": "train", "generation": 1, "step": -1, "time": 1, "values": {}}',
        b'{"kind": "train", "generation": 1, "step": 1e400, "time": 1, "values": {}}',
        b'{"kind": "train", "generation": 1, "step": 1, "time": 1, "values": {"loss": {}}}',
        b'{"kind": "train", "generation": 1, "step": 1, "time": 1, "values": {"loss": "' + b"x" * 100_000 + b'"}}',
        b'{"kind": "train", "generation": 1, "step": 1' + b"0" * 5000 + b', "time": 1, "values": {}}',
        b"[" * 100_000,
    ],
)  # fmt: skip
def test_a_damaged_line_is_named_and_nothing_breaks(line: bytes, directory_store: Store) -> None:
    run = trained_run(directory_store)
    directory_store.put(run.key("metrics/000001-rank-0/00000001.jsonl"), line + b"\n")
    follower = followed(run)
    assert "damaged" in str(follower.problem)
    assert losses(follower) == {step: np.float32(10 / step) for step in range(1, 21)}


def test_machines_have_columns_of_what_they_used(directory_store: Store) -> None:
    run = new_run(directory_store)
    writer = run.telemetry_writer("a")
    for second in range(5):
        writer.append(TelemetrySample(1e9 + second, "a", Telemetry(cpu_fraction=second / 10)))
    writer.flush()
    follower = followed(run)
    assert follower.machines["a"].means[:, TELEMETRY.index("cpu")].tolist() == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    assert np.isnan(follower.machines["a"].means[:, TELEMETRY.index("gpu")]).all()


def test_thousands_of_machines_take_little_memory(directory_store: Store) -> None:
    run = new_run(directory_store)
    writer = run.telemetry_writer("a")
    for number in range(2000):
        writer.append(TelemetrySample(1e9, f"node-{number}", Telemetry(cpu_fraction=0.5)))
    writer.flush()
    follower = RunFollower(run)
    tracemalloc.start()
    follower.read(60)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(follower.machines) == 2000
    assert size < 2000 * 4000


def test_events_are_in_the_order_of_time(directory_store: Store) -> None:
    run = new_run(directory_store)
    for name, times in (("a", (3, 5)), ("b", (1, 4))):
        writer = run.event_writer(name)
        for time in times:
            writer.append(Event(float(time), "warning", f"{name}{time}"))
        writer.flush()
    assert [event.text for event in followed(run).events] == ["b1", "a3", "b4", "a5"]


def test_a_long_history_is_read_in_parts(directory_store: Store) -> None:
    run = new_run(directory_store, recipe_job())
    writer = write_points(run, a_start(1))
    for step in range(1, 6):
        writer.append(a_step(step))
        writer.flush()
    follower = RunFollower(run)
    seen = []
    while not follower.complete:
        follower.read(0.0, ("metrics",))
        seen.append(follower.history.tables["train"].rows)
    assert seen == sorted(seen) and seen[-1] == 5 and len(seen) > 2


# The end of a run, for a list of many.


def test_the_shape_of_a_loss_is_of_all_of_the_run_and_of_what_is_new(directory_store: Store) -> None:
    run = new_run(directory_store, recipe_job())
    for chunk in range(100):  # more than are read
        points = run.point_writer(f"000001-rank-0-{chunk:03d}")
        for step in range(20 * chunk + 1, 20 * chunk + 21):
            points.append(a_step(step, 1000.0 - step))
        points.flush()
    end = EndFollower(run, evaluated=False)
    end.read()
    assert [point.step for point in end.recent.steps][::49] == [1951, 2000]
    end.read_curve()
    curve = [loss for loss in end.losses(40) if loss is not None]
    assert 20 < len(curve) <= 40
    assert curve[0] == 999.0
    assert np.abs(np.diff(curve)).max() < 200, "evenly spaced"
    write_points(run, *(a_step(step, -5000.0) for step in range(2001, 3001)))
    end.read()
    assert end.losses(40)[-1] == -5000.0
    assert end.recent.steps[-1].step == 3000


def test_a_restart_discards_its_part_of_the_shape(directory_store: Store) -> None:
    run = new_run(directory_store, recipe_job())
    write_points(run, a_start(1), *(a_step(step, 1.0) for step in range(1, 31)))
    end = EndFollower(run, evaluated=False)
    end.read()
    end.read_curve()
    write_points(run, a_start(2, 10), *(a_step(step, 2.0, 2) for step in range(11, 16)), generation=2)
    end.read()
    assert end.losses(40) == [1.0] * 10 + [2.0] * 5


def test_a_curve_stays_small_however_long_it_grows() -> None:
    curve = LossCurve("train")
    for step in range(1, 20_001):
        curve.add(a_step(step, math.inf if step == 7 else float(step)))
        if step % 1000 == 0:
            assert len(curve.losses(40)) <= 40
    assert curve._table.rows <= 400
    assert (curve.losses(40)[0], curve.losses(40)[-1]) == (1.0, 20_000.0)
