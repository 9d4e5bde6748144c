"""Stores for all tests, and the servers behind them; each server starts once, when first needed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from packtrain.files import FileLock
from packtrain.store import Store, open_store
from parts import azure, ceph, gcs, hosts, kubernetes
from parts.hosts import Network
from parts.kubernetes import KubernetesCluster
from parts.loopback import served
from parts.mounts import Mounts
from parts.proxy import Proxy, proxy_before
from parts.s3 import MOTO_PAGE, S3Server, fresh_location, leave_aws, moto_command
from parts.sandbox import Sandbox, make_sandbox

# Tests share the cores already: with a thread for each core in every one of their processes, learning takes four times
# as long. None of the modules above has loaded torch, which reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell ignores SIGINT in what it runs in the background, and processes inherit that: Ctrl-C could not be tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["parts.command", "parts.reaper", "parts.tiers"]


@pytest.fixture(scope="session", autouse=True)
def session_state(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep what is remembered of the code that tests run apart from what the person has run."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session")
def uninterrupted(training: None, processes: None, tmp_path_factory: pytest.TempPathFactory) -> Sandbox:
    """The run that the others are compared with; the processes that share the tests make it once."""
    base = tmp_path_factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "uninterrupted"
    with FileLock(place.with_suffix(".lock")):
        if not (place / "finished").exists():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            done = make_sandbox(place).packtrain("run", "job.yaml")
            assert done.returncode == 0, done.stderr + done.stdout
            (place / "finished").touch()
    return Sandbox(place, str(place / "store"))


@pytest.fixture
def compiler() -> Iterator[None]:
    """Put back what a compiled model sets for its process."""
    from torch._dynamo import config
    from torch.fx.experimental import _config as shapes

    names = ("recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit", "optimize_ddp")
    with config.patch({name: getattr(config, name) for name in names}), shapes.patch(use_duck_shape=True):
        yield


@pytest.fixture
def small_disk(needs_root: None, tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.fixture
def mounts(needs_root: None, tmp_path: Path) -> Iterator[Mounts]:
    mounts = Mounts(tmp_path)
    yield mounts
    mounts.unmount()


@pytest.fixture(scope="module")
def network(
    needs_hosts: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Network]:
    """Machines that ssh reaches: two, or as many as HOSTS in the file says."""
    with hosts.hosts(tmp_path_factory.mktemp("hosts"), getattr(request.module, "HOSTS", 2)) as network:
        yield network


@pytest.fixture(scope="session")
def moto_server(processes: None) -> Iterator[S3Server]:
    """A quick S3 server; supports put-if-absent, accepts any keys."""
    with served(lambda port: moto_command("127.0.0.1", port), {"MOTO_S3_DEFAULT_MAX_KEYS": str(MOTO_PAGE)}) as url:
        server = S3Server(url, "AKMOTO", "secret-of-moto")
        server.create_bucket()
        yield server


@pytest.fixture(scope="session")
def ceph_server(needs_ceph: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A strict S3 server: checks keys, clocks and conditions."""
    access_key, secret_key = "AKCEPH", "secret-of-ceph"
    scratch = tmp_path_factory.mktemp("ceph")
    with ceph.ceph_gateway(scratch, access_key=access_key, secret_key=secret_key) as url:
        server = S3Server(url, access_key, secret_key)
        server.create_bucket()
        yield server


@pytest.fixture(scope="session")
def rclone_server(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server that ignores put-if-absent."""
    program = Path(sys.executable).parent / "rclone"
    access_key, secret_key = "AKRCLONERCLONE", "secret-of-rclone"
    folder = tmp_path_factory.mktemp("rclone")
    command = [str(program), "serve", "s3", str(folder), "--auth-key", f"{access_key},{secret_key}"]
    with served(lambda port: [*command, "--addr", f"127.0.0.1:{port}"]) as url:
        server = S3Server(url, access_key, secret_key)
        server.create_bucket()
        yield server


@pytest.fixture(scope="session")
def kubernetes_cluster(
    needs_hosts: None, needs_kubernetes: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KubernetesCluster]:
    """A Kubernetes cluster of two nodes."""
    with kubernetes.kubernetes(tmp_path_factory.mktemp("kubernetes")) as cluster:
        yield cluster


@pytest.fixture
def no_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_aws(monkeypatch)


@pytest.fixture
def s3_environment(moto_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """Point this process, and those it starts, at moto."""
    moto_server.enter(monkeypatch)
    return moto_server


@pytest.fixture
def s3_location(s3_environment: S3Server) -> str:
    """An empty prefix of a bucket."""
    return fresh_location()


@pytest.fixture
def s3_proxy(s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy between `s3://` and moto that injects the faults a test asks for."""
    with proxy_before(s3_environment.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


@pytest.fixture
def directory_store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"), create=True)


@pytest.fixture
def s3_store(s3_location: str) -> Store:
    return open_store(s3_location)


@pytest.fixture
def ceph_store(ceph_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Store:
    ceph_server.enter(monkeypatch)
    return open_store(fresh_location())


@pytest.fixture(scope="session")
def azure_server(needs_azurite: None) -> Iterator[azure.AzureServer]:
    """Microsoft's emulator of Azure Blob Storage; checks keys and conditions."""
    with azure.azurite() as server:
        yield server


@pytest.fixture(scope="session")
def google_server(moto_server: S3Server) -> Iterator[gcs.GoogleServer]:
    with gcs.google_before(moto_server.endpoint) as server:
        yield server


@pytest.fixture
def azure_store(azure_server: azure.AzureServer, monkeypatch: pytest.MonkeyPatch) -> Store:
    azure_server.enter(monkeypatch)
    return open_store(azure.fresh_location())


@pytest.fixture
def google_store(google_server: gcs.GoogleServer, monkeypatch: pytest.MonkeyPatch) -> Store:
    google_server.enter(monkeypatch)
    return open_store(gcs.fresh_location())


@pytest.fixture(params=["directory_store", pytest.param("s3_store", marks=pytest.mark.local)])
def any_store(request: pytest.FixtureRequest) -> Store:
    """An empty store of each quick kind."""
    store: Store = request.getfixturevalue(request.param)
    return store
