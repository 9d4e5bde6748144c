"""Copies tensors in a thread of its own, so that training goes on meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

Files = dict[str, dict[str, Tensor]]


class Copies:
    """Tensors that have been copied, or are about to be."""

    def __init__(self, tensors: Files, made: Future[None]) -> None:
        self._tensors, self._made = tensors, made

    def wait(self) -> Files:
        self._made.result()
        return self._tensors


class Copier:
    """Memory for copies is used again: the first copy into new memory takes several times as long."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "copier")
        self._spare: list[Files] = []

    def begin(self, files: Mapping[str, Mapping[str, Tensor]], at_once: Collection[tuple[str, str]] = ()) -> Copies:
        """Starts to copy; nothing but what is named in `at_once`, by file and tensor, may change until that is done."""
        spare = self._spare.pop() if self._spare else {}
        copies = {
            file: {name: _room_for(tensor, spare.get(file, {}).get(name)) for name, tensor in tensors.items()}
            for file, tensors in files.items()
        }
        pairs = {
            (file, name): (copies[file][name], tensor.detach())
            for file, tensors in files.items()
            for name, tensor in tensors.items()
        }
        _copy([pairs.pop(key) for key in at_once])
        rest = list(pairs.values())
        return Copies(copies, self._thread.submit(_copy_beside, rest, _point_in_work(rest)))

    def give_back(self, copies: Copies) -> None:
        """They are not needed any more."""
        self._spare.append(copies.wait())

    def close(self) -> None:
        self._thread.shutdown(wait=False)


def _room_for(tensor: Tensor, spare: Tensor | None) -> Tensor:
    if spare is not None and spare.shape == tensor.shape and spare.dtype == tensor.dtype:
        return spare
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for copy, tensor in pairs:
        copy.copy_(tensor)


def _point_in_work(pairs: list[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
    """Where a GPU's queue of work stands: what is in it may still write what is to be copied."""
    device = next((tensor.device for _, tensor in pairs if tensor.is_cuda), None)
    return None if device is None else torch.cuda.current_stream(device).record_event()


def _copy_beside(pairs: list[tuple[Tensor, Tensor]], after: torch.cuda.Event | None) -> None:
    if after is None:
        _copy(pairs)
        return
    beside = torch.cuda.Stream(after.device)  # type: ignore[no-untyped-call]
    beside.wait_event(after)
    with torch.cuda.stream(beside):
        for copy, tensor in pairs:
            copy.copy_(tensor, non_blocking=True)
    beside.synchronize()
