"""The same job over ssh: real hosts and the system's ssh; the run depends on no connection."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fleet.jobs import commands_on, left_on, losses, newest, packtrain, wait_until_all_left, write_job, write_program
from packtrain.fleet import fleet_of
from packtrain.fleet.host import Host
from packtrain.fleet.mpi import MpiFleet, MpiSettings
from packtrain.fleet.remote import Remote, Unreachable, advice, split_destination
from packtrain.fleet.slurm import SlurmFleet, SlurmSettings
from packtrain.fleet.ssh import SshFleet, SshSettings, start_node
from packtrain.launch.check import check
from packtrain.launch.create import create
from packtrain.launch.load import load
from packtrain.pack.build import PlainProgress
from packtrain.run.run import open_run
from packtrain.store import Store, open_store
from parts import hosts
from parts.host_run import bucket_on
from parts.hosts import Network
from parts.runs import new_run, program_job
from parts.s3 import fresh_location
from parts.sandbox import wait_until

CANARY = "canary-of-the-test"


HOSTS = 3


@pytest.fixture
def environment(network: Network, tmp_path: Path) -> dict[str, str]:
    """For a client whose ssh knows the hosts."""
    return {"PATH": network.search_path(), "PACKTRAIN_CACHE": str(tmp_path / "cache")}


def test_a_plan_has_the_ssh_command_for_each_host(directory_store: Store) -> None:
    run = new_run(directory_store)
    plan = SshFleet(SshSettings(hosts=("gpu-a", "me@gpu-b:2222"), python="/opt/python", interface="eth1")).plan(run)
    assert [start.machine for start in plan] == ["gpu-a", "me@gpu-b:2222"]
    words = [*plan[1].arguments]
    assert words[0] == "ssh"
    assert words[-5:-1] == ["-p", "2222", "--", "me@gpu-b"]
    node = ["/opt/python", "-P", "-m", "packtrain", "node", "job-1", "--store", directory_store.url]
    node += ["--store-id", str(run.store.identity), "--code", run.code_digest, "--interface", "eth1"]
    assert shlex.split(words[-1]) == node


def test_ssh_checks_host_keys_and_never_prompts() -> None:
    words = " ".join(Remote("gpu-a").arguments())
    assert "BatchMode=yes" in words
    assert "KnownHosts" not in words
    assert "HostKey" not in words


@pytest.mark.usefixtures("processes")
def test_ssh_takes_no_host_for_an_option(tmp_path: Path) -> None:
    """The job refuses such names; whatever else makes one, ssh does not run its command."""
    with pytest.raises(Unreachable):
        Remote(f"-oProxyCommand=touch {tmp_path}/ran").run(["true"], seconds=20)
    assert not (tmp_path / "ran").exists()


@pytest.mark.usefixtures("processes")
def test_no_secret_is_sent_to_a_host_with_another_packtrain(
    directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ssh").write_text(f"#!/bin/sh\ncat >> {tmp_path}/sent\necho /opt/python\necho 99.0-0123456789ab\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SECRET", CANARY)
    fleet = SshFleet(SshSettings(hosts=("gpu-a",), python="/opt/python"))
    with pytest.raises(Unreachable, match=r"/opt/python has packtrain 99.0-0123456789ab"):
        fleet.usable_hosts(directory_store.url, ["SECRET"])
    assert (tmp_path / "sent").stat().st_size > 0
    assert CANARY.encode() not in (tmp_path / "sent").read_bytes()


def test_a_plan_names_the_variables_and_holds_no_values(s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "canary-of-the-test")
    run = new_run(s3_store, program_job(environment=["SECRET"]))
    [start] = SshFleet(SshSettings(hosts=("gpu-a",))).plan(run)
    assert {"AWS_SECRET_ACCESS_KEY", "SECRET"} <= set(start.variables)
    assert "canary-of-the-test" not in repr(start)
    assert "secret-of-moto" not in repr(start)


def test_keys_of_buckets_stay_here_if_the_store_is_a_directory(
    directory_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "SECRET"):
        monkeypatch.setenv(name, "canary-of-the-test")
    run = new_run(directory_store, program_job(environment=["SECRET"]))
    for fleet in (
        SshFleet(SshSettings(hosts=("a",))),
        MpiFleet(MpiSettings(hosts=("a",))),
        SlurmFleet(SlurmSettings()),
    ):
        assert [start.variables for start in fleet.plan(run)] == [("SECRET",)]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("gpu-a", ("gpu-a", None)),
        ("me@gpu-b:2222", ("me@gpu-b", "2222")),
        ("[fe80::1]:22", ("fe80::1", "22")),
    ],
)
def test_a_host_is_split_into_destination_and_port(name: str, parts: tuple[str, str | None]) -> None:
    assert split_destination(name) == parts


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ("root@x: Permission denied (publickey).", "ssh-copy-id"),
        ("ssh: connect to host x port 22: Connection timed out", "check that it is on"),
        ("kex_exchange_identification: odd", "kex_exchange"),
    ],
)
def test_errors_of_ssh_become_advice(said: str, word: str) -> None:
    assert word in advice("x", said)


@pytest.mark.usefixtures("processes")
def test_the_output_of_a_tied_node_is_kept(
    directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ssh").write_text("#!/bin/sh\necho one; echo 'packtrain: no such interface' >&2; exit 2\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    node = start_node(Host(Remote("gpu-a"), "python"), new_run(directory_store), ["node", "job-1"], {}, tied=True)
    assert node is not None
    wait_until(lambda: node.exit_code() is not None, "the node to end")
    assert (node.exit_code(), node.log.read_text()) == (2, "one\npacktrain: no such interface\n")


def test_three_hosts_finish_with_the_same_losses_as_one_machine(
    network: Network, tmp_path: Path, environment: dict[str, str]
) -> None:
    store = network.shared / "three"  # the pack of the first run is that of the second
    for fleet in ("{local: {machines: 1}, workers: 3}", "{ssh: {hosts: [host1, host2, host3]}, workers: 1}"):
        done = packtrain("run", write_job(tmp_path, store, fleet), directory=tmp_path, environment=environment)
        assert done.returncode == 0, done.stderr + done.stdout
    here, run = (open_run(open_store(str(store)), name) for name in ("small-1", "small-2"))
    wait_until_all_left(run)
    [generation] = run.generations()
    assert {member.address for member in generation.members} == {host.address for host in network}
    assert losses(run) == losses(here)
    assert left_on(network) == []
    for host in network:  # a node that finished deletes its log and its directory
        assert list((host.home / ".cache/packtrain/logs").iterdir()) == []
        assert list((host.home / ".cache/packtrain/nodes").iterdir()) == []


def test_two_hosts_start_without_the_third_and_secrets_reach_them_without_being_visible(
    network: Network, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share a bucket, and no directory. Its keys, and a variable that the job names, come over standard input:
    they are in the environment of the processes that need them, and in no command line and no file."""
    script = (
        "import os, psutil\n"
        "secrets = [os.environ['AWS_SECRET_ACCESS_KEY'], os.environ['SECRET']]\n"
        "lines = [' '.join(one.info['cmdline'] or []) for one in psutil.process_iter(['cmdline'])]\n"
        "seen = [line for line in lines if any(secret in line for secret in secrets)]\n"
        "place = os.environ.get('RANK', '0'), 'of', os.environ.get('WORLD_SIZE', '1')\n"
        "print(*place, [*map(len, secrets)], seen, flush=True)\n"
    )
    with bucket_on(network) as server:
        server.enter(monkeypatch)
        store = fresh_location()
        fleet = "{ssh: {hosts: [host1, host9, host2], machines: 2..3}, workers: 1}"
        job = write_program(tmp_path / "program", store, fleet, script, "environment: [SECRET]")
        done = packtrain("run", job, directory=tmp_path, environment={**environment, "SECRET": CANARY})
        assert done.returncode == 0, done.stderr + done.stdout
        assert "host9 is unavailable (unknown host name; check ~/.ssh/config); the run can start" in done.stdout
        assert "host9 is unavailable (unknown host name; check ~/.ssh/config); continuing" in done.stdout
        run = newest(store)
        wait_until_all_left(run)
        secrets = (server.secret_key, CANARY)
        words = sorted(line.text for line in run.log_lines().read() if line.rank is not None)
        assert words == [f"{rank} of 2 {[*map(len, secrets)]} []" for rank in range(2)]
        assert left_on(network) == []  # before the bucket goes: the last node may still write the report
        objects = {one.key: run.store.get(one.key) for one in run.store.list("")}
    for secret in secrets:
        assert not [key for key, data in objects.items() if secret in key or secret.encode() in data]
        for place in (tmp_path, network.shared, *(host.home for host in network)):
            assert files_with(place, secret) == []
        for host in network[:2]:
            new = ["find", "/tmp", "/var", "/run", "-xdev", "-type", "f", "-mmin", "-5"]
            assert host.run([*new, "-exec", "grep", "-lF", secret, "{}", "+"]).stdout == "", host.name


def files_with(directory: Path, text: str) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done.stderr + done.stdout
    assert done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr


def test_hosts_are_checked_before_the_data_is_packed(
    network: Network, tmp_path: Path, environment: dict[str, str]
) -> None:
    job = write_job(tmp_path, network.shared / "early", "{ssh: {hosts: [host1, host9]}, workers: 1}")
    done = packtrain("run", job, directory=tmp_path, environment=environment)
    assert_refused(done, "1 of the 2 hosts", "host9: unknown host name")
    assert list((network.shared / "early").rglob("*.json")) == [], "neither a pack nor a run was made"


def test_a_store_that_hosts_cannot_see_is_refused(
    network: Network, tmp_path: Path, environment: dict[str, str]
) -> None:
    job = write_program(tmp_path / "blind", tmp_path / "here", "{ssh: {hosts: [host1, host2]}}", "")
    done = packtrain("run", job, directory=tmp_path, environment=environment)
    assert_refused(done, "host1, host2: cannot see the store", "mount the same directory")
    assert open_store(str(tmp_path / "here")).list("scratch/") == []


def test_a_changed_host_key_is_refused(tmp_path: Path, environment: dict[str, str]) -> None:
    with hosts.hosts(tmp_path / "hosts", 1) as network:
        [host] = network
        host.kill()
        for name in ("host_key", "host_key.pub"):
            (host.place / "etc" / name).unlink()
        key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(host.place / "etc" / "host_key")]
        subprocess.run(key, check=True)
        host.start()
        path = network.search_path()
        job = write_program(tmp_path / "key", network.shared / "store", "{ssh: {hosts: [host1]}}", "")
        done = packtrain("run", job, directory=tmp_path, environment={**environment, "PATH": path})
        assert_refused(done, "host1: its host key has changed")


def test_nodes_outlive_the_client_and_can_be_listed_and_ended(
    network: Network, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = network.shared / "alive"
    fleet = "{ssh: {hosts: [host1, host2]}, workers: 1}"
    job = write_program(tmp_path / "alive", store, fleet, "import time\ntime.sleep(600)\n")
    done = packtrain("run", job, "--detach", directory=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr + done.stdout
    monkeypatch.setenv("PATH", environment["PATH"])
    run = newest(store)
    kind = fleet_of(run.job.fleet.kind)
    assert [(machine.name, machine.state) for machine in kind.machines(run)] == [
        ("host1", "running"),
        ("host2", "running"),
    ]
    shown = network[0].run(["tmux", "capture-pane", "-p", "-t", f"packtrain-{run.name}"]).stdout
    assert "joined" in shown
    assert kind.down(run) == ["host1", "host2"]
    assert {machine.state for machine in kind.machines(run)} == {"ended"}
    assert kind.down(run) == []  # a second time does nothing
    assert left_on(network) == []


def test_resumes_at_the_same_moment_start_one_node_on_each_host(
    network: Network, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    store = network.shared / "together"
    fleet = "{ssh: {hosts: [host1, host2], machines: 1..2}, workers: 1}"
    job = write_program(tmp_path / "together", store, fleet, "import time\ntime.sleep(600)\n")
    run = create(check(load(job), PlainProgress(lambda _: None)))
    command = [sys.executable, "-m", "packtrain", "resume", run.name, "--store", str(store), "--detach"]
    clients = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [client.communicate()[0] for client in clients]
    assert [client.returncode for client in clients] == [0, 0], said
    wait_until(lambda: any(len(one.members) == 2 for one in run.generations()), "both hosts to take part")
    assert len([line for line in commands_on(network) if f"node {run.name}" in line]) == len(run.leases()) == 2
    # Each host refuses one of them. A client that comes late, on a busy machine, sees that the run is running.
    refused = [words.count("already has its node there") + 2 * words.count("is already running") for words in said]
    assert sum(refused) == 2, said
    assert packtrain("stop", run.name, "--store", store, directory=tmp_path, environment=environment).returncode == 0
    assert left_on(network) == []


def test_tied_nodes_end_with_the_client(network: Network, tmp_path: Path, environment: dict[str, str]) -> None:
    store = network.shared / "tied"
    fleet = "{ssh: {hosts: [host1]}, workers: 1}"
    job = write_program(tmp_path / "tied", store, fleet, "import time\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "packtrain", "run", str(job), "--foreground"]
    client = subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: any(store.glob("runs/counts-1/generations/*.json")), "the first generation")
    finally:
        client.kill()
        client.wait()
    assert left_on(network) == []
    assert newest(store).result() is None  # a machine that has to go only leaves the run


def test_attach_opens_the_tmux_session_of_the_node(network: Network, directory_store: Store) -> None:
    run = new_run(directory_store)
    fleet = SshFleet(SshSettings(hosts=("host1", "root@host2:2222")))
    assert fleet.shell(run, None)[:4] == ("ssh", "-t", "--", "host1")
    assert fleet.shell(run, "host2-0a1b2c3d")[:6] == ("ssh", "-t", "-p", "2222", "--", "root@host2")
    session = ["tmux", "new-session", "-d", "-s", f"packtrain-{run.name}", "sleep 600"]
    assert network[0].run(session).returncode == 0
    command = fleet.shell(run, None)[-1]
    pane = [sys.executable, "-c", f"import pty; pty.spawn(['sh', '-c', {command!r}])"]
    process = network[0].popen(pane, {"TERM": "xterm"}, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        clients = ""
        for _ in range(100):
            clients = network[0].run(["tmux", "list-clients", "-t", f"packtrain-{run.name}"]).stdout
            if clients:
                break
        assert clients
    finally:
        network[0].run(["tmux", "kill-server"])
        process.kill()
        process.wait()
    assert left_on(network) == []
