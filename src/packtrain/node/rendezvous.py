"""The rendezvous at which the launchers of a generation find each other; runs in the launcher process.

It is torch's static rendezvous, except that it listens only on the address that the first node registered. torch's own
listens on every interface, and anyone who reaches one can join. If the generation is one machine with a recipe, it
listens nowhere: its workers meet in a file (train/world.py), which other users of the machine cannot read. torch finds
this rendezvous by the entry point `torchrun.handlers`.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable

from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

_TIMEOUT_SECONDS = 900
SILENCE_SECONDS = 45.0  # after which a machine that does not even refuse cannot be reached


class Rendezvous(StaticTCPRendezvous):
    listens = True  # False for a launcher that has no others to meet, and whose workers do not need its store

    def get_backend(self) -> str:
        return "packtrain"

    def next_rendezvous(self) -> RendezvousInfo:
        # With its store already there, the base class does not make one of its own.
        if self._store is None and not self.listens:
            self._store = HashStore()
        elif self._store is None:
            first = self.rank == 0
            if not first:
                reach(self.master_addr, self.master_port)
            self._store = TCPStore(
                self.master_addr,
                self.master_port,
                self.world_size,
                first,
                self.timeout,
                multi_tenant=True,
                master_listen_fd=_bound(self.master_addr, self.master_port) if first else None,
            )
        return super().next_rendezvous()


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    address, port = parse_rendezvous_endpoint(parameters.endpoint, -1)
    timeout = int(parameters.config.get("timeout", _TIMEOUT_SECONDS))
    rank = int(parameters.config["rank"])
    rendezvous = Rendezvous(address, port, rank, parameters.max_nodes, parameters.run_id, timeout)
    rendezvous.listens = parameters.config.get("listen") != "no"
    return rendezvous


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the factory of handlers; the entry point in pyproject.toml."""
    return create


def reach(address: str, port: int, patience: float = SILENCE_SECONDS, look: float = 5.0) -> None:
    """Wait until the first machine listens; it may still be fetching a checkpoint. Raises OSError if nothing answers.

    A machine that is not ready refuses; a firewall, or a network without a route, says nothing.
    """
    ready_by, answered = time.monotonic() + _TIMEOUT_SECONDS, time.monotonic()
    while True:
        try:
            socket.create_connection((address, port), timeout=look).close()
            return
        except ConnectionRefusedError:
            answered = time.monotonic()
        except OSError:
            if time.monotonic() - answered > patience:
                text = f"{address}:{port} does not answer; check the firewall and the routes between the machines"
                raise OSError(errno.EHOSTUNREACH, text) from None
        if time.monotonic() > ready_by:
            raise OSError(errno.ETIMEDOUT, f"nothing listens at {address}:{port}; the first machine did not start")
        time.sleep(0.2)


def _bound(address: str, port: int) -> int:
    """Return a socket bound to the address. If it is not this machine's own, torch would listen on every interface."""
    family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(place)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            advice = "start the node with one of its own (--interface, --address)"
            raise OSError(error.errno, f"{address} is not an address of this machine; {advice}") from None
        return listener.detach()  # torch takes over the descriptor; leaving the block must not close it
