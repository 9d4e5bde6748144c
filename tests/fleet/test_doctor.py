"""What works from here, tried on hosts that work, and on one that does not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from fleet.places import left_on, packtrain, write_program
from packtrain.errors import Mistake
from packtrain.fleet import link_probe as exchange
from packtrain.fleet.doctor import CLOCK_SECONDS, DISK_BYTES, Seen, Site, _look, _seen, judged
from packtrain.fleet.facts import Facts, identity
from packtrain.fleet.remote import Unreachable
from packtrain.store import Store
from parts import hosts
from parts.hosts import Network
from parts.presence import need

RIGHT = Facts("gpu-a", "10.0.0.1", "/p", "3.11.7", identity(), True, 0, 10 * DISK_BYTES, 1000.0, "", True)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    need(hosts.missing() is None, str(hosts.missing()))
    with hosts.hosts(tmp_path_factory.mktemp("hosts"), 2) as network:
        yield network


def test_a_machine_with_nothing_wrong_passes_every_step() -> None:
    checks = judged("gpu-a", Seen(RIGHT, 0.0), "/store")
    assert [check.step for check in checks] == ["python", "disk", "clock", "store", "put-if-absent"]
    assert all(check.ok and not check.advice for check in checks)


@pytest.mark.parametrize(
    ("facts", "offset", "step", "advice"),
    [
        (replace(RIGHT, identity="0.0.9-abc"), 0.0, "python", "install"),
        (replace(RIGHT, torch=False), 0.0, "python", "packtrain[train]"),
        (replace(RIGHT, free_bytes=DISK_BYTES - 1), 0.0, "disk", "make room"),
        (RIGHT, CLOCK_SECONDS + 1, "clock", "chrony"),
        (RIGHT, -CLOCK_SECONDS - 1, "clock", "chrony"),
        (replace(RIGHT, store="no such object", put_if_absent=None), 0.0, "store", "mount the same directory"),
        (replace(RIGHT, put_if_absent=False), 0.0, "put-if-absent", "use another store"),
    ],
)
def test_what_is_wrong_is_told_with_what_to_do(facts: Facts, offset: float, step: str, advice: str) -> None:
    [failed] = [check for check in judged("gpu-a", Seen(facts, offset), "/store") if not check.ok]
    assert failed.step == step
    assert advice in failed.advice


@pytest.mark.parametrize(("asked", "answered", "offset"), [(990, 1010, 0), (1600, 1700, -600), (400, 500, 500)])
def test_a_clock_is_off_by_what_the_question_cannot_explain(asked: float, answered: float, offset: float) -> None:
    assert _seen(RIGHT, asked, answered).offset_seconds == offset


@dataclass
class Elsewhere(Site):
    """A site whose Python is as the test says."""

    found: str | None
    fault: Unreachable | None = None
    name: str = "gpu-a"

    def python(self) -> str | None:
        if self.fault is not None:
            raise self.fault
        return self.found

    def run(self, command: Sequence[str], secrets: dict[str, str], seconds: float) -> str:
        raise AssertionError((command, secrets, seconds))


def test_what_a_fresh_host_cannot_try_is_said() -> None:
    checks, able = _look(Elsewhere(None), "/store", "key", {})
    assert able == []
    assert [(check.step, check.ok, check.tried) for check in checks] == [
        ("reach", True, True), ("python", False, False), ("disk, clock, store", False, False),
    ]  # fmt: skip
    assert "after the first run" in checks[-1].advice


@pytest.mark.parametrize(("answers", "step"), [(True, "python"), (False, "reach")])
def test_a_wrong_python_is_told_from_a_host_that_is_away(answers: bool, step: str) -> None:
    checks, _ = _look(Elsewhere(None, Unreachable("gpu-a", "/opt/python: not found", answers)), "/store", "key", {})
    assert [check.step for check in checks if not check.ok] == [step]


def test_an_exchange_refuses_a_public_address_as_agents_do(tmp_path: Path) -> None:
    options = ["--store", str(tmp_path), "--key", "k", "--world", "2", "--address", "8.8.8.8"]
    with pytest.raises(Mistake, match="is a public address"):
        exchange.main(options)


def test_an_exchange_listens_on_its_address_and_on_no_other(directory_store: Store) -> None:
    meeting = exchange.meet(directory_store, "k", 0, 1, "127.0.0.1")
    listening = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    assert [place.ip for place in listening if place.port == meeting.port] == ["127.0.0.1"]
    assert json.loads(directory_store.get("k")) == ["127.0.0.1", meeting.port]


def test_two_hosts_pass_and_exchange(network: Network, tmp_path: Path) -> None:
    network[1].rate(200e6)
    try:
        done = packtrain(
            "doctor", "--fleet", "ssh:host1,host2", "--store", network.shared / "store", "--json",
            directory=tmp_path, environment={"PATH": f"{network.ssh_program()}:/usr/bin:/bin"},
        )  # fmt: skip
    finally:
        network[1].rate(None)
    checks = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr + done.stdout
    steps = [check["step"] for check in checks if check["machine"] == "host2"]
    assert steps == ["reach", "python", "disk", "clock", "store", "put-if-absent"]
    [exchange] = [check for check in checks if check["step"] == "exchange"]
    assert exchange["machine"] == "2 machines"
    assert exchange["what"].startswith("gloo: ")
    assert 0.05 < float(exchange["what"].partition("(")[2].split()[0]) < 0.25, exchange  # of the 0.2 Gbit/s of the line
    assert left_on(network) == []
    assert list((network.shared / "store").glob("scratch/*")) == []


def test_a_job_with_a_blind_and_an_absent_host_fails_with_advice(network: Network, tmp_path: Path) -> None:
    job = write_program(tmp_path / "job", tmp_path / "store", "{ssh: {hosts: [host1, host9]}}", "")
    environment = {"PATH": f"{network.ssh_program()}:/usr/bin:/bin"}
    done = packtrain("doctor", "--fleet", job, directory=tmp_path, environment=environment)
    assert done.returncode == 2
    for word in ("host9", "not", "known", "mount", "directory"):
        assert word in done.stdout


def test_without_the_programs_of_a_fleet_no_machine_is_tried(tmp_path: Path) -> None:
    job = write_program(tmp_path / "job", tmp_path / "store", "{slurm: {machines: 2}}", "")
    environment = {"PATH": str(tmp_path / "empty")}
    done = packtrain("doctor", "--fleet", job, "--json", directory=tmp_path, environment=environment)
    assert done.returncode == 2, done.stderr
    checks = json.loads(done.stdout)
    assert [(check["step"], check["tried"]) for check in checks] == [
        ("sbatch", True), ("squeue", True), ("srun", True), ("reach", False),
    ]  # fmt: skip
    assert not any(check["ok"] for check in checks)


def test_a_fleet_that_is_not_one_is_refused(tmp_path: Path) -> None:
    done = packtrain("doctor", "--fleet", "shh:a", directory=tmp_path, environment={})
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "ssh:host,host" in done.stderr
