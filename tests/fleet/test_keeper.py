"""When mpirun waits in vain, on a clock that the test moves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from packtrain.fleet.mpi import LEAVE_SECONDS, REPLACE_SECONDS, EndPolicy
from packtrain.run.liveness import LEASE_LOST_SECONDS
from packtrain.run.records import Lease
from packtrain.store import Store
from parts.runs import a_lease, new_run


class Scene:
    """Machines that renew their leases every other second as long as they are at work."""

    def __init__(self, least: int, *names: str) -> None:
        self.policy, self.now = EndPolicy(least), 0.0
        self.nodes: dict[str, Lease] = {name: a_lease(name) for name in names}
        self.at_work = set(names)

    def pass_time(self, seconds: float, ended: bool = False) -> str | None:
        """The first reason to end mpirun."""
        for _ in range(int(seconds) // 2):
            self.now += 2.0
            for name in self.at_work:
                self.nodes[name] = replace(self.nodes[name], renewal=self.nodes[name].renewal + 1)
            self.policy.watch.observe(self.nodes.values(), self.now)
            if (why := self.policy.why(ended, self.now)) is not None:
                return why
        return None

    def leave(self, name: str) -> None:
        self.at_work.discard(name)
        self.nodes[name] = replace(self.nodes[name], left=True)


def test_it_goes_on_as_long_as_machines_work() -> None:
    assert Scene(2, "a", "b").pass_time(600) is None


def test_a_run_that_can_do_without_a_machine_goes_on_without() -> None:
    scene = Scene(1, "a", "b")
    scene.pass_time(10)
    scene.at_work.remove("b")
    assert scene.pass_time(600) is None
    scene.leave("a")
    assert scene.pass_time(LEAVE_SECONDS + 4, ended=True) == "the run has ended"


def test_too_few_machines_are_waited_for_a_little() -> None:
    scene = Scene(2, "a", "b")
    scene.pass_time(10)
    scene.at_work.remove("b")
    assert scene.pass_time(LEASE_LOST_SECONDS + REPLACE_SECONDS - 4) is None
    assert scene.pass_time(10) == "1 of the 2 machines that the run needs are left"


def test_one_that_takes_the_empty_place_in_time_lets_it_go_on() -> None:
    scene = Scene(2, "a", "b")
    scene.pass_time(10)
    scene.leave("b")
    assert scene.pass_time(REPLACE_SECONDS - 4) is None
    scene.nodes["c"] = a_lease("c")
    scene.at_work.add("c")
    assert scene.pass_time(600) is None


def test_before_the_first_machine_nothing_is_too_few() -> None:
    """Leases of an earlier attempt are no machines of this one."""
    scene = Scene(2, "a", "b")
    scene.at_work.clear()
    assert scene.pass_time(600) is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_what_it_holds_gets_its_signals_and_gives_its_exit_code(number: signal.Signals, directory_store: Store) -> None:
    run = new_run(directory_store)
    held = (
        "import signal, sys, time\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(7))\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    own = ["--run", run.name, "--store", run.store.url, "--least", "1"]
    command = [sys.executable, "-m", "packtrain.fleet.mpi", *own, "--", sys.executable, "-c", held]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == "up\n"
        os.kill(keeper.pid, number)
        assert keeper.wait(30) == 7


def test_what_it_holds_ends_with_it(directory_store: Store) -> None:
    run = new_run(directory_store)
    own = ["--run", run.name, "--store", run.store.url, "--least", "1"]
    held = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    command = [sys.executable, "-m", "packtrain.fleet.mpi", *own, "--", sys.executable, "-c", held]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None
        child = int(keeper.stdout.readline())
        keeper.kill()
        keeper.wait(30)
    deadline = time.monotonic() + 90
    while os.path.exists(f"/proc/{child}") and time.monotonic() < deadline:  # noqa: PTH110
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{child}")  # noqa: PTH110
