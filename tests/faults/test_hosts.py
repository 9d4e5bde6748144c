"""Hosts that lose power, network or the right time, compared with an uninterrupted run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from packtrain.run.checkpoint import committed
from parts import hosts
from parts.host_run import HostRun, bucket_on, make_host_run, wrong_clock
from parts.hosts import Network
from parts.s3 import fresh_location
from parts.sandbox import STEPS, Sandbox, assert_same_samples, history, weights


@pytest.fixture(scope="module")
def scenes(
    needs_hosts: None, needs_cc: None, tmp_path_factory: pytest.TempPathFactory, uninterrupted: Sandbox
) -> Iterator[dict[str, Future[None]]]:
    """All scenes run at the same time, each on a network of its own: they mostly wait."""

    def play(scene: Callable[[Network, Sandbox], None]) -> None:
        with hosts.hosts(tmp_path_factory.mktemp("hosts"), 2) as network:
            scene(network, uninterrupted)

    with ThreadPoolExecutor(2) as pool:
        yield {scene.__name__: pool.submit(play, scene) for scene in (halves, cut_off)}


def test_a_network_split_and_a_power_cut_with_a_wrong_clock(
    scenes: dict[str, Future[None]],
) -> None:
    scenes["halves"].result()


def test_a_first_machine_that_is_cut_off_rejoins_as_a_new_one(scenes: dict[str, Future[None]]) -> None:
    scenes["cut_off"].result()


def halves(network: Network, uninterrupted: Sandbox) -> None:
    """Only steps since the last commit are lost, and there is one line of commits."""
    field = make_host_run(network, str(network.shared / "store"), ["train.patience=8 s"], {})
    first, second = network
    field.pace(0.1)
    field.start(first)
    field.start(second, **wrong_clock(1, network.shared))
    field.wait_for_commit(20)
    assert field.members() == ["host1", "host2"]
    split_for_less_than_their_patience(field)
    split_for_more_than_their_patience(field)

    card = Path(f"/sys/class/net/{network.bridge}/address")
    before = card.read_text()
    first.kill()
    assert card.read_text() == before, "the others would send to an address that nobody has"
    field.wait_for(lambda: field.told("lost"), "the other to notice")
    first.start()
    field.start(first)
    field.pace(0)
    assert field.wait_for_result() == "finished"
    assert field.causes() == ["start", "hang", "machine"]
    assert field.culprits() == [None, None, "host1"], "a split is nobody's fault, a power cut not the other's"
    assert history(field.run) == history(uninterrupted.run())
    assert weights(field.run) == weights(uninterrupted.run())
    assert_one_line(field)
    field.assert_nodes_ended_well()
    field.assert_nothing_left()
    times = {event.time > time.time() + 1800 for event in field.run.events().read()}
    assert times == {True, False}, "the clocks were an hour apart"


def split_for_less_than_their_patience(field: HostRun) -> None:
    """They stall and continue."""
    first, second = field.network
    first.cut(second)
    time.sleep(2)
    second.restore()
    field.wait_for_commit(40)
    assert field.causes() == ["start"], "both still renewed their leases"


def split_for_more_than_their_patience(field: HostRun) -> None:
    """Both reach the store, so both count as alive: they start together again, and wait for each other."""
    first, second = field.network
    first.cut(second)
    field.wait_for(lambda: field.causes() == ["start", "hang"], "the workers to be taken for hanging")
    before = committed(field.run)
    renewals = {lease.node: lease.renewal for lease in field.run.leases()}
    field.wait_for(
        lambda: all(lease.renewal >= renewals.get(lease.node, 0) + 4 for lease in field.run.leases()),
        "both to renew their leases a few times",
    )
    assert committed(field.run) == before, "neither goes on alone"
    second.restore()
    field.wait_for_commit(60, generation=2)
    assert field.causes() == ["start", "hang"]


def assert_one_line(field: HostRun) -> None:
    """Later generations resumed from what was seen to be committed."""
    starts = {point.generation: point.step for point in field.run.points().read() if point.kind == "start"}
    for name, generation in field.seen.items():
        later = [step for number, step in starts.items() if number > generation]
        assert all(int(name.partition("-")[0]) <= step for step in later), f"{name} is of no line that survived"


def cut_off(network: Network, uninterrupted: Sandbox) -> None:
    """The other continues alone, one line of commits survives, and the first joins again like a new machine."""
    first, second = network
    with bucket_on(network) as server, pytest.MonkeyPatch.context() as monkeypatch:
        server.enter(monkeypatch)
        settings = ["fleet={local: {machines: 1..2}, workers: 1}"]
        field = make_host_run(network, fresh_location(), settings, server.environment())
        field.pace(0.1)
        field.start(first)
        field.start(second)
        field.wait_for_commit(20)
        assert field.members() == ["host1", "host2"]
        first.cut()
        field.wait_for(lambda: field.members() == ["host2"], "the other to go on alone")
        field.wait_for_commit(40, generation=2)
        field.pace(2)
        first.restore()
        field.wait_for(lambda: len(field.members()) == 2, "the first to be taken in again")
        field.pace(0)
        assert field.wait_for_result() == "finished"
        assert field.causes() == ["start", "machine", "joined"]
        assert [step for step, _ in history(field.run)] == list(range(1, STEPS + 1))
        assert_same_samples(uninterrupted, field.run)
        assert_one_line(field)
        field.assert_nodes_ended_well()
        field.assert_nothing_left()
