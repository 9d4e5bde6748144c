"""A program that takes more memory than the kernel allows."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from packtrain.run.run import Run
from packtrain.store import open_store
from parts.runs import new_run, program_job

GREEDY = """
blocks = []
while True:
    blocks.append(bytearray(b"x") * 20_000_000)
"""
LIMIT_BYTES = 900_000_000


@pytest.fixture
def group(needs_root: None) -> Iterator[Path]:
    """A memory cgroup for this test."""
    v1 = Path("/sys/fs/cgroup/memory")
    root = v1 if (v1 / "memory.limit_in_bytes").exists() else Path("/sys/fs/cgroup")
    made = root / f"packtrain-{uuid.uuid4().hex[:8]}"
    made.mkdir()
    limit = made / ("memory.limit_in_bytes" if root == v1 else "memory.max")
    limit.write_text(str(LIMIT_BYTES))
    yield made
    made.rmdir()


def test_out_of_memory_twice_at_the_same_step_ends_the_run_with_advice(tmp_path: Path, group: Path) -> None:
    run: Run = new_run(
        open_store(str(tmp_path / "store"), create=True), program_job(fleet={"local": {}, "workers": 1}), GREEDY
    )
    environment = {**os.environ, "PACKTRAIN_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}

    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    node = subprocess.Popen(
        [sys.executable, "-m", "packtrain", "node", run.name, "--store", run.store.url, "--code", run.code_digest],
        env=environment,
        preexec_fn=enter,  # noqa: PLW1509
        stdout=subprocess.DEVNULL,
    )
    assert node.wait(120) == 100
    result = run.result()
    assert result is not None
    assert "out of memory" in result.reason
    assert "train.micro_batch" in result.reason
    assert [generation.cause for generation in run.generations()] == ["start", "memory"]
