"""The same job under mpirun: one agent on each host, started over ssh."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from fleet.places import COUNTING, left_on, newest, packtrain_on, wait_until, wait_until_all_left, write_program
from packtrain.checkpoint import committed
from packtrain.fleet.mpi import MpiFleet
from packtrain.places import Mpi
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
    [start] = MpiFleet(Mpi(hosts=("a", "b"), options=("--mca", "btl_tcp_if_include", "eth1"))).plan(run)
    words = list(start.arguments)
    assert words[0] == "mpirun"
    assert words[words.index("-H") + 1] == "a:1,b:1"
    assert words[words.index("-x") + 1] == "SECRET"
    node = [sys.executable, "-m", "packtrain", "node", "job-1", "--store", directory_store.url]
    assert words[-len(node) - 3 :] == ["--mca", "btl_tcp_if_include", "eth1", *node]
    assert ("--allow-run-as-root" in words) == (os.geteuid() == 0)
    assert "canary-of-the-test" not in repr(start)


def test_fewer_machines_than_hosts_are_the_first_of_them(directory_store: Store) -> None:
    [start] = MpiFleet(Mpi.model_validate({"hosts": ["a", "b", "c"], "machines": 2})).plan(new_run(directory_store))
    assert "a:1,b:1" in start.arguments


def test_two_hosts_reach_the_goal(network: Network) -> None:
    """The client is a third host, whose ssh knows the other two."""
    store = network.shared / "two"
    script = (
        "import os, psutil\n"
        "seen = [p.cmdline() for p in psutil.process_iter() if 'canary' in ' '.join(p.cmdline())]\n"
        "print(os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], os.environ['SECRET'], seen, flush=True)\n"
    )
    fleet = "{mpi: {hosts: [host2, host3]}, workers: 1}"
    job = write_program(network.shared / "job", store, fleet, script, "environment: [SECRET]")
    done = packtrain_on(network[0], "run", job, SECRET="canary")
    assert done.returncode == 0, done.stderr + done.stdout
    run = newest(store)
    wait_until_all_left(run)
    assert sorted(line.text for line in run.log_lines().read() if line.rank is not None) == [
        "0 of 2 canary []",
        "1 of 2 canary []",
    ]
    [generation] = run.generations()
    assert {member.address for member in generation.members} == {host.address for host in network[1:]}
    assert left_on(network) == []


def test_a_host_that_loses_its_power_is_done_without_or_waited_for(network: Network) -> None:
    """mpirun would wait for it as if it were there: the run goes on with the other, and then nothing is left."""
    alone, both = network.shared / "alone", network.shared / "both"
    for store, machines in ((alone, "1..2"), (both, "2")):
        fleet = f"{{mpi: {{hosts: [host2, host3], machines: {machines}}}, workers: 1}}"
        script = COUNTING.replace("LAST", "100000")
        job = write_program(network.shared / f"{store.name}-job", store, fleet, script, "checkpoint: {every: 1 s}")
        assert packtrain_on(network[0], "run", job, "--detach").returncode == 0
    for store in (alone, both):
        wait_until(lambda store=store: committed(newest(store)), "a commit")
    network[2].kill()
    wait_until(newest(alone).result, "the run that can do without it")
    assert [one.cause for one in newest(alone).generations()] == ["start", "machine"]
    assert left_on(network) == [], "the other run cannot go on, and waits for nobody here"
    assert newest(both).result() is None

    refused = packtrain_on(network[0], "resume", "--store", both)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "host3: it does not answer" in refused.stderr
    network[2].start()
    done = packtrain_on(network[0], "resume", "--store", both)
    assert done.returncode == 0, done.stderr + done.stdout
    wait_until_all_left(newest(both))
    assert [one.cause for one in newest(both).generations()] == ["start", "resumed"]
    later = [line.text for line in newest(both).log_lines().read() if line.generation == 2 and line.rank is not None]
    assert later
    assert not [text for text in later if "from 0" in text]
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
        "from packtrain.runs import open_run\n"
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
