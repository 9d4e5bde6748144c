"""Points are read as they were written, whether as blocks of numbers or as lines of their own."""

from __future__ import annotations

import json
import math
from base64 import b64encode
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtrain.run.points import PointWriter, decode_points
from packtrain.run.records import Point, Sample
from packtrain.run.run import worker_writer
from packtrain.store import Store, StoreError
from packtrain.store.records import MAX_MEASUREMENT, DamagedRecord
from parts.dashboard import a_start, a_step, an_evaluation
from parts.faulty import FaultyStore
from parts.runs import new_run, recipe_job

STEPS = [a_step(step, 1 / step) for step in range(1, 11)]
BLOCK = {"rows": 2, "kind": "valid", "generation": 1, "names": ["loss", "x_seconds"]}
ROWS = [[1, 1e9, 0.5, 2.0], [2, 1e9, math.nan, 2.0]]


class Kept:
    """As much of a store as a writer needs."""

    def __init__(self) -> None:
        self.data = b""

    def put(self, _: str, data: bytes) -> None:
        self.data += data


def written(*points: Point) -> bytes:
    kept: Any = Kept()
    writer = PointWriter(kept, "stream", "w")
    for point in points:
        writer.append(point)
    writer.flush()
    return bytes(kept.data)


def block(rows: Any = ROWS, **fields: Any) -> bytes:
    numbers = b64encode(np.array(rows, "<f8").tobytes()).decode()
    return json.dumps({**BLOCK, "numbers": numbers, **fields}).encode() + b"\n"


def test_steps_in_a_row_are_one_line() -> None:
    data = written(*STEPS)
    assert data.count(b"\n") == 1 and data.startswith(b'{"rows": 10, "kind": "train", "generation": 1')
    assert decode_points(data, "metrics") == STEPS


def test_points_that_differ_in_more_than_numbers_are_not_mixed() -> None:
    sampled = an_evaluation(10, samples=[Sample("in", "reference", "prediction")], bleu=1.5)
    points = [
        a_start(1), *STEPS, sampled, sampled, a_start(2, 4), a_start(2, 4), a_step(5, generation=2),
        a_step(6, generation=2, more=1.0), a_step(7, generation=2, more=2.0), replace(STEPS[0], step=2**60),
        replace(STEPS[0], step=2**60 + 1),
    ]  # fmt: skip
    data = written(*points)
    assert decode_points(data, "metrics") == points
    assert data.count(b'{"rows"') == 2


def test_a_long_row_of_steps_becomes_several_blocks() -> None:
    points = [a_step(step) for step in range(1, 4500)]
    data = written(*points)
    assert data.count(b"\n") == 3
    assert decode_points(data, "metrics") == points


names = st.lists(st.sampled_from(["loss", "bleu", "a name, \u2028 and more"]), unique=True)
counts = st.integers(0, 2**63 - 1)


@given(
    st.lists(st.tuples(st.sampled_from(["valid", "test"]), st.integers(1, 2), counts, names, st.floats()), max_size=8)
)
def test_any_points_are_read_as_they_were_written_and_huge_ones_as_infinite(
    drawn: list[tuple[Any, int, int, list[str], float]],
) -> None:
    points = [Point(kind, number, step, 1e9, dict.fromkeys(used, value)) for kind, number, step, used, value in drawn]
    found = decode_points(written(*points), "metrics")
    huge = {value: math.copysign(math.inf, value) for *_, value in drawn if abs(value) > MAX_MEASUREMENT}
    read = [replace(one, values={name: huge.get(value, value) for name, value in one.values.items()}) for one in points]
    assert repr(found) == repr(read), "NaN is not equal to itself, but looks the same"


def test_a_measurement_that_is_not_a_number_is_refused_where_it_is_recorded() -> None:
    with pytest.raises(TypeError):
        written(a_step(1, loss="high"))  # type: ignore[arg-type]


def test_points_wait_for_a_store_that_is_away(directory_store: Store) -> None:
    store = FaultyStore(directory_store)
    run = new_run(store, recipe_job())
    writer = run.point_writer(worker_writer(1, 0))
    reachable, store.fault = store.fault, lambda *_: StoreError("away", temporary=True)
    for point in STEPS:
        writer.append(point)
        with pytest.raises(StoreError):
            writer.flush()
    store.fault = reachable
    writer.flush()
    assert run.points().read() == STEPS


def test_a_whole_block_is_accepted() -> None:
    found = decode_points(block(), "metrics")
    assert [(point.step, point.values["x_seconds"]) for point in found] == [(1, 2.0), (2, 2.0)]


@pytest.mark.parametrize(
    "data",
    [
        block(rows=3),
        block(rows=0),
        block(rows=2**62),
        block([[1, 1e9, 0.5], [2, 1e9, 0.5]]),
        block([[1.5, 1e9, 0.5, 2.0], ROWS[1]]),
        block([[-1, 1e9, 0.5, 2.0], ROWS[1]]),
        block([[math.nan, 1e9, 0.5, 2.0], ROWS[1]]),
        block([[2.0**70, 1e9, 0.5, 2.0], ROWS[1]]),
        block([[1, math.inf, 0.5, 2.0], ROWS[1]]),
        block([[1, 1e9, 0.5, math.nan], ROWS[1]]),
        block([[1, 1e9, 0.5, -1e300], ROWS[1]]),
        block(kind="train"),
        block(kind="start"),
        block(kind="other"),
        block(generation=-1),
        block(names=["loss", "loss"]),
        block(numbers="no numbers"),
        block(numbers="AAAA"),
        block(numbers=5),
        block(more=1)[:-9],
    ],
)
def test_a_block_that_no_writer_writes_is_refused(data: bytes) -> None:
    with pytest.raises(DamagedRecord, match="metrics is damaged"):
        decode_points(data, "metrics")
