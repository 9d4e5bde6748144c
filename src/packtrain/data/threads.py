"""Threads that compute side by side, one core each: in torch's own threads, small operations wait for each other."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from packtrain.system import usable_cores

Given = TypeVar("Given")
Made = TypeVar("Made")


def has_torch() -> bool:
    """True if torch is loaded, not only installed: importing it at home would take longer than it saves."""
    return sys.modules.get("torch") is not None


def num_threads() -> int:
    """Return how many cores this worker may use: the launcher divides those of a machine among its workers."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, int(given)) if given.isdecimal() else usable_cores()


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


def in_threads(make: Callable[[Given], Made], inputs: Sequence[Given], threads: int) -> Iterator[Made]:
    """Yield what `make` returns for each input, in their order; the last ones, often the longest, are begun first."""
    threads = min(threads, len(inputs))
    if threads < 2:
        yield from map(make, inputs)
        return
    pool = single_threaded_pool(threads)
    try:
        begun = [pool.submit(make, one) for one in reversed(inputs)]
        while begun:
            yield begun.pop().result()
    finally:
        pool.shutdown(cancel_futures=True)
