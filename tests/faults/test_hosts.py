"""Hosts that lose their power, their network, or the right time, each compared with a run that nothing happened to."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from parts import hosts
from parts.fields import bucket_on, make_field, wrong_clock
from parts.hosts import Network
from parts.places import STEPS, Place, assert_same_samples, history, weights
from parts.presence import need
from parts.s3 import fresh_location


@pytest.fixture
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    missing = hosts.missing()
    need(missing is None, str(missing))
    with hosts.hosts(tmp_path_factory.mktemp("hosts"), 2) as made:
        yield made


def test_the_first_loses_its_power_beside_one_whose_clock_is_wrong(network: Network, uninterrupted: Place) -> None:
    """Before that they cannot reach each other for a while, and stall. Nothing is lost but steps since the commit."""
    field = make_field(network, str(network.shared / "store"), [], {"PACE": "0.02"})
    first, second = network
    field.start(first)
    field.start(second, **wrong_clock(1, network.shared))
    field.wait_for_commit(20)
    assert field.members() == ["host1", "host2"]
    first.cut(second)
    time.sleep(5)
    assert field.causes() == ["start"], "both still renew their leases"
    second.restore()
    field.wait_for_commit(40)
    assert field.causes() == ["start"]

    first.kill()
    field.wait_for(lambda: field.told("lost"), "the other to notice")
    first.start()
    field.start(first)
    assert field.wait_for_result() == "finished"
    assert field.causes() == ["start", "machine"]
    assert history(field.run) == history(uninterrupted.run())
    assert weights(field.run) == weights(uninterrupted.run())
    field.assert_agents_ended_well()
    field.assert_nothing_left()
    times = {event.time > time.time() + 1800 for event in field.run.events().read()}
    assert times == {True, False}, "the clocks were an hour apart"


def test_the_first_is_cut_off_and_comes_back(
    network: Network, uninterrupted: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other goes on alone, one line of commits survives, and the first is taken in again as a new machine is."""
    first, second = network
    with bucket_on(network) as server:
        server.enter(monkeypatch)
        settings = ["fleet={local: {machines: 1..2}, workers: 1}"]
        field = make_field(network, fresh_location(), settings, {"PACE": "0.4", **server.environment()})
        field.start(first)
        field.start(second)
        field.wait_for_commit(20)
        assert field.members() == ["host1", "host2"]
        first.cut()
        field.wait_for(lambda: field.members() == ["host2"], "the other to go on alone")
        field.wait_for_commit(40, generation=2)
        first.restore()
        field.wait_for(lambda: len(field.members()) == 2, "the first to be taken in again")
        assert field.wait_for_result() == "finished"
        assert field.causes() == ["start", "machine", "joined"]
        assert [step for step, _ in history(field.run)] == list(range(1, STEPS + 1))
        assert_same_samples(uninterrupted, field.run)
        starts = {point.generation: point.step for point in field.run.points().read() if point.kind == "start"}
        for name, generation in field.seen.items():
            later = [step for number, step in starts.items() if number > generation]
            assert all(int(name.partition("-")[0]) <= step for step in later), f"{name} is of no line that survived"
        field.assert_agents_ended_well()
        field.assert_nothing_left()
