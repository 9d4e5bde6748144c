"""Bundles: what is in them, and that they install and train on a machine that reaches nothing."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.jobs import TRAINING
from packtrain.errors import Mistake
from packtrain.fleet import environment
from packtrain.fleet.bundle import BundleFile, new_bundle
from packtrain.fleet.remote import Remote
from packtrain.fleet.wheels import own_wheel
from packtrain.identity import identity
from packtrain.observe.history import read_points
from packtrain.run.run import open_run
from packtrain.store import open_store
from parts import hosts
from parts.command import Packtrain, in_a_process
from parts.hosts import Host, Network
from parts.stub_wheels import stub_index

CANARY = "canary-of-the-bundle"


@pytest.fixture(scope="module")
def bundled(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a job, a run of it that reached step 4, and a bundle of both."""
    place = tmp_path_factory.mktemp("bundled")
    with pytest.MonkeyPatch.context() as patched:
        stub_index(place / "index", patched)
        patched.setenv("PACKTRAIN_CACHE", str(place / "cache"))
        patched.setenv("OMP_NUM_THREADS", "1")
        patched.setenv("PIP_INDEX_URL", f"https://me:{CANARY}@127.0.0.1:9/simple")
        patched.setenv("WANDB_API_KEY", CANARY)
        (place / ".env").write_text(f"KEY={CANARY}\n")
        text = TRAINING.replace("STORE", "./store").replace("FLEET", "{local: {}, workers: 1}")
        (place / "job.yaml").write_text(f"{text}\ncode: mine\n".replace("recipe: translate", "recipe: mine:Mine"))
        (place / "mine").mkdir()
        (place / "mine/mine.py").write_text(
            "from packtrain.recipes.translate import Translate\nclass Mine(Translate): ...\n"
        )
        (place / "mine/.env").write_text(f"KEY={CANARY}\n")
        done = in_a_process("run", "job.yaml", "--set", "train.duration=4 steps", directory=place)
        assert done.returncode == 0, done.stdout + done.stderr
        for name in ("first.tar", "second.tar"):
            done = in_a_process("bundle", "job.yaml", "-o", name, "--run", "small-1", directory=place)
            assert done.returncode == 0, done.stdout + done.stderr
    yield place


def names(bundle: Path) -> list[str]:
    with tarfile.open(bundle) as tar:
        return [member.name for member in tar]


def test_a_bundle_has_everything_once_the_same_bytes_every_time_and_no_secret(bundled: Path) -> None:
    found = names(bundled / "first.tar")
    assert len(set(found)) == len(found)
    assert found[-1] == "small-bundle/SHA256SUMS"
    assert {"small-bundle/install.sh", "small-bundle/job/job.yaml", "small-bundle/job/mine/mine.py"} <= set(found)
    assert not [name for name in found if name.endswith(".env") or "/nodes/" in name or "/logs/" in name]
    assert len([name for name in found if "/checkpoints/" in name and name.endswith("manifest.json")]) == 1
    data = (bundled / "first.tar").read_bytes()
    assert data == (bundled / "second.tar").read_bytes()
    assert CANARY.encode() not in data
    assert [path.name for path in bundled.glob(".*.part")] == []


def test_a_bundle_that_was_cut_off_or_changed_is_refused(bundled: Path, tmp_path: Path) -> None:
    data = (bundled / "first.tar").read_bytes()
    copy = tmp_path / "copy.tar"
    copy.write_bytes(data[: len(data) // 2])
    with pytest.raises(Mistake, match=r"copy\.tar: .*(incomplete|not a bundle)"):
        BundleFile(copy)
    at = data.index(b"small-bundle/wheels/numpy") + 512 + 40
    copy.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    environment.check_bundle(copy)
    with pytest.raises(Mistake, match=r"copy\.tar: wheels/numpy-.* is damaged; copy the bundle again"):
        environment.write_archive(copy, io.BytesIO())
    copy.write_bytes(b"something else")
    with pytest.raises(Mistake, match="is not a bundle"):
        environment.check_bundle(copy)


def test_a_full_disk_leaves_no_bundle(small_disk: Path) -> None:
    with (
        pytest.raises(Mistake, match="No space left on device; free some space"),
        new_bundle(small_disk / "a.tar", "a") as writer,
    ):
        writer.add_bytes("large", bytes(4 << 20))
    assert list(small_disk.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-o", "none/x.tar"], "there is no directory none"),
        (["--platform", "linux/arm"], "did you mean 'linux/arm64'"),
        (["--variant", "jetson"], "must be cpu or cuda"),
        (["--run", "other-7"], "no run 'other-7'"),
        (["--set", "data.pack=small-0"], "data.pack: no such pack in"),
    ],
)
def test_a_wrong_request_for_a_bundle_is_refused_in_one_line(
    words: list[str], said: str, bundled: Path, packtrain: Packtrain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bundled)
    done = packtrain("bundle", "job.yaml", *words)
    assert done.returncode in (2, 102)
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


@pytest.fixture(scope="module")
def network(needs_hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with hosts.hosts(tmp_path_factory.mktemp("hosts"), 1) as network:
        # On the host's PATH, as if installed there; a link to it would look for its library beside itself.
        script = f'#!/bin/sh\nexec {sys.base_prefix}/bin/python3 "$@"\n'
        network[0].run(["sh", "-c", 'cat > "$0"; chmod 755 "$0"', "/usr/local/bin/python3.11"], text=script)
        yield network


def test_a_host_without_a_route_to_anywhere_installs_a_bundle_trains_and_continues_a_run(
    bundled: Path, network: Network
) -> None:
    host: Host = network[0]
    shutil.copy(bundled / "first.tar", network.shared)
    host.cut()
    try:
        assert host.run(["ip", "route", "get", "8.8.8.8"]).returncode != 0 or not reaches(host)
        own = {"PATH": "/root/.local/bin:/usr/local/bin:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
        unpacked = host.run(["tar", "-xf", network.shared / "first.tar"], own)
        assert unpacked.returncode == 0, unpacked.stderr
        done = host.run(["sh", "-c", "cd small-bundle && sh install.sh && packtrain run job/job.yaml"], own)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "finished: reached 12 steps" in done.stdout
        words = "packtrain resume small-1 --trust-code --set train.duration='8 steps'"
        done = host.run(["sh", "-c", f"cd small-bundle && {words}"], own)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "finished: reached 8 steps" in done.stdout
        store = open_store(str(host.home / "small-bundle/store"))
        steps = [point.step for point in read_points(open_run(store, "small-1")) if point.kind == "train"]
        assert steps == list(range(1, 9)), "its history has no gap"
        host.run(["sh", "-c", "echo >> small-bundle/requirements.txt"])
        damaged = host.run(["sh", "small-bundle/install.sh"], own)
        assert damaged.returncode == 1
        assert "install.sh: the bundle is damaged" in damaged.stderr
    finally:
        host.restore()


def reaches(host: Host) -> bool:
    code = "import socket; socket.create_connection(('8.8.8.8', 53), 1)"
    return host.run(["/usr/local/bin/python3.11", "-c", code]).returncode == 0


def test_the_ssh_fleet_makes_the_environment_of_a_host_from_a_bundle(
    bundled: Path, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", network.search_path())
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    environment.check_bundle(bundled / "first.tar")
    remote = Remote("host1")
    made = environment.create(remote, bundled / "first.tar")
    assert made == f"/root/.cache/packtrain/environments/{identity()}/bin/python"
    assert environment.find(remote, None) == made


def test_the_nodes_of_a_cluster_make_their_environment_from_a_bundle_once(bundled: Path, tmp_path: Path) -> None:
    with BundleFile(bundled / "first.tar") as bundle:
        bundle.check_own(own_wheel()[1])
        with pytest.raises(Mistake, match="another Packtrain"):
            bundle.check_own(b"other")
    own = {**os.environ, "PACKTRAIN_CACHE": str(tmp_path / "cache"), "PATH": f"{sys.base_prefix}/bin:/usr/bin:/bin"}
    script = environment.create_commands(bundled / "first.tar", "env") + '\n"$python" -m packtrain.identity\n'
    for _ in range(2):
        done = subprocess.run(["bash", "-c", script], env=own, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == identity()
    assert [path.name for path in (tmp_path / "cache/environments").iterdir()] == [identity()]
    missing = environment.create_commands(tmp_path / "none.tar", "env")
    own["PACKTRAIN_CACHE"] = str(tmp_path / "other")
    done = subprocess.run(["bash", "-c", missing], env=own, capture_output=True, text=True)
    assert done.returncode == 2
    assert shlex.quote("none.tar").strip("'") in done.stderr
    assert list((tmp_path / "other/environments").iterdir()) == []


def test_a_bundle_lists_its_packages_as_an_sbom(bundled: Path) -> None:
    with tarfile.open(bundled / "first.tar") as tar:
        reader = tar.extractfile("small-bundle/sbom.cdx.json")
        assert reader is not None
        assert json.load(reader)["bomFormat"] == "CycloneDX"
