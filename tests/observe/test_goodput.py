from __future__ import annotations

import pytest

from packtrain.observe.goodput import goodput, lost_seconds
from packtrain.observe.spans import COMPUTING, LABELS, RECORDED
from packtrain.run.records import Cause, Generation, Member, Point, TimeSpent


def generation(number: int, cause: Cause = "start") -> Generation:
    return Generation(number, (Member("n0", "::1", 1),), 1, "", cause=cause)


def spent(time: float, generation: int = 1, rank: int = 0, step: int = 99, **seconds: float) -> TimeSpent:
    return TimeSpent(time, generation, rank, step, seconds)


def step(number: int, generation: int = 1, forward: float = 1.0) -> Point:
    return Point("train", generation, number, 0.0, {"forward_seconds": forward})


def began(at: int, generation: int, time: float = 0.0) -> Point:
    return Point("start", generation, at, time, {})


def test_a_run_without_records_has_no_goodput() -> None:
    times = goodput([], [], [])
    assert (times.seconds, times.useful, times.fraction, times.ranks) == (0.0, 0.0, None, ())


def test_parts_add_up_to_the_elapsed_time() -> None:
    records = [spent(110.0, start=4.0, forward=3.0, data=2.0, save=1.0), spent(120.0, forward=7.0, evaluation=3.0)]
    times = goodput([generation(1)], [began(0, 1), step(1), step(2)], records)
    assert times.seconds == pytest.approx(20.0)
    assert times.parts == {"start": 4.0, "forward": 10.0, "data": 2.0, "save": 1.0, "evaluation": 3.0}
    assert times.fraction == pytest.approx(0.5)


def test_steps_that_no_later_generation_continued_from_are_lost() -> None:
    points = [began(0, 1), step(1), step(2, forward=3.0), began(1, 2), step(2, 2)]
    assert lost_seconds(points) == {1: 3.0}
    records = [spent(10.0, forward=4.0, data=6.0), spent(20.0, generation=2, forward=1.0)]
    times = goodput([generation(1), generation(2, "program")], points, records)
    assert times.parts["lost steps"] == pytest.approx(3.0)
    assert times.useful == pytest.approx(2.0)


def test_no_more_time_is_lost_than_was_computed() -> None:
    times = goodput([generation(1)], [began(0, 1), step(5, forward=9.0), began(0, 2)], [spent(9.0, forward=4.0)])
    assert (times.useful, times.parts) == (0.0, {"lost steps": 4.0})


def test_steps_of_a_killed_worker_after_its_last_record_are_accounted_for_by_their_points() -> None:
    """One step per second: records at 10 s and 20 s, killed at 28 s, resumed from step 20 at 30 s, startup 1 s."""
    points = [began(0, 1), *map(step, range(1, 29)), began(20, 2), *(step(number, 2) for number in range(21, 31))]
    records = [spent(10.0, step=10, forward=10.0), spent(20.0, step=20, forward=10.0)]
    records.append(spent(41.0, generation=2, step=30, start=1.0, forward=10.0))
    times = goodput([generation(1), generation(2, "program")], points, records)
    assert times.useful == pytest.approx(30.0)
    assert times.parts == pytest.approx({"forward": 30.0, "lost steps": 8.0, "recovery": 2.0 + 1.0})
    assert times.seconds == pytest.approx(41.0)


def test_spans_of_steps_after_the_last_record_keep_their_names() -> None:
    late = Point("train", 1, 3, 0.0, {"forward_seconds": 1.0, "data_seconds": 2.0, "step_seconds": 3.0})
    times = goodput([generation(1)], [began(0, 1), step(1), step(2), late], [spent(12.0, step=2, forward=2.0)])
    assert times.parts == pytest.approx({"forward": 3.0, "data": 2.0})


def test_a_worker_killed_before_its_first_record_is_accounted_for() -> None:
    first = Point("train", 2, 21, 37.0, {"start_seconds": 4.0, "forward_seconds": 1.0})
    points = [*map(step, range(1, 21)), began(20, 2, 36.0), first, step(22, 2), began(22, 3), step(23, 3)]
    records = [spent(20.0, step=20, forward=20.0), spent(42.0, generation=3, step=23, start=3.0, forward=1.0)]
    times = goodput([generation(1), generation(2, "machine"), generation(3, "program")], points, records)
    assert times.useful == pytest.approx(23.0)
    assert times.parts == pytest.approx({"forward": 23.0, "recovery": 12.0 + 4.0 + 0.0 + 3.0})
    assert times.seconds == pytest.approx(42.0)


def test_time_from_a_failure_to_the_next_step_is_recovery() -> None:
    records = [spent(100.0, start=2.0, forward=8.0), spent(120.0, generation=2, start=5.0, forward=5.0)]
    times = goodput([generation(1), generation(2, "machine")], [], records)
    assert times.parts["recovery"] == pytest.approx(10.0 + 5.0)
    assert times.parts["start"] == pytest.approx(2.0)


def test_time_in_which_a_run_was_stopped_does_not_count() -> None:
    records = [spent(100.0, forward=10.0), spent(5000.0, generation=2, start=1.0, forward=9.0)]
    times = goodput([generation(1), generation(2, "resumed")], [], records)
    assert times.seconds == pytest.approx(20.0)
    assert times.parts["start"] == pytest.approx(1.0)


def test_clocks_that_disagree_do_not_subtract_time() -> None:
    records = [spent(9000.0, forward=10.0), spent(100.0, generation=2, forward=10.0)]
    times = goodput([generation(1), generation(2, "machine")], [], records)
    assert times.seconds == pytest.approx(20.0)


def test_each_rank_has_its_own_times() -> None:
    records = [spent(1.0, forward=1.0), spent(1.0, rank=1, wait=2.0), spent(2.0, rank=1, wait=1.0)]
    assert [(one.rank, one.seconds) for one in goodput([], [], records).ranks] == [
        (0, {"forward": 1.0}),
        (1, {"wait": 3.0}),
    ]


def test_every_span_of_a_worker_has_a_label() -> None:
    assert set(RECORDED) <= set(LABELS)
    assert set(COMPUTING) <= set(RECORDED)


def test_what_workers_do_not_account_for_is_startup() -> None:
    times = goodput([generation(1)], [], [spent(10.0, start=1.0, forward=9.0)])
    longer = times.within(12.0)
    assert (longer.seconds, longer.parts["start"], longer.useful) == (12.0, 3.0, 9.0)
    assert times.within(9.0) is times
    assert goodput([], [], []).within(9.0).fraction is None
