"""The workers of a generation and what they send each other: collectives, the step sync, the data barrier.

Only tensors and bytes cross: torch's object collectives unpickle, and so execute, what they receive.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store, _broadcast_coalesced
from torch.distributed.rendezvous import rendezvous

from packtrain.errors import PacktrainError
from packtrain.train.control import CONTROL_VARIABLE, VISIBLE_GPUS_VARIABLE
from packtrain.train.transfer import Reading, SideStream, is_queued
from packtrain.units import counted

_TIMEOUT = timedelta(hours=1)  # must outlast an evaluation; the watchdog and the leases find a hang much sooner
CONNECT_SECONDS = 60.0  # to connect to all others, which are there by then
_FACTS, _FACTS_OF_ALL = "facts of rank {}", "facts of all ranks"
_MESSAGE_BYTES = 250 * 2**20  # tensors of one dtype are joined into messages of this size
_WAITING = "waiting for data"

# For the measurement of links: less than half a second, unless they are slower than 10 Mbit/s.
_LINK_BYTES, _LINK_GROWTH, _LINK_SECONDS = 128 << 10, 8, 0.1
_MAX_LINK_BYTES, _MAX_LINK_BYTES_GPU = 8 << 20, 64 << 20


class StopRequested(Exception):
    """Raised where all ranks abandon an evaluation or a wait for data together, because of a stop."""


@dataclass(frozen=True)
class WorkerFacts:
    """Facts about a worker that all must have in common, or agree on."""

    host: str
    device: str
    has_bf16: bool
    torch_version: str
    nccl_version: str
    gpu: str  # its address; parts of one GPU have the same

    @classmethod
    def of_this_worker(cls, device: torch.device) -> WorkerFacts:
        on_gpu = device.type == "cuda"
        has_bf16 = not on_gpu or torch.cuda.is_bf16_supported(including_emulation=False)
        nccl_version = ".".join(map(str, torch.cuda.nccl.version()[:2])) if on_gpu else ""
        gpu = _address(device.index) if on_gpu else ""
        return cls(socket.gethostname(), device.type, has_bf16, torch.__version__, nccl_version, gpu)


def misfits(everyone: Sequence[WorkerFacts]) -> dict[int, str]:
    """Return the ranks that cannot train with the others, and why: those without a GPU, and those of a minority."""
    faults: dict[int, str] = {}
    if any(facts.device == "cuda" for facts in everyone):
        why = "has no usable GPU, and the other machines have; check its driver with nvidia-smi"
        faults.update({rank: why for rank, facts in enumerate(everyone) if facts.device != "cuda"})
    for name in ("torch", "nccl"):
        fitting = [getattr(facts, f"{name}_version") for rank, facts in enumerate(everyone) if rank not in faults]
        usual = max(fitting, key=fitting.count)  # the first of several: that of the lowest rank
        for rank, facts in enumerate(everyone):
            if rank not in faults and (version := getattr(facts, f"{name}_version")) != usual:
                faults[rank] = f"has {name} {version}, and the other machines have {usual}; install the same"
    return faults


def agree(store: Store, rank: int, num_ranks: int, facts: WorkerFacts) -> list[WorkerFacts]:
    """Return the facts of all ranks. Raises PacktrainError on all of them if one does not fit."""
    store.set(_FACTS.format(rank), json.dumps(asdict(facts)))
    if rank == 0:  # reads those of all, so that not everyone has to
        keys = [_FACTS.format(number) for number in range(num_ranks)]
        store.wait(keys, _TIMEOUT)  # one may still be fetching its data
        store.set(_FACTS_OF_ALL, json.dumps([json.loads(store.get(key)) for key in keys]))
    store.wait([_FACTS_OF_ALL], _TIMEOUT)
    everyone = [WorkerFacts(**facts) for facts in json.loads(store.get(_FACTS_OF_ALL))]
    wrong = misfits(everyone)
    if rank in wrong:
        raise PacktrainError(f"{facts.host} {wrong[rank]}")
    for number, why in wrong.items():
        raise PacktrainError(f"another worker is gone: {everyone[number].host} {why}")
    return everyone


def _meeting_place(num_ranks: int) -> Store:
    """Return the store in which the workers find each other: the launcher's, unless all are on one machine.

    Then it is a file of the node's directory: a port on loopback would be open to every user of the machine.
    """
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        return FileStore(str(Path(os.environ[CONTROL_VARIABLE]) / "rendezvous"), num_ranks)
    store: Store = next(rendezvous("env://", timeout=_TIMEOUT))[0]
    return store


def _own_device(local_rank: int) -> torch.device:
    visible = os.environ.get(VISIBLE_GPUS_VARIABLE, "").split(",")
    if any(gpu.startswith("MIG-") for gpu in visible):  # of the parts of GPUs, a process sees only the first
        os.environ[VISIBLE_GPUS_VARIABLE] = visible[local_rank]
        local_rank = 0
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= (count := torch.cuda.device_count()):
        gpus = f"{counted(count, 'usable GPU')}, and more workers; check nvidia-smi, or set fleet.workers"
        raise PacktrainError(f"{socket.gethostname()} has {gpus}")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def gpu_addresses(device: torch.device, workers: int) -> list[str]:
    """Return the PCI address of the GPU of each worker of this machine, as the system writes it; none without GPUs.

    They are empty where this version of torch does not know them.
    """
    if device.type != "cuda":
        return []
    # Of the parts of a GPU a process sees only its own: then the others are taken to be on the same one.
    numbers = range(workers) if torch.cuda.device_count() >= workers else [device.index] * workers
    return [_address(number) for number in numbers]


def _address(number: int) -> str:
    properties = torch.cuda.get_device_properties(number)
    ids = [getattr(properties, f"pci_{name}_id", -1) for name in ("domain", "bus", "device")]
    return "" if min(ids) < 0 else "{:04x}:{:02x}:{:02x}.0".format(*ids)


def backend_of(everyone: Sequence[WorkerFacts]) -> str:
    """Return what connects the workers: NCCL, unless there are no GPUs or several workers have parts of one."""
    gpus = [(facts.host, facts.gpu) for facts in everyone if facts.gpu]
    on_gpu = all(facts.device == "cuda" for facts in everyone)
    return "nccl" if on_gpu and len(set(gpus)) == len(gpus) else "gloo"


def _connect(store: Store, rank: int, num_ranks: int, device: torch.device, backend: str) -> None:
    dist.init_process_group(
        backend,
        timeout=timedelta(seconds=CONNECT_SECONDS),
        rank=rank,
        world_size=num_ranks,
        store=store,
        device_id=device if backend == "nccl" else None,  # connects now, and not in the first collective
    )
    first = torch.zeros(1, device=device)
    dist.all_reduce(first)
    first.item()  # a GPU has only queued it
    dist.distributed_c10d._set_pg_timeout(_TIMEOUT, dist.group.WORLD)


class World:
    """This worker's place: `rank` of `num_ranks`, and `rank_of_node` on its machine. A single worker has no group.

    `has_bf16` is true if all of them support it; the step sync uses the `side` stream.
    """

    def __init__(
        self,
        rank: int = 0,
        num_ranks: int = 1,
        device: torch.device | None = None,
        rank_of_node: int = 0,
        has_bf16: bool = True,
    ) -> None:
        self.rank, self.num_ranks, self.rank_of_node = rank, num_ranks, rank_of_node
        self.device, self.has_bf16 = device or torch.device("cpu"), has_bf16
        self.side = SideStream(self.device)

    @classmethod
    def join(cls, watched: AbstractContextManager[object] | None = None) -> World:
        """Join the process group that the launcher's environment variables name; `watched` while it connects."""
        rank, num_ranks, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        device = _own_device(local_rank)
        everyone = [WorkerFacts.of_this_worker(device)]
        if num_ranks > 1:
            store = _meeting_place(num_ranks)
            everyone = agree(store, rank, num_ranks, everyone[0])
            with watched or nullcontext():
                _connect(store, rank, num_ranks, device, backend_of(everyone))
        return cls(rank, num_ranks, device, local_rank, all(facts.has_bf16 for facts in everyone))

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def new_channel(self) -> dist.ProcessGroup | None:
        """Return a group of all ranks whose messages do not queue behind others; None for a single one. Collective."""
        if self.num_ranks == 1:
            return None
        channel: dist.ProcessGroup = dist.new_group(timeout=_TIMEOUT)
        return channel

    def begin_sum(self, values: Tensor) -> dist.Work | None:
        """Start to sum `values` over all ranks, in place; wait for the returned work before reading them."""
        return dist.all_reduce(values, async_op=True) if self.num_ranks > 1 else None

    def average_all(self, values: Sequence[Tensor]) -> None:
        """Average over all ranks, in place, with one message per dtype."""
        if self.num_ranks == 1:
            return
        for dtype in sorted({tensor.dtype for tensor in values}, key=str):
            alike = [tensor for tensor in values if tensor.dtype == dtype]
            message = torch.cat([tensor.flatten() for tensor in alike])
            dist.all_reduce(message)
            means = torch.split(message.div_(self.num_ranks), [tensor.numel() for tensor in alike])
            torch._foreach_copy_(alike, [mean.view_as(tensor) for mean, tensor in zip(means, alike, strict=True)])

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
        tensor = values.to(self.device)
        rows = [torch.empty_like(tensor) for _ in range(self.num_ranks)] if self.is_first else None
        dist.gather(tensor, rows)
        return rows or []

    def any(self, flag: bool) -> bool:
        """True if the flag is true on any rank. Collective."""
        return self.count(flag)[0] > 0

    def count(self, *flags: bool) -> list[int]:
        """Count, for each of these flags, the ranks on which it is true. Collective."""
        if self.num_ranks == 1:
            return [int(flag) for flag in flags]
        votes = torch.tensor(flags, dtype=torch.int64, device=self.device)
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

    def tell(self, subject: str, text: str) -> None:
        """Tell the other ranks something. May be called from any thread."""
        dist.distributed_c10d._get_default_store().set(subject, text)

    def heard(self, subject: str) -> bytes | None:
        """Return what a rank has told about something. May be called from any thread."""
        store = dist.distributed_c10d._get_default_store()
        return store.get(subject) if store.check([subject]) else None

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
        queued = is_queued(world.device)
        with world.side.use(after_computing=True):
            # float64: clocks and losses survive the sum exactly. From pinned memory they are copied without a wait.
            numbers = torch.tensor(row, dtype=torch.float64, pin_memory=queued)
            self._row = numbers.to(world.device, non_blocking=True)
            self._row[_LOSS] = loss  # on the device, without reading it
            self._work: dist.Work | None = world.begin_sum(self._row)
            if queued and self._work is not None:
                self._work.wait()  # makes the side stream wait for the sum, not the host
            self._totals = Reading(self._row)
        self._queued, self._loss = queued, loss  # kept until it is read: the side stream does not own its memory

    def wait(self) -> StepTotals:
        if not self._queued and self._work is not None:
            self._work.wait()
        loss, stop, short_of_data, save, seconds, *communication = self._totals.read()
        return StepTotals(loss, stop > 0, short_of_data > 0, save > 0, seconds, tuple(communication))


# Batches ready after a step: for the next step, and for the one after it, which starts before this number is known.
ENOUGH_BATCHES = 2


def pass_data_barrier(world: World, ready: bool, stop_requested: bool) -> bool:
    """Wait where ranks wait until all have a batch, and return True if all have. Collective.

    A rank inside the gradient sync cannot leave for a stop: the others would have to join it with data they do not
    have. So all ranks come here before a step for which one of them may be short of data, and vote until every rank has
    its batch, or until a stop makes all of them leave after the same step (StopRequested). The step sync says how many
    batches each rank has ready; as long as all have enough, no rank comes here.
    """
    lacking, stop = world.count(not ready, stop_requested)
    if lacking and stop:
        raise StopRequested
    return not lacking
