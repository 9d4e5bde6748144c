"""Stores for all tests, and the servers behind them; each server starts once, when first needed."""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.testing

from packtrain.store import Store, open_store
from packtrain.system import FileLock
from parts import azure, ceph, gcs, hosts, kubernetes
from parts.kubernetes import KubernetesCluster
from parts.loopback import served
from parts.presence import need
from parts.proxy import Proxy, proxy_before
from parts.s3 import S3Server, fresh_location, leave_aws
from parts.sandbox import Sandbox, make_sandbox

# Tests share the cores already: with a thread for each core in every one of their processes, learning takes four times
# as long. None of the modules above has loaded torch, which reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What is remembered of the code that tests run must not mix with what the person has run.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="packtrain-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# A shell ignores SIGINT in what it runs in the background, and processes inherit that: Ctrl-C could not be tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["parts.reaper"]

# Reading the options of thirty commands takes longer than most tests that run one: once is enough.
typer.testing._get_command = cache(typer.testing._get_command)

# The files that take longest, in that order: so the processes that share the tests end together.
LONGEST = (
    "test_on_kubernetes", "test_image", "test_killed", "test_translate_job", "test_store_away", "test_mpi",
    "test_hosts", "test_ssh", "test_moves", "test_trainer", "test_starved", "test_aws", "test_slurm",
    "test_dashboard_page", "test_on_aws", "test_node", "test_bundle", "test_benchmarks", "test_kill_anywhere",
    "test_fuzz_records", "test_onnx", "test_deliver", "test_ibm", "test_environment", "test_on_arm64", "test_bucket",
    "test_commands", "test_notebook", "test_own_recipe", "test_base", "test_drive",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        return LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST)

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give the tests of a file to one process, for what they share; but each benchmark to any."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return nodeid if file.endswith("test_benchmarks.py") else file

    return ByFile(config, log)


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Sandbox:
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
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    need(os.geteuid() == 0, "only root can mount a small disk")
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    need(subprocess.run(mount, capture_output=True).returncode == 0, "this machine mounts no tmpfs")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.fixture(scope="session")
def moto_server() -> Iterator[S3Server]:
    """A quick S3 server; supports put-if-absent, accepts any keys."""
    need(importlib.util.find_spec("moto"), "moto[server] is not installed")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p"]
    with served(lambda port: [*command, str(port)]) as url:
        server = S3Server(url, "AKMOTO", "secret-of-moto")
        server.create_bucket()
        yield server


@pytest.fixture(scope="session")
def ceph_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A strict S3 server: checks keys, clocks and conditions."""
    missing = ceph.missing_programs()
    need(not missing, f"Ceph is not installed ({', '.join(missing)}): run tests/parts/install")
    access_key, secret_key = "AKCEPH", "secret-of-ceph"
    scratch = tmp_path_factory.mktemp("ceph")
    with ceph.ceph_gateway(scratch, access_key=access_key, secret_key=secret_key) as url:
        server = S3Server(url, access_key, secret_key)
        server.create_bucket()
        yield server


@pytest.fixture(scope="session")
def rclone_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server that ignores put-if-absent."""
    beside = Path(sys.executable).parent / "rclone"
    program = str(beside) if beside.exists() else shutil.which("rclone")
    need(program, "rclone is not installed")
    access_key, secret_key = "AKRCLONERCLONE", "secret-of-rclone"
    folder = tmp_path_factory.mktemp("rclone")
    command = [str(program), "serve", "s3", str(folder), "--auth-key", f"{access_key},{secret_key}"]
    with served(lambda port: [*command, "--addr", f"127.0.0.1:{port}"]) as url:
        server = S3Server(url, access_key, secret_key)
        server.create_bucket()
        yield server


@pytest.fixture(scope="session")
def kubernetes_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesCluster]:
    """A Kubernetes cluster of two nodes."""
    for missing in (hosts.missing(), kubernetes.missing()):
        need(missing is None, str(missing))
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
def azure_server() -> Iterator[azure.AzureServer]:
    """Microsoft's emulator of Azure Blob Storage; checks keys and conditions."""
    need(azure.PROGRAM.exists(), "azurite is not installed: run tests/parts/install")
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


@pytest.fixture(params=["directory_store", "s3_store"])
def any_store(request: pytest.FixtureRequest) -> Store:
    """An empty store of each quick kind."""
    store: Store = request.getfixturevalue(request.param)
    return store
