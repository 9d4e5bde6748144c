"""A store that often fails and is slow, and then is gone for a while."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from packtrain.node.preemption import POWER_OFF
from packtrain.run.liveness import LEASE_LOST_SECONDS
from parts.mounts import Mounts
from parts.proxy import HANG, PASS, REFUSE, Proxy, no_fault
from parts.s3 import fresh_location
from parts.sandbox import Sandbox, assert_nothing_left, assert_same_samples, make_sandbox, wait_until
from parts.sandbox import history as history_of

Make = Callable[..., Sandbox]
AWAY_SECONDS = 2.5 * LEASE_LOST_SECONDS  # at which a machine whose lease is not renewed would long count as lost


@pytest.fixture
def make(tmp_path: Path, s3_environment: object, s3_proxy: Proxy) -> Iterator[Make]:
    """Sandboxes whose stores are behind a proxy that the test controls."""
    sandboxes = []

    def make(name: str, **extra: str) -> Sandbox:
        (tmp_path / name).mkdir()
        sandboxes.append(make_sandbox(tmp_path / name, fresh_location(), AWS_ENDPOINT_URL=s3_proxy.url, **extra))
        return sandboxes[-1]

    yield make
    for sandbox in sandboxes:
        sandbox.close()


def test_a_run_survives_a_failing_store_and_half_a_minute_without_it(
    make: Make, s3_proxy: Proxy, uninterrupted: Sandbox, tmp_path: Path
) -> None:
    """Training continues, no machine counts as lost, and everything is uploaded afterwards. Only a run whose budget is
    used up meanwhile ends without the store: by itself, and its machines shut down."""
    switched_off = tmp_path / "switched-off"
    path = f"{without_power_off(tmp_path / 'bin', switched_off)}:{os.environ['PATH']}"
    sandbox, short = make("place"), make("short", PATH=path)
    short.pace(1)
    sandbox.pace(0.2)  # so that it is not over before it is slowed
    sandbox.detach()
    every_fifth_request_fails_and_every_fifth_is_slow(s3_proxy)
    sandbox.wait_for_commit()
    sandbox.pace(0.5)
    s3_proxy.fault = no_fault
    short.detach("--set", f"budget={{hours: {15 / 3600}}}", "--set", "fleet.local.power_off=true")
    wait_until(lambda: short.run().latest_generation(), "its machines to find together")

    s3_proxy.fault = lambda *_: REFUSE
    gone = time.time()
    wait_until(lambda: not short.processes(), "the machines without time to end", 60)
    assert switched_off.read_text() == "poweroff\n" * 2
    time.sleep(max(0.0, gone + AWAY_SECONDS - time.time()))
    every_fifth_request_fails_and_every_fifth_is_slow(s3_proxy)
    back = time.time()
    sandbox.pace(0)

    assert sandbox.wait_for_result() == "finished"
    s3_proxy.fault = no_fault
    assert short.run().result() is None, "it has not reached its goal, and could not tell"
    made_meanwhile = [point for point in sandbox.run().points().read() if gone + 5 < point.time < back]
    assert len(made_meanwhile) > 20
    assert [generation.cause for generation in sandbox.run().generations()] == ["start"]
    assert history_of(sandbox.run()) == history_of(uninterrupted.run())
    assert_nothing_left(sandbox)


def test_a_run_survives_that_its_store_is_unmounted_and_mounted_again(
    tmp_path: Path, uninterrupted: Sandbox, mounts: Mounts
) -> None:
    """Training continues, also on a machine that starts meanwhile; nothing is written below the mount point."""
    mounts.mount("disk")
    sandbox = make_sandbox(tmp_path, str(mounts.point / "store"))
    try:
        sandbox.pace(0.2)
        sandbox.detach("--set", "fleet.local.machines=1..2", "--set", "fleet.workers=1")
        sandbox.wait_for_commit()
        name = sandbox.run().name
        mounts.unmount()
        gone = time.time()
        late = sandbox.add_node(name)
        time.sleep(10)
        assert late.poll() is None, "it waits for the store"
        assert list(mounts.point.rglob("*")) == []
        mounts.mount("disk")
        back = time.time()
        sandbox.pace(0)
        assert sandbox.wait_for_result() == "finished"
        assert len([point for point in sandbox.run().points().read() if gone + 2 < point.time < back]) > 20
        assert_same_samples(uninterrupted, sandbox.run())
        assert_nothing_left(sandbox)
    finally:
        sandbox.close()
        mounts.unmount()
    assert list(mounts.point.rglob("*")) == []


def every_fifth_request_fails_and_every_fifth_is_slow(proxy: Proxy) -> None:
    numbers = itertools.count()
    proxy.hang_seconds = 0.5
    proxy.fault = lambda *_: {0: REFUSE, 1: HANG}.get(next(numbers) % 5, PASS)


def without_power_off(directory: Path, switched_off: Path) -> Path:
    """For the front of PATH: a command that writes a line instead of shutting the machine down."""
    directory.mkdir()
    assert POWER_OFF == ("systemctl", "poweroff")
    (directory / "systemctl").write_text(f'#!/bin/sh\necho "$@" >> {switched_off}\n')
    (directory / "systemctl").chmod(0o755)
    return directory
