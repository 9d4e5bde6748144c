"""Where other machines reach this one. What workers say to each other is neither encrypted nor checked, so the
address is a private one unless the job says otherwise."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from packtrain.errors import Mistake

LOOPBACK = "127.0.0.1"
_ELSEWHERE = "198.51.100.1"  # an address for documentation, of no network: the way to it is the default route
_OPEN = "set `fleet.public_address: true` if the line between the machines is safe, or tunnel it (docs/reliability.md)"


def choose_address(
    given: str | None, interface: str | None, alone: bool, store_endpoint: str | None, others: Sequence[str] = ()
) -> str:
    """The address to register: as asked for, or a private one of an interface that leads to other machines.

    That is the one that leads to `others` of the run, to the store, or to the rest of the world; then any. Bridges
    that only join what runs on this machine, such as docker0, lead to nobody. A machine that is alone in its run needs
    no other, and so no network.
    """
    if given is not None and interface is not None:
        raise Mistake("--address and --interface: give one of the two")
    if given is not None:
        return _number_of(given)
    if interface is not None:
        return _address_on(interface)
    if alone:
        return LOOPBACK
    outward = [
        address
        for name, addresses in interface_addresses().items()
        if not is_inner_bridge(name)
        for address in addresses
        if not ipaddress.ip_address(address).is_loopback
    ]
    if others and all(ipaddress.ip_address(other).is_loopback for other in others):
        return LOOPBACK  # all of the run is on this machine
    routed = [_routed_to(host) for host in (*others, urlsplit(store_endpoint or "").hostname, _ELSEWHERE) if host]
    leading = [address for address in routed if address in outward]
    private = [address for address in (*leading, *outward) if is_private(address)]
    return next(iter([*private, *leading, *outward]), LOOPBACK)


def check_private(address: str, public_address: bool) -> None:
    if not public_address and not is_private(address):
        raise Mistake(f"{address} is a public address, and collectives are open to whoever reaches it: {_OPEN}")


def is_private(address: str) -> bool:
    number = ipaddress.ip_address(address)
    return number.is_private or number.is_loopback or number.is_link_local or number in _SHARED


_SHARED = ipaddress.ip_network("100.64.0.0/10")  # between carriers and their customers; overlay networks use it too


def is_inner_bridge(interface: str, devices: Path = Path("/sys/class/net")) -> bool:
    """A bridge without a network card among its ports: for containers and virtual machines of this computer."""
    ports = devices / interface / "brif"
    if not (devices / interface / "bridge").exists():
        return False
    return not any((devices / port.name / "device").exists() for port in ports.iterdir())


def interface_addresses() -> Mapping[str, list[str]]:
    """The IPv4 addresses of each interface that is up."""
    up = {name for name, status in psutil.net_if_stats().items() if status.isup}
    return {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
        if name in up
    }


def _address_on(interface: str) -> str:
    known = interface_addresses()
    if interface not in known:
        raise Mistake(f"--interface {interface}: there is none of that name that is up; known: {', '.join(known)}")
    if not known[interface]:
        raise Mistake(f"--interface {interface}: it has no IPv4 address")
    return known[interface][0]


def _number_of(given: str) -> str:
    """An address as numbers; a name is looked up."""
    try:
        return str(ipaddress.ip_address(given))
    except ValueError:
        pass
    try:
        return socket.gethostbyname(given)
    except OSError:
        raise Mistake(f"--address {given}: it is neither an address nor a name that is known here") from None


def _routed_to(host: str) -> str | None:
    """This machine's address on the way there. Nothing is sent: connecting a datagram socket only routes."""
    for family, address in _resolved(host):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 9))
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None


def _resolved(host: str) -> Iterator[tuple[int, str]]:
    try:
        answers = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_DGRAM)
    except OSError:
        return
    for family, _, _, _, address in answers:
        yield family, str(address[0])
