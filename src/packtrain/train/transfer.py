"""Copies between main memory and the device, which run beside its computing: the host never waits for a whole queue.

A GPU works through a queue (a stream). A copy in that queue, or a number that is read from it, waits for everything
before it; then the queue is empty, and the GPU idles until it gets the next kernels. So batches go to the device in a
queue of their own, and numbers come back one step after they were computed. On a CPU there is no queue: tensors are
used where they are, and numbers are read at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from packtrain.data.loader import Arrays, LoadedBatch, Loader
from packtrain.recipes import Batch


def is_queued(device: torch.device) -> bool:
    """True if the device computes after the host has asked for it, so that reading a result makes the host wait."""
    return device.type == "cuda"


def pinned(arrays: Arrays, device: torch.device) -> Arrays:
    """Return the arrays in pinned memory if the device is a GPU: from there a copy runs asynchronously."""
    if not is_queued(device):
        return arrays
    with torch.cuda.device(device):  # a new thread would use, and so occupy, the first GPU of the machine
        return {name: torch.from_numpy(array).pin_memory().numpy() for name, array in arrays.items()}


def on_device(arrays: Arrays, device: torch.device, on_host: Collection[str] = ()) -> Batch:
    """Return the arrays as tensors on the device; those that `on_host` names stay in main memory."""
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    copies = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items() if name not in on_host}
    return tensors | copies


class SideStream:
    """A second queue of a GPU; nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if is_queued(device) else None

    def __bool__(self) -> bool:
        return self._stream is not None

    def use(self, after_computing: bool) -> AbstractContextManager[object]:
        """Queue what follows here; if `after_computing`, it begins when everything that is queued by now is done."""
        if self._stream is None:
            return nullcontext()
        if after_computing:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)


class Reading:
    """A few numbers that are copied to the host when the device gets there: reading waits for them alone."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers, self._done = numbers, None
        if is_queued(numbers.device):
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            # Blocking, not spinning: the loader's threads need the core.
            self._done = torch.cuda.Event(blocking=True)
            self._done.record()

    def read(self) -> list[float]:
        if self._done is not None:
            self._done.synchronize()
        numbers: list[float] = self._numbers.flatten().tolist()
        return numbers


class SentBatch:
    """A batch that is being copied to the device."""

    def __init__(
        self, loaded: LoadedBatch, device: torch.device, side: SideStream, on_host: Collection[str] = ()
    ) -> None:
        self.loaded, self._device, self._arrived, self._on_host = loaded, device, None, on_host
        with side.use(after_computing=False):
            self._parts = [on_device(arrays, device, on_host) for arrays in loaded.micro_batches]
            if side:
                self._arrived = torch.cuda.Event()
                self._arrived.record()

    def receive(self) -> list[Batch]:
        """Return the micro-batches; computing that is queued from now on waits until they have arrived."""
        if self._arrived is not None:
            computing = torch.cuda.current_stream(self._device)
            computing.wait_event(self._arrived)
            for micro_batch in self._parts:
                for name in micro_batch.keys() - self._on_host:
                    micro_batch[name].record_stream(computing)  # else the next copy could get memory that is in use
        return self._parts


class Feed:
    """The batches of a loader, on the device but for the arrays `on_host`. On a GPU one is copied ahead of its use."""

    def __init__(self, loader: Loader, device: torch.device, on_host: Collection[str] = ()) -> None:
        self._loader, self._side, self._where = loader, SideStream(device), (device, on_host)
        self._ahead: SentBatch | None = None

    def next(self, pulse: Callable[[], object] = lambda: None) -> SentBatch:
        """Return the next batch; while it is not loaded, call `pulse` as the loader does."""
        sent, self._ahead = self._ahead, None
        return sent or self._send(self._loader.next(pulse))

    def send_ahead(self) -> None:
        """Begin to copy the next batch if it is loaded: when a step is queued, and before the host waits for one."""
        if self._side and self._ahead is None and (loaded := self._loader.poll()) is not None:
            self._ahead = self._send(loaded)

    def _send(self, loaded: LoadedBatch) -> SentBatch:
        device, on_host = self._where
        return SentBatch(loaded, device, self._side, on_host)

    @property
    def ready(self) -> int:
        """The number of batches that `next` returns without waiting, or more if one arrives meanwhile."""
        return self._loader.ready + (self._ahead is not None)

    def close(self) -> None:
        self._loader.close()
