"""`packtrain doctor` without arguments: what this machine has, and what it lacks for which fleet."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from packtrain.cli import app
from packtrain.fleet.here import describe
from packtrain.job.kinds import FLEETS
from packtrain.store import Store

SECRET = "not-to-be-shown"


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
    [disk] = [one for one in here.found if one.name == "disk"]
    assert (disk.detail, disk.fix) == (
        f"{bare}/file/cache: cannot write to this directory",
        "set PACKTRAIN_CACHE to one of your own",
    )
    monkeypatch.delenv("PACKTRAIN_CACHE")
    monkeypatch.setenv("HOME", str(bare / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(bare))
    here = describe("./store", create_store=False)
    [disk] = [one for one in here.found if one.name == "disk"]
    assert disk.note.startswith("cannot write to the home directory; set HOME")


def test_a_store_that_is_named_is_created_and_one_that_cannot_be_is_a_fault(bare: Path, directory_store: Store) -> None:
    assert CliRunner().invoke(app, ["doctor", "--store", "new"]).exit_code == 0
    assert (bare / "new" / ".packtrain-store").exists()
    (bare / "file").write_text("")
    wrong = CliRunner().invoke(app, ["doctor", "--store", "file/store"])
    assert wrong.exit_code == 2
    assert "fix:" in wrong.stdout
    seen = {one.name: one for one in describe(directory_store.url, create_store=False).found}
    assert seen["store"].detail == f"reachable  {directory_store.url}"


def test_without_torch_nothing_trains_here(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packtrain.fleet.here.find_spec", lambda _: None)
    here = describe(str(bare / "store"), create_store=False)
    assert not here.can_train
    torch = next(one for one in here.found if one.name == "torch")
    assert (torch.detail, "pip install" in torch.fix) == ("not installed", True)
