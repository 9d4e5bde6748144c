"""The checks of doctor: pure judgments, and real hosts of which some do not work."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
import pytest

from fleet.jobs import left_on, packtrain, write_program
from packtrain.errors import Mistake
from packtrain.fleet import link_probe
from packtrain.fleet.doctor import CLOCK_SECONDS, DISK_BYTES, check_target, clock_offset, judge
from packtrain.fleet.facts import Facts
from packtrain.fleet.fleet import Target
from packtrain.fleet.remote import Unreachable
from packtrain.identity import identity
from packtrain.store import Store
from parts.hosts import Network

GOOD = Facts("gpu-a", "10.0.0.1", "/p", "3.11.7", identity(), True, 0, 10 * DISK_BYTES, 1000.0, "", True)


def test_a_machine_in_good_order_passes_every_check() -> None:
    checks = judge("gpu-a", GOOD, 0.0, "/store")
    assert [check.step for check in checks] == ["python", "disk", "clock", "store", "atomic create"]
    assert all(check.ok and not check.advice for check in checks)


@pytest.mark.parametrize(
    ("facts", "offset", "step", "advice"),
    [
        (replace(GOOD, identity="0.0.9-abc"), 0.0, "python", "install"),
        (replace(GOOD, torch=False), 0.0, "python", "torch>="),
        (replace(GOOD, free_bytes=DISK_BYTES - 1), 0.0, "disk", "free some space"),
        (GOOD, CLOCK_SECONDS + 1, "clock", "chrony"),
        (GOOD, -CLOCK_SECONDS - 1, "clock", "chrony"),
        (replace(GOOD, store_error="no such object", atomic_create=None), 0.0, "store", "mount the same directory"),
        (replace(GOOD, atomic_create=False), 0.0, "atomic create", "use another store"),
    ],
)
def test_a_failed_check_says_how_to_fix_it(facts: Facts, offset: float, step: str, advice: str) -> None:
    [failed] = [check for check in judge("gpu-a", facts, offset, "/store") if not check.ok]
    assert failed.step == step
    assert advice in failed.advice


def test_a_machine_for_a_program_needs_no_torch() -> None:
    facts = replace(GOOD, torch=False)
    target = FakeTarget("/opt/python", answer=json.dumps(asdict(facts)))
    checks, usable = check_target(target, "/store", "key", {}, needs_torch=False)
    assert [check.step for check in checks if not check.ok] == ["clock"], "that of these facts stands still"
    assert usable is not None
    assert check_target(target, "/store", "key", {})[1] is None


@pytest.mark.parametrize(("asked", "answered", "offset"), [(990, 1010, 0), (1600, 1700, -600), (400, 500, 500)])
def test_a_clock_is_off_by_what_the_duration_of_the_request_cannot_explain(
    asked: float, answered: float, offset: float
) -> None:
    assert clock_offset(GOOD.time, asked, answered) == offset


@dataclass
class FakeTarget(Target):
    """A target whose Python is as the test says, and whose answer to any command."""

    found: str | None
    fault: Unreachable | None = None
    name: str = "gpu-a"
    answer: str | None = None

    def python(self) -> str | None:
        if self.fault is not None:
            raise self.fault
        return self.found

    def run(self, command: Sequence[str], secrets: dict[str, str], seconds: float) -> str:
        assert self.answer is not None, (command, secrets, seconds)
        return self.answer


def test_checks_that_need_packtrain_on_a_fresh_host_are_skipped() -> None:
    checks, usable = check_target(FakeTarget(None), "/store", "key", {})
    assert usable is None
    assert [(check.step, check.ok, check.skipped) for check in checks] == [
        ("connect", True, False), ("python", False, True), ("disk, clock, store", False, True),
    ]  # fmt: skip
    assert "after the first run" in checks[-1].advice


@pytest.mark.parametrize(("answers", "step"), [(True, "python"), (False, "connect")])
def test_a_wrong_python_and_an_unreachable_host_are_different_failures(answers: bool, step: str) -> None:
    fault = Unreachable("gpu-a", "/opt/python: not found", answers)
    checks, _ = check_target(FakeTarget(None, fault), "/store", "key", {})
    assert [check.step for check in checks if not check.ok] == [step]


@pytest.mark.parametrize(
    ("address", "fault"),
    [("8.8.8.8", "not an address of this machine"), ("0.0.0.0", "not the address of a machine")],
)
def test_the_link_probe_refuses_an_address_as_nodes_do(tmp_path: Path, address: str, fault: str) -> None:
    options = ["--store", str(tmp_path), "--key", "k", "--world", "2", "--address", address]
    with pytest.raises(Mistake, match=fault):
        link_probe.main(options)


def test_the_link_probe_listens_on_its_own_address_only(directory_store: Store) -> None:
    shared = link_probe.rendezvous(directory_store, "k", 0, 1, "127.0.0.1")
    listening = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    assert [place.ip for place in listening if place.port == shared.port] == ["127.0.0.1"]
    assert json.loads(directory_store.get("k")) == ["127.0.0.1", shared.port]


def test_two_good_hosts_pass_every_check_and_their_link_is_measured(network: Network, tmp_path: Path) -> None:
    network[1].rate(200e6)
    try:
        done = packtrain(
            "doctor", "--fleet", "ssh:host1,host2", "--store", network.shared / "store", "--json",
            directory=tmp_path, environment={"PATH": network.search_path()},
        )  # fmt: skip
    finally:
        network[1].rate(None)
    checks = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr + done.stdout
    steps = [check["step"] for check in checks if check["machine"] == "host2"]
    assert steps == ["connect", "python", "disk", "clock", "store", "atomic create"]
    [link] = [check for check in checks if check["step"] == "link probe"]
    assert link["machine"] == "2 machines"
    assert link["detail"].startswith("gloo: ")
    assert 0.05 < float(link["detail"].partition("(")[2].split()[0]) < 0.25, link  # of the 0.2 Gbit/s of the line
    assert left_on(network) == []
    assert list((network.shared / "store").glob("scratch/*")) == []


def test_an_unreachable_host_and_one_without_the_store_fail_with_advice(network: Network, tmp_path: Path) -> None:
    job = write_program(tmp_path / "job", tmp_path / "store", "{ssh: {hosts: [host1, host9]}}", "")
    environment = {"PATH": network.search_path()}
    done = packtrain("doctor", "--fleet", job, directory=tmp_path, environment=environment)
    assert done.returncode == 2
    for word in ("host9", "unknown", "host", "mount", "directory"):
        assert word in done.stdout


@pytest.mark.usefixtures("processes")
def test_no_machine_is_checked_without_the_programs_of_the_fleet(tmp_path: Path) -> None:
    job = write_program(tmp_path / "job", tmp_path / "store", "{slurm: {machines: 2}}", "")
    environment = {"PATH": str(tmp_path / "empty")}
    done = packtrain("doctor", "--fleet", job, "--json", directory=tmp_path, environment=environment)
    assert done.returncode == 2, done.stderr
    checks = json.loads(done.stdout)
    assert [(check["step"], check["skipped"]) for check in checks] == [
        ("sbatch", False), ("squeue", False), ("srun", False), ("connect", True),
    ]  # fmt: skip
    assert not any(check["ok"] for check in checks)


@pytest.mark.usefixtures("processes")
def test_an_unknown_fleet_is_refused(tmp_path: Path) -> None:
    done = packtrain("doctor", "--fleet", "shh:a", directory=tmp_path, environment={})
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "ssh:host,host" in done.stderr
