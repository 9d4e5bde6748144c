"""Killed workers and nodes, and a stopped run, compared with an uninterrupted run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from packtrain.run.checkpoint import committed
from packtrain.run.liveness import state_now
from parts.s3 import S3Server, fresh_location
from parts.sandbox import Sandbox, assert_nothing_left, assert_same_as, kill, make_sandbox, send, wait_until
from parts.stores import keys


def members(sandbox: Sandbox) -> list[str]:
    latest = sandbox.run().latest_generation()
    return [member.node for member in latest.members] if latest else []


def causes(sandbox: Sandbox) -> list[str]:
    return [generation.cause for generation in sandbox.run().generations()]


def test_a_run_survives_a_killed_worker_a_killed_node_and_a_stop(sandbox: Sandbox, uninterrupted: Sandbox) -> None:
    """All of it happens to one run."""
    sandbox.pace(0.15)
    sandbox.detach()
    sandbox.wait_for_commit()
    kill_a_worker(sandbox)
    first = kill_the_node_that_hosts_the_rendezvous(sandbox)
    stop_twice_and_once_right_after_the_start(sandbox)
    sandbox.pace(0)
    assert sandbox.packtrain("resume").returncode == 0
    assert first not in members(sandbox)
    assert_same_as(uninterrupted, sandbox)
    assert_nothing_left(sandbox)
    lines = [line.text for line in sandbox.run().log_lines().read() if line.node == first]
    assert any("checkpoint: committed" in line for line in lines), "what the dead machine wrote is kept"


def kill_a_worker(sandbox: Sandbox) -> None:
    kill(sandbox.workers_of(members(sandbox)[1]))
    sandbox.wait_for_commit(40)
    assert causes(sandbox) == ["start", "program"]
    assert sandbox.run().store.list(sandbox.run().key("stacks/")) == [], "it did not hang"


def kill_the_node_that_hosts_the_rendezvous(sandbox: Sandbox) -> str:
    """Its workers die with it, and another node takes its place."""
    first = members(sandbox)[0]
    node = sandbox.machine(first)[0]
    workers = sandbox.workers_of(first)
    kill([node])
    wait_until(lambda: not any(one.is_running() for one in workers), "its workers to die with it", 60)
    sandbox.add_node()
    wait_until(lambda: len(causes(sandbox)) == 3, "the next generation")
    assert first not in members(sandbox)
    sandbox.wait_for_commit(60)
    assert causes(sandbox)[:2] == ["start", "program"]
    return first


def stop_twice_and_once_right_after_the_start(sandbox: Sandbox) -> None:
    for _ in range(2):
        assert sandbox.here("stop").exit_code == 0
    assert sandbox.wait_for_result() == "stopped"
    assert_nothing_left(sandbox)

    assert sandbox.packtrain("resume", "--detach").returncode == 0
    assert state_now(sandbox.run()) == "running"
    assert sandbox.here("stop").exit_code == 0
    assert sandbox.wait_for_result() == "stopped"
    assert_nothing_left(sandbox)


# So that a checkpoint takes long enough to be caught, and a step does not.
LARGE = ("model.width=256", "model.feedforward=8192", "train.batch=100 tokens")
SHORT = ("train.duration=15 steps", "checkpoint.every=3 steps", "fleet.local.machines=1")


@pytest.fixture(scope="module")
def killed_uploads(
    moto_server: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[None]]]:
    """Both at the same time: they mostly wait."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("directory", "bucket")}
    with pytest.MonkeyPatch.context() as monkeypatch, ThreadPoolExecutor(2) as pool:
        moto_server.enter(monkeypatch)
        yield {kind: pool.submit(kill_during_an_upload, kind, folder, moto_server) for kind, folder in folders.items()}


@pytest.mark.parametrize("kind", ["directory", "bucket"])
def test_nothing_but_commits_is_left_of_a_run_that_was_killed_during_an_upload(
    kind: str, killed_uploads: dict[str, Future[None]]
) -> None:
    killed_uploads[kind].result()


def is_stopped(process: psutil.Process) -> bool:
    """True if no thread of the process is at work."""
    states = []
    for thread in Path(f"/proc/{process.pid}/task").glob("*/stat"):
        with suppress(OSError):  # it has just ended
            states.append(thread.read_text().rpartition(") ")[2][0])
    return set(states) <= set("TZX")


def kill_during_an_upload(kind: str, tmp_path: Path, bucket: S3Server) -> None:
    sandbox = make_sandbox(tmp_path, fresh_location() if kind == "bucket" else None)

    def unfinished() -> list[str]:
        if kind == "bucket":
            return bucket.uploads(sandbox.store)
        return [str(path) for path in Path(sandbox.store).rglob("files/.tmp-*")]

    try:
        sandbox.detach(*(word for field in (*LARGE, *SHORT) for word in ("--set", field)))
        sandbox.wait_for_commit(3)
        processes = sandbox.processes()  # before the upload: finding them may take longer
        while True:
            wait_until(unfinished, "the next upload")
            send(processes, signal.SIGSTOP)
            # A thread in a system call, such as the one that completes the upload, stops only after it.
            wait_until(lambda: all(map(is_stopped, processes)), "all threads to stop")
            if unfinished():
                break
            send(processes, signal.SIGCONT)  # it ended just before they did
        kill(sandbox.processes())
        wait_until(lambda: not sandbox.processes(), "all processes to end", 30)
        assert unfinished()
        assert sandbox.packtrain("resume").returncode == 0
        run = sandbox.run()
        names = {key.split("/")[3] for key in keys(run.store, run.key("checkpoints"))}
        assert names == {checkpoint.name for checkpoint in committed(run)}
        assert unfinished() == []
        if kind == "directory":
            left = [path for path in Path(sandbox.store).rglob("*") if path.is_dir() and not list(path.iterdir())]
            assert left == list(Path(sandbox.store).rglob(".tmp-*")) == []
        assert_nothing_left(sandbox)
    finally:
        sandbox.close()
