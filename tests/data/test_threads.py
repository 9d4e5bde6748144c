from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from packtrain.data import threads as module
from packtrain.data.threads import (
    cores_nearby,
    in_threads,
    node_of_gpu,
    numa_nodes,
    single_threaded_pool,
    spread,
    stay_nearby,
)


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


def made_tree(root: Path, cores: dict[int, str], gpus: dict[str, int]) -> tuple[Path, Path]:
    """Make what the kernel shows of the cores of NUMA nodes, and of the node of each GPU."""
    nodes, devices = root / "node", root / "devices"
    for node, text in cores.items():
        (nodes / f"node{node}").mkdir(parents=True)
        (nodes / f"node{node}" / "cpulist").write_text(f"{text}\n")
    (nodes / "possible").write_text("0-7\n")  # other files are there, too
    for address, node in gpus.items():
        (devices / address).mkdir(parents=True)
        (devices / address / "numa_node").write_text(f"{node}\n")
    return nodes, devices


def test_the_system_says_which_cores_and_gpus_belong_together(tmp_path: Path) -> None:
    cores = {10: "5", 0: "0-1,4", 1: "2-3", 2: ""}
    nodes, devices = made_tree(tmp_path, cores, {"0000:dc:00.0": 1, "0000:01:00.0": -1})
    assert numa_nodes(nodes) == {0: {0, 1, 4}, 1: {2, 3}, 2: set(), 10: {5}}
    assert list(numa_nodes(nodes)) == [0, 1, 2, 10]
    assert node_of_gpu("0000:dc:00.0", devices) == 1
    assert node_of_gpu("0000:01:00.0", devices) is None, "the system does not know"
    assert node_of_gpu("0000:02:00.0", devices) is None, "in a container that shows no devices"
    assert node_of_gpu("", devices) is None
    assert numa_nodes(tmp_path / "nothing") == {}


def test_workers_without_gpus_are_spread_over_all_nodes_or_not_at_all() -> None:
    assert spread(4, [0, 1]) == [0, 0, 1, 1]
    assert spread(3, [0, 2]) == [0, 0, 2]
    assert spread(1, [0, 1]) == [None], "one worker uses the whole machine"
    assert spread(2, []) == [None, None]


TWO_NODES = {0: frozenset({0, 1, 2, 3}), 1: frozenset({4, 5, 6, 7})}


@pytest.mark.parametrize(
    ("places", "rank", "threads", "found"),
    [
        ([0, 0, 1, 1], 2, 2, TWO_NODES[1]),
        ([0, 0, 0, 1], 0, 2, None),  # three workers of two threads on four cores would wait for each other
        ([0, 0, 0, 1], 3, 2, TWO_NODES[1]),
        ([None, 1], 0, 2, None),
        ([3], 0, 1, None),  # a node whose cores this process may not use
    ],
)
def test_a_worker_keeps_to_the_cores_of_its_node_if_they_are_enough(
    places: list[int | None], rank: int, threads: int, found: frozenset[int] | None
) -> None:
    assert cores_nearby(TWO_NODES, places, rank, threads) == found
    assert cores_nearby({1: TWO_NODES[1]}, places, rank, threads) is None, "there is no choice"


def test_threads_start_on_the_cores_near_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 3, 4, 5, 6})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: asked.append(set(cores)))
    monkeypatch.setattr(module, "numa_nodes", lambda: TWO_NODES)
    monkeypatch.setattr(module, "node_of_gpu", {"near 0": 0, "near 1": 1}.get)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    stay_nearby(["near 1", "near 0"], 0, 2)
    assert asked == [{4, 5, 6}], "those of the node that this process may use"
    stay_nearby([], 0, 2)
    assert asked[1:] == [{1, 2, 3}]
    stay_nearby(["unknown", "near 0"], 0, 2)

    def forbid(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", forbid)
    stay_nearby(["near 1", "near 0"], 0, 2)  # goes on as it is
    monkeypatch.setattr(module, "numa_nodes", dict)
    stay_nearby(["near 1", "near 0"], 0, 2)
    assert len(asked) == 2


def test_a_thread_inherits_the_cores_of_the_worker_that_starts_it() -> None:
    """The loader and its pool are started after the worker has chosen."""
    before = os.sched_getaffinity(0)
    few = {min(before)}
    os.sched_setaffinity(0, few)
    try:
        with single_threaded_pool(2) as pool:
            assert pool.submit(os.sched_getaffinity, 0).result() == few
    finally:
        os.sched_setaffinity(0, before)
