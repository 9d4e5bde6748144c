"""Who does the work of packing: processes on this machine, or the workers of a Dask cluster."""

from __future__ import annotations

import multiprocessing
import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from packtrain.errors import Mistake
from packtrain.job.job import Data, Source
from packtrain.pack.manifest import PackFile
from packtrain.pack.shard import Gathered
from packtrain.store import Store

Task = TypeVar("Task")
Result = TypeVar("Result")


class Workers(ABC):
    @abstractmethod
    def do(self, work: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """The results as they come. Only a few tasks are taken ahead, so that memory stays bounded."""


class HereAlone(Workers):
    """In this process, one after the other."""

    def do(self, work: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        return map(work, tasks)


class Processes(Workers):
    """On this machine's cores. Processes are started anew: a forked one could not use the store."""

    def __init__(self, count: int | None = None) -> None:
        self._count = count or os.cpu_count() or 1

    def do(self, work: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(self._count, mp_context=context)
        try:
            pending: set[Future[Result]] = set()
            for task in tasks:
                pending.add(pool.submit(work, task))
                if len(pending) > 2 * self._count:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            yield from (future.result() for future in pending)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


class Dask(Workers):
    """On an existing cluster. Its workers must see the raw data and the store under the same names."""

    def __init__(self, address: str) -> None:
        try:
            from distributed import Client
        except ImportError:
            raise Mistake("--dask needs the extra: pip install 'packtrain[dask]'") from None
        try:
            self._client: Any = Client(address, timeout=10)  # type: ignore[no-untyped-call]
        except (OSError, TimeoutError, ValueError) as error:
            raise Mistake(f"--dask {address}: no scheduler answers there ({error})") from None

    def do(self, work: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        from distributed import as_completed

        # Names of tasks are unique per call: the same shard made again must not come from the cluster's memory.
        running: Any = as_completed()  # type: ignore[no-untyped-call]
        ahead = 2 * max(1, sum(self._client.nthreads().values()))
        for task in tasks:
            running.add(self._client.submit(work, task, pure=False))
            if running.count() > ahead:
                yield next(running).result()
        for future in running:
            yield future.result()

    def close(self) -> None:
        self._client.close()


# What all packers work with, and what they come to.


Sources = tuple[Source, ...]


@dataclass(frozen=True)
class Packing:
    """What is packed, where to and by whom. `name` is that of the pack's folder."""

    name: str
    data: Data
    store: Store
    workers: Workers
    progress: Progress


@dataclass
class Contents:
    """Splits in the making. `fingerprints` are hashes of raw samples, to find one that is in two splits."""

    gathered: dict[str, Gathered]
    classes: tuple[str, ...] = ()
    vocabulary: PackFile | None = None
    target_vocabulary: PackFile | None = None
    fingerprints: dict[str, array[int]] = field(default_factory=dict)


def splits_of(data: Data) -> dict[str, Sources]:
    named = {"train": data.train, "valid": data.valid, "test": data.test}
    return {split: sources for split, sources in named.items() if sources}


def empty_contents(data: Data) -> Contents:
    splits = splits_of(data)
    return Contents(
        {split: Gathered(len(sources)) for split, sources in splits.items()},
        fingerprints={split: array("Q") for split in splits},
    )


# What packing tells while it goes on.


Advance = Callable[[int], None]


class Progress(Protocol):
    def say(self, text: str) -> None:
        """A line that stays."""

    def track(self, what: str, total: int | None) -> AbstractContextManager[Advance]:
        """A bar of that many samples; None where nobody knows."""


class Plain:
    """Lines alone, for scripts."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def say(self, text: str) -> None:
        self._tell(text)

    @contextmanager
    def track(self, what: str, total: int | None) -> Iterator[Advance]:  # noqa: ARG002
        yield lambda _: None
