"""Machines of one run on a clock that only the test moves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from packtrain.store import Store, open_store
from parts.nodes import Cluster, Make, cluster_of
from parts.runs import new_run, recipe_job


@pytest.fixture
def directory_store() -> Iterator[Store]:
    """In memory where there is such a place: these tests write thousands of small files, and each is synced."""
    with TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield open_store(folder, create=True)


@pytest.fixture
def make(directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    with ExitStack() as clusters:

        def make(machines: object, count: int, job: Any = recipe_job, **sections: object) -> Cluster:
            fleet = {"local": {"machines": machines}, "price": 1.0}
            run = new_run(directory_store, job(fleet=fleet, **sections))
            cluster = clusters.enter_context(cluster_of(run, monkeypatch, str(tmp_path / "cache")))
            for _ in range(count):
                cluster.add()
            return cluster

        yield make
