"""Packing on a Dask cluster whose scheduler and workers were started over SSH."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from pack.pictures import photo, saved
from pack.rawsets import write
from packtrain.job.job import DataSettings
from packtrain.pack import images
from packtrain.pack.build import PlainProgress, pack
from packtrain.pack.workers import Dask, InProcess, Workers
from packtrain.store import open_store
from parts import sshd
from parts.sshd import SshServer


@pytest.fixture
def ssh(needs_sshd: None, needs_asyncssh: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    with sshd.ssh_server(tmp_path_factory.mktemp("sshd")) as server:
        yield server


def packed(source: Path, location: Path, workers: Workers) -> dict[str, bytes]:
    """Return the objects in the store after packing."""
    store = open_store(str(location), create=True)
    data = DataSettings.model_validate({"train": [{"imagenet": str(source)}], "sizes": [16]})
    manifest = pack("toy", data, store, workers, PlainProgress(lambda _: None))
    assert manifest.splits["train"].samples == 16
    assert len(manifest.splits["train"].shards) > 3
    return {entry.key: store.get(entry.key) for entry in store.list("")}


def test_an_ssh_cluster_makes_the_same_bytes_and_leaves_no_process(
    ssh: SshServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distributed import Client, SSHCluster

    monkeypatch.setattr(images, "SHARD_BYTES", 4_000)
    for number in range(16):
        write(tmp_path / "train" / "ab"[number % 2] / f"{number}.jpg", saved(photo(40, 32, number), "JPEG"))
    here = {"host": "127.0.0.1", "dashboard": False, "dashboard_address": "127.0.0.1:0"}
    with SSHCluster(
        ["127.0.0.1"] * 3,  # the scheduler and two workers, each in its own session
        connect_options=ssh.connect_options(),
        scheduler_options={"port": 0, **here},
        worker_options={"n_workers": 1, "nthreads": 1, "local_directory": str(tmp_path / "scratch"), **here},
        remote_python=sys.executable,
    ) as cluster:
        with Client(cluster) as client, closing(Dask(cluster.scheduler_address)) as workers:
            client.get_task_stream()  # records from now on
            on_cluster = packed(tmp_path / "train", tmp_path / "cluster", workers)
            tasks = client.get_task_stream()
            worker_pids = client.run(os.getpid).values()
        started = ssh.processes()
    assert len(tasks) > 3
    assert len(worker_pids) == 2
    assert set(worker_pids) <= {process.pid for process in started}
    assert on_cluster == packed(tmp_path / "train", tmp_path / "alone", InProcess())

    _, alive = psutil.wait_procs(started, timeout=60)
    assert [*alive, *ssh.processes()] == []
