"""A client that is gone, a full disk, a worker that hangs; compared with a run that nothing happened to."""

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
from parts.places import Place, assert_nothing_left, assert_same_as, make_place, wait_until
from parts.presence import need


def causes(place: Place) -> list[str]:
    return [generation.cause for generation in place.run().generations()]


def told(place: Place, kind: str) -> list[Event]:
    return [event for event in place.run().events().read() if event.kind == kind]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The machine's own disk: caches, logs and what is on its way to the store."""
    disk = tmp_path / "cache"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(disk)], capture_output=True, text=True
    )
    need(done.returncode == 0, f"no small disk can be mounted: {done.stderr.strip()}")
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
def place(tmp_path: Path, small_disk: Path) -> Iterator[Place]:
    made = make_place(tmp_path, TMPDIR=str(small_disk / "tmp"), HANG="100")
    yield made
    made.close()


def test_the_client_goes_the_disk_is_full_and_a_worker_hangs(
    place: Place, small_disk: Path, uninterrupted: Place
) -> None:
    """All of it happens to one run, and nobody does anything about it but make room."""
    place.pace(0.15)
    start_and_lose_the_client(place)
    place.wait_for_commit()
    fill_the_disk_for_a_while(place, small_disk)
    place.wait_for_commit(80)
    place.pace(0)
    assert place.wait_for_result() == "finished"
    assert causes(place) == ["start", "hang"]
    run = place.run()
    stacks = [entry.key for entry in run.store.list(run.key("stacks/"))]
    assert run.key("stacks/000001-1.txt") in stacks
    assert "in hang" in run.store.get(run.key("stacks/000001-1.txt")).decode(), "the line that it hung in"
    assert any("stacks/000001-1.txt" in event.text for event in told(place, "stacks"))
    assert_same_as(uninterrupted, place)
    assert_nothing_left(place)


def start_and_lose_the_client(place: Place) -> None:
    command = [sys.executable, "-m", "packtrain", "run", "job.yaml", "--set", "train.patience=5 s"]
    client = subprocess.Popen(command, cwd=place.directory, env=place.environment, stdout=subprocess.DEVNULL)
    wait_until(lambda: run_names(open_store(place.store)), "the run")
    wait_until(lambda: place.run().leases(), "the first machine")
    client.kill()
    client.wait()


def fill_the_disk_for_a_while(place: Place, disk: Path) -> None:
    """Training goes on and says what it cannot save; the last good checkpoint stays, until there is room again."""
    kept = place.committed_step()
    filler = fill(disk)
    wait_until(lambda: len(told(place, "warning")) >= 2, "two saves to fail")
    assert all("No space left on device" in event.text for event in told(place, "warning"))
    assert kept <= place.committed_step() <= kept + 20, "one save may have been on its way"
    filler.unlink()
    assert causes(place) == ["start"], "nothing had to start again"
