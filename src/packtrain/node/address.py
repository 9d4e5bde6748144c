"""The address at which other machines reach this one.

Collectives are neither encrypted nor authenticated, so it is a private address unless the job says otherwise.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from packtrain.errors import Mistake

LOOPBACK = "127.0.0.1"
_ELSEWHERE = "198.51.100.1"  # reserved for documentation, so nobody has a special route to it: finds the default route
_SHARED = ipaddress.ip_network("100.64.0.0/10")  # carrier-grade NAT; overlay networks such as Tailscale use it, too


def choose_address(
    given: str | None, interface: str | None, alone: bool, store_endpoint: str | None, others: Sequence[str] = ()
) -> str:
    """Return the address to register: as given, or a private one of an interface that leads to other machines.

    That is the interface on the route to `others` of the run, to the store, or to the internet; then any. Bridges
    inside this machine, such as docker0, lead to no other machine. A machine that is alone in its run needs no network.
    """
    if given is not None and interface is not None:
        raise Mistake("--address and --interface: give only one of them")
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
        return LOOPBACK  # the whole run is on this machine
    routed = [_routed_to(host) for host in (*others, urlsplit(store_endpoint or "").hostname, _ELSEWHERE) if host]
    leading = [address for address in routed if address in outward]
    private = [address for address in (*leading, *outward) if is_private(address)]
    return next(iter([*private, *leading, *outward]), LOOPBACK)


def ssh_address(environment: Mapping[str, str]) -> str | None:
    """Return the address at which ssh reached this machine, if other machines can use it, too.

    None for IPv6 and loopback, which other machines do not use, and for public addresses, which the node refuses.
    """
    parts = environment.get("SSH_CONNECTION", "").split()  # client address and port, server address and port
    if len(parts) != 4 or ":" in parts[2] or parts[2].startswith("127.") or not is_private(parts[2]):
        return None
    return parts[2]


def check_private(address: str, public_address: bool) -> None:
    if not public_address and not is_private(address):
        raise Mistake(
            f"{address} is a public address, and collectives are not protected; set `fleet.public_address: true` if "
            "the network between the machines is safe, or tunnel it (docs/reliability.md)"
        )


def is_private(address: str) -> bool:
    number = ipaddress.ip_address(address)
    return number.is_private or number.is_loopback or number.is_link_local or number in _SHARED


def is_inner_bridge(interface: str, devices: Path = Path("/sys/class/net")) -> bool:
    """True for a bridge without a network card among its ports: for containers and VMs on this machine."""
    ports = devices / interface / "brif"
    if not (devices / interface / "bridge").exists():
        return False
    return not any((devices / port.name / "device").exists() for port in ports.iterdir())


def interface_addresses() -> Mapping[str, list[str]]:
    """Return the IPv4 addresses of each interface that is up."""
    up = {name for name, status in psutil.net_if_stats().items() if status.isup}
    return {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
        if name in up
    }


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with that address."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None


def _address_on(interface: str) -> str:
    known = interface_addresses()
    if interface not in known:
        raise Mistake(f"--interface {interface}: no such interface is up; available: {', '.join(known)}")
    if not known[interface]:
        raise Mistake(f"--interface {interface}: it has no IPv4 address")
    return known[interface][0]


def _number_of(given: str) -> str:
    with suppress(ValueError):
        return str(ipaddress.ip_address(given))
    try:
        return socket.gethostbyname(given)
    except OSError:
        raise Mistake(f"--address {given}: not an IP address, and the name cannot be resolved") from None


def _routed_to(host: str) -> str | None:
    """Return this machine's address on the way to the host. Connecting a datagram socket routes, but sends nothing."""
    with suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, 9, socket.AF_INET, socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return None
