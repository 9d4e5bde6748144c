"""The checks of doctor: pure judgments, and real hosts of which some do not work."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from fleet.jobs import left_on, packtrain, write_program
from packtrain.cli import app
from packtrain.errors import Mistake
from packtrain.fleet import link_probe
from packtrain.fleet.doctor import CLOCK_SECONDS, DISK_BYTES, check_target, clock_offset, describe, judge
from packtrain.fleet.fleet import Target
from packtrain.fleet.host import Facts
from packtrain.fleet.remote import Unreachable
from packtrain.identity import identity
from packtrain.job.kinds import FLEETS
from packtrain.store import Store
from parts.hosts import Network

SECRET = "not-to-be-shown"
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


# This machine.


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of a person who has nothing but Python."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "KUBECONFIG", "KUBERNETES_SERVICE_HOST", "SL_USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_each_fleet_says_what_it_needs_here_and_how_to_get_it(bare: Path) -> None:
    missing = describe(str(bare / "store"), create_store=False).missing
    assert set(missing) == set(FLEETS)
    assert missing["local"] == {}
    assert missing["ssh"] == {"ssh": "apt install openssh-client"}
    assert missing["mpi"] == {"mpirun": "apt install openmpi-bin", "ssh": "apt install openssh-client"}
    assert set(missing["slurm"]) == {"sbatch", "squeue", "srun"}
    assert missing["kubernetes"] == {"kubeconfig": "log in to a cluster, or set KUBECONFIG"}
    assert missing["aws"] == {"credentials": "run `aws configure`, or set AWS_PROFILE"}
    assert set(missing["ibm"]) == {"ssh", "credentials"}


def test_credentials_are_seen_and_never_shown(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "SL_USERNAME", "SL_API_KEY"):
        monkeypatch.setenv(name, SECRET)
    config = bare / "config"
    config.write_text(SECRET)
    monkeypatch.setenv("KUBECONFIG", str(config))
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    here = json.loads(done.stdout)
    assert (here["missing"]["aws"], here["missing"]["kubernetes"]) == ({}, {})
    assert "credentials" not in here["missing"]["ibm"]
    assert SECRET not in done.output


def test_this_machine_is_described_without_creating_a_store(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACKTRAIN_STORE", raising=False)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0, done.output
    names = [line.split()[0] for line in done.stdout.splitlines() if line]
    for name in ("machine", "python", "packtrain", "torch", "GPUs", "driver", "cores", "memory", "disk", "store"):
        assert name in names
    assert "none yet  ./store" in done.stdout
    assert not (bare / "store").exists()


def test_a_home_or_a_cache_that_cannot_be_written_is_named_with_what_to_set(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bare / "file").touch()
    monkeypatch.setenv("PACKTRAIN_CACHE", str(bare / "file" / "cache"))
    here = describe("./store", create_store=False)
    assert not here.can_train
    [disk] = [trait for trait in here.traits if trait.name == "disk"]
    assert (disk.detail, disk.fix) == (
        f"{bare}/file/cache: cannot write to this directory",
        "set PACKTRAIN_CACHE to one of your own",
    )
    monkeypatch.delenv("PACKTRAIN_CACHE")
    monkeypatch.setenv("HOME", str(bare / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(bare))
    here = describe("./store", create_store=False)
    [disk] = [trait for trait in here.traits if trait.name == "disk"]
    assert disk.note.startswith("cannot write to the home directory; set HOME")


def test_a_store_that_is_named_is_created_and_one_that_cannot_be_is_a_fault(bare: Path, directory_store: Store) -> None:
    assert CliRunner().invoke(app, ["doctor", "--store", "new"]).exit_code == 0
    assert (bare / "new" / ".packtrain-store").exists()
    (bare / "file").write_text("")
    wrong = CliRunner().invoke(app, ["doctor", "--store", "file/store"])
    assert wrong.exit_code == 2
    assert "fix:" in wrong.stdout
    seen = {trait.name: trait for trait in describe(directory_store.url, create_store=False).traits}
    assert seen["store"].detail == f"reachable  {directory_store.url}"


def test_without_torch_nothing_trains_here(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packtrain.fleet.doctor.find_spec", lambda _: None)
    here = describe(str(bare / "store"), create_store=False)
    assert not here.can_train
    torch = next(trait for trait in here.traits if trait.name == "torch")
    assert (torch.detail, "pip install" in torch.fix) == ("not installed", True)
