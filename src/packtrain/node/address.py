"""Where other machines reach this one. What workers say to each other is neither encrypted nor checked, so the
address is a private one unless the job says otherwise."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

import psutil

from packtrain.errors import Mistake

LOOPBACK = "127.0.0.1"
_OPEN = "set `fleet.public_address: true` if the line between the machines is safe, or tunnel it (docs/reliability.md)"


def choose_address(given: str | None, interface: str | None, alone: bool, store_endpoint: str | None) -> str:
    """The address to register: as asked for, or that of the interface that leads to the store, or a private one.

    A machine that is alone in its run needs no other, and so no network.
    """
    if given is not None and interface is not None:
        raise Mistake("--address and --interface: give one of the two")
    if given is not None:
        return _number_of(given)
    if interface is not None:
        return _address_on(interface)
    if alone:
        return LOOPBACK
    found = [address for addresses in interface_addresses().values() for address in addresses]
    routed = _routed_to(store_endpoint) if store_endpoint else None
    if routed is not None and is_private(routed):
        return routed
    outward = [address for address in found if not ipaddress.ip_address(address).is_loopback]
    private = [address for address in outward if is_private(address)]
    return next(iter([*private, *outward]), LOOPBACK)


def check_private(address: str, public_address: bool) -> None:
    if not public_address and not is_private(address):
        raise Mistake(f"{address} is a public address, and collectives are open to whoever reaches it: {_OPEN}")


def is_private(address: str) -> bool:
    number = ipaddress.ip_address(address)
    return number.is_private or number.is_loopback or number.is_link_local or number in _SHARED


_SHARED = ipaddress.ip_network("100.64.0.0/10")  # between carriers and their customers; overlay networks use it too


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


def _routed_to(endpoint: str) -> str | None:
    """This machine's address on the way to the endpoint. Nothing is sent: connecting a datagram socket only routes."""
    host = urlsplit(endpoint).hostname
    for family, address in _resolved(host or ""):
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
