"""The workers of a generation and what they send each other: collectives, the step sync, the data barrier.

Only tensors and bytes cross: torch's object collectives unpickle, and so execute, what they receive.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store, _broadcast_coalesced

from packtrain.train.control import CONTROL_VARIABLE

_TIMEOUT = timedelta(hours=1)  # must outlast an evaluation; the watchdog and the leases find a hang much sooner
_MESSAGE_BYTES = 250 * 2**20  # tensors of one dtype are joined into messages of this size
_WAITING = "waiting for data"

# For the measurement of links: less than half a second, unless they are slower than 10 Mbit/s.
_LINK_BYTES, _LINK_GROWTH, _LINK_SECONDS = 128 << 10, 8, 0.1
_MAX_LINK_BYTES, _MAX_LINK_BYTES_GPU = 8 << 20, 64 << 20


class StopRequested(Exception):
    """Raised where all ranks abandon an evaluation or a wait for data together, because of a stop."""


def _store_of_machine(num_ranks: int) -> Store | None:
    """Return the store in which the workers find each other if all are on one machine; None for the launcher's.

    A file of the node's directory: a port on loopback would be open to every user of the machine.
    """
    if os.environ.get("GROUP_WORLD_SIZE") != "1":
        return None
    return FileStore(str(Path(os.environ[CONTROL_VARIABLE]) / "rendezvous"), num_ranks)


class World:
    """This worker's place: `rank` of `num_ranks`, and `rank_of_node` on its machine. A single worker has no group."""

    def __init__(
        self, rank: int = 0, num_ranks: int = 1, device: torch.device | None = None, rank_of_node: int = 0
    ) -> None:
        self.rank, self.num_ranks, self.rank_of_node = rank, num_ranks, rank_of_node
        self.device = device or torch.device("cpu")

    @classmethod
    def join(cls) -> World:
        """Join the process group that the launcher's environment variables name."""
        rank, num_ranks, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        on_gpu = torch.cuda.is_available()
        device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        if num_ranks > 1:
            backend = "nccl" if on_gpu else "gloo"
            dist.init_process_group(
                backend, timeout=_TIMEOUT, rank=rank, world_size=num_ranks, store=_store_of_machine(num_ranks)
            )
        return cls(rank, num_ranks, device, local_rank)

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def begin_sum(self, values: Tensor) -> dist.Work | None:
        """Start to sum `values` over all ranks, in place; wait for the returned work before reading them."""
        return dist.all_reduce(values, async_op=True) if self.num_ranks > 1 else None

    def average_all(self, values: Sequence[Tensor]) -> None:
        """Average over all ranks, in place, with one message per dtype."""
        if self.num_ranks == 1:
            return
        for dtype in sorted({one.dtype for one in values}, key=str):
            alike = [one for one in values if one.dtype == dtype]
            message = torch.cat([one.flatten() for one in alike])
            dist.all_reduce(message)
            means = torch.split(message.div_(self.num_ranks), [one.numel() for one in alike])
            torch._foreach_copy_(alike, [mean.view_as(one) for mean, one in zip(means, alike, strict=True)])

    def broadcast_all(self, values: list[Tensor]) -> None:
        """Copy the first rank's values to all ranks, in place, with as few messages as there are dtypes."""
        if self.num_ranks > 1 and values:
            everyone = dist.group.WORLD
            assert everyone is not None
            _broadcast_coalesced(everyone, values, _MESSAGE_BYTES, 0)

    def gather_tensor(self, values: Tensor) -> list[Tensor]:
        """Return every rank's tensor on the first rank, and nothing on the others."""
        if self.num_ranks == 1:
            return [values]
        here = values.to(self.device)
        rows = [torch.empty_like(here) for _ in range(self.num_ranks)] if self.is_first else None
        dist.gather(here, rows)
        return rows or []

    def any(self, here: bool) -> bool:
        """True if `here` is true on any rank. Collective."""
        return self.count(here)[0] > 0

    def count(self, *here: bool) -> list[int]:
        """Count, for each of these flags, the ranks on which it is true. Collective."""
        if self.num_ranks == 1:
            return [int(one) for one in here]
        votes = torch.tensor(here, dtype=torch.int64, device=self.device)
        dist.all_reduce(votes)
        counted: list[int] = votes.tolist()
        return counted

    def ring_bytes(self, size: int) -> float:
        """Return how many bytes each rank sends to average a message: in a ring, and no other way needs fewer."""
        return 2 * (self.num_ranks - 1) / self.num_ranks * size

    def measure_link(self) -> float | None:
        """Return the bytes per second that each rank can send while all of them do; None for a single one. Collective.

        By all-reduces of growing messages: larger ones measure a fast link better, but would keep a slow one busy.
        """
        if self.num_ranks == 1:
            return None
        size, largest = _LINK_BYTES, _MAX_LINK_BYTES_GPU if self.device.type == "cuda" else _MAX_LINK_BYTES
        seconds = min(self._seconds_of_sum(size) for _ in range(2))  # the first one opens connections
        while size < largest and seconds * _LINK_GROWTH <= _LINK_SECONDS:
            size *= _LINK_GROWTH
            seconds = min(self._seconds_of_sum(size) for _ in range(2))
        return self.ring_bytes(size) / seconds

    def _seconds_of_sum(self, size: int) -> float:
        """Return how long the slowest rank needs to sum that many bytes: the same number on all ranks."""
        message = torch.zeros(size // 4, device=self.device)
        self.barrier()
        started = time.perf_counter()
        dist.all_reduce(message)
        message[:1].tolist()  # a GPU is done when it answers
        seconds = torch.tensor([time.perf_counter() - started], dtype=torch.float64, device=self.device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return max(1e-9, float(seconds))

    # Through the process group's key-value store, which answers while collectives are blocked.

    def announce_waiting(self) -> None:
        """Tell the other ranks that this one is waiting for data; repeated for as long as it does."""
        with suppress(RuntimeError):  # the rank that hosts the store may be gone: that is detected elsewhere
            if self.num_ranks > 1:
                dist.distributed_c10d._get_default_store().set(_WAITING, str(time.time()))

    def last_waiting(self) -> bytes | None:
        """Return the last announcement of a rank that is waiting for data; every announcement is different."""
        with suppress(RuntimeError):
            if self.num_ranks > 1 and (store := dist.distributed_c10d._get_default_store()).check([_WAITING]):
                return store.get(_WAITING)
        return None

    def barrier(self) -> None:
        self.any(False)  # an all-reduce of one number ends on no rank before all have come to it

    def share(self, data: bytes) -> bytes:
        """Return the first rank's bytes on all ranks."""
        return self.gather(data if self.is_first else b"")[0]

    def gather(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order, on all ranks."""
        if self.num_ranks == 1:
            return [data]
        # all_gather needs equal shapes: first the lengths, then everything padded to the longest.
        sizes = self._gather(torch.tensor([len(data)], device=self.device))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = self._gather(padded)
        return [bytes(row[: int(size)].cpu().numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def _gather(self, values: Tensor) -> Sequence[Tensor]:
        rows = [torch.empty_like(values) for _ in range(self.num_ranks)]
        dist.all_gather(rows, values)
        return rows


_LOSS, _STOP, _SHORT_OF_DATA, _SAVE, _SECONDS, _COMMUNICATION = range(6)


@dataclass(frozen=True)
class StepTotals:
    """The result of a step sync, equal on all ranks. `seconds` is the first rank's clock."""

    loss: float
    stop: bool
    short_of_data: bool
    save: bool
    seconds: float
    communication_seconds: tuple[float, ...]

    def waited(self, rank: int) -> float:
        """Return how long a rank waited for the slowest one, which itself only communicated: all finish together."""
        return self.communication_seconds[rank] - min(self.communication_seconds)


class StepSync:
    """The small all-reduce after every step: one row of numbers, summed while the next step computes."""

    def __init__(
        self,
        world: World,
        loss: Tensor,
        stop: bool,
        short_of_data: bool,
        save: bool,
        seconds: float,
        communication: float,
    ) -> None:
        row = [0.0] * (_COMMUNICATION + world.num_ranks)
        row[_STOP], row[_SHORT_OF_DATA], row[_SAVE] = float(stop), float(short_of_data), float(save)
        if world.is_first:
            row[_SECONDS] = seconds
        row[_COMMUNICATION + world.rank] = communication
        # float64: clocks and losses survive the sum exactly. The loss is copied on the device, without reading it.
        self._row = torch.tensor(row, dtype=torch.float64, device=world.device)
        self._row[_LOSS] = loss
        self._work: dist.Work | None = world.begin_sum(self._row)

    def wait(self) -> StepTotals:
        if self._work is not None:
            self._work.wait()
        loss, stop, short_of_data, save, seconds, *communication = self._row.tolist()
        return StepTotals(loss, stop > 0, short_of_data > 0, save > 0, seconds, tuple(communication))


# Batches ready after a step: for the next step, and for the one after it, which starts before this number is known.
ENOUGH_BATCHES = 2


class DataBarrier:
    """The place where ranks wait until all have a batch.

    A rank inside the gradient sync cannot leave for a stop: the others would have to join it with data they do not
    have. So all ranks come here before a step for which one of them may be short of data, and vote until every rank has
    its batch, or until a stop makes all of them leave after the same step. The step sync says how many batches each
    rank has ready; as long as all have enough, no rank comes here.
    """

    def __init__(self, world: World, stop_requested: Callable[[], bool]) -> None:
        self._world, self._stop_requested = world, stop_requested

    def all_ready(self, ready: bool) -> bool:
        """True if every rank has its batch. Collective; raises StopRequested on all if one lacks data and one stops."""
        lacking, stop = self._world.count(not ready, self._stop_requested())
        if lacking and stop:
            raise StopRequested
        return not lacking
