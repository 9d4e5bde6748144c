"""Runs under mpirun: the command, its supervisor on a clock that the test moves, and real hosts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from fleet.jobs import COUNTING, commands_on, left_on, newest, packtrain_on, wait_until_all_left, write_program
from packtrain.fleet.mpi import LEAVE_SECONDS, REPLACE_SECONDS, EndPolicy, MpiFleet, MpiSettings
from packtrain.run.checkpoint import committed
from packtrain.run.liveness import LEASE_LOST_SECONDS
from packtrain.run.records import Lease
from packtrain.run.run import Run
from packtrain.store import Store
from parts.hosts import Network
from parts.runs import a_lease, new_run, program_job
from parts.sandbox import kill, wait_until

HOSTS = 3


@pytest.fixture(scope="module")
def network(needs_mpi: None, network: Network) -> Network:
    return network


def test_a_plan_has_the_whole_command_and_names_of_variables_only(
    directory_store: Store, no_aws: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv("SECRET", "canary-of-the-test")
    run = new_run(directory_store, program_job(environment=["SECRET"]))
    [start] = MpiFleet(MpiSettings(hosts=("a", "b"), options=("--mca", "btl_tcp_if_include", "eth1"))).plan(run)
    words = list(start.arguments)
    assert words[0] == "mpirun"
    assert words[words.index("-H") + 1] == "a:1,b:1"
    assert words[words.index("-x") + 1] == "SECRET"
    node = [sys.executable, "-P", "-m", "packtrain", "node", "job-1", "--store", directory_store.url]
    node += ["--store-id", str(run.store.identity), "--code", run.code_digest]
    assert words[-len(node) - 3 :] == ["--mca", "btl_tcp_if_include", "eth1", *node]
    assert ("--allow-run-as-root" in words) == (os.geteuid() == 0)
    assert "canary-of-the-test" not in repr(start)


def test_the_first_hosts_are_used_if_there_are_more_than_machines(directory_store: Store) -> None:
    [start] = MpiFleet(MpiSettings.model_validate({"hosts": ["a", "b", "c"], "machines": 2})).plan(
        new_run(directory_store)
    )
    assert "a:1,b:1" in start.arguments


class Scene:
    """Machines that renew their leases every other second while they work."""

    def __init__(self, least: int, *names: str) -> None:
        self.policy, self.now = EndPolicy(least), 0.0
        self.leases: dict[str, Lease] = {name: a_lease(name) for name in names}
        self.working = set(names)

    def pass_time(self, seconds: float, ended: bool = False) -> str | None:
        """Return the first reason to end mpirun."""
        for _ in range(int(seconds) // 2):
            self.now += 2.0
            for name in self.working:
                self.leases[name] = replace(self.leases[name], renewal=self.leases[name].renewal + 1)
            self.policy.watch.observe(self.leases.values(), self.now)
            if (why := self.policy.why(ended, self.now)) is not None:
                return why
        return None

    def leave(self, name: str) -> None:
        self.working.discard(name)
        self.leases[name] = replace(self.leases[name], left=True)


def test_mpirun_keeps_running_while_enough_machines_work() -> None:
    assert Scene(2, "a", "b").pass_time(600) is None


def test_a_run_that_can_do_without_a_lost_machine_continues() -> None:
    scene = Scene(1, "a", "b")
    scene.pass_time(10)
    scene.working.remove("b")
    assert scene.pass_time(600) is None
    scene.leave("a")
    assert scene.pass_time(LEAVE_SECONDS + 4, ended=True) == "the run has ended"


def test_mpirun_ends_some_time_after_too_few_machines_are_left() -> None:
    scene = Scene(2, "a", "b")
    scene.pass_time(10)
    scene.working.remove("b")
    assert scene.pass_time(LEASE_LOST_SECONDS + REPLACE_SECONDS - 4) is None
    assert scene.pass_time(10) == "only 1 of the 2 machines that the run needs are left"


def test_a_replacement_that_joins_in_time_keeps_mpirun_running() -> None:
    scene = Scene(2, "a", "b")
    scene.pass_time(10)
    scene.leave("b")
    assert scene.pass_time(REPLACE_SECONDS - 4) is None
    scene.leases["c"] = a_lease("c")
    scene.working.add("c")
    assert scene.pass_time(600) is None


def test_old_leases_from_before_the_first_machine_joins_are_ignored() -> None:
    scene = Scene(2, "a", "b")
    scene.working.clear()
    assert scene.pass_time(600) is None


def supervisor(store: Store, code: str) -> subprocess.Popen[str]:
    """A supervisor with a Python script in place of mpirun."""
    run = new_run(store)
    own = ["--run", run.name, "--store", run.store.url, "--least", "1"]
    command = [sys.executable, "-m", "packtrain.fleet.mpi", *own, "--", sys.executable, "-c", code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_supervisor_forwards_signals_and_returns_the_exit_code(
    number: signal.Signals, directory_store: Store
) -> None:
    code = (
        "import signal, sys, time\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(7))\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    with supervisor(directory_store, code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        assert process.wait(30) == 7


@pytest.mark.usefixtures("processes")
def test_mpirun_ends_when_its_supervisor_is_killed(directory_store: Store) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with supervisor(directory_store, code) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        process.kill()
        process.wait(30)
    wait_until(lambda: not child.is_running(), "the end of mpirun", 90)


SEEN = """
import psutil
lines = [one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])]
print("seen", [line for line in lines if "canary" in " ".join(line)], flush=True)
"""


def test_a_run_survives_a_host_that_loses_its_power_or_resumes_when_it_is_back(network: Network) -> None:
    """A run that can do without the host finishes on the other, and no process is left. One that needs both ends, and
    finishes after a resume when the host is back. The client is a third host, whose ssh knows the other two."""
    alone, both = network.shared / "alone", network.shared / "both"

    def begin(store: Path, machines: str) -> int:
        fleet = f"{{mpi: {{hosts: [host2, host3], machines: {machines}}}, workers: 1}}"
        script, more = SEEN + COUNTING.replace("LAST", "100000"), "checkpoint: {every: 1 s}\nenvironment: [SECRET]"
        job = write_program(network.shared / f"{store.name}-job", store, fleet, script, more)
        return packtrain_on(network[0], "run", job, "--detach", SECRET="canary").returncode

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(begin, (alone, both), ("1..2", "2"))) == [0, 0]
    wait_until(lambda: committed(newest(alone)), "a commit")
    wait_until(lambda: committed(newest(both)), "a commit")
    network[2].kill()
    wait_until(newest(alone).result, "the run that can do without it")
    assert [one.cause for one in newest(alone).generations()] == ["start", "machine"]
    assert left_on(network) == [], "the other run cannot continue, and nothing waits for it here"
    assert newest(both).result() is None

    refused = packtrain_on(network[0], "resume", "--store", both, SECRET="canary")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "host3: no answer" in refused.stderr
    network[2].start()
    done = packtrain_on(network[0], "resume", "--store", both, SECRET="canary")
    assert done.returncode == 0, done.stderr + done.stdout
    run = newest(both)
    wait_until_all_left(run)
    assert [one.cause for one in run.generations()] == ["start", "resumed"]
    for generation in run.generations():
        assert {member.address for member in generation.members} == {host.address for host in network[1:]}
    later = [line.text for line in run.log_lines().read() if line.generation == 2 and line.rank is not None]
    seen, said = (sorted(text for text in later if text.startswith(word)) for word in ("seen", "rank"))
    assert len(later) == 4
    assert seen == ["seen []", "seen []"]
    for rank, text in enumerate(said):
        assert re.fullmatch(rf"rank {rank} of 2 from [1-9]\d* canary", text)
    assert left_on(network) == []


def long_run(network: Network, name: str) -> Run:
    """A run that does not end by itself, once its workers have been started."""
    fleet = "{mpi: {hosts: [host2, host3]}, workers: 1}"
    job = write_program(network.shared / f"{name}-job", network.shared / name, fleet, "import time\ntime.sleep(600)\n")
    assert packtrain_on(network[0], "run", job, "--detach").returncode == 0
    run = newest(network.shared / name)
    wait_until(run.generations, "the first generation")
    return run


def test_nodes_end_with_mpirun(network: Network) -> None:
    run = long_run(network, "alive")
    code = (
        "import sys\n"
        "from packtrain.fleet import fleet_of\n"
        "from packtrain.run.run import open_run\n"
        "from packtrain.store import open_store\n"
        "run = open_run(open_store(sys.argv[1]), None)\n"
        "fleet = fleet_of(run.job.fleet.kind)\n"
        "print([machine.state for machine in fleet.machines(run)])\n"
        "fleet.end(run)\n"
        "print([machine.state for machine in fleet.machines(run)])\n"
    )
    done = network[0].run([sys.executable, "-c", code, run.store.url])
    assert done.stdout.splitlines() == ["['running', 'running']", "['ended', 'ended']"], done.stderr
    assert left_on(network) == []


def test_nodes_leave_at_once_when_mpirun_is_killed(network: Network) -> None:
    """Its daemons alone would let them train for a minute. The last test: the daemons stay for two."""
    run = long_run(network, "killed")
    [mpirun] = [process for process in network[0].processes() if "mpirun" in process.cmdline()[0]]
    kill([mpirun])
    wait_until(lambda: all(lease.left for lease in run.leases()), "the nodes to leave", 30)
    wait_until(lambda: not any("packtrain" in one and "orted" not in one for one in commands_on(network)), "their end")
    assert not any(one.startswith("/usr/bin/ssh") for one in commands_on(network)), "connections are closed"
    assert run.result() is None, "the run can be resumed"
