from __future__ import annotations

from pathlib import Path

import pytest

from packtrain.errors import Mistake
from packtrain.node import address as address_module
from packtrain.node.address import check_own, check_private, choose_address, is_inner_bridge, is_private, ssh_address


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    known = {"lo": ["127.0.0.1"], "wan0": ["93.184.216.34"], "eth0": ["10.0.0.5"], "down0": []}
    monkeypatch.setattr(address_module, "interface_addresses", lambda: known)
    return known


@pytest.mark.parametrize(
    ("address", "private"),
    [
        ("10.1.2.3", True),
        ("172.16.0.1", True),
        ("192.168.1.1", True),
        ("127.0.0.1", True),
        ("100.100.1.2", True),
        ("169.254.1.1", True),
        ("93.184.216.34", False),
        ("8.8.8.8", False),
        ("::ffff:8.8.8.8", False),
        ("::ffff:10.1.2.3", True),
        ("0.0.0.0", False),
        ("::", False),
        ("evil.example.org", False),
        ("", False),
    ],
)
def test_private_addresses_are_recognized(address: str, private: bool) -> None:
    assert is_private(address) is private


def test_a_public_address_is_refused_unless_the_job_allows_it() -> None:
    with pytest.raises(Mistake, match=r"93.184.216.34 is a public address.*fleet.public_address"):
        check_private("93.184.216.34", public_address=False)
    check_private("93.184.216.34", public_address=True)
    check_private("10.0.0.5", public_address=False)


@pytest.mark.usefixtures("interfaces")
def test_a_machine_that_is_alone_uses_loopback() -> None:
    assert choose_address(None, None, True, None) == "127.0.0.1"


@pytest.mark.usefixtures("interfaces")
def test_with_other_machines_the_first_private_address_is_chosen() -> None:
    assert choose_address(None, None, False, None) == "10.0.0.5"


@pytest.fixture
def ways(interfaces: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Which of this machine's addresses leads where; docker0 is a bridge that leads to containers alone."""
    interfaces.clear()
    interfaces.update({"lo": ["127.0.0.1"], "docker0": ["172.17.0.1"], "eth0": ["10.0.0.5"], "ib0": ["10.9.0.5"]})
    known = {"172.17.0.2": "172.17.0.1", "10.9.0.7": "10.9.0.5", address_module._ELSEWHERE: "10.0.0.5"}
    monkeypatch.setattr(address_module, "_routed_to", known.get)
    monkeypatch.setattr(address_module, "is_inner_bridge", lambda name: name == "docker0")
    return known


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize(
    ("others", "endpoint", "chosen"),
    [
        ((), None, "10.0.0.5"),  # the way to the rest of the world
        (("10.9.0.7",), None, "10.9.0.5"),  # the way to the others
        ((), "http://10.9.0.7:9000", "10.9.0.5"),  # the way to the store
        ((), "http://172.17.0.2:9000", "10.0.0.5"),  # a store in a container of this machine
        ((), "http://127.0.0.1:9000", "10.0.0.5"),  # one at the end of a tunnel
        (("127.0.0.1",), None, "127.0.0.1"),  # all on this machine
        (("127.0.0.1", "10.9.0.7"), None, "10.9.0.5"),
    ],
)
def test_the_interface_that_leads_to_others_is_chosen(
    others: tuple[str, ...], endpoint: str | None, chosen: str
) -> None:
    assert choose_address(None, None, False, endpoint, others) == chosen


def test_an_inner_bridge_is_used_only_if_named(interfaces: dict[str, list[str]], ways: dict[str, str]) -> None:
    assert choose_address(None, "docker0", False, None) == "172.17.0.1"
    ways.clear()
    assert choose_address(None, None, False, None) == "10.0.0.5"
    del interfaces["eth0"], interfaces["ib0"]
    assert choose_address(None, None, False, None) == "127.0.0.1"


def test_a_bridge_with_a_network_card_is_not_an_inner_bridge(tmp_path: Path) -> None:
    for bridge, port, card in (("br0", "eno1", True), ("docker0", "veth1", False)):
        (tmp_path / bridge / "bridge").mkdir(parents=True)
        (tmp_path / bridge / "brif" / port).mkdir(parents=True)
        (tmp_path / port / ("device" if card else "queues")).mkdir(parents=True)
    (tmp_path / "virbr0" / "bridge").mkdir(parents=True)
    (tmp_path / "virbr0" / "brif").mkdir()
    inner = {name: is_inner_bridge(name, tmp_path) for name in ("br0", "docker0", "virbr0", "eno1", "veth1")}
    assert inner == {"br0": False, "docker0": True, "virbr0": True, "eno1": False, "veth1": False}


def test_without_a_private_address_the_public_one_is_chosen_and_refused_later(
    interfaces: dict[str, list[str]],
) -> None:
    del interfaces["eth0"]
    assert choose_address(None, None, False, None) == "93.184.216.34"


@pytest.mark.usefixtures("interfaces")
def test_a_store_whose_name_cannot_be_resolved_is_ignored() -> None:
    assert choose_address(None, None, False, "http://no-such-host.invalid:9000") == "10.0.0.5"


@pytest.mark.usefixtures("interfaces")
def test_a_given_address_or_interface_is_used() -> None:
    assert choose_address("127.0.0.2", None, False, None) == "127.0.0.2"
    assert choose_address("localhost", None, False, None) == "127.0.0.1"
    assert choose_address(None, "wan0", True, None) == "93.184.216.34"


@pytest.mark.usefixtures("interfaces")
@pytest.mark.parametrize(
    ("address", "interface", "fault"),
    [
        ("10.0.0.5", "eth0", "only one of them"),
        (None, "eth1", "available: lo, wan0, eth0, down0"),
        (None, "down0", "no IPv4 address"),
        ("no-such-host.invalid", None, "not an IP address"),
        ("192.0.2.1", None, "192.0.2.1: not an address of this machine; it has 127.0.0.1, 93.184.216.34, 10.0.0.5"),
    ],
)
def test_an_impossible_choice_is_refused(address: str | None, interface: str | None, fault: str) -> None:
    with pytest.raises(Mistake, match=fault):
        choose_address(address, interface, False, None)


def test_an_address_that_is_none_or_stands_for_every_interface_is_always_refused() -> None:
    for address in ("0.0.0.0", "::", "evil.example.org"):
        with pytest.raises(Mistake, match="not the address of a machine"):
            check_private(address, True)


def test_a_private_address_on_an_interface_that_also_has_a_public_one_is_refused(
    interfaces: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch takes the name of an interface and listens on its first address."""
    interfaces["eth0"] = ["93.184.216.35", "10.0.0.5"]
    monkeypatch.setattr(address_module, "interface_of", lambda _: "eth0")
    with pytest.raises(Mistake, match=r"93.184.216.35 is a public address of eth0, like 10.0.0.5, and collectives"):
        check_own("10.0.0.5", False)
    check_own("10.0.0.5", True)
    interfaces["eth0"].reverse()
    check_own("10.0.0.5", False)


@pytest.mark.parametrize(
    ("connection", "address"),
    [
        ("10.0.0.9 51000 10.0.0.5 22", "10.0.0.5"),
        ("127.0.0.1 51000 127.0.0.1 22", None),
        ("fd00::9 51000 fd00::5 22", None),
        ("8.8.8.8 51000 93.184.216.34 22", None),
        ("", None),
    ],
)
def test_the_address_that_ssh_reached_is_used_if_other_machines_can_use_it(
    connection: str, address: str | None
) -> None:
    assert ssh_address({"SSH_CONNECTION": connection}) == address
    assert ssh_address({}) is None
