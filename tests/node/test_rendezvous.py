"""The rendezvous of launchers: the first one listens, only at its registered address."""

from __future__ import annotations

import errno
import socket
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from types import SimpleNamespace

import psutil
import pytest
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from packtrain.node.rendezvous import create, handler, reach
from parts.loopback import free_port


def at(address: str, port: int, rank: int, ranks: int = 1, **more: str) -> RendezvousHandler:
    return get_rendezvous_handler(
        RendezvousParameters("packtrain", f"{address}:{port}", "generation-1", ranks, ranks, rank=str(rank), **more)
    )


def listening() -> list[tuple[str, int]]:
    found = psutil.Process().net_connections("tcp")
    return [(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN]


def test_torchs_launcher_finds_the_rendezvous_by_its_entry_point() -> None:
    [found] = entry_points(group="torchrun.handlers", name="packtrain")
    assert found.load() is handler
    assert handler() is create


def test_the_rendezvous_listens_on_its_address_only() -> None:
    port = free_port()
    met = at("127.0.0.1", port, 0).next_rendezvous()
    assert [place for place in listening() if place[1] == port] == [("127.0.0.1", port)]
    assert (met.rank, met.world_size) == (0, 1)


def test_launchers_share_one_store() -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda rank: at("127.0.0.1", port, rank, 2).next_rendezvous(), range(2))
    first.store.set("said", "here")
    assert second.store.get("said") == b"here"
    assert (second.rank, second.world_size) == (1, 2)
    meeting_place = second.bootstrap_store_info
    assert meeting_place is not None
    assert (meeting_place.master_addr, meeting_place.master_port) == ("127.0.0.1", port)


@pytest.mark.usefixtures("processes")
def test_a_machine_that_does_not_answer_is_named() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        port = silent.getsockname()[1]
        waiting = [socket.socket() for _ in range(3)]  # its queue is full: the kernel drops what comes then
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        with pytest.raises(OSError, match=f"127.0.0.1:{port} does not answer; check the firewall"):
            reach("127.0.0.1", port, patience=0.5, look=0.3)
        for one in waiting:
            one.close()


@pytest.mark.usefixtures("processes")
def test_a_machine_that_is_not_ready_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses for longer than the patience with one that does not answer."""
    port, now = free_port(), 0.0
    listeners: list[socket.socket] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now > 10.0 and not listeners:
            listeners.append(socket.create_server(("127.0.0.1", port)))

    monkeypatch.setattr("packtrain.node.rendezvous.time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    reach("127.0.0.1", port, patience=0.5)
    [listener] = listeners
    listener.close()


@pytest.mark.usefixtures("processes")
def test_a_port_in_use_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use") as raised:
        at("127.0.0.1", taken.getsockname()[1], 0).next_rendezvous()
    assert raised.value.errno == errno.EADDRINUSE


def test_an_address_of_another_machine_is_an_error_and_not_every_interface() -> None:
    before, port = listening(), free_port()
    with pytest.raises(OSError, match=r"192.0.2.1 is not an address of this machine; start the node with one"):
        at("192.0.2.1", port, 0).next_rendezvous()
    assert listening() == before


def test_a_launcher_without_others_and_with_workers_of_ours_listens_nowhere() -> None:
    before = listening()
    met = at("127.0.0.1", free_port(), 0, listen="no").next_rendezvous()
    met.store.set("said", "here")
    assert met.store.get("said") == b"here"
    assert listening() == before
