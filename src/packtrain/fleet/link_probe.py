"""The link probe: how fast machines exchange data, measured by an all-reduce between them with torch's collectives.

Each machine runs it once (`packtrain.fleet.on_host link-probe`); the first writes its address to the store, and every
machine prints the result.
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
from packtrain.node.address import check_own, choose_address, interface_of
from packtrain.store import Store, open_store

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

SECONDS = 5.0
RENDEZVOUS_SECONDS = 60.0
_TIMEOUT = timedelta(seconds=RENDEZVOUS_SECONDS)
_LARGE_BYTES = 16 * 1024 * 1024
_LATENCY_ROUNDS, _WARM_UP_ROUNDS = 50, 5


@dataclass(frozen=True)
class LinkSpeed:
    """`bytes_per_second` is the rate on each machine's link, in each direction."""

    machines: int
    backend: str
    latency_seconds: float
    bytes_per_second: float


def probe_parser(program: str) -> argparse.ArgumentParser:
    """Return a parser of the options of every probe: where its machines meet, and at which address of each."""
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("--store", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--rank", type=int, default=int(os.environ.get("SLURM_PROCID", "0")))
    parser.add_argument("--address", default=None)
    parser.add_argument("--interface", default=None)
    parser.add_argument("--public-address", action="store_true")
    return parser


def reachable_address(options: argparse.Namespace) -> str:
    """Return the address of this machine that the options choose, and have torch's backends use its interface."""
    address = choose_address(options.address, options.interface, False, None)
    check_own(address, options.public_address)
    interface = interface_of(address)
    if interface is not None:
        os.environ.update(GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=f"={interface}")
    return address


def rendezvous(store: Store, key: str, rank: int, world: int, address: str) -> TCPStore:
    """Return torch's store that the machines share; the first machine serves it and writes its address to `key`."""
    from torch._C._distributed_c10d import TCPStore

    if rank == 0:
        with socket.socket() as listener:
            listener.bind((address, 0))
            port = int(listener.getsockname()[1])
            store.put(key, json.dumps([address, port]).encode())
            fd = listener.detach()
            # With a socket of ours: by itself it would listen on every interface, open to anyone who reaches it.
            return TCPStore(address, port, world, True, _TIMEOUT, wait_for_workers=False, master_listen_fd=fd)
    deadline = time.monotonic() + RENDEZVOUS_SECONDS
    while (data := store.find(key)) is None:
        if time.monotonic() > deadline:
            raise PacktrainError(f"the first machine did not publish its address within {RENDEZVOUS_SECONDS:g} s")
        time.sleep(0.1)
    first, port = json.loads(data)
    return TCPStore(first, port, world, False, _TIMEOUT, wait_for_workers=False)


def measure(shared: TCPStore, rank: int, world: int, backend: str, seconds: float) -> LinkSpeed:
    import torch
    import torch.distributed as dist

    dist.init_process_group(backend, store=shared, rank=rank, world_size=world, timeout=_TIMEOUT)
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    small, large = torch.zeros(1, device=device), torch.zeros(_LARGE_BYTES // 4, device=device)

    def reduce_seconds(tensor: torch.Tensor) -> float:
        began = time.perf_counter()
        dist.all_reduce(tensor)
        if backend == "nccl":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    latency = median([reduce_seconds(small) for _ in range(_LATENCY_ROUNDS)][_WARM_UP_ROUNDS:])
    first = torch.tensor([reduce_seconds(large) + reduce_seconds(large)], dtype=torch.float64, device=device)
    # The slowest machine decides on the number of rounds: all must do the same number, or some would wait forever.
    dist.all_reduce(first, op=dist.ReduceOp.MAX)
    rounds = max(3, min(10_000, int(seconds / (first.item() / 2))))
    took = sum(reduce_seconds(large) for _ in range(rounds)) / rounds
    dist.destroy_process_group()
    # A ring all-reduce sends and receives 2 (n - 1) / n of the data on every link.
    return LinkSpeed(world, backend, latency, _LARGE_BYTES * 2 * (world - 1) / world / took)


def main(words: Sequence[str]) -> None:
    parser = probe_parser("packtrain.fleet.link_probe")
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    options = parser.parse_args(words)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # several probes on one machine would compete for its cores
    address = reachable_address(options)
    try:
        shared = rendezvous(open_store(options.store), options.key, options.rank, options.world, address)
        speed = measure(shared, options.rank, options.world, options.backend, SECONDS)
    except RuntimeError as error:  # from torch; its first line has the fault, the rest is a page of addresses
        raise PacktrainError(str(error).splitlines()[0]) from None
    print(json.dumps(asdict(speed)), flush=True)
