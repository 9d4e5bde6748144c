from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import pytest

from packtrain.export.batching import Batched, Batcher, BatchTimes, QueueFull
from parts.service import wait_until


class Computer:
    """Doubles numbers when the gate is open, or gives up if nobody waits; records what it was given."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.calls: list[tuple[str, list[int]]] = []

    def __call__(self, key: str, inputs: Sequence[int], is_wanted: Callable[[], bool]) -> list[int]:
        self.calls.append((key, list(inputs)))
        wait_until(lambda: self.gate.is_set() or not is_wanted(), "it may go on")
        if not is_wanted():
            raise RuntimeError("nobody waits")
        if -1 in inputs:
            raise ValueError("bad input")
        return [2 * one for one in inputs]


@contextmanager
def batching(computer: Computer, batch: int = 8, queue: int = 100) -> Iterator[Batcher[str, int, int]]:
    batcher: Batcher[str, int, int] = Batcher(computer, batch, queue, gather_seconds=0.0, turn_seconds=3600.0)
    try:
        yield batcher
    finally:
        computer.gate.set()
        batcher.close()


def busy(batcher: Batcher[str, int, int], computer: Computer) -> Future[Batched[int]]:
    """Submit a first request and wait until it is being computed: what comes next has to queue."""
    first = batcher.submit("a", [0])
    wait_until(lambda: computer.calls, "the first request is computed")
    return first


def test_requests_that_came_meanwhile_are_computed_together_and_answered_in_order() -> None:
    computer = Computer()
    with batching(computer) as batcher:
        first = busy(batcher, computer)
        others = [batcher.submit("a", [number, 10 * number]) for number in range(1, 4)]
        computer.gate.set()
        assert first.result(30) == Batched([0], 1)
        assert [one.result(30) for one in others] == [Batched([2 * n, 20 * n], 6) for n in range(1, 4)]
        assert [len(inputs) for _, inputs in computer.calls] == [1, 6]


def test_only_requests_with_the_same_settings_share_a_batch_and_the_oldest_goes_first() -> None:
    computer = Computer()
    with batching(computer) as batcher:
        busy(batcher, computer)
        asked = [batcher.submit(key, [number]) for number, key in enumerate("bababc", 1)]
        computer.gate.set()
        assert [one.result(30).outputs for one in asked] == [[2], [4], [6], [8], [10], [12]]
        assert computer.calls[1:] == [("b", [1, 3, 5]), ("a", [2, 4]), ("c", [6])]


def test_a_batch_has_at_most_its_size_unless_one_input_is_larger() -> None:
    computer = Computer()
    with batching(computer, batch=4) as batcher:
        busy(batcher, computer)
        asked = [batcher.submit("a", [size], [size]) for size in (3, 2, 1, 6, 1)]
        computer.gate.set()
        assert [one.result(30).outputs for one in asked] == [[6], [4], [2], [12], [2]]
        assert [inputs for _, inputs in computer.calls[1:]] == [[3, 1], [2, 1], [6]]


def test_a_large_request_is_computed_in_parts_and_others_between_them() -> None:
    computer = Computer()
    with batching(computer, batch=4) as batcher:
        busy(batcher, computer)
        large = batcher.submit("a", list(range(1, 11)))
        same, different = batcher.submit("a", [100]), batcher.submit("b", [200])
        computer.gate.set()
        assert large.result(30) == Batched([2 * number for number in range(1, 11)], 3, batches=3)
        assert (same.result(30).outputs, different.result(30).outputs) == ([200], [400])
        inputs = [inputs for _, inputs in computer.calls[1:]]
        assert inputs == [[1, 2, 3, 100], [200], [4, 5, 6, 7], [8, 9, 10]]


def test_large_requests_share_every_batch() -> None:
    computer = Computer()
    with batching(computer, batch=4) as batcher:
        busy(batcher, computer)
        first, second = batcher.submit("a", [1, 2, 3, 4]), batcher.submit("a", [5, 6, 7], [2, 2, 2])
        computer.gate.set()
        assert [first.result(30).outputs, second.result(30).outputs] == [[2, 4, 6, 8], [10, 12, 14]]
        assert [inputs for _, inputs in computer.calls[1:]] == [[1, 2, 5], [6, 3, 4], [7]]


def test_keys_take_turns_however_many_requests_each_has() -> None:
    computer = Computer()
    with batching(computer, batch=2) as batcher:
        busy(batcher, computer)
        many = [batcher.submit("b", [number, number]) for number in (1, 2, 3)]
        one = batcher.submit("c", [4])
        computer.gate.set()
        assert [request.result(30).outputs for request in (*many, one)] == [[2, 2], [4, 4], [6, 6], [8]]
        assert [inputs for _, inputs in computer.calls[1:]] == [[1, 2], [4], [2, 3], [3, 1]]


def test_a_round_through_many_keys_takes_as_long_as_one_through_a_few() -> None:
    computer = Computer()
    with batching(computer) as batcher:
        batcher.learn_speed(1, seconds=1800.0)  # two inputs are a turn
        busy(batcher, computer)
        for key in "bcdefghi":
            batcher.submit(key, [1, 2])
        computer.gate.set()
        wait_until(lambda: len(computer.calls) > 2, "the first key has had its share")
        assert computer.calls[1] == ("b", [1]), "four turns for eight keys: half a turn for each"


def test_the_rest_of_a_request_that_nobody_waits_for_is_not_computed() -> None:
    computer = Computer()
    with batching(computer, batch=2) as batcher:
        large = batcher.submit("a", [1, 2, 3, 4, 5])
        wait_until(lambda: computer.calls, "its first part is computed")
        assert large.cancel()
        after = batcher.submit("a", [7])
        computer.gate.set()
        assert after.result(30).outputs == [14]
        assert [inputs for _, inputs in computer.calls] == [[1, 2], [7]]


def test_a_batch_that_nobody_waits_for_is_abandoned_as_a_whole() -> None:
    computer = Computer()
    with batching(computer) as batcher:
        first = busy(batcher, computer)
        both = [batcher.submit("a", [1]), batcher.submit("a", [2])]
        assert first.cancel()
        wait_until(lambda: len(computer.calls) == 2, "the first batch has ended, though the gate is closed")
        assert both[0].cancel()
        after = batcher.submit("b", [3])
        assert not after.done() and len(computer.calls) == 2, "somebody still waits for this batch"
        assert both[1].cancel()
        wait_until(lambda: len(computer.calls) == 3, "the second batch has ended without a try of its halves")
        computer.gate.set()
        assert after.result(30).outputs == [6]
        assert computer.calls == [("a", [0]), ("a", [1, 2]), ("b", [3])]


def test_a_bad_input_ends_its_own_request_and_the_rest_of_it_is_not_computed() -> None:
    computer = Computer()
    with batching(computer, batch=2) as batcher:
        busy(batcher, computer)
        bad, good = batcher.submit("a", [1, -1, 3]), batcher.submit("a", [5, 6, 7])
        computer.gate.set()
        assert good.result(30).outputs == [10, 12, 14]
        with pytest.raises(ValueError, match="bad input"):
            bad.result(30)
        assert not any(3 in inputs for _, inputs in computer.calls)


def test_slow_inputs_make_smaller_batches() -> None:
    computer = Computer()
    computer.gate.set()
    batcher: Batcher[str, int, int] = Batcher(computer, 8, 100, gather_seconds=0.0, turn_seconds=0.0)
    assert batcher.submit("a", [1]).result(30).outputs == [2], "now it knows how long an input takes"
    assert batcher.submit("a", [1, 2, 3]).result(30) == Batched([2, 4, 6], 1, batches=3)
    batcher.close()


def test_a_slow_batch_makes_the_next_one_smaller_and_fast_ones_make_it_larger_again() -> None:
    computer = Computer()
    computer.gate.set()
    batcher: Batcher[str, int, int] = Batcher(computer, 8, 100, gather_seconds=0.0, turn_seconds=10.0)

    def batches() -> int:
        return batcher.submit("a", [1] * 8).result(30).batches

    batcher.learn_speed(8, 8.0)
    assert batches() == 1, "8 inputs take 8 seconds, less than their turn"
    batcher.learn_speed(2, 20.0)
    assert batches() >= 4, "an input takes 10 seconds"
    for _ in range(20):
        batcher.learn_speed(8, 0.1)
    assert batches() == 1
    batcher.close()


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    computer = Computer()
    with batching(computer, queue=3) as batcher:
        busy(batcher, computer)
        batcher.submit("a", [1, 2])
        with pytest.raises(QueueFull, match="try again in 1 s"):
            batcher.submit("a", [3, 4])
        assert batcher.submit("a", [3]), "the rest of the queue is still free"
        assert batcher.num_waiting == 3


def test_the_queue_counts_the_sizes_of_inputs() -> None:
    computer = Computer()
    with batching(computer, queue=10) as batcher:
        busy(batcher, computer)
        batcher.submit("a", [1], [8])
        with pytest.raises(QueueFull):
            batcher.submit("a", [2], [3])
        batcher.submit("a", [2], [2])
        assert batcher.num_waiting == 10


def test_requests_whose_client_left_make_room_and_are_not_computed() -> None:
    computer = Computer()
    with batching(computer, queue=2) as batcher:
        busy(batcher, computer)
        left = batcher.submit("a", [1, 2])
        assert left.cancel()
        stayed = batcher.submit("a", [3])
        computer.gate.set()
        assert stayed.result(30).outputs == [6]
        assert computer.calls == [("a", [0]), ("a", [3])]


def test_a_bad_input_fails_its_own_request_alone() -> None:
    computer = Computer()
    with batching(computer, batch=32) as batcher:
        busy(batcher, computer)
        asked = [batcher.submit("a", [-1 if number == 5 else number]) for number in range(16)]
        computer.gate.set()
        for number, one in enumerate(asked):
            if number == 5:
                with pytest.raises(ValueError, match="bad input"):
                    one.result(30)
            else:
                assert one.result(30).outputs == [2 * number]
        assert len(computer.calls) < 12, "halves, not one by one"


def test_an_idle_batcher_waits_for_company_until_the_gathering_time_is_over() -> None:
    computer = Computer()
    computer.gate.set()
    seen: list[BatchTimes] = []
    batcher: Batcher[str, int, int] = Batcher(computer, 2, 10, 3600.0, 3600.0, on_batch=seen.append)
    asked = [batcher.submit("a", [number]) for number in (1, 2)]  # together they fill the batch: nobody waits an hour
    assert [one.result(30).batch_size for one in asked] == [2, 2]
    assert [(one.inputs, one.requests) for one in seen] == [(2, 2)]
    batcher.close()


def test_closing_cancels_what_waits() -> None:
    computer = Computer()
    with batching(computer) as batcher:
        first = busy(batcher, computer)
        waiting = batcher.submit("a", [1])
        batcher.close()
        assert waiting.cancelled()
        computer.gate.set()
        assert first.result(30).outputs == [0], "the batch that was being computed is finished"


def test_a_batch_that_never_ends_is_noticed() -> None:
    computer = Computer()
    with batching(computer) as batcher:
        assert batcher.is_working(0.0), "an idle thread is fine"
        busy(batcher, computer)
        assert batcher.is_working(3600.0)
        assert not batcher.is_working(0.0)
