"""The same job under mpirun: one agent on each host, started over ssh."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fleet.places import COUNTING, left_on, newest, packtrain_on, wait_until, wait_until_all_left, write_program
from packtrain.fleet.mpi import MpiFleet, MpiSettings
from packtrain.run.checkpoint import committed
from packtrain.store import Store
from parts import hosts, mpi
from parts.hosts import Network
from parts.presence import need
from parts.runs import new_run, program_job


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    need(hosts.missing() is None, str(hosts.missing()))
    need(mpi.missing() is None, str(mpi.missing()))
    with hosts.hosts(tmp_path_factory.mktemp("hosts"), 3) as network:
        yield network


def test_a_plan_is_the_whole_command_with_names_of_variables(
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
    node = [sys.executable, "-m", "packtrain", "node", "job-1", "--store", directory_store.url]
    assert words[-len(node) - 3 :] == ["--mca", "btl_tcp_if_include", "eth1", *node]
    assert ("--allow-run-as-root" in words) == (os.geteuid() == 0)
    assert "canary-of-the-test" not in repr(start)


def test_fewer_machines_than_hosts_are_the_first_of_them(directory_store: Store) -> None:
    [start] = MpiFleet(MpiSettings.model_validate({"hosts": ["a", "b", "c"], "machines": 2})).plan(
        new_run(directory_store)
    )
    assert "a:1,b:1" in start.arguments


SEEN = """
import psutil
print("seen", [p.cmdline() for p in psutil.process_iter() if "canary" in " ".join(p.cmdline())], flush=True)
"""


def test_a_host_that_loses_its_power_is_done_without_or_waited_for(network: Network) -> None:
    """mpirun would wait for it as if it were there: the run goes on with the other, and then nothing is left. Where
    both are needed, both reach the goal when it is back. The client is a third host, whose ssh knows the other two."""
    alone, both = network.shared / "alone", network.shared / "both"

    def begin(store: Path, machines: str) -> int:
        fleet = f"{{mpi: {{hosts: [host2, host3], machines: {machines}}}, workers: 1}}"
        script, more = SEEN + COUNTING.replace("LAST", "100000"), "checkpoint: {every: 1 s}\nenvironment: [SECRET]"
        job = write_program(network.shared / f"{store.name}-job", store, fleet, script, more)
        return packtrain_on(network[0], "run", job, "--detach", SECRET="canary").returncode

    with ThreadPoolExecutor(2) as at_once:
        assert list(at_once.map(begin, (alone, both), ("1..2", "2"))) == [0, 0]
    for store in (alone, both):
        wait_until(lambda store=store: committed(newest(store)), "a commit")
    network[2].kill()
    wait_until(newest(alone).result, "the run that can do without it")
    assert [one.cause for one in newest(alone).generations()] == ["start", "machine"]
    assert left_on(network) == [], "the other run cannot go on, and waits for nobody here"
    assert newest(both).result() is None

    refused = packtrain_on(network[0], "resume", "--store", both, SECRET="canary")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "host3: it does not answer" in refused.stderr
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


def test_agents_end_with_mpirun(network: Network) -> None:
    store = network.shared / "alive"
    fleet = "{mpi: {hosts: [host2, host3]}, workers: 1}"
    job = write_program(network.shared / "long", store, fleet, "import time\ntime.sleep(600)\n")
    assert packtrain_on(network[0], "run", job, "--detach").returncode == 0
    run = newest(store)
    wait_until(run.generations, "the first generation")
    code = (
        "import sys\n"
        "from packtrain.fleet import fleet_of\n"
        "from packtrain.run.run import open_run\n"
        "from packtrain.store import open_store\n"
        "run = open_run(open_store(sys.argv[1]), None)\n"
        "fleet = fleet_of(run.job.fleet.kind)\n"
        "print([machine.state for machine in fleet.list(run)])\n"
        "fleet.end(run)\n"
        "print([machine.state for machine in fleet.list(run)])\n"
    )
    done = network[0].run([sys.executable, "-c", code, str(store)])
    assert done.stdout.splitlines() == ["['running', 'running']", "['ended', 'ended']"], done.stderr
    assert left_on(network) == []
