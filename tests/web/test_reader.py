"""What the dashboard knows of a run is what the records say, however they arrive."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.report.goodput import goodput
from packtrain.run.records import Event, LogLine, Point, Telemetry, TelemetrySample, TimeSpent
from packtrain.run.run import Run, worker_writer
from packtrain.store import Store
from packtrain.web.logs import LogPlace, LogQuery, lines_after, lines_before
from packtrain.web.reader import TELEMETRY, Readers, RunReader
from parts.dashboard import a_start, a_step, an_evaluation, trained_run, write_points
from parts.faulty import FaultyStore
from parts.runs import a_generation, new_run, recipe_job


def read(run: Run) -> RunReader:
    reader = RunReader(run)
    reader.refresh(60)
    return reader


def losses(reader: RunReader, kind: str = "train") -> dict[int, float]:
    table = reader.tables[kind]
    return dict(zip(table.all("step").astype(int).tolist(), table.all("loss").tolist(), strict=True))


def expected(run: Run, kind: str = "train") -> dict[int, float]:
    return {point.step: float(np.float32(point.values["loss"])) for point in run.metrics() if point.kind == kind}


def test_the_numbers_of_a_program_are_columns_of_their_own_names(directory_store: Store) -> None:
    run = new_run(directory_store)
    points = [Point("log", 1, step, 1e9 + step, {"loss": 1 / step, "time": 5.0}) for step in range(1, 5)]
    writer = write_points(run, a_start(1), *points, Point("log", 1, 6, 1e9 + 6, {"val/loss": 0.5}))
    reader = read(run)
    assert reader.names() == ["log.loss", "log.val/loss"]
    assert losses(reader, "log")[4] == 0.25
    # More numbers of a step that was told before.
    writer.append(Point("log", 1, 4, 1e9 + 7, {"loss": 0.25, "val/loss": 0.75}))
    writer.flush()
    reader.refresh(60)
    assert reader.tables["log"].all("step").tolist() == [1, 2, 3, 4, 6]
    assert reader.tables["log"].all("val/loss")[3:].tolist() == [0.75, 0.5]
    write_points(run, a_start(2, 2), Point("log", 2, 3, 1e9 + 9, {"loss": 9.0}), generation=2)
    reader.refresh(60)
    assert losses(reader, "log") == {1: 1.0, 2: 0.5, 3: 9.0}


def test_columns_have_what_the_records_have(any_store: Store) -> None:
    run = trained_run(any_store)
    reader = read(run)
    assert losses(reader) == expected(run)
    assert reader.tables["valid"].all("bleu").tolist() == [12.5]
    assert reader.complete and reader.problem is None
    assert {"train.loss", "train.throughput", "valid.bleu"} <= set(reader.names())
    assert reader.samples(None) == [10]


def test_nothing_is_read_twice(any_store: Store) -> None:
    run = new_run(any_store, recipe_job())
    writer = write_points(run, a_start(1), a_step(1))
    counting = FaultyStore(any_store)
    reader = RunReader(Run(counting, run.name))
    reader.refresh(60)
    for step in range(2, 5):
        writer.append(a_step(step))
        writer.flush()
        counting.operations.clear()
        reader.refresh(60)
        assert losses(reader) == expected(run)
        chunks = [key for name, key in counting.operations if name == "find" and "metrics" in key]
        assert len(chunks) <= 2, "the new chunk, and that there is no other"


def test_a_restart_discards_what_it_does_not_continue(directory_store: Store) -> None:
    run = new_run(directory_store, recipe_job())
    write_points(run, a_start(1), *(a_step(step, 1.0) for step in range(1, 9)), an_evaluation(8, loss=1.0))
    reader = read(run)
    edition = reader.edition
    write_points(run, a_start(2, 5), a_step(6, 2.0, 2), a_step(7, 2.0, 2), generation=2)
    reader.refresh(60)
    assert reader.edition != edition
    assert losses(reader) == expected(run) == {**dict.fromkeys(range(1, 6), 1.0), 6: 2.0, 7: 2.0}
    assert losses(reader, "valid") == {}


def test_points_of_an_old_generation_that_arrive_late_find_their_place(directory_store: Store) -> None:
    run = new_run(directory_store, recipe_job())
    old = write_points(run, a_start(1), a_step(1))
    write_points(run, a_start(2, 3), a_step(4, 2.0, 2), generation=2)
    reader = read(run)
    for step in (2, 3, 4, 5):
        old.append(a_step(step))
    old.flush()
    reader.refresh(60)
    assert losses(reader) == expected(run) == {1: 1.0, 2: 1.0, 3: 1.0, 4: 2.0}


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_any_history_reads_as_the_records_say(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    from packtrain.store import open_store

    run = new_run(open_store(str(tmp_path_factory.mktemp("store")), create=True), recipe_job())
    reader = RunReader(run)
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
                reader.refresh(60)
        writer.flush()
    reader.refresh(60)
    for kind in ("train", "valid"):
        assert losses(reader, kind) == expected(run, kind)


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
    mine = read(run).goodput(generations)
    theirs = goodput(generations, run.points().read(), run.time_spent().read())
    assert mine.parts == pytest.approx(theirs.parts)
    assert [rank.seconds for rank in mine.ranks] == [rank.seconds for rank in theirs.ranks]


def test_one_damaged_chunk_does_not_hide_the_others(directory_store: Store) -> None:
    run = trained_run(directory_store)
    directory_store.put(run.key("metrics/000001-rank-0/00000001.jsonl"), b'{"kind": "train", "step": "x"}\n')
    directory_store.put(run.key("metrics/000001-rank-0/00000002.jsonl"), encoded(a_step(21, 0.5)))
    reader = read(run)
    assert losses(reader)[21] == 0.5
    assert "00000001.jsonl" in str(reader.problem) and "damaged" in str(reader.problem)


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
    reader = read(run)
    assert "damaged" in str(reader.problem)
    assert losses(reader) == {step: np.float32(10 / step) for step in range(1, 21)}


def test_machines_have_columns_of_what_they_used(directory_store: Store) -> None:
    run = new_run(directory_store)
    writer = run.telemetry_writer("a")
    for second in range(5):
        writer.append(TelemetrySample(1e9 + second, "a", Telemetry(cpu_fraction=second / 10)))
    writer.flush()
    reader = read(run)
    assert reader.machines["a"].means[:, TELEMETRY.index("cpu")].tolist() == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    assert np.isnan(reader.machines["a"].means[:, TELEMETRY.index("gpu")]).all()


def test_thousands_of_machines_take_little_memory(directory_store: Store) -> None:
    run = new_run(directory_store)
    writer = run.telemetry_writer("a")
    for number in range(2000):
        writer.append(TelemetrySample(1e9, f"node-{number}", Telemetry(cpu_fraction=0.5)))
    writer.flush()
    reader = RunReader(run)
    tracemalloc.start()
    reader.refresh(60)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(reader.machines) == 2000
    assert size < 2000 * 4000


def test_events_are_in_the_order_of_time(directory_store: Store) -> None:
    run = new_run(directory_store)
    for name, times in (("a", (3, 5)), ("b", (1, 4))):
        writer = run.event_writer(name)
        for time in times:
            writer.append(Event(float(time), "warning", f"{name}{time}"))
        writer.flush()
    assert [event.text for event in read(run).events] == ["b1", "a3", "b4", "a5"]


def test_a_long_history_is_read_in_parts(directory_store: Store) -> None:
    run = new_run(directory_store, recipe_job())
    writer = write_points(run, a_start(1))
    for step in range(1, 6):
        writer.append(a_step(step))
        writer.flush()
    reader = RunReader(run)
    seen = []
    while not reader.complete:
        reader.refresh(0.0, ("metrics",))
        seen.append(reader.tables["train"].rows)
    assert seen == sorted(seen) and seen[-1] == 5 and len(seen) > 2


def test_readers_that_were_not_used_for_long_are_forgotten(
    directory_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packtrain.web.reader.MAX_READERS", 2)
    runs = [new_run(directory_store) for _ in range(3)]
    readers = Readers()
    first = readers.of(runs[0])
    readers.of(runs[1])
    assert readers.of(runs[0]) is first
    readers.of(runs[2])
    assert readers.of(runs[0]) is first
    monkeypatch.setattr("packtrain.web.reader.MAX_BYTES", -1)
    readers.of(runs[1])
    assert readers.of(runs[0]) is not first


# Logs.


def logged(store: Store) -> tuple[Run, list[str]]:
    run = new_run(store)
    writer = run.log_writer("a")
    for number in range(10):
        stream = "err" if number % 5 == 0 else "out"
        writer.append(LogLine(1e9 + number, 1, "a", number % 2, stream, f"Line {number}"))  # type: ignore[arg-type]
        if number % 3 == 2:
            writer.flush()
    writer.flush()
    return run, read(run).refresh_logs()


def test_lines_are_paged_from_the_end_to_the_start_and_then_followed(any_store: Store) -> None:
    run, keys = logged(any_store)
    found, place = list[str](), None
    while True:
        lines, place, _ = lines_before(run, keys, place, LogQuery(), 4)
        found = [*(line.text for line in lines), *found]
        if place is None:
            break
    assert found == [f"Line {number}" for number in range(10)]
    assert lines_after(run, keys, LogPlace(len(keys), 0), LogQuery(), 4)[0] == []
    lines, after = lines_after(run, keys, LogPlace(1, 1), LogQuery(), 3)
    assert [line.text for line in lines] == ["Line 4", "Line 5", "Line 6"]
    assert [line.text for line in lines_after(run, keys, after, LogQuery(), 1)[0]] == ["Line 7"]


@pytest.mark.parametrize(
    ("query", "numbers"),
    [
        (LogQuery(search="line 7"), [7]),
        (LogQuery(rank=1), [1, 3, 5, 7, 9]),
        (LogQuery(stream="err"), [0, 5]),
        (LogQuery(node="b"), []),
        (LogQuery(rank=0, stream="err"), [0]),
    ],
)
def test_lines_are_searched(query: LogQuery, numbers: list[int], directory_store: Store) -> None:
    run, keys = logged(directory_store)
    assert [line.text for line in lines_before(run, keys, None, query, 100)[0]] == [f"Line {n}" for n in numbers]


def test_a_damaged_chunk_of_lines_is_a_line_that_says_so(directory_store: Store) -> None:
    run, keys = logged(directory_store)
    directory_store.put(keys[1], b"garbage\n")
    lines, _, _ = lines_before(run, keys, None, LogQuery(), 100)
    assert len(lines) == 8
    assert "damaged" in lines[3].text
