"""The history of a run is the same however its chunks arrive, and as a person would write it by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.observe.history import RECENT_STEPS, History, RecentPoints, read_points, read_recent, surviving
from packtrain.run.points import PointBlock
from packtrain.run.records import Point
from packtrain.store import Store, open_store
from packtrain.store.records import MAX_NUMBER
from parts.runs import MEASURED, new_run


def a_point(kind: str, generation: int, step: int, value: float = 0.0) -> Point:
    return Point(kind, generation, step, 0.0, {**MEASURED, "loss": value})  # type: ignore[arg-type]


def test_steps_that_were_lost_and_repeated_count_once() -> None:
    lost = [a_point("train", 1, step, value=1.0) for step in range(1, 8)]
    made_again = [a_point("start", 2, 4)] + [a_point("train", 2, step, value=2.0) for step in range(5, 10)]
    kept = [point for point in surviving(lost + made_again) if point.kind == "train"]
    assert [point.step for point in kept] == list(range(1, 10))
    assert [point.generation for point in kept] == [1] * 4 + [2] * 5


def test_a_repeated_measurement_at_the_same_step_replaces_the_first() -> None:
    points = [a_point("test", 1, 9, value=1.0), a_point("start", 2, 9), a_point("test", 2, 9, value=2.0)]
    assert [point.values["loss"] for point in surviving(points) if point.kind == "test"] == [2.0]


@st.composite
def histories(draw: st.DrawFn) -> list[list[Point]]:
    """Generations that each go on from some step that was reached, and end anywhere; some before their start."""
    attempts, reached = [], 0
    for generation in range(1, draw(st.integers(1, 6)) + 1):
        if draw(st.booleans()):
            start = draw(st.integers(0, reached))
            end = start + draw(st.integers(0, 6))
            steps = [a_point("train", generation, step) for step in range(start + 1, end + 1)]
            valid = [a_point("valid", generation, step) for step in range(start + 1, end + 1) if step % 2 == 0]
            attempts.append([a_point("start", generation, start), *steps, *valid])
            reached = end
    return attempts


def by_hand(attempts: list[list[Point]]) -> dict[tuple[str, int], Point]:
    """Strike out what lies after the start of each generation, then write on."""
    line: dict[tuple[str, int], Point] = {}
    for attempt in attempts:
        line = {place: point for place, point in line.items() if point.step <= attempt[0].step}
        line |= {(point.kind, point.step): point for point in attempt}
    return line


@settings(deadline=None)
@given(histories(), st.randoms(use_true_random=False))
def test_the_surviving_points_do_not_depend_on_the_order_of_reading(attempts, random) -> None:  # type: ignore[no-untyped-def]
    points = [point for attempt in attempts for point in attempt]
    random.shuffle(points)
    kept = surviving(points)
    assert [point.step for point in kept] == sorted(point.step for point in kept)
    assert len({(point.kind, point.step) for point in kept}) == len(kept)
    assert {(point.kind, point.step): point for point in kept} == by_hand(attempts)
    trained = [point.step for point in kept if point.kind == "train"]
    assert trained == list(range(1, len(trained) + 1))


def test_metrics_are_read_from_all_generations(any_store: Store) -> None:
    run = new_run(any_store)
    for generation, steps in ((1, (1, 2, 3)), (2, (3, 4))):
        writer = run.point_writer(f"{generation}-rank-0")
        writer.append(a_point("start", generation, steps[0] - 1))
        for step in steps:
            writer.append(a_point("train", generation, step))
        writer.flush()
    line = [(point.generation, point.step) for point in read_points(run) if point.kind == "train"]
    assert line == [(1, 1), (1, 2), (2, 3), (2, 4)]


@settings(deadline=None, max_examples=50)
@given(histories(), st.integers(1, 8), st.booleans())
def test_recent_points_are_the_end_of_the_surviving_points(attempts, steps, evaluated) -> None:  # type: ignore[no-untyped-def]
    with TemporaryDirectory() as place:
        run = new_run(open_store(place, create=True))
        for attempt in attempts:
            writer = run.point_writer(f"{attempt[0].generation:06d}-rank-0")
            for point in sorted(attempt, key=lambda point: point.step):
                writer.append(point)
                writer.flush()
        recent, line = read_recent(run, steps, evaluated), read_points(run)
    wanted = {"train": steps, "valid": int(evaluated)}
    for kind, count in wanted.items():
        found, whole = ([point for point in points if point.kind == kind] for points in (recent, line))
        assert found == whole[len(whole) - len(found) :]
        assert len(found) >= min(count, len(whole))


# Chunks that arrive in any order, split anywhere.

Part = PointBlock | Point


def parts_of(points: Sequence[Point]) -> list[Part]:
    """Return the lines of a chunk: points in a row of one kind are a block."""
    lines: list[Part] = []
    for kind, same in groupby(points, lambda point: point.kind):
        row = list(same)
        if kind == "start" or len(row) == 1:
            lines += row
            continue
        numbers = np.array([[point.step, point.time, *point.values.values()] for point in row], "<f8")
        lines.append(PointBlock(len(row), kind, row[0].generation, tuple(row[0].values), numbers.tobytes()))
    return lines


@st.composite
def chunks(draw: st.DrawFn, attempts: list[list[Point]]) -> list[list[Part]]:
    """Split what each generation wrote into chunks, and shuffle those of all generations."""
    split: list[list[Part]] = []
    for attempt in attempts:
        edges = sorted(draw(st.sets(st.integers(1, max(1, len(attempt) - 1)), max_size=4)))
        pieces = zip([0, *edges], [*edges, len(attempt)], strict=True)
        split += [parts_of(attempt[start:end]) for start, end in pieces if start < end]
    return draw(st.permutations(split))


def rows(history: History) -> dict[tuple[str, int], tuple[int, float]]:
    return {
        (kind, int(step)): (int(generation), float(loss))
        for kind, table in history.tables.items()
        for step, generation, loss in zip(*(table.all(name) for name in ("step", "generation", "loss")), strict=True)
    }


@settings(deadline=None)
@given(st.data())
def test_any_order_and_split_of_chunks_gives_the_same_history(data: st.DataObject) -> None:
    attempts = data.draw(histories())
    line = by_hand(attempts)
    history = History("tokens")
    for chunk in data.draw(chunks(attempts)):
        for part in chunk:
            history.add(part, "key", "source")
        if data.draw(st.booleans()):
            history.settle()
    history.settle()
    assert rows(history) == {
        place: (point.generation, point.values["loss"]) for place, point in line.items() if point.kind != "start"
    }
    for table in history.tables.values():
        assert (np.diff(table.all("step")) > 0).all()
    lost = [point for attempt in attempts for point in attempt if point.kind == "train" and point not in line.values()]
    places = zip(history.lost.all("generation").tolist(), history.lost.all("step").tolist(), strict=True)
    assert sorted(places) == sorted((point.generation, point.step) for point in lost)
    steps = [point for point in sorted(line.values(), key=lambda point: point.step) if point.kind == "train"]
    assert history.recent.steps == steps[-RECENT_STEPS:]


@given(histories(), st.randoms(use_true_random=False))
def test_points_may_be_given_in_parts(attempts: list[list[Point]], random) -> None:  # type: ignore[no-untyped-def]
    points = [point for attempt in attempts for point in attempt]
    random.shuffle(points)
    kept: list[Point] = []
    for point in points:
        kept = surviving([*kept, point])
    assert {(point.kind, point.step): point for point in kept} == by_hand(attempts)


def test_the_recent_points_of_a_long_run_are_its_last_steps_and_evaluations() -> None:
    recent = RecentPoints("train")
    for first in range(1, 1000, 100):
        recent.add(parts_of([a_point("train", 1, step) for step in range(first, first + 100)])[0], "source")
        recent.add(a_point("valid", 1, first + 99))
    assert [point.step for point in recent.steps] == list(range(1001 - RECENT_STEPS, 1001))
    assert [point.step for point in recent.points if point.kind == "valid"] == [800, 900, 1000]
    recent.add(a_point("start", 2, 990))
    assert [point.step for point in recent.steps][-1] == 990
    assert recent.latest_steps == []
    recent.add(a_point("train", 2, 991))
    assert [(point.generation, point.step) for point in recent.latest_steps] == [(2, 991)]


def test_a_million_steps_need_a_hundred_megabytes() -> None:
    """How long they take is measured by benchmarks/ui.py."""
    spans = ("data", "forward", "backward", "communication", "wait", "optimizer")
    measured = ("loss", "rate", "epoch", "elapsed_seconds", "step_seconds", "gradient_norm", "tokens")
    names = (*measured, *(f"{span}_seconds" for span in spans))
    history = History("tokens")
    for first in range(0, 1_000_000, 2000):
        numbers = np.ones((2000, 2 + len(names)))
        numbers[:, 0] = np.arange(first, first + 2000)
        history.add(PointBlock(2000, "train", 1, names, numbers.tobytes()), "key", "source")
    history.settle()
    assert history.tables["train"].rows == 1_000_000
    assert history.num_bytes < 100 << 20
    assert len(history.thinned("train.loss", 300)) <= 302


def test_a_step_that_no_float_holds_is_accounted_for() -> None:
    history = History("tokens")
    for step in (MAX_NUMBER - 1, MAX_NUMBER):
        history.add(a_point("train", 1, step), "key", "source")
    history.add(a_point("start", 2, 1), "key", "source")
    history.settle()
    assert [point.step for point in surviving(history.seconds_after({}))] == [1]
