"""Threads: those that compute side by side, one core each, and on which cores those of a worker run.

In torch's own threads, small operations wait for each other. On a machine with several NUMA nodes, memory and GPUs of
another node are slower to reach.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from packtrain.process import say
from packtrain.system import usable_cores

Input = TypeVar("Input")
Output = TypeVar("Output")


def has_torch() -> bool:
    """True if torch is loaded, not only installed: importing it at home would take longer than it saves."""
    return sys.modules.get("torch") is not None


def num_threads() -> int:
    """Return how many cores this worker may use: the launcher divides those of a machine among its workers."""
    launcher_cores = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, int(launcher_cores)) if launcher_cores.isdecimal() else usable_cores()


def single_threaded_pool(threads: int) -> ThreadPoolExecutor:
    """Return a pool in whose threads torch starts no others; outside of it torch keeps its number of threads."""
    if not has_torch():
        return ThreadPoolExecutor(threads, "packtrain")
    import torch

    started = threading.Barrier(threads + 1)

    def start() -> None:
        torch.get_num_threads()  # first: the first call in a thread adopts the number of the process
        torch.set_num_threads(1)
        started.wait()

    elsewhere = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, "packtrain")
    for _ in range(threads):
        pool.submit(start)
    started.wait()
    torch.set_num_threads(elsewhere)  # setting it in a thread has also set it for new threads
    return pool


def in_threads(make: Callable[[Input], Output], inputs: Sequence[Input], threads: int) -> Iterator[Output]:
    """Yield what `make` returns for each input, in their order; the last ones, often the longest, are begun first."""
    threads = min(threads, len(inputs))
    if threads < 2:
        yield from map(make, inputs)
        return
    pool = single_threaded_pool(threads)
    try:
        begun = [pool.submit(make, argument) for argument in reversed(inputs)]
        while begun:
            yield begun.pop().result()
    finally:
        pool.shutdown(cancel_futures=True)


# NUMA nodes.


def numa_nodes(nodes: Path = Path("/sys/devices/system/node")) -> dict[int, frozenset[int]]:
    """Return the cores of every NUMA node; none where the system does not say."""
    cores_of_nodes = {}
    with suppress(OSError, ValueError):
        for place in nodes.glob("node[0-9]*/cpulist"):
            # A list of the kernel's, such as `0-3,8-11`.
            spans = [span.split("-") for span in place.read_text("utf-8").strip().split(",") if span]
            cores = frozenset(core for span in spans for core in range(int(span[0]), int(span[-1]) + 1))
            cores_of_nodes[int(place.parent.name.removeprefix("node"))] = cores
    return dict(sorted(cores_of_nodes.items()))


def node_of_gpu(address: str, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Return the NUMA node that a GPU is attached to; None if the system does not say."""
    try:
        node = int((devices / address / "numa_node").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def spread(workers: int, nodes: Sequence[int]) -> list[int | None]:
    """Return a NUMA node for each worker of a machine without GPUs; None if some nodes would be left idle."""
    if not 0 < len(nodes) <= workers:
        return [None] * workers
    return [nodes[rank * len(nodes) // workers] for rank in range(workers)]


def cores_nearby(
    nodes: Mapping[int, frozenset[int]], places: Sequence[int | None], rank: int, threads: int
) -> frozenset[int] | None:
    """Return the cores that a worker should keep to, given the NUMA node of each worker of its machine.

    None if there is no choice, or if that node has too few cores for the threads of all workers there.
    """
    cores = nodes.get(-1 if (place := places[rank]) is None else place, frozenset())
    return cores if len(nodes) > 1 and len(cores) >= threads * places.count(place) else None


def stay_nearby(gpus: Sequence[str], rank: int, workers: int) -> None:
    """Keep this worker near its GPU, or else to a part of the machine; `gpus` are PCI addresses, one for each worker.

    Threads that are started from now on, such as the loader's, inherit it; with them the memory that they touch first.
    """
    allowed = os.sched_getaffinity(0)
    nodes = {node: cores & allowed for node, cores in numa_nodes().items() if cores & allowed}
    places = [node_of_gpu(address) for address in gpus] if gpus else spread(workers, list(nodes))
    cores = cores_nearby(nodes, places, rank, num_threads())
    if cores is not None:
        with suppress(OSError):  # a container may forbid it: then the threads are slower, and nothing else
            os.sched_setaffinity(0, cores)
            say(f"threads: keeping to the {len(cores)} cores of NUMA node {places[rank]}")
