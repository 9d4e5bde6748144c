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
_UNPROTECTED = (
    "and collectives are not protected; set `fleet.public_address: true` if the network between the machines is safe, "
    "or tunnel it (docs/fleets.md)"
)
_SHARED = ipaddress.ip_network("100.64.0.0/10")  # carrier-grade NAT; overlay networks such as Tailscale use it, too


def choose_address(
    address: str | None, interface: str | None, alone: bool, store_endpoint: str | None, members: Sequence[str] = ()
) -> str:
    """Return the address to register: as given, or a private one of an interface that leads to other machines.

    That is the interface on the route to other `members` of the run, to the store, or to the internet; then any.
    Bridges inside this machine, such as docker0, lead to no other machine. A machine that is alone in its run needs no
    network.
    """
    if address is not None and interface is not None:
        raise Mistake("--address and --interface: give only one of them")
    if address is not None:
        return _own_number_of(address)
    if interface is not None:
        interfaces = interface_addresses()
        if interface not in interfaces:
            raise Mistake(f"--interface {interface}: no such interface is up; available: {', '.join(interfaces)}")
        if not interfaces[interface]:
            raise Mistake(f"--interface {interface}: it has no IPv4 address")
        return interfaces[interface][0]
    if alone:
        return LOOPBACK
    outward = [
        candidate
        for name, addresses in interface_addresses().items()
        if not is_inner_bridge(name)
        for candidate in addresses
        if not ipaddress.ip_address(candidate).is_loopback
    ]
    if members and all(ipaddress.ip_address(member).is_loopback for member in members):
        return LOOPBACK  # the whole run is on this machine
    routed = [_routed_to(host) for host in (*members, urlsplit(store_endpoint or "").hostname, _ELSEWHERE) if host]
    leading = [candidate for candidate in routed if candidate in outward]
    private = [candidate for candidate in (*leading, *outward) if is_private(candidate)]
    return next(iter([*private, *leading, *outward]), LOOPBACK)


def ssh_address(environment: Mapping[str, str]) -> str | None:
    """Return the address at which ssh reached this machine, if other machines can use it, too.

    None for IPv6 and loopback, which other machines do not use, and for public addresses, which the node refuses.
    """
    words = environment.get("SSH_CONNECTION", "").split()  # client address and port, server address and port
    if len(words) != 4 or ":" in words[2] or words[2].startswith("127.") or not is_private(words[2]):
        return None
    return words[2]


def check_private(address: str, public_address: bool) -> None:
    """Refuse an address at which anyone could talk to the workers, or that is none."""
    try:
        is_any = ipaddress.ip_address(address).is_unspecified  # 0.0.0.0 and ::, which listen on every interface
    except ValueError:
        is_any = True
    if is_any:
        raise Mistake(f"{address!r} is not the address of a machine; name one that other machines can reach")
    if not public_address and not is_private(address):
        raise Mistake(f"{address} is a public address, {_UNPROTECTED}")


def check_own(address: str, public_address: bool) -> None:
    """Refuse an address of this machine that is public, or whose interface makes torch listen on one that is.

    torch is told the interface, and listens on its first address.
    """
    check_private(address, public_address)
    interface = interface_of(address)
    first = next(iter(interface_addresses().get(interface or "", [])), address)
    if not public_address and not is_private(first):
        raise Mistake(f"{first} is a public address of {interface}, like {address}, {_UNPROTECTED}")


def is_private(address: str) -> bool:
    """True for an address that the internet does not route; False for what is none."""
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(number, ipaddress.IPv6Address) and number.ipv4_mapped is not None:
        number = number.ipv4_mapped
    return not number.is_unspecified and (
        number.is_private or number.is_loopback or number.is_link_local or number in _SHARED
    )


def is_inner_bridge(interface: str, devices: Path = Path("/sys/class/net")) -> bool:
    """True for a bridge without a network card among its ports: for containers and VMs on this machine."""
    ports = devices / interface / "brif"
    if not (devices / interface / "bridge").exists():
        return False
    return not any((devices / port.name / "device").exists() for port in ports.iterdir())


def interface_addresses() -> Mapping[str, list[str]]:
    up = {name for name, status in psutil.net_if_stats().items() if status.isup}
    return {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
        if name in up
    }


def interface_of(address: str) -> str | None:
    """Return the name of this machine's network interface with that address."""
    if address.startswith("127."):  # all of these belong to the loopback interface, which lists only one
        address = LOOPBACK
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None


def _own_number_of(address: str) -> str:
    """Return the number of an address of this machine, which may be given by a name."""
    try:
        number = str(ipaddress.ip_address(address))
    except ValueError:
        try:
            number = socket.gethostbyname(address)
        except OSError:
            fault = "not an IP address, and the name cannot be resolved"
            raise Mistake(f"--address {address}: {fault}") from None
    family = socket.AF_INET6 if ":" in number else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((number, 0))
    except OSError:  # the outer address of a router, or a typo: torch would listen on every interface instead
        usable = ", ".join(number for numbers in interface_addresses().values() for number in numbers)
        raise Mistake(f"--address {address}: not an address of this machine; it has {usable}") from None
    return number


def _routed_to(host: str) -> str | None:
    """Return this machine's address on the way to the host. Connecting a datagram socket routes, but sends nothing."""
    with suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, 9, socket.AF_INET, socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return None
