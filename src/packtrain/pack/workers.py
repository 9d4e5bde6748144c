"""Workers that pack: this process, processes on this machine, or a Dask cluster."""

from __future__ import annotations

import multiprocessing
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from packtrain.errors import Mistake, PacktrainError
from packtrain.identity import install_command
from packtrain.system import check_shared_memory, usable_cores

Task = TypeVar("Task")
Result = TypeVar("Result")


class Workers(ABC):
    @abstractmethod
    def do(self, work: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Yield results as they arrive, in any order. Only a few tasks are taken ahead, to bound memory."""


class InProcess(Workers):
    """Runs tasks in this process, one after the other."""

    def do(self, work: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        return map(work, tasks)


class Processes(Workers):
    """Runs tasks on the cores of this machine."""

    def __init__(self, count: int | None = None) -> None:
        self._count = count or usable_cores()

    def do(self, work: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        check_shared_memory()
        # Spawned, not forked: the threads of the store's client do not survive a fork.
        context = multiprocessing.get_context("spawn")
        with _safe_path():
            pool = ProcessPoolExecutor(self._count, mp_context=context)
        try:
            pending: set[Future[Result]] = set()
            for task in tasks:
                with _safe_path():
                    pending.add(pool.submit(work, task))
                if len(pending) > 2 * self._count:
                    finished, pending = wait(pending, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in finished)
            yield from (future.result() for future in pending)
        except BrokenProcessPool:
            raise PacktrainError(
                "a process that packs was killed, perhaps for lack of memory; pack again with fewer --processes:"
                " finished shards are kept"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _safe_path() -> Iterator[None]:
    """Keep processes that start meanwhile from importing from the current directory, as `python -P` does.

    multiprocessing takes no options for Python. Afterwards the variable is gone: a program that this process starts
    later may count on its own directory.
    """
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


class Dask(Workers):
    """Runs tasks on an existing cluster, whose workers must see the raw data and the store under the same names."""

    def __init__(self, address: str) -> None:
        try:
            from distributed import Client
        except ImportError:
            raise Mistake(f"--dask: not installed; run `{install_command('dask')}`") from None
        try:
            self._client: Any = Client(address, timeout=10)
        except (OSError, TimeoutError, ValueError) as error:
            raise Mistake(f"--dask {address}: no scheduler answers at this address ({error})") from None

    def do(self, work: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        from distributed import as_completed

        running: Any = as_completed()
        ahead = 2 * max(1, sum(self._client.nthreads().values()))
        for task in tasks:
            # pure=False names each call uniquely; otherwise the cluster would answer a repeated task from memory.
            running.add(self._client.submit(work, task, pure=False))
            if running.count() > ahead:
                yield next(running).result()
        for future in running:
            yield future.result()

    def close(self) -> None:
        self._client.close()
