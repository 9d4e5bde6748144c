from __future__ import annotations

from pathlib import Path

import pytest

from packtrain.errors import Mistake
from packtrain.node import address as address_module
from packtrain.node.address import check_private, choose_address, is_inner_bridge, is_private


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
    ],
)
def test_what_is_private(address: str, private: bool) -> None:
    assert is_private(address) is private


def test_a_public_address_is_refused_unless_the_job_allows_it() -> None:
    with pytest.raises(Mistake, match=r"93.184.216.34 is a public address.*fleet.public_address"):
        check_private("93.184.216.34", public_address=False)
    check_private("93.184.216.34", public_address=True)
    check_private("10.0.0.5", public_address=False)


@pytest.mark.usefixtures("interfaces")
def test_a_machine_alone_needs_no_network() -> None:
    assert choose_address(None, None, True, None) == "127.0.0.1"


@pytest.mark.usefixtures("interfaces")
def test_among_others_it_takes_the_first_private_one() -> None:
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
def test_it_takes_the_interface_that_leads_to_others(
    others: tuple[str, ...], endpoint: str | None, chosen: str
) -> None:
    assert choose_address(None, None, False, endpoint, others) == chosen


def test_a_bridge_is_taken_when_it_is_named_and_never_by_itself(
    interfaces: dict[str, list[str]], ways: dict[str, str]
) -> None:
    assert choose_address(None, "docker0", False, None) == "172.17.0.1"
    ways.clear()
    assert choose_address(None, None, False, None) == "10.0.0.5"
    del interfaces["eth0"], interfaces["ib0"]
    assert choose_address(None, None, False, None) == "127.0.0.1"


def test_a_bridge_with_a_network_card_is_a_way_out(tmp_path: Path) -> None:
    for bridge, port, card in (("br0", "eno1", True), ("docker0", "veth1", False)):
        (tmp_path / bridge / "bridge").mkdir(parents=True)
        (tmp_path / bridge / "brif" / port).mkdir(parents=True)
        (tmp_path / port / ("device" if card else "queues")).mkdir(parents=True)
    (tmp_path / "virbr0" / "bridge").mkdir(parents=True)
    (tmp_path / "virbr0" / "brif").mkdir()
    inner = {name: is_inner_bridge(name, tmp_path) for name in ("br0", "docker0", "virbr0", "eno1", "veth1")}
    assert inner == {"br0": False, "docker0": True, "virbr0": True, "eno1": False, "veth1": False}


def test_without_a_private_one_the_public_one_is_named_so_that_it_is_refused(interfaces: dict[str, list[str]]) -> None:
    del interfaces["eth0"]
    assert choose_address(None, None, False, None) == "93.184.216.34"


@pytest.mark.usefixtures("interfaces")
def test_a_store_whose_name_is_not_known_shows_nothing() -> None:
    assert choose_address(None, None, False, "http://no-such-host.invalid:9000") == "10.0.0.5"


@pytest.mark.usefixtures("interfaces")
def test_what_is_asked_for_holds() -> None:
    assert choose_address("192.168.7.7", None, False, None) == "192.168.7.7"
    assert choose_address("localhost", None, False, None) == "127.0.0.1"
    assert choose_address(None, "wan0", True, None) == "93.184.216.34"


@pytest.mark.usefixtures("interfaces")
@pytest.mark.parametrize(
    ("address", "interface", "fault"),
    [
        ("10.0.0.5", "eth0", "one of the two"),
        (None, "eth1", "known: lo, wan0, eth0, down0"),
        (None, "down0", "no IPv4 address"),
        ("no-such-host.invalid", None, "neither an address nor a name"),
    ],
)
def test_what_cannot_be_is_refused(address: str | None, interface: str | None, fault: str) -> None:
    with pytest.raises(Mistake, match=fault):
        choose_address(address, interface, False, None)
