"""A client that is gone, a full disk and a worker that hangs, compared with an uninterrupted run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from packtrain.run.records import Event
from packtrain.run.run import run_names
from packtrain.store import open_store
from parts.sandbox import Sandbox, assert_nothing_left, assert_same_as, make_sandbox, wait_until


def causes(sandbox: Sandbox) -> list[str]:
    return [generation.cause for generation in sandbox.run().generations()]


def told(sandbox: Sandbox, kind: str) -> list[Event]:
    return [event for event in sandbox.run().events().read() if event.kind == kind]


@pytest.fixture
def small_disk(needs_root: None, tmp_path: Path) -> Iterator[Path]:
    """The machine's own disk: caches, logs and what is being uploaded."""
    disk = tmp_path / "cache"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m,mode=700", "tmpfs", str(disk)], check=True)
    (disk / "tmp").mkdir()
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            try:
                while True:
                    os.write(file.fileno(), b"x" * size)
            except OSError:
                continue
    return filler


@pytest.fixture
def sandbox(tmp_path: Path, small_disk: Path) -> Iterator[Sandbox]:
    made = make_sandbox(tmp_path, TMPDIR=str(small_disk / "tmp"), HANG="100")
    yield made
    made.close()


def test_a_run_survives_a_lost_client_a_full_disk_and_a_hanging_worker(
    sandbox: Sandbox, small_disk: Path, uninterrupted: Sandbox
) -> None:
    """All of it happens to one run, and the only help is space on the disk."""
    sandbox.pace(0.15)
    start_and_lose_the_client(sandbox)
    sandbox.wait_for_commit()
    fill_the_disk_for_a_while(sandbox, small_disk)
    sandbox.wait_for_commit(80)
    sandbox.pace(0)
    assert sandbox.wait_for_result() == "finished"
    assert causes(sandbox) == ["start", "hang"]
    run = sandbox.run()
    stacks = [entry.key for entry in run.store.list(run.key("stacks/"))]
    assert run.key("stacks/000001-1.txt") in stacks
    assert "in hang" in run.store.get(run.key("stacks/000001-1.txt")).decode(), "the line that it hung in"
    assert any("stacks/000001-1.txt" in event.text for event in told(sandbox, "stacks"))
    assert_same_as(uninterrupted, sandbox)
    assert_nothing_left(sandbox)


def start_and_lose_the_client(sandbox: Sandbox) -> None:
    command = [sys.executable, "-m", "packtrain", "run", "job.yaml", "--set", "train.patience=5 s"]
    client = subprocess.Popen(command, cwd=sandbox.directory, env=sandbox.environment, stdout=subprocess.DEVNULL)
    wait_until(lambda: run_names(open_store(sandbox.store, create=True)), "the run")
    wait_until(lambda: sandbox.run().leases(), "the first machine")
    client.kill()
    client.wait()


def fill_the_disk_for_a_while(sandbox: Sandbox, disk: Path) -> None:
    """Training continues and says what it cannot save; the last good checkpoint stays until there is space again."""
    kept = sandbox.committed_step()
    filler = fill(disk)
    wait_until(lambda: len(told(sandbox, "warning")) >= 2, "two saves to fail")
    assert all("No space left on device" in event.text for event in told(sandbox, "warning"))
    assert kept <= sandbox.committed_step() <= kept + 20, "one save may have been on its way"
    filler.unlink()
    assert causes(sandbox) == ["start"], "nothing had to start again"
