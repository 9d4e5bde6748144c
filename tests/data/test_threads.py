from __future__ import annotations

import threading

import pytest
import torch

from packtrain.data.threads import in_threads, single_threaded_pool


def test_torch_keeps_its_threads_outside_of_the_pool() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with single_threaded_pool(2) as pool:
            assert {pool.submit(torch.get_num_threads).result() for _ in range(8)} == {1}
            assert torch.get_num_threads() == 2
            later: list[int] = []
            thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
            thread.start()
            thread.join()
            assert later == [2]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_results_come_in_the_order_of_the_inputs(threads: int) -> None:
    assert list(in_threads(lambda number: number * number, range(20), threads)) == [one * one for one in range(20)]
    assert list(in_threads(str, [], threads)) == []


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_is_raised_where_its_input_would_come(threads: int) -> None:
    found = in_threads(lambda number: 6 // number, [3, 2, 0, 1], threads)
    assert [next(found), next(found)] == [2, 3]
    with pytest.raises(ZeroDivisionError):
        next(found)
