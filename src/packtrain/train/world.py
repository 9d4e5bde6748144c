"""The workers of a generation, and the few things that they say to each other.

Everything that crosses is tensors or bytes: torch's object collectives run code out of what they receive.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _broadcast_coalesced

_TIMEOUT = timedelta(hours=1)  # hangs are found sooner, by the watch and by leases; this must outlast an evaluation
_MESSAGE_BYTES = 250 * 2**20
_WAITING = "waits for its data"


class LeftEarly(Exception):
    """Raised by a pulse, to leave an evaluation, and wherever else all ranks leave together for a stop."""


class World:
    """This worker's place: `rank` of `num_ranks`, and `rank_of_node` on its machine.

    Alone, it needs no process group.
    """

    def __init__(
        self, rank: int = 0, num_ranks: int = 1, device: torch.device | None = None, rank_of_node: int = 0
    ) -> None:
        self.rank, self.num_ranks, self.rank_of_node = rank, num_ranks, rank_of_node
        self.device = device or torch.device("cpu")

    @classmethod
    def join(cls) -> World:
        """Meets the others where the launcher's variables say."""
        local_rank = int(os.environ["LOCAL_RANK"])
        on_gpu = torch.cuda.is_available()
        device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=_TIMEOUT)
        return cls(dist.get_rank(), dist.get_world_size(), device, local_rank)

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def begin_sum(self, values: Tensor) -> dist.Work | None:
        """Starts to add up `values` over all ranks, in place; wait for the work before reading them."""
        return dist.all_reduce(values, async_op=True) if self.num_ranks > 1 else None

    def average_all(self, values: Sequence[Tensor]) -> None:
        """The mean over all ranks, in place, in one message for each kind of numbers."""
        if self.num_ranks == 1:
            return
        for kind in sorted({one.dtype for one in values}, key=str):
            alike = [one for one in values if one.dtype == kind]
            message = torch.cat([one.flatten() for one in alike])
            dist.all_reduce(message)
            means = torch.split(message.div_(self.num_ranks), [one.numel() for one in alike])
            torch._foreach_copy_(alike, [mean.view_as(one) for mean, one in zip(means, alike, strict=True)])

    def broadcast_all(self, values: list[Tensor]) -> None:
        """What the first rank has, in place, in as few messages as there are kinds of numbers."""
        if self.num_ranks > 1 and values:
            everyone = dist.group.WORLD
            assert everyone is not None
            _broadcast_coalesced(everyone, values, _MESSAGE_BYTES, 0)

    def gather_tensor(self, values: Tensor) -> list[Tensor]:
        """What every rank has, on the first; nothing on the others."""
        if self.num_ranks == 1:
            return [values]
        here = values.to(self.device)
        rows = [torch.empty_like(here) for _ in range(self.num_ranks)] if self.is_first else None
        dist.gather(here, rows)
        return rows or []

    def any(self, here: bool) -> bool:
        """Whether it holds on any rank. All of them ask."""
        return self.count(here)[0] > 0

    def count(self, *here: bool) -> list[int]:
        """On how many ranks each of these holds. All of them ask."""
        if self.num_ranks == 1:
            return [int(one) for one in here]
        votes = torch.tensor(here, dtype=torch.int64, device=self.device)
        dist.all_reduce(votes)
        counted: list[int] = votes.tolist()
        return counted

    # What is said beside the work, while collectives wait.

    def say_waiting(self) -> None:
        """Tells the others that this rank waits for its data; said again and again for as long as it does."""
        with suppress(RuntimeError):  # whoever keeps what is said may be gone: that will be seen elsewhere
            if self.num_ranks > 1:
                dist.distributed_c10d._get_default_store().set(_WAITING, str(time.time()))

    def said_waiting(self) -> bytes | None:
        """What was last said by a rank that waits for its data: it is another each time."""
        with suppress(RuntimeError):
            if self.num_ranks > 1 and (said := dist.distributed_c10d._get_default_store()).check([_WAITING]):
                return said.get(_WAITING)
        return None

    def share(self, data: bytes) -> bytes:
        """What the first rank has, on all of them; what others give is not looked at."""
        return self.gather(data if self.is_first else b"")[0]

    def gather(self, data: bytes) -> list[bytes]:
        """What every rank has, in the order of ranks, on all of them."""
        if self.num_ranks == 1:
            return [data]
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


# What ranks tell each other with every step: one row of numbers, added up while the next step is computed.


_LOSS, _STOP, _SHORT, _SAVE, _SECONDS, _EXCHANGE = range(6)


@dataclass(frozen=True)
class Outcome:
    """The same on all ranks. `seconds` is the first rank's clock, and `save` its wish; `short` if one is of data."""

    loss: float
    stop: bool
    short: bool
    save: bool
    seconds: float
    exchange_seconds: tuple[float, ...]

    def waited(self, rank: int) -> float:
        """How long a rank waited for the slowest, which itself only exchanged: all of them are done at once."""
        return self.exchange_seconds[rank] - min(self.exchange_seconds)


class Ballot:
    def __init__(
        self, world: World, loss: Tensor, stop: bool, short: bool, save: bool, seconds: float, exchange: float
    ) -> None:
        row = [0.0] * (_EXCHANGE + world.num_ranks)
        row[_STOP], row[_SHORT] = float(stop), float(short)
        if world.is_first:
            row[_SAVE], row[_SECONDS] = float(save), seconds
        row[_EXCHANGE + world.rank] = exchange
        self._row = torch.tensor(row, dtype=torch.float64, device=world.device)
        self._row[_LOSS] = loss
        self._work: dist.Work | None = world.begin_sum(self._row)

    def count(self) -> Outcome:
        if self._work is not None:
            self._work.wait()
        loss, stop, short, save, seconds, *exchange = self._row.tolist()
        return Outcome(loss, stop > 0, short > 0, save > 0, seconds, tuple(exchange))


# Where ranks wait for each other's data, so that none is inside an exchange of gradients when a stop comes.
#
# A rank that is cannot leave: the others would have to join it, with data that they do not have. So all of them come
# here
# before a step for which one of them may lack its batch, and vote until every one has it, or until a stop takes all of
# them along after the same step. How many batches each rank has at hand is told with every step (ballot), and where all
# have enough nobody comes here.


ENOUGH = 2  # batches at hand after a step: for the next one, and for the one after it, which is begun knowing this


class Gate:
    def __init__(self, world: World, asked_to_stop: Callable[[], bool]) -> None:
        self._world, self._asked_to_stop = world, asked_to_stop

    def vote(self, ready: bool) -> bool:
        """Whether every rank has its data. All of them vote; LeftEarly on all, if one has none and one is to stop."""
        lacking, stop = self._world.count(not ready, self._asked_to_stop())
        if lacking and stop:
            raise LeftEarly
        return not lacking
