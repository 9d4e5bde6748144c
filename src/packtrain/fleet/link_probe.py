"""How fast machines exchange: an all-reduce between them for a few seconds, with torch's own collectives.

Each machine runs this once (`packtrain.fleet.local exchange`); the first writes where it can be met into the store,
and everyone prints what was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from statistics import median
from typing import TYPE_CHECKING

from packtrain.errors import PacktrainError
from packtrain.node.launch import interface_of
from packtrain.store import Store, open_store

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

SECONDS = 5.0
MEET_SECONDS = 60.0
_LARGE, _ROUNDS = 16 * 1024 * 1024, 50


@dataclass(frozen=True)
class Measured:
    """`bytes_per_second` is what goes over each machine's line, both ways together halved: the busy line's rate."""

    machines: int
    backend: str
    latency_seconds: float
    bytes_per_second: float


def meet(store: Store, key: str, rank: int, world: int, address: str) -> TCPStore:
    """Where the machines find each other: the first one listens on its address and no other, and says so."""
    from torch._C._distributed_c10d import TCPStore

    patience = timedelta(seconds=MEET_SECONDS)
    if rank > 0:
        return TCPStore(*_place_of_the_first(store, key), world, False, patience, wait_for_workers=False)
    with socket.socket() as listener:
        listener.bind((address, 0))
        port = int(listener.getsockname()[1])
        store.put(key, json.dumps([address, port]).encode())
        fd = listener.detach()
        # Left to itself it would listen on every interface, and whoever reaches it could join.
        return TCPStore(address, port, world, True, patience, wait_for_workers=False, master_listen_fd=fd)


def _place_of_the_first(store: Store, key: str) -> tuple[str, int]:
    deadline = time.monotonic() + MEET_SECONDS
    while time.monotonic() < deadline:
        data = store.find(key)
        if data is not None:
            found, port = json.loads(data)
            return str(found), int(port)
        time.sleep(0.1)
    raise PacktrainError(f"the first machine did not say where it is within {MEET_SECONDS:g} s")


def measure(meeting: TCPStore, rank: int, world: int, backend: str, seconds: float) -> Measured:
    import torch
    import torch.distributed as dist

    patience = timedelta(seconds=MEET_SECONDS)
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=world, timeout=patience)
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    small, large = torch.zeros(1, device=device), torch.zeros(_LARGE // 4, device=device)

    def once(tensor: torch.Tensor) -> float:
        began = time.perf_counter()
        dist.all_reduce(tensor)
        if backend == "nccl":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    latency = median([once(small) for _ in range(_ROUNDS)][5:])
    first = torch.tensor([once(large) + once(large)], dtype=torch.float64, device=device)
    dist.all_reduce(first, op=dist.ReduceOp.MAX)  # all must do as many
    rounds = max(3, min(10_000, int(seconds / (first.item() / 2))))
    took = sum(once(large) for _ in range(rounds)) / rounds
    dist.destroy_process_group()
    return Measured(world, backend, latency, _LARGE * 2 * (world - 1) / world / took)


def main(given: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="packtrain.fleet.link_probe")
    parser.add_argument("--store", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--rank", type=int, default=int(os.environ.get("SLURM_PROCID", "0")))
    parser.add_argument("--address", default=None)
    parser.add_argument("--interface", default=None)
    parser.add_argument("--public-address", action="store_true")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    options = parser.parse_args(given)
    from packtrain.node.address import check_private, choose_address

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    address = choose_address(options.address, options.interface, False, None)
    check_private(address, options.public_address)
    interface = interface_of(address)
    if interface is not None:
        os.environ.update(GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=interface)
    store = open_store(options.store)
    try:
        meeting = meet(store, options.key, options.rank, options.world, address)
        measured = measure(meeting, options.rank, options.world, options.backend, options.seconds)
    except RuntimeError as error:  # of torch, with a page of addresses in it
        raise PacktrainError(str(error).splitlines()[0]) from None
    print(json.dumps(asdict(measured)), flush=True)
